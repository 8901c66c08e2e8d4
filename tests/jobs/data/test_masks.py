"""What is foreground in a mask, what is void, and which masks brightness alone cannot read."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefold.errors import DataError
from onefold_jobs.data.masks import (
    AUTO,
    VOID,
    VOID_NUMBER,
    MaskRule,
    colored_mask,
    list_classes,
    look_at_mask,
    mask_tensor,
    read_mask,
)
from onefold_jobs.data.pairs import MaskedPictures, read_pairs
from tests.jobs.tiny import write_class_masks
from tests.masked import save
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')


MEANT = np.array([[0, 1, 1], [0, 0, 1]], dtype=np.uint8)
PLAIN = MaskRule()
BLACK, RED, GREEN, WHITE = (0, 0, 0), (255, 0, 0), (0, 255, 0), (255, 255, 255)
VOC = (BLACK, (128, 0, 0), (0, 128, 0), (224, 224, 192))


def with_palette(numbers: Any, *table: tuple[int, int, int]) -> Any:
    picture = pillow.fromarray(numbers, "L")
    picture.putpalette([value for color in table for value in color])
    return picture


def written(folder: Path, pixels: Any) -> Path:
    picture = pixels if isinstance(pixels, pillow.Image) else pillow.fromarray(pixels)
    picture.save(folder / "mask.png")
    return folder / "mask.png"


def test_every_kind_of_mask_means_the_same(tmp_path: Path) -> None:
    for pixels, inverted in (
        *((MEANT * value, False) for value in (1, 128, 255)),
        (np.where(MEANT > 0, 255, 127).astype(np.uint8), False),
        *((MEANT.astype(np.uint16) * value, False) for value in (1, 255, 65535)),
        (MEANT.astype(bool), False),
        (np.stack([MEANT * 255] * 3, axis=2), False),
        (np.stack([MEANT * 0, MEANT * 0, MEANT * 255], axis=2), False),
        (np.stack([MEANT] * 3, axis=2), False),
        (np.stack([MEANT * 255] * 3 + [np.full_like(MEANT, 255)], axis=2), False),
        (np.stack([MEANT * 255, np.full_like(MEANT, 255)], axis=2), False),
        (with_palette(MEANT, BLACK, WHITE), False),
        (with_palette(MEANT, BLACK, (128, 0, 0)), False),
        (with_palette(MEANT, WHITE, BLACK), True),
    ):
        path = written(tmp_path, pixels)
        mask, look = read_mask(path), look_at_mask(path, PLAIN)
        expected = 1 - MEANT if inverted else MEANT
        assert mask.mode == "L"
        assert (look.size, look.foreground, look.void) == ((3, 2), int(expected.sum()), 0)
        assert np.array_equal(np.asarray(mask), expected * 255)
        assert mask_tensor(mask).tolist() == expected.astype(float).tolist()


def disc(side: int = 40, soft: float = 1.0) -> Any:
    """A disc whose edge rises over so many pixels; uint8."""
    rows, columns = np.mgrid[:side, :side] - (side - 1) / 2
    distance = side / 3 - np.hypot(rows, columns)
    return (np.clip(distance / soft + 0.5, 0, 1) * 255).round().astype(np.uint8)


def fields(*values: int, width: int = 8) -> Any:
    return np.repeat(np.array([values]), 24, axis=0).repeat(width, axis=1).astype(np.uint8)


def colors(numbers: Any, *table: tuple[int, int, int]) -> Any:
    return np.array(table, dtype=np.uint8)[numbers]


def test_smooth_edges_do_no_harm(tmp_path: Path) -> None:
    for pixels, soft in (
        (disc(), 1.0),
        (disc(soft=12.0), 12.0),
        (with_palette(disc(), *((v, v, v) for v in range(256))), 1.0),
        (np.stack([disc()] * 3, axis=2), 1.0),
        (np.stack([disc(), disc() * 0, disc() * 0], axis=2), 1.0),
        (disc().astype(np.uint16), 1.0),
        # Near white.
        (np.where(disc() > 127, 252 + np.arange(1600).reshape(40, 40) % 4, 0).astype("u1"), 1.0),
    ):
        path, expected = written(tmp_path, pixels), disc(soft=soft) > 127
        assert look_at_mask(path, PLAIN).foreground == int(expected.sum())
        assert np.array_equal(np.asarray(read_mask(path)) == 255, expected)


def test_a_mask_of_more_meanings_than_two_is_refused(tmp_path: Path) -> None:
    for pixels, words in (
        (fields(0, 1, 2, 255), "0 .*, 1 .*, 2 .*, 255 .*more than two of"),
        (fields(*range(0, 250, 10), width=4), "and 19 more values: more than two"),
        # A thin border.
        (
            np.where(np.eye(24, dtype=bool), 128, fields(0, 0, 255)).astype(np.uint8),
            "0 .*, 128 .*, 255 .*more than two",
        ),
        (fields(128, 255), "128 .*, 255 .*: all of them are bright"),
        (fields(0, 1, 2).astype(np.uint16) * 1001, "0 .*, 1001 .*, 2002 .*more than two"),
        (fields(0, 1, 2, 3), "none of them is bright"),
        (fields(0, 127), r"0 \(50.0%\), 127 \(50.0%\): none of them is bright"),
        (colors(fields(0, 1, 2), BLACK, RED, GREEN), "#000000 .*, #00ff00 .*, #ff0000 .*more tha"),
        (with_palette(fields(0, 1, 2, 3), *VOC), "the palette's 0 .*, 1 .*, 2 .*, 3 .*more than"),
    ):
        expected = rf"mask\.png: expected a mask of 0 and 1, or of 0 and 255, got .*{words}"
        with pytest.raises(DataError, match=f"{expected}.*--foreground.*--void"):
            look_at_mask(written(tmp_path, pixels), PLAIN)


def read_by(path: Path, *foreground: str, void: tuple[str, ...] = ()) -> Any:
    """Columns of the first row, a stripe each: 1, 0 or void."""
    mask = mask_tensor(read_mask(path, MaskRule(foreground, void)))
    return [VOID if value == VOID else int(value) for value in mask[0, ::8].tolist()]


def test_values_are_foreground_background_or_void(tmp_path: Path) -> None:
    expected: Sequence[float]
    for foreground, void, expected in (
        (("15",), (), [0, 1, 0, 0]),
        (("15", "200"), (), [0, 1, 1, 0]),
        (("15-200",), (), [0, 1, 1, 0]),
        (("15",), ("255",), [0, 1, 0, VOID]),
        (("0",), ("200-255",), [1, 0, VOID, VOID]),
        (("#0f0f0f",), ("#ffffff",), [0, 1, 0, VOID]),
        ((), ("15", "200"), [0, VOID, VOID, 1]),
    ):
        path = save(tmp_path / "mask.png", fields(0, 15, 200, 255))
        assert read_by(path, *foreground, void=void) == expected
        look = look_at_mask(path, MaskRule(foreground, void))
        counts = [24 * 8 * sum(each == value for each in expected) for value in (1, VOID)]
        assert [look.foreground, look.void] == counts
        assert sorted(look.named) == sorted([*foreground, *void])


def test_colors_and_wide_numbers_are_named_as_they_are(tmp_path: Path) -> None:
    path = save(tmp_path / "mask.png", colors(fields(0, 1, 2), BLACK, RED, GREEN))
    assert read_by(path, "#00FF00", void=("#ff0000",)) == [0, VOID, 1]
    assert look_at_mask(path, MaskRule(("255",))).named == []
    path = save(tmp_path / "mask.png", fields(0, 1, 2).astype(np.uint16) * 1001)
    assert read_by(path, "2002", void=("1001",)) == [0, VOID, 1]
    path = written(tmp_path, with_palette(fields(0, 1, 2, 3), *VOC))
    for value in ("3", "#e0e0c0"):
        assert read_by(path, value) == [0, 0, 0, 1]


def test_a_rule_that_says_nothing_or_two_things_is_refused() -> None:
    for foreground, void, words in (
        ("x", [], "--foreground x: expected pixel values of the masks, such as 15, 128-255"),
        ("9-3", [], "--foreground 9-3: expected pixel values"),
        ("9" * 5000, [], "expected pixel values of the masks"),
        ("1", ["#12345"], "--void #12345: expected pixel values"),
        (
            "1-5",
            ["3"],
            "--void: expected values with one meaning each, got 1-5 for --foreground and 3",
        ),
        ("#FF0000", ["#ff0000"], "got #FF0000 for --foreground and #ff0000 for --void"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            MaskRule((foreground,), tuple(void))


NAMED = ("ground=0", "bird=3", "person=15")


def read(data: Path, *classes: str, void: str = "255") -> MaskedPictures:
    rule = MaskRule((), (void,), classes)
    return read_pairs(data, holdout=0.1, seed=0, skip_bad=False, rule=rule)


@for_each(
    ("lines", "expected"),
    [
        ("sky\nperson\n", ("sky=0", "person=1")),
        ("\ufeffsky\n\nperson = 15\n", ("sky=0", "person=15")),
        ("name,r,g,b\nSky, 0, 0, 255\nold car,64,0,128\n", ("Sky=#0000ff", "old car=#400080")),
        ("64bit 1 2 3\nb=#FF0000|7\n", ("64bit=#010203", "b=#ff0000|7")),
    ],
)
def test_a_file_of_classes_is_read(tmp_path: Path, lines: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "classes.txt").write_text(lines)
    assert list_classes([str(tmp_path / "classes.txt")]) == expected
    assert list_classes(expected) == expected


def test_classes_that_cannot_be_told_apart_are_refused() -> None:
    for names, words in ((["a", "a"], "got a twice"), (["a"], "got 1 of them"), ([], "got 0 of")):
        with pytest.raises(ValueError, match=f"^--classes .*expected auto, a file .*{words}"):
            list_classes(names)
    for rule, words in (
        (((), (), ("a=1|2", "b=2-5")), "got 2 for a and 2-5 for b"),
        (((), ("7",), ("a=1", "b=7")), "got 7 for b and 7 for --void"),
        ((("3",), (), ("a=1", "b=7")), "cannot be combined with --foreground"),
        (((), (), ("a=1", "b=x")), "--classes x: expected pixel values of the masks"),
    ):
        with pytest.raises(ValueError, match=words):
            MaskRule(*rule)


def test_every_kind_of_mask_gives_the_same_classes(tmp_path: Path) -> None:
    colors = ("ground=#000000", "bird=#808000", "person=#c08080")
    found = {}
    for kind, classes, void in (
        ("palette", NAMED, "255"),
        ("numbers", NAMED, "255"),
        ("colors", colors, "#e0e0c0"),
        ("palette", AUTO, "255"),
    ):
        data = tmp_path / f"{kind}-{len(classes)}"
        read_data = read(write_class_masks(data, kind=kind), *classes, void=void)
        masks = [np.asarray(read_mask(pair.mask, read_data.rule)) for pair in read_data.train]
        found[kind, len(classes)] = (
            np.stack(masks).tolist(),
            [each.color for each in read_data.classes],
            read_data.void,
        )
        # Of each class, whatever the masks call it.
        expected = [int((np.stack(masks) == number).sum()) for number in range(3)]
        assert read_data.counts[0] == expected
        tested = np.stack([np.asarray(read_mask(p.mask, read_data.rule)) for p in read_data.test])
        assert sum(read_data.counts[1]) == int((tested != VOID_NUMBER).sum())
        assert set(np.unique(masks).tolist()) == {0, 1, 2, VOID_NUMBER}
        tensor = mask_tensor(read_mask(read_data.train[0].mask, read_data.rule), classes=True)
        assert set(tensor.unique().tolist()) == {VOID, 0.0, 1.0, 2.0}
    assert len({str(masks) for masks, _, _ in found.values()}) == 1
    voc = ["#000000", "#808000", "#c08080"]
    assert [colors for _, colors, _ in found.values()] == [
        voc, ["#000000", "#800000", "#008000"], voc, voc
    ]  # fmt: skip
    auto = read(tmp_path / "palette-1", *AUTO)
    assert [each.name for each in auto.classes] == ["0", "3", "15"]
    assert auto.notes[0] == "--classes auto: one class per value of the masks, 0, 3, 15"


def test_values_of_no_class_and_classes_of_no_pixel_are_told(tmp_path: Path) -> None:
    data = write_class_masks(tmp_path / "data")
    words = (
        r"0.png: expected values that --classes or --void names, got the palette's 15 \(10.5%\):"
    )
    # All masks are like that: to leave them out would be no way out.
    with pytest.raises(DataError, match=f"(?s){words}.*nothing else can be used$"):
        read(data, "ground=0", "bird=3")
    assert "no training mask has a pixel of cat" in read(data, *NAMED, "cat=9").notes
    with pytest.raises(DataError, match=r"--void 254: no mask in .* has this value"):
        read(data, *AUTO, void="254")
    many = np.arange(400, dtype=np.uint16).reshape(20, 20)
    pillow.fromarray(many).save(tmp_path / "many.png")
    with pytest.raises(DataError, match="masks of at most 255 classes, got 400 different values"):
        look_at_mask(tmp_path / "many.png", MaskRule(classes=AUTO))
    with pytest.raises(DataError, match=r"one class per value with --classes auto"):
        read_pairs(data, holdout=0.1, seed=0, skip_bad=False)


def test_a_rule_without_classes_is_spelled_as_before() -> None:
    """Or no run that was begun before could be resumed: it is part of the digest of the data."""
    assert str(MaskRule(("1", "2"), ("255",))) == "1,2/255"
    assert str(MaskRule((), ("255",), NAMED)) == "/255/ground=0,bird=3,person=15"


def test_a_mask_is_drawn_in_its_palette(tmp_path: Path) -> None:
    classes = read(write_class_masks(tmp_path / "data"), *NAMED).classes
    numbers = np.array([[0, 1, 2, VOID_NUMBER]], dtype=np.uint8)
    rgb: Any = colored_mask(numbers, classes, values=False).convert("RGB")
    expected = [(0, 0, 0), (128, 128, 0), (192, 128, 128), (128, 128, 128)]
    assert [rgb.getpixel((x, 0)) for x in range(4)] == expected
    drawn = colored_mask(numbers[:, :3], classes, values=True)
    assert (drawn.mode, np.asarray(drawn).tolist()) == ("P", [[0, 3, 15]])
