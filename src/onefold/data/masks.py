"""Masks: which pixels of a picture are foreground, which are not, and which count for neither.

Without a rule a mask has two values. Its pixels are foreground where they are brighter than half;
in a mask without any value above 1, where they are 1. A coloured pixel is as bright as its
brightest channel.

Note: more than two values
--------------------------
Smoothed edges and the noise of JPEG give a mask of two values many others, and harm nothing: they
lie on edges, or close to the two. Numbers of classes, or a border that is to be left out, make
areas of their own. So values between the darkest and the brightest are taken for edges only if
there are several, and few of their pixels lie in the midst of pixels of the same value. All other
masks are refused, for brightness does not say which of their values are foreground.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from onefold.data.bad import readable
from onefold.data.decoding import is_deep, load_picture
from onefold.data.pictures import count_levels
from onefold.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["VOID", "MaskLook", "MaskRule", "look_at_mask", "mask_tensor", "read_mask"]

VOID = -1.0
"""In a tensor: a pixel that counts neither for the mask nor against it."""

_Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]

_HALF = 127
_VOID_LEVEL = 128
"""In a picture of a mask."""
_FEW = 4
"""Fewer values than these between two others are no smoothed edge."""
_FLAT_SHARE = 0.25
"""Of the pixels between, more in the midst of their like than this are areas and no edge."""
_NOISE = 8
"""How far JPEG, or what was a JPEG before, may be from the brightest value."""
_COLOUR_NOISE = 48
"""The same for the channels of a colour, which JPEG keeps less well."""
_LISTED = 6
_WEIGHT = 8
"""How many times the memory of a picture a mask takes: it is counted in whole numbers."""
_LOSSY = frozenset({".jfif", ".jpe", ".jpeg", ".jpg", ".webp"})
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COLOUR = re.compile(r"#([0-9a-fA-F]{6})")


@dataclass(frozen=True, slots=True)
class _Span:
    """Values that an option names: numbers from one to another, or one colour."""

    text: str
    first: int
    last: int
    colour: bool

    @classmethod
    def read(cls, option: str, text: str) -> _Span:
        if numbers := _NUMBERS.fullmatch(text):
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if first <= last:
                return cls(text, first, last, colour=False)
        if colour := _COLOUR.fullmatch(text):
            value = int(colour[1], 16)
            return cls(text, value, value, colour=True)
        raise ValueError(
            f"--{option} {text}: expected values of the masks' pixels, such as 15, 128-255 or "
            f"#ff0000"
        )

    def meets(self, other: _Span) -> bool:
        return self.colour == other.colour and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which values of masks are foreground, and which are left out.

    A value is a number, ``FIRST-LAST``, or a colour ``#rrggbb``. In a file with a palette, a number
    is that of the palette's entry.

    Raises:
        ValueError: a value cannot be read, or is in both lists.
    """

    foreground: tuple[str, ...] = ()
    """All others are background; without any, brightness decides."""
    void: tuple[str, ...] = ()
    """Left out of loss and scores."""

    def __post_init__(self) -> None:
        void = self.spans("void")
        for mine in self.spans("foreground"):
            for other in void:
                if mine.meets(other):
                    raise ValueError(
                        f"--void {other.text}: expected other values than those of --foreground, "
                        f"got {mine.text} there"
                    )

    def __str__(self) -> str:
        return f"{','.join(self.foreground)}/{','.join(self.void)}"

    def spans(self, option: str) -> list[_Span]:
        """The values of one of the two."""
        return [_Span.read(option, text) for text in getattr(self, option)]


@dataclass(frozen=True, slots=True)
class MaskLook:
    """What is kept of a mask that has been read."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    foreground: int
    """Pixels of it."""
    void: int
    """Pixels that are left out."""
    scale: int
    """The value of the foreground where brightness decides, 1 or 255; 0 if there is none."""
    values: list[str]
    """The most frequent ones."""
    named: list[str]
    """Values of the rule that it has."""

    def packed(self) -> list[Any]:
        """As JSON can hold it."""
        pixels = [self.foreground, self.void]
        return [list(self.size), *pixels, self.scale, self.values, self.named]

    @classmethod
    def unpacked(cls, values: Sequence[Any]) -> MaskLook:
        """From what `packed` gave."""
        (width, height), *rest = values
        return cls((width, height), *rest)


@dataclass(frozen=True, slots=True)
class _Pixels:
    """A mask as its file has it."""

    codes: _Array
    """(h, w): a number for each value; of colours without a palette, red, green and blue in one."""
    brightness: _Array
    """(h, w) uint8."""
    coloured: bool
    """Whether the numbers are colours."""
    palette: _Array | None
    """(256,) int64, the colour of each number, if the file has a palette."""
    lossy: bool

    def matches(self, spans: Sequence[_Span]) -> _Array:
        """(h, w) bool: whether a pixel has one of these values."""
        found = np.zeros(self.codes.shape, dtype=bool)
        for span in spans:
            found |= self._match(span)
        return found

    def _match(self, span: _Span) -> _Array:
        if not span.colour:
            within = (self.codes >= span.first) & (self.codes <= span.last)
            return within & (not self.coloured)
        if self.palette is not None:
            return np.asarray((self.palette == span.first)[self.codes])
        codes = self.codes if self.coloured else self.codes.astype(np.int64) * 0x10101
        return np.asarray(codes == span.first)

    def word(self, code: int) -> str:
        return f"#{code:06x}" if self.coloured else str(code)


def read_mask(path: Path, rule: MaskRule | None = None) -> Image:
    """A mask of mode ``L``: 255 where it is foreground, 128 where it is void, and 0 elsewhere.

    Args:
        path: of a file that `look_at_mask` has found usable.
        rule: which values are which.

    Raises:
        DataError: it cannot be read.
    """
    from PIL import Image

    rule = rule or MaskRule()
    pixels = _pixels(path)
    void = pixels.matches(rule.spans("void"))
    mask = np.where(_foreground(pixels, rule, ~void), 255, 0).astype(np.uint8)
    mask[void] = _VOID_LEVEL
    return Image.fromarray(mask)


def mask_tensor(mask: Image) -> torch.Tensor:
    """(h, w) float32, 1 where it is foreground, `VOID` where it is void, 0 elsewhere."""
    levels = torch.from_numpy(np.array(mask))
    return (levels.to(torch.float32) / 255).masked_fill(levels == _VOID_LEVEL, VOID)


def look_at_mask(path: Path, rule: MaskRule) -> MaskLook:
    """Read a mask and see whether the rule says what it means.

    Raises:
        DataError: it cannot be read, or it has other values than two and the rule names none.
    """
    pixels = _pixels(path)
    void = pixels.matches(rule.spans("void"))
    values = _counted(pixels.codes)
    if not rule.foreground and not void.all():
        _require_two_values(pixels, ~void, path)
    foreground = _foreground(pixels, rule, ~void)
    height, width = pixels.codes.shape
    spans = [*rule.spans("foreground"), *rule.spans("void")]
    any_foreground = bool(foreground.any()) and not rule.foreground
    return MaskLook(
        size=(width, height),
        foreground=int(np.count_nonzero(foreground)),
        void=int(np.count_nonzero(void)),
        scale=(1 if pixels.brightness[foreground].max() == 1 else 255) if any_foreground else 0,
        values=[pixels.word(code) for code in _most_frequent(values)],
        named=[span.text for span in spans if pixels.matches([span]).any()],
    )


def _foreground(pixels: _Pixels, rule: MaskRule, counted: _Array) -> _Array:
    """(h, w) bool."""
    if rule.foreground:
        return pixels.matches(rule.spans("foreground")) & counted
    brightest = int(pixels.brightness.max(initial=0, where=counted))
    limit = _HALF if brightest > 1 else 0
    return np.asarray((pixels.brightness > limit) & counted)


def _pixels(path: Path) -> _Pixels:
    picture = load_picture(path, weight=_WEIGHT)
    lossy = path.suffix.lower() in _LOSSY
    if picture.mode == "P":
        return _of_palette(picture)
    if is_deep(picture):
        codes, brightness = _of_numbers(np.nan_to_num(np.asarray(picture, dtype=np.float64)))
        return _Pixels(codes, brightness, coloured=False, palette=None, lossy=False)
    if picture.mode in ("1", "L", "LA"):
        grey = np.asarray(picture.convert("L"))
        return _Pixels(grey, grey, coloured=False, palette=None, lossy=lossy)
    return _of_colours(np.asarray(picture.convert("RGB")), lossy=lossy)


def _of_palette(picture: Image) -> _Pixels:
    entries = np.zeros((256, 3), dtype=np.int64)
    given = np.array(picture.getpalette("RGB") or [], dtype=np.int64).reshape(-1, 3)
    entries[: len(given)] = given[:256]
    codes = np.asarray(picture)
    brightness = entries.max(axis=1).astype(np.uint8)[codes]
    colours = entries @ np.array([1 << 16, 1 << 8, 1])
    return _Pixels(codes, brightness, coloured=False, palette=colours, lossy=False)


def _of_numbers(values: _Array) -> tuple[_Array, _Array]:
    """Of more than 8 bits: whole numbers as they are, fractions of 1 as parts of 255."""
    if values.max(initial=0) <= 1 and (values % 1).any():
        values = values.clip(0, 1) * 255
    codes = values.clip(0, None).astype(np.int64)
    return codes, codes.clip(0, 255).astype(np.uint8)


def _of_colours(rgb: _Array, *, lossy: bool) -> _Pixels:
    """Greys in three channels are numbers."""
    red, green, blue = (rgb[..., channel].astype(np.int32) for channel in range(3))
    brightness = rgb.max(axis=2)
    apart = int((brightness - rgb.min(axis=2)).max(initial=0))
    if apart <= (_COLOUR_NOISE if lossy else 0):
        return _Pixels(brightness, brightness, coloured=False, palette=None, lossy=lossy)
    codes = (red << 16) | (green << 8) | blue
    return _Pixels(codes, brightness, coloured=True, palette=None, lossy=lossy)


def _require_two_values(pixels: _Pixels, counted: _Array, path: Path) -> None:
    """Refuse a mask if brightness does not say which of its values are foreground.

    Args:
        pixels: of the mask.
        counted: (h, w) bool, where it is not void.
        path: of the file.

    Raises:
        DataError: it does not.
    """
    codes = _counted(pixels.codes[counted])
    doubt = _doubt(pixels, counted, len(codes))
    if doubt:
        raise DataError(
            f"{readable(path)}: expected a mask of 0 and 1, or of 0 and 255, got "
            f"{_told(pixels, codes)}: {doubt}. Name the foreground, such as --foreground "
            f"{_example(pixels, codes)}, and with --void what counts as neither"
        )


def _doubt(pixels: _Pixels, counted: _Array, values: int) -> str:
    """Why brightness does not say which of so many values are foreground; empty if it does."""
    levels = pixels.brightness[counted]
    darkest, brightest = int(levels.min()), int(levels.max())
    single = values == 1 or (pixels.lossy and brightest - darkest <= _NOISE)
    if 1 < brightest <= _HALF:
        return "none of them is bright"
    if not pixels.lossy and values <= 3 and brightest > 1 and bool((levels == 1).any()):
        return "the foreground may be 1, or what is brighter"
    if darkest > _HALF and not single:
        return "all of them are bright"
    if values > 2 and _has_areas(pixels, _between(pixels, counted)):
        return "more than two of them cover areas, as numbers of classes do"
    return ""


def _between(pixels: _Pixels, counted: _Array) -> _Array:
    """(h, w) bool: pixels whose value is near neither the darkest nor the brightest."""
    brightness, codes = pixels.brightness, pixels.codes
    ends = []
    for level in (brightness[counted].min(), brightness[counted].max()):
        at_level = _counted(codes[counted & (brightness == level)])
        ends.append(max(at_level, key=lambda code: at_level[code]))
    tolerances = (_tolerance(pixels) if pixels.lossy else 0, _tolerance(pixels))
    far = counted.copy()
    for end, tolerance in zip(ends, tolerances, strict=True):
        far &= ~_is_near(pixels, end, tolerance)
    return far


def _tolerance(pixels: _Pixels) -> int:
    if pixels.palette is not None:
        return 0
    return _COLOUR_NOISE if pixels.coloured and pixels.lossy else _NOISE


def _is_near(pixels: _Pixels, code: int, tolerance: int) -> _Array:
    """(h, w) bool: whether a pixel is that value, or differs from it by no more than this."""
    if not pixels.coloured:
        return np.asarray(np.abs(pixels.codes.astype(np.int64) - code) <= tolerance)
    near = np.ones(pixels.codes.shape, dtype=bool)
    for shift in (16, 8, 0):
        channel = (pixels.codes >> shift) & 255
        near &= np.abs(channel - ((code >> shift) & 255)) <= tolerance
    return near


def _has_areas(pixels: _Pixels, between: _Array) -> bool:
    """Whether values between two others are more than smoothed edges."""
    total = int(np.count_nonzero(between))
    if not total:
        return False
    if not pixels.lossy and len(_counted(pixels.codes[between])) < _FEW:
        return True
    return int(np.count_nonzero(_flat(pixels.codes) & between)) > _FLAT_SHARE * total


def _flat(codes: _Array) -> _Array:
    """(h, w) bool: whether a pixel and its eight neighbours have one value."""
    flat = np.zeros(codes.shape, dtype=bool)
    if min(codes.shape) < 3:
        return flat
    across = codes[:, 1:] == codes[:, :-1]
    rows = across[:, 1:] & across[:, :-1]
    down = (codes[1:] == codes[:-1])[:, 1:-1]
    flat[1:-1, 1:-1] = rows[:-2] & rows[1:-1] & rows[2:] & down[1:] & down[:-1]
    return flat


def _counted(codes: _Array) -> dict[int, int]:
    """How many pixels have each value; in order of the values."""
    if codes.dtype == np.uint8:
        counts = count_levels(codes)
        return {value: int(counts[value]) for value in np.flatnonzero(counts).tolist()}
    values, counts = np.unique(codes, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _most_frequent(counts: dict[int, int]) -> list[int]:
    return sorted(sorted(counts, key=lambda code: -counts[code])[:_LISTED])


def _told(pixels: _Pixels, counts: dict[int, int]) -> str:
    """The most frequent values, each with its share of the pixels."""
    whole = sum(counts.values())
    told = [f"{pixels.word(c)} ({_percent(counts[c] / whole)})" for c in _most_frequent(counts)]
    more = len(counts) - len(told)
    kind = "the palette's " if pixels.palette is not None else ""
    return kind + ", ".join(told) + (f" and {more} more values" if more > 0 else "")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _example(pixels: _Pixels, counts: dict[int, int]) -> str:
    """The value after the most frequent one, mostly the background; as a shell takes it."""
    ranked = sorted(counts, key=lambda code: -counts[code])
    word = pixels.word(ranked[min(1, len(ranked) - 1)])
    return f"'{word}'" if pixels.coloured else word
