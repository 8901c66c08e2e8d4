"""Reads pictures, one or all of them, and says before training which cannot be read.

A picture here is a ``PIL.Image`` of mode ``L`` (grey) or ``RGB``, turned as its EXIF note says.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from onefold.data.bad import BadFile
from onefold.errors import DataError, LaunchError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "ArrayPictures",
    "Mode",
    "PictureFacts",
    "PictureFiles",
    "Pictures",
    "Sums",
    "is_picture",
    "open_picture",
    "require_pillow",
    "scan_pictures",
]

Mode = Literal["L", "RGB"]

_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
_GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "F"})
_READERS = 4
"""Threads that look through the pictures: decoding leaves Python to the others."""


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
        return str(self.paths[index].relative_to(self._root))


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
        channels = np.moveaxis(pixels, -1, 0)
        counts = [np.bincount(channel.ravel(), minlength=256) for channel in channels]
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
        """Of pixels in [0, 1], by channel."""
        means = tuple(total / self.count / 255 for total in self.totals)
        variances = [
            max(0.0, square / self.count / 255**2 - mean**2)
            for square, mean in zip(self.squares, means, strict=True)
        ]
        return means, tuple(max(variance**0.5, 1 / 255) for variance in variances)


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What a look through pictures has found."""

    sound: list[int]
    """Numbers of those that can be read."""
    bad: list[BadFile]
    sizes: list[tuple[int, int]]
    """Width and height of the sound ones, in pixels."""
    grey: bool
    """All sound ones are grey."""
    sums: Sums
    """Over the pixels of the sound ones as RGB, or as grey if all are."""


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


def open_picture(path: Path) -> Image:
    """Read a picture as a whole, to mode ``L`` if it is grey, or else ``RGB``.

    Raises:
        DataError: it cannot be read; the message names the file.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            opened.load()
            turned = ImageOps.exif_transpose(opened)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: expected a picture that can be read: {error}") from error
    if turned.mode.startswith(("I", "F")):
        turned = _to_bytes(turned)
    return turned.convert("L" if turned.mode in _GREY_MODES else "RGB")


def _to_bytes(picture: Image) -> Image:
    """A grey picture of more than 8 bits a pixel, scaled as a whole to 8."""
    from PIL import Image

    values = np.asarray(picture, dtype=np.float64)
    largest = 65535.0 if values.max() > 255 else 255.0
    return Image.fromarray((values.clip(0, largest) * (255 / largest)).astype(np.uint8))


def scan_pictures(paths: Sequence[Path]) -> PictureFacts:
    """Read every picture once: which are sound, how large they are, and the sums of their pixels.

    Args:
        paths: of the files.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        looks = list(readers.map(_look, paths))
    sound = [number for number, look in enumerate(looks) if isinstance(look, _Look)]
    found = [look for look in looks if isinstance(look, _Look)]
    grey = bool(found) and all(look.grey for look in found)
    return PictureFacts(
        sound=sound,
        bad=[look for look in looks if isinstance(look, BadFile)],
        sizes=[look.size for look in found],
        grey=grey,
        sums=_joined(look.sums for look in found) if grey else _joined(_in_rgb(found)),
    )


@dataclass(frozen=True, slots=True)
class _Look:
    size: tuple[int, int]
    grey: bool
    sums: Sums


def _look(path: Path) -> _Look | BadFile:
    try:
        picture = open_picture(path)
    except DataError as error:
        return BadFile(path, str(error).removeprefix(f"{path}: "))
    pixels = np.asarray(picture)
    sums = Sums()
    sums.add(pixels[..., None] if pixels.ndim == 2 else pixels)
    return _Look(picture.size, picture.mode == "L", sums)


def _in_rgb(looks: Iterable[_Look]) -> Iterable[Sums]:
    """A grey picture in RGB has its one channel three times."""
    for look in looks:
        times = 3 if look.grey else 1
        yield Sums(look.sums.count, look.sums.totals * times, look.sums.squares * times)


def _joined(parts: Iterable[Sums]) -> Sums:
    whole = Sums()
    for part in parts:
        whole.join(part)
    return whole
