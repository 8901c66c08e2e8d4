"""Masks of several classes: how classes are named, and what their pixels become."""

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
from tests.tables import for_each

pillow = pytest.importorskip("PIL.Image", reason='needs pip install "onefold-jobs[images]"')

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
        (((), (), ("a=1|2", "b=2-5")), "got 2-5 for a and for b"),
        (((), ("7",), ("a=1", "b=7")), "got 7 for b and for --void"),
        ((("3",), (), ("a=1", "b=7")), "expected no --foreground"),
        (((), (), ("a=1", "b=x")), "--classes x: expected values of the masks' pixels"),
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
        tested = np.stack([read_mask(pair.mask, read_data.rule) for pair in read_data.test])
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
    assert auto.notes[0] == "--classes auto: a class for each value of the masks, 0, 3, 15"


def test_values_of_no_class_and_classes_of_no_pixel_are_told(tmp_path: Path) -> None:
    data = write_class_masks(tmp_path / "data")
    words = (
        r"0.png: expected values that --classes or --void names, got the palette's 15 \(10.5%\):"
    )
    # All masks are like that: to leave them out would be no way out.
    with pytest.raises(DataError, match=f"(?s){words}.*nothing else can be used$"):
        read(data, "ground=0", "bird=3")
    assert "no training mask has a pixel of cat" in read(data, *NAMED, "cat=9").notes
    with pytest.raises(DataError, match="--void 254: expected a value of the masks"):
        read(data, *AUTO, void="254")
    many = np.arange(400, dtype=np.uint16).reshape(20, 20)
    pillow.fromarray(many).save(tmp_path / "many.png")
    with pytest.raises(DataError, match="masks of at most 255 classes, got 400 different values"):
        look_at_mask(tmp_path / "many.png", MaskRule(classes=AUTO))
    with pytest.raises(DataError, match=r"for each of them with --classes auto"):
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
