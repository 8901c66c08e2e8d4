"""Finds the pictures below a folder, and reads them: one, or all to find bad ones before training.

A picture here is a ``PIL.Image`` of mode ``L`` (grey) or ``RGB``, turned upright by its EXIF note.
`picture_paths` finds the pictures below a folder. `look_through` reads all of them, and finds
before training those that cannot be read.

Note: more than 8 bits
----------------------
A file of 16 bits does not tell how many of them its camera used. If white were 65535 for all, data
of 12 bits would come down to 16 greys; if each picture had its own white, a dark one would become
as bright as the others. So a data set has one white, `white_of` all its pictures: the largest
number of as many bits as its largest value needs. It is kept with the run, for new pictures.

Note: large JPEGs
-----------------
The look before training only needs the size, the mean colours, and whether the file can be read.
The decoder can leave out the finest detail of a large JPEG, which takes a fraction of the time.
Training reads all of it.

Note: exact sums
----------------
Mean and standard deviation of the pixels end up in every sample, so they must not depend on what
has been added first. So sums are kept as Python's integers, which have no limit and no rounding,
and are divided once, at the end.
"""

from __future__ import annotations

import errno
import math
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from onefold.errors import DataError
from onefold.jobs.data.decoding import (
    ORIENTATION,
    TURNED,
    finite,
    in_bytes,
    in_hand,
    is_deep,
    is_picture,
    loaded,
    open_picture,
    opened_picture,
    pillow_quiet,
    reading,
)
from onefold.jobs.data.files import BadFile, readable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.PngImagePlugin import PngInfo

__all__ = [
    "ArrayPictures",
    "Look",
    "Mode",
    "PictureFiles",
    "Pictures",
    "Sums",
    "Watch",
    "count_levels",
    "look_at",
    "look_through",
    "made_here",
    "picture_paths",
    "require_folder",
    "sum_looks",
    "visible_folders",
    "white_of",
]


Mode = Literal["L", "RGB"]
Watch = Callable[[int, int], None]
"""Takes how many things have been looked at, and how many there are."""
_Item = TypeVar("_Item")
_Seen = TypeVar("_Seen")
_READERS = 4
"""Threads that look through the pictures: Pillow decodes without holding Python's lock."""
_FILES_AT_ONCE = 16
"""Files that make one task: a task in the queue takes more memory than what is kept of a file."""
_PIXELS_AT_ONCE = 1 << 20
"""Pixels that are counted at a time: NumPy widens each to eight bytes for it."""
_LOOKED_AT = 512
"""A JPEG may be decoded at a fraction of its size, but no side below so many pixels."""


class Pictures(Protocol):
    """A sequence of pictures, each read when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Image: ...

    def name(self, index: int, /) -> str:
        """Name a picture for people to read."""
        ...


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """Pictures in files."""

    paths: Sequence[Path]
    """Path of each picture."""
    root: Path
    """Folder that names are relative to."""
    white: int | None = None
    """White of those that have more than 8 bits; None takes the usual one of each."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image:
        return open_picture(self.paths[index], white=self.white)

    def name(self, index: int) -> str:
        """Return the path below the root of the data."""
        return readable(self.paths[index].relative_to(self.root))


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPictures:
    """Pictures in memory."""

    pixels: torch.Tensor  # (n, h, w) uint8, grey
    title: str
    """What each name begins with; its number follows."""

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.pixels[index].numpy())

    def name(self, index: int) -> str:
        """Return the title and the number, from 0."""
        return f"{self.title} {index}"


@dataclass(slots=True)
class Sums:
    """Exact sums over pixels, for their mean and standard deviation.

    >>> sums = Sums()
    >>> sums.add(np.array([[[0], [255]]], dtype=np.uint8))
    >>> sums.mean_and_std()
    ((0.5,), (0.5,))
    """

    count: int = 0
    """Number of pixels."""
    totals: list[int] = field(default_factory=list)
    """Sum of the levels, by channel."""
    squares: list[int] = field(default_factory=list)
    """Sum of the squared levels, by channel."""

    def add(self, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        """Add pictures, (..., c) uint8."""
        self._add_counts(np.stack([count_levels(part) for part in np.moveaxis(pixels, -1, 0)]))

    def add_picture(self, picture: Image, *, times: int = 1) -> None:
        """Add a picture of mode ``L`` or ``RGB``, each of whose pixels counts several times."""
        self._add_counts(np.array(picture.histogram(), dtype=np.int64).reshape(-1, 256) * times)

    def _add_counts(self, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        """Add pixels by the number of those of each level, (c, 256) int64."""
        # Sums over 256 levels instead of millions of pixels. In int64 the squares of one picture
        # fit by far; what is added up over a data set is Python's own integers.
        levels = np.arange(256)
        totals, squares = ((counts @ factors).tolist() for factors in (levels, levels * levels))
        self.join(Sums(int(counts[0].sum()), totals, squares))

    def join(self, other: Sums) -> None:
        """Add the sums of another one."""
        if not self.totals:
            self.totals, self.squares = [0] * len(other.totals), [0] * len(other.squares)
        self.count += other.count
        self.totals = [a + b for a, b in zip(self.totals, other.totals, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation, at least 1/255, of pixels in [0, 1], by channel."""
        means = tuple(total / (self.count * 255) for total in self.totals)
        # Whole numbers up to the last division: nothing is lost between two large squares.
        variances = [
            (self.count * square - total**2) / (self.count * 255) ** 2
            for total, square in zip(self.totals, self.squares, strict=True)
        ]
        # At least one level: pictures of one colour would otherwise be divided by 0.
        return means, tuple(max(math.sqrt(variance), 1 / 255) for variance in variances)


class Look(msgspec.Struct, frozen=True, array_like=True, tag="picture"):
    """What is remembered of a picture that has been read: a few numbers."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    grey: bool
    sums: Sums
    """Over its pixels, of one channel if it is grey."""
    largest: float | None = None
    """The largest value, where it has more than 8 bits a pixel."""
    fractions: bool = False
    """Whether it holds floating point values, none of them above 1."""
    white: int | None = None
    """The white by which the sums were taken, where it has more than 8 bits a pixel."""


def made_here(software: str) -> PngInfo:
    """Make the note that a PNG carries about the program that wrote it."""
    from PIL.PngImagePlugin import PngInfo

    note = PngInfo()
    note.add_text("Software", software)
    return note


def white_of(looks: Iterable[Look]) -> int | None:
    """Find the common white of the pictures with more than 8 bits a pixel; None without any.

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
    """Call a function that reads pictures with each item, in several threads.

    An exception, Ctrl-C among them, ends it after the pictures that are being read.

    Args:
        look: reads pictures by `load_picture` or `look_at`.
        items: what the function is called with, one after another.
        watch: called for every item by the calling thread, as soon as those before it are done.

    Returns:
        What the function returned, in the order of the items.
    """
    from PIL import Image

    stopped = threading.Event()

    def look_at_all(group: Sequence[_Item]) -> list[_Seen]:
        seen = []
        for item in group:
            if stopped.is_set():
                break
            with in_hand.counted():
                seen.append(look(item))
        return seen

    # Before the threads: Pillow loads formats on demand, and while one thread does so, another may
    # find a half-filled table and take its format for unknown.
    Image.init()
    groups = [items[i : i + _FILES_AT_ONCE] for i in range(0, len(items), _FILES_AT_ONCE)]
    seen: list[_Seen] = []
    with pillow_quiet(), ThreadPoolExecutor(_READERS) as readers:
        try:
            # map keeps the order of the groups, whichever thread is done first.
            for each in chain.from_iterable(readers.map(look_at_all, groups)):
                seen.append(each)
                if watch is not None:
                    watch(len(seen), len(items))
            return seen
        # Leaving the executor waits for its threads, which would first read all that is queued.
        except BaseException:
            stopped.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise


def sum_looks(looks: Iterable[Look], *, grey: bool) -> Sums:
    """Add up the sums of pictures as RGB, or as grey if all of them are."""
    whole = Sums()
    for look in looks:
        # A grey picture in RGB has its one channel three times.
        times = 3 if look.grey and not grey else 1
        whole.join(Sums(look.sums.count, look.sums.totals * times, look.sums.squares * times))
    return whole


def look_at(path: Path, white: int | None = None) -> Look:
    """Read a picture for what is to be remembered of it; for threads of `look_through`.

    Args:
        path: path of the file.
        white: white of a picture of more than 8 bits; None takes that of this picture alone.

    Raises:
        DataError: the picture cannot be read; the message names the file.
    """
    picture, size, factor = _load_small(path)
    largest, fractions = None, False
    if is_deep(picture):
        with reading(path):
            values = finite(picture)
            largest = float(values.max())
            fractions = picture.mode == "F" and largest <= 1
            alone = Look(size, True, Sums(), largest, fractions)
            white = white_of([alone]) if white is None else white
    else:
        white = None
    picture = in_bytes(picture, path, white)
    sums = Sums()
    sums.add_picture(picture, times=factor)
    return Look(size, picture.mode == "L", sums, largest, fractions, white)


def _load_small(path: Path) -> tuple[Image, tuple[int, int], int]:
    """Read a picture with as little detail as will do.

    Returns:
        The picture, its full width and height, and how many full pixels each of its pixels stands
        for.
    """
    with reading(path), opened_picture(path) as opened:
        width, height = opened.size
        # No mode is passed to draft: it would make the decoder convert colours to grey.
        if opened.format in ("JPEG", "MPO"):
            opened.draft(None, (_LOOKED_AT, _LOOKED_AT))
        step = round(width / opened.width)
        picture = loaded(opened)
        # Those were the sides before `loaded` turned the picture.
        if opened.getexif().get(ORIENTATION) in TURNED:
            width, height = height, width
        return picture, (width, height), step * step


def count_levels(
    channel: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Count the pixels of each of the 256 levels, as (256,) int64."""
    flat = channel.reshape(-1)
    counts = np.zeros(256, np.int64)
    for start in range(0, flat.size, _PIXELS_AT_ONCE):
        counts += np.bincount(flat[start : start + _PIXELS_AT_ONCE], minlength=256)
    return counts


_DEEPEST = 64
"""Folders within each other; deeper ones would end in a RecursionError."""
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of looking at a link that leads nowhere, or to itself."""


def require_folder(path: Path, expected: str) -> None:
    """Refuse a path that is not a folder.

    Args:
        path: what ``--data`` names.
        expected: what should be there, in words.

    Raises:
        DataError: the path does not exist, or is not a folder.
    """
    if path.is_dir():
        return
    nothing = "there is no such folder" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    came = "this is a file" if path.exists() else nothing
    raise DataError(f"--data {readable(path)}: expected {expected}; {came}")


def picture_paths(folder: Path, bad: list[BadFile]) -> list[Path]:
    """Find all pictures below a folder, in the order of their paths; hidden ones are left out.

    A folder that can be reached in several ways, by links, is looked through once.

    Args:
        folder: folder to look through.
        bad: list to which folders that cannot be read, or lie too deep, are added.
    """
    # A file system lists in an order of its own, and the position of a picture seeds its
    # augmentation and decides whether it is held out.
    return sorted(_below(folder, bad, set(), _DEEPEST))


def visible_folders(directory: Path) -> list[Path]:
    """List the folders of a folder, and links to folders, by name; hidden ones are left out.

    Raises:
        DataError: the folder may not be read or searched.
    """
    try:
        return sorted(path for path in directory.iterdir() if _is_visible_folder(path))
    except OSError as error:
        raise DataError(
            f"{readable(Path(error.filename or directory))}: expected a folder that can be looked "
            f"through, got {error.strerror}"
        ) from error


def _is_visible_folder(path: Path) -> bool:
    """Whether a path is a folder, or a link to one, and is not hidden.

    Raises:
        OSError: that cannot be seen, as in a folder that may be read and not searched.
    """
    if path.name.startswith("."):
        return False
    # Not is_dir: it raises as well, or returns False without a word, by the version of Python.
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return False
        raise


def _below(
    folder: Path, bad: list[BadFile], seen: set[tuple[int, int]], deeper: int
) -> Iterator[Path]:
    """Yield the pictures of a folder and of those within it, following links."""
    try:
        # By number, not by name: a link to a folder above would otherwise be followed for ever.
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            return
        seen.add(identity)
        # Of two links to one folder the first by name is followed, on every machine.
        entries = sorted(folder.iterdir())
    except OSError as error:
        bad.append(BadFile(folder, f"expected a folder that can be read, got {error.strerror}"))
        return
    for path in entries:
        try:
            within = _is_visible_folder(path)
        except OSError as error:
            bad.append(BadFile(path, f"expected a file or folder, got {error.strerror}"))
            continue
        if within:
            if deeper:
                yield from _below(path, bad, seen, deeper - 1)
            else:
                bad.append(BadFile(path, f"expected folders at most {_DEEPEST} deep"))
        # A link that leads nowhere is yielded too, so that reading reports it; dropped here, it
        # would be missing without a word.
        elif is_picture(path) and (path.is_file() or path.is_symlink()):
            yield path
