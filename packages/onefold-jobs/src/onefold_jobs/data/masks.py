"""Masks: which pixels of a picture are foreground, or of which class, and which count for neither.

Without a rule a mask has two values. Its pixels are foreground where they are brighter than half,
or, in a mask without any value above 1, where they are 1. A colored pixel is as bright as its
brightest channel.

Note: more than two values
--------------------------
Smoothed edges and the noise of JPEG add many values to a mask of two, and do no harm: they lie on
edges, or close to the two. Numbers of classes, or a border that is to be left out, cover areas of
their own. So values between the darkest and the brightest count as edges only if there are several
of them, and few of their pixels are surrounded by pixels of the same value. All other masks are
refused, because brightness does not tell which of their values are foreground.
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
]

MASK_NOTE = "onefold predict"
"""Software that the PNG of a predicted mask names, and so the mark of our own masks."""
VOID = -1.0
"""In a tensor: a pixel that counts neither for the mask nor against it."""

_Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]

_HALF = 127
"""The brightest level that is background."""
_VOID_LEVEL = 128
"""In a picture of a mask: neither 0 nor 255, and changed by no flip or crop."""
_FEW = 4
"""Fewer values than these between the two ends are classes, and no smoothed edge."""
_FLAT_SHARE = 0.25
"""If more of the pixels between the ends are surrounded by their like, they are areas."""
_NOISE = 8
"""How far from an end JPEG, or a file that was converted from JPEG, may put a pixel."""
_COLOR_NOISE = 48
"""The same for a channel of a color: JPEG stores color at half the resolution."""
_LISTED = 6
"""Values that an error names."""
_WEIGHT = 8
"""How many times the memory of a picture a mask takes, mostly for its codes in int64."""
_MOST_CODE = 1 << 62
"""Values above it, which floating point numbers may have, are taken for it."""
_LOSSY = frozenset({".jfif", ".jpe", ".jpeg", ".jpg", ".webp"})
# At most 18 digits, so that a value fits the int64 it is compared with.
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COLOR = re.compile(r"#([0-9a-fA-F]{6})")


@dataclass(frozen=True, slots=True)
class _Span:
    """Values that an option names: numbers from one to another, or one color."""

    text: str
    """As the user wrote it."""
    first: int
    last: int
    """Included."""
    color: bool
    """Whether ``first`` and ``last`` are one color, 0xRRGGBB."""

    @classmethod
    def read(cls, option: str, text: str) -> _Span:
        """Read one value of an option."""
        if numbers := _NUMBERS.fullmatch(text):
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if first <= last:
                return cls(text, first, last, color=False)
        if color := _COLOR.fullmatch(text):
            value = int(color[1], 16)
            return cls(text, value, value, color=True)
        raise ValueError(
            f"--{option} {text}: expected values of the masks' pixels, such as 15, 128-255 or "
            f"#ff0000"
        )

    def meets(self, other: _Span) -> bool:
        """Whether a value belongs to both."""
        return self.color == other.color and self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which values of masks are foreground, or which class they are, and which are left out.

    A value is a number, ``FIRST-LAST``, or a color ``#rrggbb``. In a file with a palette, a number
    means an entry of the palette.

    Raises:
        ValueError: a value cannot be read, or is in both lists.
    """

    foreground: tuple[str, ...] = ()
    """Values of the foreground, all others being background; if empty, brightness decides."""
    void: tuple[str, ...] = ()
    """Values whose pixels are left out of loss and scores."""
    classes: tuple[str, ...] = ()
    """Classes as NAME=VALUES, or `AUTO`; none if masks have a foreground."""

    def __post_init__(self) -> None:
        if self.classes and self.foreground:
            raise ValueError("--classes: expected no --foreground, which makes two of them")
        # A pixel that stands for two things would silently be the last of them. Two values of the
        # foreground may meet, which does no harm.
        known = [(span, name) for name, spans in self.named for span in spans]
        known += [(span, "--foreground") for span in self.spans("foreground")]
        known += [(span, "--void") for span in self.spans("void")]
        for place, (span, name) in enumerate(known):
            for other, second in known[:place]:
                if span.meets(other) and (self.classes or name != second):
                    raise ValueError(
                        f"{'--classes' if self.classes else '--void'}: expected values that stand "
                        f"for one thing each, got {other.text} for {second} and {span.text} for "
                        f"{name}"
                    )

    def __str__(self) -> str:
        # Part of the kind under which a scan keeps what it saw, and of the data set's digest: with
        # another form every mask would be read again, and no run could be resumed.
        classes = f"/{','.join(self.classes)}" if self.classes else ""
        return f"{','.join(self.foreground)}/{','.join(self.void)}{classes}"

    @property
    def named(self) -> list[tuple[str, list[_Span]]]:
        """The classes and their values; none for `AUTO`."""
        if self.classes == AUTO:
            return []
        parts = (each.rpartition("=") for each in self.classes)
        return [
            (name, [_Span.read("classes", text) for text in values.split("|")])
            for name, _, values in parts
        ]

    def spans(self, option: str) -> list[_Span]:
        """Read the values of ``foreground`` or ``void``."""
        return [_Span.read(option, text) for text in getattr(self, option)]


class MaskLook(msgspec.Struct, frozen=True, array_like=True, tag="mask"):
    """What is remembered of a mask that has been read."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    foreground: int
    """Number of pixels that are foreground."""
    void: int
    """Number of pixels that are left out."""
    scale: int
    """The foreground's value where brightness decides, 1 or 255; else 0."""
    values: list[str]
    """The most frequent values, as an option would name them."""
    named: list[str]
    """Values of the rule that occur in the mask."""
    counts: dict[str, int] = {}
    """Where masks have classes: number of pixels of each by its name; of `AUTO`, of each value."""
    colors: dict[str, str] = {}
    """The colors of these values, where the file has a palette."""


@dataclass(frozen=True, slots=True)
class _Pixels:
    """A mask's pixels, as its file has them."""

    codes: _Array
    """(h, w) uint8, int32 or int64: the number of each pixel's value, or 0xRRGGBB if colored."""
    brightness: _Array
    """(h, w) uint8."""
    colored: bool = False
    """Whether the codes are colors."""
    palette: _Array | None = None
    """(256,) int64, the color of each code, if the file has a palette."""
    lossy: bool = False
    """Whether the file's format changes values a little."""

    def matches(self, spans: Sequence[_Span]) -> _Array:
        """Find the pixels that have one of these values, as (h, w) bool."""
        found = np.zeros(self.codes.shape, dtype=bool)
        for span in spans:
            found |= self._match(span)
        return found

    def _match(self, span: _Span) -> _Array:
        if not span.color:
            within = (self.codes >= span.first) & (self.codes <= span.last)
            return within & (not self.colored)
        # A table of 256 answers, looked up by code: a palette may have one color twice.
        if self.palette is not None:
            return np.asarray((self.palette == span.first)[self.codes])
        # A gray is a color as well. Widened first: in uint8 the product would wrap round.
        codes = self.codes if self.colored else self.codes.astype(np.int64) * 0x10101
        return np.asarray(codes == span.first)

    def word(self, code: int) -> str:
        """Spell a value as an option takes it."""
        return f"#{code:06x}" if self.colored else str(code)


def read_mask(path: Path, rule: MaskRule | None = None) -> Image:
    """Read a mask in mode ``L``: 255 for foreground, 128 for void, and 0 for all else.

    Where masks have classes: the number of each pixel's class, and `VOID_NUMBER` for void.

    Args:
        path: path of a file that `look_at_mask` has accepted.
        rule: which values are foreground and which void; None lets brightness decide.

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
    # Last: void takes precedence over whatever brightness makes of the same pixels.
    mask[void] = _VOID_LEVEL
    return Image.fromarray(mask)


def mask_name(name: str) -> str:
    """Name of the mask of a picture: masks are PNG files."""
    return str(Path(name).with_suffix(".png"))


def mask_tensor(mask: Image, *, classes: bool = False) -> torch.Tensor:
    """Turn a mask into (h, w) float32: 1 for foreground, `VOID` for void, and 0 for all else.

    Args:
        mask: what `read_mask` returned.
        classes: whether it has classes; then their numbers.
    """
    # np.array copies: a view of Pillow's memory is read-only, which from_numpy warns about.
    levels = torch.from_numpy(np.array(mask))
    if classes:
        return levels.to(torch.float32).masked_fill(levels == VOID_NUMBER, VOID)
    return (levels.to(torch.float32) / 255).masked_fill(levels == _VOID_LEVEL, VOID)


def look_at_mask(path: Path, rule: MaskRule) -> MaskLook:
    """Read a mask, and check that the rule tells which of its values are foreground.

    Raises:
        DataError: the file cannot be read; or the rule names no foreground, and brightness does not
            tell it either.
    """
    pixels = _pixels(path)
    void = pixels.matches(rule.spans("void"))
    counts: dict[str, int] = {}
    colors: dict[str, str] = {}
    scale = 0
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
        # Which of 1 and 255 stands for foreground only matters where nobody has named it; see
        # `_require_one_scale` of the pairs, which compares it between masks.
        if foreground.any() and not rule.foreground:
            scale = 1 if pixels.brightness[foreground].max() == 1 else 255
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
    )


def _numbers(pixels: _Pixels, rule: MaskRule) -> _Array:
    """The number of each pixel's class, (h, w) uint8; `VOID_NUMBER` for those of none."""
    numbers = np.full(pixels.codes.shape, VOID_NUMBER, dtype=np.uint8)
    for number, (_, spans) in enumerate(rule.named):
        numbers[pixels.matches(spans)] = number
    return numbers


def _require_classes(
    pixels: _Pixels, values: Counter[int], void: _Array, rule: MaskRule, path: Path
) -> None:
    """Refuse a mask of which a value stands for no class, or with too many for `AUTO`.

    Raises:
        DataError: it has such a value, or as many.
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
            f"{len(values):,} different values: smoothed edges and JPEG make more of them, so save "
            f"masks without either, or list the values in --classes"
        )


def _foreground(pixels: _Pixels, rule: MaskRule, counted: _Array) -> _Array:
    """Find the foreground, (h, w) bool, among the pixels that are counted."""
    if rule.foreground:
        return pixels.matches(rule.spans("foreground")) & counted
    brightest = int(pixels.brightness.max(initial=0, where=counted))
    # Among counted pixels only, or a void border of 255 would make background of a foreground of 1.
    limit = _HALF if brightest > 1 else 0
    return np.asarray((pixels.brightness > limit) & counted)


def _pixels(path: Path) -> _Pixels:
    picture = load_picture(path, weight=_WEIGHT)
    lossy = path.suffix.lower() in _LOSSY
    # Not converted to RGB: --foreground 3 names entry 3 of the palette, whatever its color.
    if picture.mode == "P":
        return _of_palette(picture)
    values = deep_values(picture)
    if values is not None:
        return _of_numbers(values)
    # Without the alpha channel, which editors add to masks without any meaning.
    if picture.mode in ("1", "L", "LA"):
        gray = np.asarray(picture.convert("L"))
        return _Pixels(gray, gray, lossy=lossy)
    return _of_colors(np.asarray(picture.convert("RGB")), lossy=lossy)


def _of_palette(picture: Image) -> _Pixels:
    # A palette may be shorter than the codes that use it; 256 rows leave no code without a color.
    entries = np.zeros((256, 3), dtype=np.int64)
    given = np.array(picture.getpalette("RGB") or [], dtype=np.int64).reshape(-1, 3)
    entries[: len(given)] = given[:256]
    codes = np.asarray(picture)
    brightness = entries.max(axis=1).astype(np.uint8)[codes]
    colors = entries @ np.array([1 << 16, 1 << 8, 1])
    return _Pixels(codes, brightness, palette=colors)


def _of_numbers(values: _Array) -> _Pixels:
    """Read deep values; fractions of 1 become parts of 255."""
    if values.max(initial=0) <= 1 and (values % 1).any():
        values = values.clip(0, 1) * 255
    # Within int64, or a large value would wrap round to a negative one, and be background.
    codes = values.clip(0, _MOST_CODE).astype(np.int64)
    return _Pixels(codes, codes.clip(0, 255).astype(np.uint8))


def _of_colors(rgb: _Array, *, lossy: bool) -> _Pixels:
    """Read RGB as colors, or as plain numbers if the three channels are equal all over."""
    # Signed and wide: differences of uint8 wrap round, and three channels go into one code.
    red, green, blue = (rgb[..., channel].astype(np.int32) for channel in range(3))
    brightness = rgb.max(axis=2)
    apart = int((brightness - rgb.min(axis=2)).max(initial=0))
    # JPEG makes grays slightly colored.
    if apart <= (_COLOR_NOISE if lossy else 0):
        return _Pixels(brightness, brightness, lossy=lossy)
    codes = (red << 16) | (green << 8) | blue
    return _Pixels(codes, brightness, colored=True, lossy=lossy)


def _require_two_values(pixels: _Pixels, counted: _Array, path: Path) -> None:
    """Refuse a mask if brightness does not tell which of its values are foreground.

    Args:
        pixels: pixels of the mask.
        counted: (h, w) bool, where the mask is not void.
        path: path of the file, for the error.

    Raises:
        DataError: brightness does not tell.
    """
    codes = _counted(pixels.codes[counted])
    doubt = _doubt(pixels, counted, len(codes))
    if doubt:
        raise DataError(
            f"{readable(path)}: expected a mask of 0 and 1, or of 0 and 255, got "
            f"{_told(pixels, codes, codes.total())}: {doubt}. Name the foreground, such as "
            f"--foreground {_example(pixels, codes)}, and with --void what counts as neither; or "
            f"train a class for each of them with --classes auto"
        )


def _doubt(pixels: _Pixels, counted: _Array, values: int) -> str:
    """Say why brightness does not tell which values are foreground; nothing if it does."""
    levels = pixels.brightness[counted]
    darkest, brightest = int(levels.min()), int(levels.max())
    # A mask that is all foreground, or all background, is legitimate.
    single = values == 1 or (pixels.lossy and brightest - darkest <= _NOISE)
    if 1 < brightest <= _HALF:
        return "none of them is bright"
    # 0, 1 and 255: class 1 with a void border, or foreground 255 with a smoothed edge.
    if not pixels.lossy and values <= 3 and brightest > 1 and bool((levels == 1).any()):
        return "the foreground may be 1, or what is brighter"
    if darkest > _HALF and not single:
        return "all of them are bright"
    if values > 2 and _has_areas(pixels, _between(pixels, counted)):
        return "more than two of them cover areas, as numbers of classes do"
    return ""


def _between(pixels: _Pixels, counted: _Array) -> _Array:
    """Find the pixels, (h, w) bool, that are near neither the darkest nor the brightest value."""
    tolerance = _tolerance(pixels)
    levels = pixels.brightness[counted]
    far = counted.copy()
    # Background is drawn as exactly 0 and stays so in a lossless file, where values just above it
    # are numbers of classes; near the brightest, they are what a former JPEG left.
    for level, near in (
        (levels.min(), tolerance if pixels.lossy else 0),
        (levels.max(), tolerance),
    ):
        at_level = _counted(pixels.codes[counted & (pixels.brightness == level)])
        # Several colors may be equally bright; the most frequent one is the end.
        far &= ~_is_near(pixels, at_level.most_common(1)[0][0], near)
    return far


def _tolerance(pixels: _Pixels) -> int:
    # Entries of a palette that are neighbors by number have nothing in common.
    if pixels.palette is not None:
        return 0
    return _COLOR_NOISE if pixels.colored and pixels.lossy else _NOISE


def _is_near(pixels: _Pixels, code: int, tolerance: int) -> _Array:
    """Find the pixels, (h, w) bool, whose value differs from a code by at most the tolerance."""
    if not pixels.colored:
        return np.asarray(np.abs(pixels.codes.astype(np.int64) - code) <= tolerance)
    near = np.ones(pixels.codes.shape, dtype=bool)
    for shift in (16, 8, 0):
        channel = (pixels.codes >> shift) & 255
        near &= np.abs(channel - ((code >> shift) & 255)) <= tolerance
    return near


def _has_areas(pixels: _Pixels, between: _Array) -> bool:
    """Whether values between the two ends are more than smoothed edges."""
    total = int(np.count_nonzero(between))
    if not total:
        return False
    if not pixels.lossy and len(_counted(pixels.codes[between])) < _FEW:
        return True
    return int(np.count_nonzero(_flat(pixels.codes) & between)) > _FLAT_SHARE * total


def _flat(codes: _Array) -> _Array:
    """Find the pixels, (h, w) bool, that have one value with their eight neighbors."""
    flat = np.zeros(codes.shape, dtype=bool)
    if min(codes.shape) < 3:
        return flat
    # Eight neighbors would take eight comparisons of all pixels; here neighbors share theirs.
    across = codes[:, 1:] == codes[:, :-1]
    rows = across[:, 1:] & across[:, :-1]
    down = (codes[1:] == codes[:-1])[:, 1:-1]
    flat[1:-1, 1:-1] = rows[:-2] & rows[1:-1] & rows[2:] & down[1:] & down[:-1]
    return flat


def _counted(codes: _Array) -> Counter[int]:
    """Count the pixels of each value, in order of the values."""
    # np.unique sorts all pixels, which is many times slower than counting 256 levels.
    if codes.dtype == np.uint8:
        counts = count_levels(codes)
        return Counter({value: int(counts[value]) for value in np.flatnonzero(counts).tolist()})
    values, counts = np.unique(codes, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _most_frequent(counts: Counter[int]) -> list[int]:
    return sorted(code for code, _ in counts.most_common(_LISTED))


def _told(pixels: _Pixels, counts: Counter[int], whole: int) -> str:
    """List the most frequent values, each with its share of the whole."""
    named = [f"{pixels.word(c)} ({_percent(counts[c] / whole)})" for c in _most_frequent(counts)]
    more = len(counts) - len(named)
    kind = "the palette's " if pixels.palette is not None else ""
    return kind + ", ".join(named) + (f" and {more} more values" if more > 0 else "")


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _example(pixels: _Pixels, counts: Counter[int]) -> str:
    """Suggest a foreground, quoted for a shell: the second most frequent value."""
    # The most frequent one is mostly background. Unquoted, # would begin a comment in a shell.
    word = pixels.word(counts.most_common(2)[-1][0])
    return f"'{word}'" if pixels.colored else word


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
