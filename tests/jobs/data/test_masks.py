"""What is foreground in a mask, what is void, and which masks brightness alone cannot read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onefold.errors import DataError
from onefold_jobs.data.masks import VOID, MaskRule, look_at_mask, mask_tensor, read_mask
from tests.masked import save

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
        counts = [24 * 8 * expected.count(value) for value in (1, VOID)]
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
        ("x", [], "--foreground x: expected values of the masks' pixels, such as 15, 128-255"),
        ("9-3", [], "--foreground 9-3: expected values"),
        ("9" * 5000, [], "expected values of the masks' pixels"),
        ("1", ["#12345"], "--void #12345: expected values"),
        ("1-5", ["3"], "--void 3: expected other values than those of --foreground, got 1-5"),
        ("#FF0000", ["#ff0000"], "--void #ff0000: expected other values"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            MaskRule((foreground,), tuple(void))
