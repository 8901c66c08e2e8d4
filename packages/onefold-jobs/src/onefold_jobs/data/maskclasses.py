"""The classes of masks: their names, the values of pixels that stand for them, their colors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from onefold_jobs.data.files import read_whole

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "AUTO",
    "MOST_CLASSES",
    "VOID_NUMBER",
    "MaskClass",
    "colored_mask",
    "colors_of",
    "list_classes",
]

AUTO = ("auto",)
"""Takes the values that occur in the masks as classes."""
MOST_CLASSES = 255
VOID_NUMBER = 255
"""In a picture of class numbers: a pixel that belongs to no class."""
_VOID_COLOR = "#808080"
_MOST_BYTES = 1 << 20
_COLOR_LINE = re.compile(r"(.*?)[,;\s]+([0-9]{1,3})[,;\s]+([0-9]{1,3})[,;\s]+([0-9]{1,3})")


class MaskClass(msgspec.Struct, frozen=True):
    """One class of the pixels of masks."""

    name: str
    values: tuple[str, ...]
    """Values of pixels that stand for it, as `MaskRule` takes them."""
    color: str = ""
    """How it is shown, as ``#rrggbb``."""


def list_classes(given: Sequence[str]) -> tuple[str, ...]:
    """Spell the classes that an option names as NAME=VALUES.

    Args:
        given: names, each with its values or not; or the path of a file with one class a line. A
            class without a value has the number of its place, from 0. In a file a line may also
            have a name and three numbers, its color.

    Raises:
        ValueError: a class is named twice, or there are too many.
        OSError: the file cannot be read.

    >>> list_classes(["sky", "person=15", "car=3|4"])
    ('sky=0', 'person=15', 'car=3|4')
    """
    items = [each.strip() for each in given]
    if len(items) == 1 and Path(items[0]).is_file():
        lines = read_whole(Path(items[0]), _MOST_BYTES).decode("utf-8-sig").splitlines()
        items = [line.strip() for line in lines if line.strip()]
        # As tables of colors begin.
        if items and re.fullmatch(r"name[,;\s]+r[,;\s]+g[,;\s]+b", items[0].lower()):
            del items[0]
    spelled = []
    for number, item in enumerate(items):
        name, _, values = item.rpartition("=") if "=" in item else (item, "", str(number))
        if rgb := _COLOR_LINE.fullmatch(item):
            name, values = rgb[1], "#{:02x}{:02x}{:02x}".format(*map(int, rgb.groups()[1:]))
        spelled.append(f"{name.strip()}={values.strip().lower()}")
    names = [each.rpartition("=")[0] for each in spelled]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None or not 2 <= len(names) <= MOST_CLASSES:
        came = f"{double} twice" if double else f"{len(names)} of them"
        raise ValueError(
            f"--classes {','.join(given)[:60]}: expected auto, a file with a class on each line, "
            f"or from 2 to {MOST_CLASSES} names of classes, got {came}"
        )
    return tuple(spelled)


def colors_of(
    classes: Sequence[tuple[str, Sequence[str]]], found: Mapping[str, str]
) -> tuple[MaskClass, ...]:
    """Give each class the color that the masks have for it, or one of its own.

    Args:
        classes: names and values.
        found: the colors that a palette has, by value.
    """
    known = dict(found) | {each: each for _, values in classes for each in values if "#" in each}
    shown = [next((known[each] for each in values if each in known), None) for _, values in classes]
    # A palette of few colors is nobody's choice; then all are chosen here.
    own = None not in shown and len(set(shown)) == len(shown)
    return tuple(
        MaskClass(name, tuple(values), str(shown[number]) if own else _spread_color(number))
        for number, (name, values) in enumerate(classes)
    )


def _spread_color(number: int) -> str:
    """The color of a class by its number: the bits of the number, spread over three channels.

    Neighbors look different, and 0 is black. Source: the colors of the Pascal VOC challenge.

    >>> _spread_color(0), _spread_color(1), _spread_color(15)
    ('#000000', '#800000', '#c08080')
    """
    channels = [0, 0, 0]
    for place in range(8):
        for channel in range(3):
            channels[channel] |= ((number >> (3 * place + channel)) & 1) << (7 - place)
    return "#{:02x}{:02x}{:02x}".format(*channels)


def colored_mask(numbers: np.ndarray, classes: Sequence[MaskClass], *, values: bool) -> Image:
    """Make a picture with a palette of class numbers, (h, w) uint8.

    Args:
        numbers: number of each pixel's class; `VOID_NUMBER` for none.
        classes: the classes.
        values: write the values that stand for the classes instead of their numbers, where each
            has one that a palette can have.
    """
    from PIL import Image

    codes = [*range(len(classes))]
    if values and all(_is_code(each.values[0]) for each in classes):
        codes = [int(each.values[0]) for each in classes]
    table = np.full(256, VOID_NUMBER, dtype=np.uint8)
    table[: len(codes)] = codes
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[VOID_NUMBER] = _channels(_VOID_COLOR)
    for code, each in zip(codes, classes, strict=True):
        palette[code] = _channels(each.color)
    picture = Image.fromarray(table[numbers])
    picture.putpalette(palette.tobytes())
    return picture


def _is_code(value: str) -> bool:
    return value.isdecimal() and int(value) < 256


def _channels(color: str) -> list[int]:
    return [*bytes.fromhex(color.removeprefix("#"))]
