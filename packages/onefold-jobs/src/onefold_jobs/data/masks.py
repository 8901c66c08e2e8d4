"""Masks: which pixels of an image are foreground, which class they have, and which are ignored.

Without a rule, a mask has two values. Pixels are foreground if they are brighter than half, or, in
a mask without values above 1, if they are 1. The brightness of a color is its brightest channel.

Note: more than two values
--------------------------
Smoothed edges and JPEG noise add many values to a mask of two, without harm: they occur only at
edges or close to the two values. Class numbers, or a border to ignore, cover whole areas. So values
between the darkest and the brightest count as edges only if there are several of them and few of
their pixels are surrounded by pixels with the same value. All other masks are rejected, because
brightness does not determine which of their values are foreground.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch

from onefold.errors import DataError
from onefold_jobs.data.files import read_whole, readable
from onefold_jobs.data.pictures import count_levels, deep_values, load_picture

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "AUTO",
    "MASK_NOTE",
    "MOST_CLASSES",
    "VOID",
    "VOID_NUMBER",
    "MaskClass",
    "MaskLook",
    "MaskRule",
    "colored_mask",
    "colors_of",
    "list_classes",
    "look_at_mask",
    "mask_name",
    "mask_tensor",
    "read_mask",
    "require_one_foreground",
]

MASK_NOTE = "onefold predict"
"""Software that the PNG of a predicted mask names, which marks it as one of ours."""
VOID = -1.0
"""Tensor value of ignored pixels."""

_Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]

_HALF = 127
"""The brightest background level."""
_VOID_LEVEL = 128
"""Image level of void: neither 0 nor 255, and unchanged by flips and crops."""
_FEW = 4
"""Fewer values than this between the two ends are classes, not smoothed edges."""
_FLAT_SHARE = 0.25
"""Above this fraction of uniform pixels between the ends, the values are areas."""
_NOISE = 8
"""Maximum distance from an end that JPEG, or a conversion from JPEG, causes."""
_COLOR_NOISE = 48
"""The same for color channels, which JPEG stores at half the resolution."""
_LISTED = 6
"""Maximum number of values that an error names."""
_WEIGHT = 8
"""Memory of a mask relative to an image, mostly for its codes in int64."""
_MOST_CODE = 1 << 62
"""Maximum code; larger floating point values are clipped."""
_LOSSY = frozenset({".jfif", ".jpe", ".jpeg", ".jpg", ".webp"})
# At most 18 digits, so that a value fits the int64 it is compared with.
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SHADE = re.compile(r"|[0-9]{1,19}|#[0-9a-f]{6}")
_COLOR = re.compile(r"#([0-9a-fA-F]{6})")


@dataclass(frozen=True, slots=True)
class _Span:
    """Values that an option names: a range of numbers, or a color."""

    text: str
    """The user's spelling."""
    first: int
    last: int
    """Inclusive."""
    color: bool
    """Whether ``first`` and ``last`` are the same color, 0xRRGGBB."""

    @classmethod
    def read(cls, option: str, text: str) -> _Span:
        """Parse one value of an option."""
        if numbers := _NUMBERS.fullmatch(text):
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if first <= last:
                return cls(text, first, last, color=False)
        if color := _COLOR.fullmatch(text):
            value = int(color[1], 16)
            return cls(text, value, value, color=True)
        raise ValueError(
            f"--{option} {text}: expected pixel values of the masks, such as 15, 128-255 or #ff0000"
        )

    def meets(self, other: _Span) -> bool:
        """Whether the two overlap."""
        return self.color == other.color and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Maps mask values to foreground or classes, and to void.

    A value is a number, ``FIRST-LAST``, or a color ``#rrggbb``. In a file with a palette, a number
    is an index of the palette.

    Raises:
        ValueError: a value is invalid, or is in both lists.
    """

    foreground: tuple[str, ...] = ()
    """Foreground values, with all others as background; if empty, brightness decides."""
    void: tuple[str, ...] = ()
    """Values whose pixels are ignored by loss and scores."""
    classes: tuple[str, ...] = ()
    """Classes as NAME=VALUES, or `AUTO`; empty for foreground masks."""

    def __post_init__(self) -> None:
        if self.classes and self.foreground:
            raise ValueError("--classes cannot be combined with --foreground")
        # A value with two meanings would silently have the last one. Foreground values may overlap,
        # which is harmless.
        known = [(span, name) for name, spans in self.named for span in spans]
        known += [(span, "--foreground") for span in self.spans("foreground")]
        known += [(span, "--void") for span in self.spans("void")]
        for place, (span, name) in enumerate(known):
            for other, second in known[:place]:
                if span.meets(other) and (self.classes or name != second):
                    raise ValueError(
                        f"{'--classes' if self.classes else '--void'}: expected values with one "
                        f"meaning each, got {other.text} for {second} and {span.text} for {name}"
                    )

    def __str__(self) -> str:
        # Part of a scan's kind, and of the dataset's digest: with another format, every mask would
        # be read again, and no run could be resumed.
        classes = f"/{','.join(self.classes)}" if self.classes else ""
        return f"{','.join(self.foreground)}/{','.join(self.void)}{classes}"

    @property
    def named(self) -> list[tuple[str, list[_Span]]]:
        """Classes and their values; empty for `AUTO`."""
        if self.classes == AUTO:
            return []
        parts = (each.rpartition("=") for each in self.classes)
        return [
            (name, [_Span.read("classes", text) for text in values.split("|")])
            for name, _, values in parts
        ]

    def spans(self, option: str) -> list[_Span]:
        """Parse the values of ``foreground`` or ``void``."""
        return [_Span.read(option, text) for text in getattr(self, option)]


class MaskLook(msgspec.Struct, frozen=True, array_like=True, tag="mask"):
    """Facts of a mask that was read."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    foreground: int
    """Number of foreground pixels."""
    void: int
    """Number of void pixels."""
    scale: int
    """Foreground value if brightness decides, 1 or 255; otherwise 0."""
    values: list[str]
    """The most frequent values, in the spelling of an option."""
    named: list[str]
    """Values of the rule that the mask contains."""
    counts: dict[str, int] = {}
    """Pixels of each class by name, for masks with classes; for `AUTO`, of each value."""
    colors: dict[str, str] = {}
    """Colors of these values, or of ``shade``, if the file has a palette."""
    shade: str = ""
    """Most frequent value of the foreground's areas, if brightness decides."""

    def __post_init__(self) -> None:
        # The scan in a run's folder may come from another user.
        if not all(map(_SHADE.fullmatch, (self.shade, self.colors.get(self.shade, "")))):
            raise ValueError(f"expected a value of a mask, got {self.shade!r:.80}")

    @property
    def color(self) -> tuple[int, ...]:
        """RGB of ``shade``."""
        named = self.colors.get(self.shade, self.shade)
        return tuple(_channels(named)) if "#" in named else (min(int(named), 255),) * 3


@dataclass(frozen=True, slots=True)
class _Pixels:
    """Pixels of a mask, as stored in its file."""

    codes: _Array
    """(h, w) uint8, int32 or int64: value of each pixel, or 0xRRGGBB if colored."""
    brightness: _Array
    """(h, w) uint8."""
    colored: bool = False
    """Whether codes are colors."""
    palette: _Array | None = None
    """(256,) int64, color of each code, if the file has a palette."""
    lossy: bool = False
    """Whether the file format changes values slightly."""

    def matches(self, spans: Sequence[_Span]) -> _Array:
        """Return the pixels with any of these values, as (h, w) bool."""
        found = np.zeros(self.codes.shape, dtype=bool)
        for span in spans:
            found |= self._match(span)
        return found

    def _match(self, span: _Span) -> _Array:
        if not span.color:
            within = (self.codes >= span.first) & (self.codes <= span.last)
            return within & (not self.colored)
        # A lookup table of 256 entries, because a palette may contain a color twice.
        if self.palette is not None:
            return np.asarray((self.palette == span.first)[self.codes])
        # Gray values are colors, too. Widen first, because the product would wrap around in uint8.
        codes = self.codes if self.colored else self.codes.astype(np.int64) * 0x10101
        return np.asarray(codes == span.first)

    def word(self, code: int) -> str:
        """Spell a value in the form of an option."""
        return f"#{code:06x}" if self.colored else str(code)


def read_mask(path: Path, rule: MaskRule | None = None) -> Image:
    """Read a mask in mode ``L``: 255 for foreground, 128 for void, otherwise 0.

    For masks with classes: class numbers, and `VOID_NUMBER` for void.

    Args:
        path: path of a file that `look_at_mask` accepts.
        rule: foreground and void values; None lets brightness decide.

    Raises:
        DataError: the file cannot be read.
    """
    from PIL import Image

    rule = rule or MaskRule()
    pixels = _pixels(path)
    void = pixels.matches(rule.spans("void"))
    if rule.classes:
        return Image.fromarray(_numbers(pixels, rule))
    mask = np.where(_foreground(pixels, rule, ~void), 255, 0).astype(np.uint8)
    # Last, because void takes precedence over brightness.
    mask[void] = _VOID_LEVEL
    return Image.fromarray(mask)


def mask_name(name: str) -> str:
    """Return the name of an image's mask: masks are PNG files."""
    return str(Path(name).with_suffix(".png"))


def mask_tensor(mask: Image, *, classes: bool = False) -> torch.Tensor:
    """Convert a mask to (h, w) float32: 1 for foreground, `VOID` for void, otherwise 0.

    Args:
        mask: result of `read_mask`.
        classes: whether the mask contains class numbers, which are kept.
    """
    # np.array copies: Pillow's memory is read-only, which from_numpy warns about.
    levels = torch.from_numpy(np.array(mask))
    if classes:
        return levels.to(torch.float32).masked_fill(levels == VOID_NUMBER, VOID)
    return (levels.to(torch.float32) / 255).masked_fill(levels == _VOID_LEVEL, VOID)


def look_at_mask(path: Path, rule: MaskRule) -> MaskLook:
    """Read a mask, and check that its foreground is defined.

    Raises:
        DataError: the file cannot be read; or the rule names no foreground, and brightness does not
            determine it either.
    """
    pixels = _pixels(path)
    void = pixels.matches(rule.spans("void"))
    counts: dict[str, int] = {}
    colors: dict[str, str] = {}
    scale, shade = 0, ""
    if rule.classes:
        values, foreground = _counted(pixels.codes[~void]), ~void
        _require_classes(pixels, values, void, rule, path)
        counts = {pixels.word(code): count for code, count in values.items()}
        if rule.classes != AUTO:
            inside = count_levels(_numbers(pixels, rule)).tolist()
            counts = {name: n for (name, _), n in zip(rule.named, inside, strict=False) if n}
        if pixels.palette is not None:
            colors = {str(code): f"#{int(pixels.palette[code]):06x}" for code in values}
    else:
        values = _counted(pixels.codes)
        if not rule.foreground and not void.all():
            _require_two_values(pixels, ~void, path)
        foreground = _foreground(pixels, rule, ~void)
        # Both matter only without a named foreground; `require_one_foreground` compares them
        # between masks.
        if foreground.any() and not rule.foreground:
            scale = 1 if pixels.brightness[foreground].max() == 1 else 255
            code = _shade(pixels, foreground)
            shade = "" if code is None else pixels.word(code)
            if code is not None and pixels.palette is not None:
                colors = {shade: f"#{int(pixels.palette[code]):06x}"}
    height, width = pixels.codes.shape
    spans = [*rule.spans("foreground"), *rule.spans("void")]
    return MaskLook(
        size=(width, height),
        foreground=int(np.count_nonzero(foreground)),
        void=int(np.count_nonzero(void)),
        scale=scale,
        values=[pixels.word(code) for code in _most_frequent(values)],
        named=[span.text for span in spans if pixels.matches([span]).any()],
        counts=counts,
        colors=colors,
        shade=shade,
    )


def require_one_foreground(masks: Sequence[tuple[Path, MaskLook]]) -> None:
    """Reject masks whose foregrounds have different values, which are probably classes.

    Args:
        masks: paths of the masks, and their scan results with a rule without a foreground.

    Raises:
        DataError: some have 0 and 1 and others 0 and 255, or their foregrounds differ in color.
    """
    # A mask with only the classes 0 and 255 looks valid; others reveal that 1 is a class.
    first: dict[int, tuple[Path, MaskLook]] = {}
    for path, look in masks:
        first.setdefault(look.scale, (path, look))
    if 1 in first and 255 in first:
        small, large = (readable(first[scale][0]) for scale in (1, 255))
        values = {scale: ", ".join(look.values) for scale, (_, look) in first.items()}
        raise DataError(
            f"{small}: expected masks with either 0 and 1, or 0 and 255; this one has "
            f"{values[1]}, but {large} has {values[255]}. Name the foreground, such as "
            f"--foreground 1, and the values to ignore, such as --void 255"
        )
    # Each mask alone looks valid if no image contains two classes.
    shades: dict[str, tuple[Path, MaskLook]] = {}
    for path, look in sorted(masks, key=lambda mask: mask[0]):
        if look.shade and look.scale == 255:
            shades.setdefault(look.shade, (path, look))
    for path, look in list(shades.values())[1:]:
        known, other = next(iter(shades.values()))
        gray = len({*look.color}) == len({*other.color}) == 1
        lossy = not gray and any(x.suffix.lower() in _LOSSY for x in (path, known))
        apart = max(abs(a - b) for a, b in zip(look.color, other.color, strict=True))
        if apart > (_COLOR_NOISE if lossy else _NOISE):
            named = ",".join(list(shades)[:_LISTED])
            named = f"'{named}'" if "#" in named else named
            raise DataError(
                f"{readable(path)}: expected masks with one foreground value, but this one has "
                f"{look.shade}, and {readable(known)} has {other.shade}: they may be different "
                f"classes. If all are foreground, name them with --foreground {named}; or train "
                f"one class per value with --classes auto"
            )


def _shade(pixels: _Pixels, foreground: _Array) -> int | None:
    """Return the most frequent value of the foreground's areas; None if it has only edges."""
    counts = _counted(pixels.codes[foreground])
    if len(counts) > 1:
        counts = _counted(pixels.codes[foreground & _flat(pixels.codes)])
    return max(counts, key=counts.__getitem__, default=None)


def _numbers(pixels: _Pixels, rule: MaskRule) -> _Array:
    """Return each pixel's class number, (h, w) uint8; `VOID_NUMBER` for pixels without a class."""
    numbers = np.full(pixels.codes.shape, VOID_NUMBER, dtype=np.uint8)
    for number, (_, spans) in enumerate(rule.named):
        numbers[pixels.matches(spans)] = number
    return numbers


def _require_classes(
    pixels: _Pixels, values: Counter[int], void: _Array, rule: MaskRule, path: Path
) -> None:
    """Reject a mask with a value without a class, or with too many values for `AUTO`.

    Raises:
        DataError: the mask has such a value, or too many values.
    """
    if rule.classes != AUTO:
        strange = _counted(pixels.codes[~void & (_numbers(pixels, rule) == VOID_NUMBER)])
        if strange:
            raise DataError(
                f"{readable(path)}: expected values that --classes or --void names, got "
                f"{_told(pixels, strange, pixels.codes.size)}: name them as well"
            )
    elif len(values) > MOST_CLASSES:
        raise DataError(
            f"{readable(path)}: expected masks of at most {MOST_CLASSES} classes, got "
            f"{len(values):,} different values: smoothed edges and JPEG add values, so save masks "
            f"without either, or list the values in --classes"
        )


def _foreground(pixels: _Pixels, rule: MaskRule, counted: _Array) -> _Array:
    """Return the foreground, (h, w) bool, among the counted pixels."""
    if rule.foreground:
        return pixels.matches(rule.spans("foreground")) & counted
    brightest = int(pixels.brightness.max(initial=0, where=counted))
    # Read only counted pixels, or a void border of 255 would turn a foreground of 1 into
    # background.
    limit = _HALF if brightest > 1 else 0
    return np.asarray((pixels.brightness > limit) & counted)


def _pixels(path: Path) -> _Pixels:
    picture = load_picture(path, weight=_WEIGHT)
    lossy = path.suffix.lower() in _LOSSY
    # Keep the palette: --foreground 3 means its index 3, whatever the color.
    if picture.mode == "P":
        return _of_palette(picture)
    values = deep_values(picture)
    if values is not None:
        return _of_numbers(values)
    # Drop the alpha channel, which editors add to masks without meaning.
    if picture.mode in ("1", "L", "LA"):
        gray = np.asarray(picture.convert("L"))
        return _Pixels(gray, gray, lossy=lossy)
    return _of_colors(np.asarray(picture.convert("RGB")), lossy=lossy)


def _of_palette(picture: Image) -> _Pixels:
    # A palette may be shorter than the codes that refer to it; 256 rows cover all of them.
    entries = np.zeros((256, 3), dtype=np.int64)
    given = np.array(picture.getpalette("RGB") or [], dtype=np.int64).reshape(-1, 3)
    entries[: len(given)] = given[:256]
    codes = np.asarray(picture)
    brightness = entries.max(axis=1).astype(np.uint8)[codes]
    colors = entries @ np.array([1 << 16, 1 << 8, 1])
    return _Pixels(codes, brightness, palette=colors)


def _of_numbers(values: _Array) -> _Pixels:
    """Convert values above 8 bits; fractions of 1 become fractions of 255."""
    if values.max(initial=0) <= 1 and (values % 1).any():
        values = values.clip(0, 1) * 255
    # Clip to int64, or a large value would wrap around to a negative one, and become background.
    codes = values.clip(0, _MOST_CODE).astype(np.int64)
    return _Pixels(codes, codes.clip(0, 255).astype(np.uint8))


def _of_colors(rgb: _Array, *, lossy: bool) -> _Pixels:
    """Convert RGB to colors, or to plain numbers if the three channels are equal everywhere."""
    # Signed and wide, because uint8 differences wrap around, and a code holds three channels.
    red, green, blue = (rgb[..., channel].astype(np.int32) for channel in range(3))
    brightness = rgb.max(axis=2)
    apart = int((brightness - rgb.min(axis=2)).max(initial=0))
    # JPEG tints grays slightly.
    if apart <= (_COLOR_NOISE if lossy else 0):
        return _Pixels(brightness, brightness, lossy=lossy)
    codes = (red << 16) | (green << 8) | blue
    return _Pixels(codes, brightness, colored=True, lossy=lossy)


def _require_two_values(pixels: _Pixels, counted: _Array, path: Path) -> None:
    """Reject a mask if brightness does not determine its foreground.

    Args:
        pixels: pixels of the mask.
        counted: (h, w) bool, False for void.
        path: path of the file, for the error.

    Raises:
        DataError: brightness does not determine the foreground.
    """
    codes = _counted(pixels.codes[counted])
    doubt = _doubt(pixels, counted, len(codes))
    if doubt:
        raise DataError(
            f"{readable(path)}: expected a mask of 0 and 1, or of 0 and 255, got "
            f"{_told(pixels, codes, codes.total())}: {doubt}. Name the foreground, such as "
            f"--foreground {_example(pixels, codes)}, and the values to ignore with --void; or "
            f"train one class per value with --classes auto"
        )


def _doubt(pixels: _Pixels, counted: _Array, values: int) -> str:
    """Return why brightness does not determine the foreground; empty if it does."""
    levels = pixels.brightness[counted]
    darkest, brightest = int(levels.min()), int(levels.max())
    # A mask with only foreground, or only background, is valid.
    single = values == 1 or (pixels.lossy and brightest - darkest <= _NOISE)
    if 1 < brightest <= _HALF:
        return "none of them is bright"
    # 0, 1 and 255: either class 1 with a void border, or foreground 255 with smoothed edges.
    if not pixels.lossy and values <= 3 and brightest > 1 and bool((levels == 1).any()):
        return "the foreground may be 1, or the brighter values"
    if darkest > _HALF and not single:
        return "all of them are bright"
    if values > 2 and _has_areas(pixels, _between(pixels, counted)):
        return "more than two of them cover areas, like class numbers"
    return ""


def _between(pixels: _Pixels, counted: _Array) -> _Array:
    """Return the pixels, (h, w) bool, that are near neither the darkest nor the brightest value."""
    tolerance = _tolerance(pixels)
    levels = pixels.brightness[counted]
    far = counted.copy()
    # Background is exactly 0, and stays 0 in a lossless file, in which values just above 0 are
    # class numbers; values near the brightest one are remains of an earlier JPEG.
    for level, near in (
        (levels.min(), tolerance if pixels.lossy else 0),
        (levels.max(), tolerance),
    ):
        at_level = _counted(pixels.codes[counted & (pixels.brightness == level)])
        # Several colors may be equally bright; use the most frequent one.
        far &= ~_is_near(pixels, at_level.most_common(1)[0][0], near)
    return far


def _tolerance(pixels: _Pixels) -> int:
    # Neighboring indices of a palette have unrelated colors.
    if pixels.palette is not None:
        return 0
    return _COLOR_NOISE if pixels.colored and pixels.lossy else _NOISE


def _is_near(pixels: _Pixels, code: int, tolerance: int) -> _Array:
    """Return the pixels, (h, w) bool, whose value differs from a code by at most the tolerance."""
    if not pixels.colored:
        return np.asarray(np.abs(pixels.codes.astype(np.int64) - code) <= tolerance)
    near = np.ones(pixels.codes.shape, dtype=bool)
    for shift in (16, 8, 0):
        channel = (pixels.codes >> shift) & 255
        near &= np.abs(channel - ((code >> shift) & 255)) <= tolerance
    return near


def _has_areas(pixels: _Pixels, between: _Array) -> bool:
    """Whether the values between the two ends are more than smoothed edges."""
    total = int(np.count_nonzero(between))
    if not total:
        return False
    if not pixels.lossy and len(_counted(pixels.codes[between])) < _FEW:
        return True
    return int(np.count_nonzero(_flat(pixels.codes) & between)) > _FLAT_SHARE * total


def _flat(codes: _Array) -> _Array:
    """Return the pixels, (h, w) bool, with the same value as their eight neighbors."""
    flat = np.zeros(codes.shape, dtype=bool)
    if min(codes.shape) < 3:
        return flat
    # Cheaper than eight comparisons of all pixels, because neighbors share comparisons.
    across = codes[:, 1:] == codes[:, :-1]
    rows = across[:, 1:] & across[:, :-1]
    down = (codes[1:] == codes[:-1])[:, 1:-1]
    flat[1:-1, 1:-1] = rows[:-2] & rows[1:-1] & rows[2:] & down[1:] & down[:-1]
    return flat


def _counted(codes: _Array) -> Counter[int]:
    """Count the pixels of each value, in ascending order of values."""
    # np.unique sorts all pixels, which is much slower than counting 256 levels.
    if codes.dtype == np.uint8:
        counts = count_levels(codes)
        return Counter({value: int(counts[value]) for value in np.flatnonzero(counts).tolist()})
    values, counts = np.unique(codes, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _most_frequent(counts: Counter[int]) -> list[int]:
    return sorted(code for code, _ in counts.most_common(_LISTED))


def _told(pixels: _Pixels, counts: Counter[int], whole: int) -> str:
    """List the most frequent values with their percentages."""
    named = [f"{pixels.word(c)} ({_percent(counts[c] / whole)})" for c in _most_frequent(counts)]
    more = len(counts) - len(named)
    kind = "the palette's " if pixels.palette is not None else ""
    return kind + ", ".join(named) + (f" and {more} more values" if more > 0 else "")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _example(pixels: _Pixels, counts: Counter[int]) -> str:
    """Suggest a foreground, quoted for a shell: the second most frequent value."""
    # The most frequent value is usually background. Unquoted, # would start a comment.
    word = pixels.word(counts.most_common(2)[-1][0])
    return f"'{word}'" if pixels.colored else word


AUTO = ("auto",)
"""Uses the values that occur in the masks as classes."""
MOST_CLASSES = 255
VOID_NUMBER = 255
"""Image value of pixels without a class."""
_VOID_COLOR = "#808080"
_MOST_BYTES = 1 << 20
_COLOR_LINE = re.compile(r"(.*?)[,;\s]+([0-9]{1,3})[,;\s]+([0-9]{1,3})[,;\s]+([0-9]{1,3})")


class MaskClass(msgspec.Struct, frozen=True):
    """A class of mask pixels."""

    name: str
    values: tuple[str, ...]
    """Pixel values of the class, in the form of `MaskRule`."""
    color: str = ""
    """Display color, as ``#rrggbb``."""


def list_classes(given: Sequence[str]) -> tuple[str, ...]:
    """Spell the classes that an option names as NAME=VALUES.

    Args:
        given: names, optionally with values; or the path of a file with one class per line. The
            value of a class defaults to its position, from 0. In a file, a line may also contain a
            name and three numbers, its color.

    Raises:
        ValueError: a class is named twice, or there are too many classes.
        OSError: the file cannot be read.

    >>> list_classes(["sky", "person=15", "car=3|4"])
    ('sky=0', 'person=15', 'car=3|4')
    """
    items = [each.strip() for each in given]
    if len(items) == 1 and Path(items[0]).is_file():
        lines = read_whole(Path(items[0]), _MOST_BYTES).decode("utf-8-sig").splitlines()
        items = [line.strip() for line in lines if line.strip()]
        # Header of color tables.
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
            f"--classes {','.join(given)[:60]}: expected auto, a file with one class per line, "
            f"or 2 to {MOST_CLASSES} class names, got {came}"
        )
    return tuple(spelled)


def colors_of(
    classes: Sequence[tuple[str, Sequence[str]]], found: Mapping[str, str]
) -> tuple[MaskClass, ...]:
    """Give each class its color in the masks, or a color of its own.

    Args:
        classes: names and values of the classes.
        found: colors of the palette, by value.
    """
    known = dict(found) | {each: each for _, values in classes for each in values if "#" in each}
    shown = [next((known[each] for each in values if each in known), None) for _, values in classes]
    # A palette with duplicate colors was not chosen deliberately; then choose all colors here.
    own = None not in shown and len(set(shown)) == len(shown)
    return tuple(
        MaskClass(name, tuple(values), str(shown[number]) if own else _spread_color(number))
        for number, (name, values) in enumerate(classes)
    )


def _spread_color(number: int) -> str:
    """Return the color of a class: the bits of its number, spread over three channels.

    Neighboring numbers look different, and 0 is black. Source: colors of the Pascal VOC challenge.

    >>> _spread_color(0), _spread_color(1), _spread_color(15)
    ('#000000', '#800000', '#c08080')
    """
    channels = [0, 0, 0]
    for place in range(8):
        for channel in range(3):
            channels[channel] |= ((number >> (3 * place + channel)) & 1) << (7 - place)
    return "#{:02x}{:02x}{:02x}".format(*channels)


def colored_mask(numbers: np.ndarray, classes: Sequence[MaskClass], *, values: bool) -> Image:
    """Make a palette image of class numbers, (h, w) uint8.

    Args:
        numbers: class number of each pixel; `VOID_NUMBER` for none.
        classes: the classes.
        values: whether to write the values of the classes instead of their numbers, if each has a
            value that a palette can represent.
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
