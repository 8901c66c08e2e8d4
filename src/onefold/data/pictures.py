"""Reads pictures, one or all of them, and says before training which cannot be read.

A picture here is a ``PIL.Image`` of mode ``L`` (grey) or ``RGB``, turned as its EXIF note says.

Note: more than 8 bits
----------------------
A file of 16 bits does not say how many of them its camera used. If white were 65535 for all, data
of 12 bits would come down to 16 greys; if each picture had its own white, a dark one would become
as bright as the others. So a data set has one white, `white_of` all its pictures: the largest
number of so many bits as its largest value needs. It is kept with the run, for new pictures.

Note: large JPEGs
-----------------
The look before training needs no more than size, soundness and mean colours. The decoder can leave
out the finest detail of a large JPEG, which takes a fraction of the time. Training reads all of it.

Note: what a picture may cost
-----------------------------
A file of a few kilobytes may say that it has any number of pixels. What its header says is looked
at before anything is decoded: no picture may have more than `MOST_PIXELS`, and threads that look
through many wait for each other where theirs together would have more than `_PIXELS_IN_HAND`. Only
decoders of the formats in `_FORMATS` are tried, whatever the file is called: others that Pillow
knows start programs, such as Ghostscript for EPS.
"""

from __future__ import annotations

import importlib.util
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from onefold.data.bad import readable
from onefold.data.files import open_regular
from onefold.errors import DataError, LaunchError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from PIL.PngImagePlugin import PngInfo

__all__ = [
    "MOST_PIXELS",
    "ArrayPictures",
    "Look",
    "Mode",
    "PictureFiles",
    "Pictures",
    "Sums",
    "Watch",
    "count_levels",
    "is_deep",
    "is_picture",
    "load_picture",
    "look_at",
    "look_through",
    "made_here",
    "open_picture",
    "require_pillow",
    "sum_looks",
    "white_of",
]

Mode = Literal["L", "RGB"]
Watch = Callable[[int, int], None]
"""Takes how many things have been looked at, and how many there are; threads call it in turn."""
_Item = TypeVar("_Item")
_Seen = TypeVar("_Seen")

_SUFFIXES = frozenset({
    ".avif", ".bmp", ".gif", ".heic", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm",
    ".tif", ".tiff", ".webp",
})  # fmt: skip
"""Also of formats that not every Pillow reads: such a file is told, not passed over."""
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "AVIF", "HEIF")
"""That are tried, those of `_SUFFIXES`; the last is read where somebody has added it to Pillow."""
MOST_PIXELS = 1 << 27
"""Of a picture."""
_PIXELS_IN_HAND = 1 << 26
"""That threads decode together, unless a single picture has more."""
_GREY_MODES = frozenset({"1", "L", "LA"})
_READERS = 4
"""Threads that look through the pictures: decoding leaves Python to the others."""
_FILES_AT_ONCE = 16
"""What a thread is given in turn: an entry in its queue is larger than what is kept of a file."""
_PIXELS_AT_ONCE = 1 << 20
"""What is counted in turn: counting takes eight bytes for each."""
_LOOKED_AT = 512
"""Pixels of a JPEG's shorter side, at least, that are looked at where it has more."""
_TURNED = range(5, 9)
"""Orientations in an EXIF note by which width and height change places."""
_ORIENTATION = 0x0112


class Pictures(Protocol):
    """Pictures by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Image: ...

    def name(self, index: int, /) -> str:
        """What to call a picture where people look at it."""
        ...


class PictureFiles:
    """Pictures in files.

    Args:
        paths: one for each picture.
        root: names are reported from here on.
        white: of all that have more than 8 bits; None takes the usual one of each.
    """

    def __init__(self, paths: Sequence[Path], root: Path, white: int | None = None) -> None:
        self.paths = paths
        self.white = white
        self._root = root

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image:
        return open_picture(self.paths[index], white=self.white)

    def name(self, index: int) -> str:
        """The path from the root of the data."""
        return readable(self.paths[index].relative_to(self._root))


class ArrayPictures:
    """Pictures in memory.

    Args:
        pixels: (n, h, w) uint8, grey.
        title: names are this and a number.
    """

    def __init__(self, pixels: torch.Tensor, title: str) -> None:
        self.pixels = pixels
        self._title = title

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.pixels[index].numpy())

    def name(self, index: int) -> str:
        """The title and the number, from 0."""
        return f"{self._title} {index}"


@dataclass(slots=True)
class Sums:
    """Exact sums over pixels, from which mean and standard deviation come.

    >>> sums = Sums()
    >>> sums.add(np.array([[[0], [255]]], dtype=np.uint8))
    >>> sums.mean_and_std()
    ((0.5,), (0.5,))
    """

    count: int = 0
    totals: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)

    def add(self, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        """Add pictures, (..., c) uint8."""
        self._add_counts([count_levels(channel) for channel in np.moveaxis(pixels, -1, 0)])

    def add_picture(self, picture: Image) -> None:
        """Add a picture of mode ``L`` or ``RGB``."""
        self._add_counts(list(np.array(picture.histogram(), dtype=np.int64).reshape(-1, 256)))

    def _add_counts(self, counts: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> None:
        """Add pixels by how many there are of each level, for every channel."""
        levels = np.arange(256)
        totals = [int(count @ levels) for count in counts]
        squares = [int(count @ (levels * levels)) for count in counts]
        self.join(Sums(int(counts[0].sum()), totals, squares))

    def times(self, factor: int) -> Sums:
        """As if every pixel were there so many times."""
        totals, squares = ([each * factor for each in part] for part in (self.totals, self.squares))
        return Sums(self.count * factor, totals, squares)

    def join(self, other: Sums) -> None:
        """Add what another one has gathered."""
        if not self.totals:
            self.totals, self.squares = [0] * len(other.totals), [0] * len(other.squares)
        self.count += other.count
        self.totals = [a + b for a, b in zip(self.totals, other.totals, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of pixels in [0, 1], by channel; 1/255 for a smaller standard deviation."""
        means = tuple(total / (self.count * 255) for total in self.totals)
        # Whole numbers up to the last division: nothing is lost between two large squares.
        variances = [
            (self.count * square - total**2) / (self.count * 255) ** 2
            for total, square in zip(self.totals, self.squares, strict=True)
        ]
        return means, tuple(max(math.sqrt(variance), 1 / 255) for variance in variances)


@dataclass(frozen=True, slots=True)
class Look:
    """What is kept of a picture that has been read: a few numbers."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    grey: bool
    sums: Sums
    """Over its pixels, of one channel if it is grey."""
    largest: float | None = None
    """The largest value, where it has more than 8 bits a pixel."""
    fractions: bool = False
    """Its values are no whole numbers, and none is above 1."""
    white: int | None = None
    """The white by which the sums were taken, where it has more than 8 bits a pixel."""

    def packed(self) -> list[Any]:
        """As JSON can hold it."""
        sums = [self.sums.count, self.sums.totals, self.sums.squares]
        return [list(self.size), self.grey, sums, self.largest, self.fractions, self.white]

    @classmethod
    def unpacked(cls, values: Sequence[Any]) -> Look:
        """From what `packed` gave."""
        (width, height), grey, sums, *deep = values
        return cls((width, height), grey, Sums(*sums), *deep)


def require_pillow() -> None:
    """Refuse to go on without the library that reads pictures.

    Raises:
        LaunchError: it is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise LaunchError(
            "reading pictures needs Pillow, which is not installed here: "
            'pip install "onefold[images]"'
        )


def is_picture(path: Path) -> bool:
    """Whether a file's name is that of a picture, and not hidden."""
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")


def open_picture(path: Path, *, white: int | None = None) -> Image:
    """Read a picture as a whole, to mode ``L`` if it is grey, or else ``RGB``.

    Args:
        path: of the file.
        white: of more than 8 bits; None takes the usual one: 65535 for 16 bits, else the first of
            1 (fractions), 255 and 65535 that no value is above.

    Raises:
        DataError: it cannot be read; the message names the file.
    """
    with _pillow_quiet():
        return _in_bytes(load_picture(path), path, white)


@contextmanager
def _pillow_quiet() -> Iterator[None]:
    """Without Pillow's warnings, of a damaged EXIF note or of a large picture: it has been read.

    What this sets holds for all threads, so no thread of several may set it on its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def load_picture(path: Path, *, weight: int = 1) -> Image:
    """Read a picture as its file has it, turned as its note says; for threads of `look_through`.

    Args:
        path: of the file.
        weight: as many pictures it counts for while threads look through many.

    Raises:
        DataError: it cannot be read; the message names the file.
    """
    with _reading(path), _opened(path) as opened:
        return _loaded(opened, weight)


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile]:
    """A picture of which only the header has been read, and that may be decoded.

    Raises:
        ValueError: it has too many pixels.
    """
    from PIL import Image

    with open_regular(path) as file, Image.open(file, formats=_known_formats()) as opened:
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise ValueError(
                f"it has {width}x{height} pixels, more than the {MOST_PIXELS:,} that a picture may "
                f"have: make it smaller, or cut it into several"
            )
        yield opened


def _known_formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _loaded(opened: ImageFile, weight: int = 1) -> Image:
    """The pixels, turned as the note says; without a copy where there is nothing to turn."""
    from PIL import ImageOps

    _in_hand.take(opened.width * opened.height * weight)
    opened.load()
    turned = opened.getexif().get(_ORIENTATION, 1) != 1
    return ImageOps.exif_transpose(opened) if turned else opened


class _InHand:
    """How many pixels the threads of `look_through` decode at the moment.

    A thread that is none of them, or has taken none yet, is not counted.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pixels: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what this thread takes, until the end."""
        thread = threading.get_ident()
        with self._changed:
            self._pixels[thread] = 0
        try:
            yield
        finally:
            with self._changed:
                del self._pixels[thread]
                self._changed.notify_all()

    def take(self, pixels: int) -> None:
        """Wait until there is room for so many, or nobody else has any."""
        thread = threading.get_ident()
        with self._changed:
            if thread not in self._pixels:
                return
            self._pixels[thread] = 0
            self._changed.wait_for(lambda: self._fits(pixels))
            self._pixels[thread] = pixels

    def _fits(self, pixels: int) -> bool:
        others = sum(self._pixels.values())
        return not others or others + pixels <= _PIXELS_IN_HAND


_in_hand = _InHand()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a damaged file raises, by its format, becomes one error that names it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        came = _what_came(path, error)
        raise DataError(f"{readable(path)}: expected a picture that can be read: {came}") from error


def made_here(software: str) -> PngInfo:
    """What a PNG says of who has made it."""
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("Software", software)
    return note


def is_deep(picture: Image) -> bool:
    """Whether a picture has more than 8 bits a pixel."""
    return picture.mode.startswith(("I", "F"))


def _in_bytes(picture: Image, path: Path, white: int | None) -> Image:
    with _reading(path):
        if is_deep(picture):
            picture = _to_bytes(picture, white)
        mode = "L" if picture.mode in _GREY_MODES else "RGB"
        return picture if picture.mode == mode else picture.convert(mode)


def _what_came(path: Path, error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if not isinstance(error, UnidentifiedImageError):
        return f"{error}" or type(error).__name__
    with open_regular(path) as file:
        start = file.read(16)
    if not start:
        return "an empty file"
    return f"a file of no known format that begins with {start!r}; known are {', '.join(_FORMATS)}"


def _to_bytes(picture: Image, white: int | None) -> Image:
    """A grey picture of more than 8 bits a pixel, scaled as a whole to 8."""
    from PIL import Image

    values = _finite(picture)
    if white is None:
        white = _usual_white(picture.mode, values.max())
    return Image.fromarray((values.clip(0, white) * (255 / white)).astype(np.uint8))


def _finite(picture: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Its values; what is not finite is black."""
    return np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)


def _usual_white(mode: str, largest: float) -> int:
    """Of a picture alone: only 16 bits say what white is."""
    whites = [65535] if mode.startswith("I;16") else [255, 65535]
    if mode == "F":
        whites.insert(0, 1)
    return next((white for white in whites if largest <= white), 65535)


def white_of(looks: Iterable[Look]) -> int | None:
    """The white of all pictures of a data set that have more than 8 bits a pixel; None without any.

    >>> deep = [Look((1, 1), True, Sums(), largest=value) for value in (90.0, 4000.0)]
    >>> white_of(deep)
    4095
    """
    deep = [look for look in looks if look.largest is not None]
    if not deep:
        return None
    if all(look.fractions for look in deep):
        return 1
    largest = max(look.largest or 0.0 for look in deep)
    bits = max(8, math.ceil(largest).bit_length())
    return int((1 << bits) - 1)


def look_through(
    look: Callable[[_Item], _Seen], items: Sequence[_Item], watch: Watch | None = None
) -> list[_Seen]:
    """What a function says of each of many things that it reads pictures for, by several threads.

    An exception, Ctrl-C among them, ends it after the pictures that are being read.

    Args:
        look: reads by `load_picture` or `look_at`.
        items: what it is called with.
        watch: called after every item.
    """
    from PIL import Image

    stopped, counting, done = threading.Event(), threading.Lock(), 0

    def look_at_all(group: Sequence[_Item]) -> list[_Seen]:
        nonlocal done
        seen = []
        for item in group:
            if stopped.is_set():
                break
            with _in_hand.counted():
                seen.append(look(item))
            if watch is not None:
                with counting:
                    done += 1
                    watch(done, len(items))
        return seen

    Image.init()  # or threads that load formats at the same time may take one for unknown
    groups = [items[i : i + _FILES_AT_ONCE] for i in range(0, len(items), _FILES_AT_ONCE)]
    with _pillow_quiet(), ThreadPoolExecutor(_READERS) as readers:
        try:
            return [seen for group in readers.map(look_at_all, groups) for seen in group]
        except BaseException:
            stopped.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise


def sum_looks(looks: Iterable[Look], *, grey: bool) -> Sums:
    """Over the pixels of pictures as RGB, or as grey where all are."""
    whole = Sums()
    for look in looks:
        # A grey picture in RGB has its one channel three times.
        times = 3 if look.grey and not grey else 1
        whole.join(Sums(look.sums.count, look.sums.totals * times, look.sums.squares * times))
    return whole


def look_at(path: Path, white: int | None = None) -> Look:
    """Read a picture for what is to be kept of it; for threads of `look_through`.

    Args:
        path: of the file.
        white: of more than 8 bits; None takes that of the picture alone.

    Raises:
        DataError: it cannot be read; the message names the file.
    """
    picture, size, factor = _load_small(path)
    largest, fractions = None, False
    if is_deep(picture):
        with _reading(path):
            values = _finite(picture)
            largest = float(values.max())
            fractions = picture.mode == "F" and largest <= 1
            alone = Look(size, True, Sums(), largest, fractions)
            white = white_of([alone]) if white is None else white
    else:
        white = None
    picture = _in_bytes(picture, path, white)
    sums = Sums()
    sums.add_picture(picture)
    return Look(size, picture.mode == "L", sums.times(factor), largest, fractions, white)


def _load_small(path: Path) -> tuple[Image, tuple[int, int], int]:
    """A picture, with less detail if it is a large JPEG; its whole size; and for how many pixels
    one of these stands.
    """
    with _reading(path), _opened(path) as opened:
        width, height = opened.size
        if opened.format in ("JPEG", "MPO"):
            opened.draft(None, (_LOOKED_AT, _LOOKED_AT))
        step = round(width / opened.width)
        picture = _loaded(opened)
        if opened.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
        return picture, (width, height), step * step


def count_levels(
    channel: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many pixels there are of each of the 256 levels."""
    flat = channel.reshape(-1)
    counts = np.zeros(256, np.int64)
    for start in range(0, flat.size, _PIXELS_AT_ONCE):
        counts += np.bincount(flat[start : start + _PIXELS_AT_ONCE], minlength=256)
    return counts
