"""Reads pictures, one or all of them, and says before training which cannot be read.

A picture here is a ``PIL.Image`` of mode ``L`` (grey) or ``RGB``, turned as its EXIF note says.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
import torch

from onefold.data.bad import BadFile, readable
from onefold.errors import DataError, LaunchError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "ArrayPictures",
    "Look",
    "Mode",
    "PictureFacts",
    "PictureFiles",
    "Pictures",
    "Sums",
    "decode_picture",
    "is_picture",
    "look_through",
    "open_picture",
    "require_pillow",
    "scan_pictures",
    "sum_looks",
]

Mode = Literal["L", "RGB"]
_Item = TypeVar("_Item")
_Seen = TypeVar("_Seen")

_SUFFIXES = frozenset({
    ".avif", ".bmp", ".gif", ".heic", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm",
    ".tif", ".tiff", ".webp",
})  # fmt: skip
"""Also of formats that not every Pillow reads: such a file is told, not passed over."""
_GREY_MODES = frozenset({"1", "L", "LA"})
_READERS = 4
"""Threads that look through the pictures: decoding leaves Python to the others."""
_FILES_AT_ONCE = 16
"""What a thread is given in turn: an entry in its queue is larger than what is kept of a file."""
_PIXELS_AT_ONCE = 1 << 20
"""What is counted in turn: counting takes eight bytes for each."""


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
        root: names are told from here on.
    """

    def __init__(self, paths: Sequence[Path], root: Path) -> None:
        self.paths = paths
        self._root = root

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image:
        return open_picture(self.paths[index])

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
        levels = np.arange(256)
        counts = [_count_levels(channel) for channel in np.moveaxis(pixels, -1, 0)]
        totals = [int(count @ levels) for count in counts]
        squares = [int(count @ (levels * levels)) for count in counts]
        self.join(Sums(int(counts[0].sum()), totals, squares))

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
        return means, tuple(max(sqrt(variance), 1 / 255) for variance in variances)


@dataclass(frozen=True, slots=True)
class Look:
    """What is kept of a picture that has been read: a few numbers."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    grey: bool
    sums: Sums
    """Over its pixels, of one channel if it is grey."""


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What a look through pictures has found."""

    sound: list[int]
    """Numbers of those that can be read."""
    bad: list[BadFile]
    looks: list[Look]
    """What is kept of each sound one."""

    @property
    def grey(self) -> bool:
        """All sound ones are grey."""
        return bool(self.looks) and all(look.grey for look in self.looks)


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


def open_picture(path: Path, *, scaled: bool = True) -> Image:
    """Read a picture as a whole, to mode ``L`` if it is grey, or else ``RGB``.

    Raises:
        DataError: it cannot be read; the message names the file.
    """
    with _pillow_quiet():
        return decode_picture(path, scaled=scaled)


@contextmanager
def _pillow_quiet() -> Iterator[None]:
    """Without Pillow's warnings, of a damaged EXIF note or of a large picture: it has been read.

    What this sets holds for all threads, so no thread of several may set it on its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def decode_picture(path: Path, *, scaled: bool = True) -> Image:
    """As `open_picture`, for threads that run within `look_through`.

    Args:
        path: of the file.
        scaled: bring more than 8 bits to 8 as a whole; otherwise what is above 255 becomes 255.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            opened.load()
            turned = ImageOps.exif_transpose(opened)
        if turned.mode.startswith(("I", "F")):
            turned = _to_bytes(turned, scaled=scaled)
        return turned.convert("L" if turned.mode in _GREY_MODES else "RGB")
    except MemoryError:
        raise
    except Exception as error:  # a damaged file may raise anything, by its format
        came = _what_came(path, error)
        raise DataError(f"{readable(path)}: expected a picture that can be read: {came}") from error


def _what_came(path: Path, error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if not isinstance(error, UnidentifiedImageError):
        return f"{error}" or type(error).__name__
    with path.open("rb") as file:
        start = file.read(16)
    return f"a file of no known format that begins with {start!r}" if start else "an empty file"


def _to_bytes(picture: Image, *, scaled: bool) -> Image:
    """A grey picture of more than 8 bits a pixel, scaled as a whole to 8.

    Only 16 bits say what white is. Other numbers go up to 1 (fractions), 255 or 65535, whichever
    holds them all; what is not finite is black.
    """
    from PIL import Image

    values = np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)
    whites = [65535] if picture.mode.startswith("I;16") else [255, 65535]
    if picture.mode == "F":
        whites.insert(0, 1)
    if not scaled:
        return Image.fromarray(values.clip(0, 255).astype(np.uint8))
    white = next((white for white in whites if values.max() <= white), 65535)
    return Image.fromarray((values.clip(0, white) * (255 / white)).astype(np.uint8))


def scan_pictures(paths: Sequence[Path]) -> PictureFacts:
    """Read every picture once: which are sound, how large they are, and the sums of their pixels.

    Args:
        paths: of the files.
    """
    looks = look_through(_look, paths)
    return PictureFacts(
        sound=[number for number, look in enumerate(looks) if isinstance(look, Look)],
        bad=[look for look in looks if isinstance(look, BadFile)],
        looks=[look for look in looks if isinstance(look, Look)],
    )


def look_through(look: Callable[[_Item], _Seen], items: Sequence[_Item]) -> list[_Seen]:
    """What a function says of each of many things that it reads pictures for, by several threads.

    Args:
        look: reads by `decode_picture`.
        items: what it is called with.
    """
    from PIL import Image

    def look_at_all(group: Sequence[_Item]) -> list[_Seen]:
        return [look(item) for item in group]

    Image.init()  # or threads that load formats at the same time may take one for unknown
    groups = [items[i : i + _FILES_AT_ONCE] for i in range(0, len(items), _FILES_AT_ONCE)]
    with _pillow_quiet(), ThreadPoolExecutor(_READERS) as readers:
        return [seen for group in readers.map(look_at_all, groups) for seen in group]


def sum_looks(looks: Iterable[Look], *, grey: bool) -> Sums:
    """Over the pixels of pictures as RGB, or as grey where all are."""
    whole = Sums()
    for look in looks:
        # A grey picture in RGB has its one channel three times.
        times = 3 if look.grey and not grey else 1
        whole.join(Sums(look.sums.count, look.sums.totals * times, look.sums.squares * times))
    return whole


def _look(path: Path) -> Look | BadFile:
    try:
        picture = decode_picture(path)
    except DataError as error:
        return BadFile(path, str(error).removeprefix(f"{readable(path)}: "))
    pixels = np.asarray(picture)
    sums = Sums()
    sums.add(pixels[..., None] if pixels.ndim == 2 else pixels)
    return Look(picture.size, picture.mode == "L", sums)


def _count_levels(
    channel: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How many pixels there are of each of the 256 levels."""
    flat = channel.reshape(-1)
    counts = np.zeros(256, np.int64)
    for start in range(0, flat.size, _PIXELS_AT_ONCE):
        counts += np.bincount(flat[start : start + _PIXELS_AT_ONCE], minlength=256)
    return counts
