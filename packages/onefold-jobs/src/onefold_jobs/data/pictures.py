"""Finds the pictures below a folder, and reads them: one, or all to find bad ones before training.

A picture here is a ``PIL.Image`` of mode ``L`` (gray) or ``RGB``, turned upright by its EXIF note.
Its origin is unknown: it is opened by known decoders alone, and within bounds. `picture_paths`
finds the pictures below a folder. `look_through` reads all of them, and finds before training those
that cannot be read.

Note: what a picture may cost
-----------------------------
A file of a few kilobytes may claim any number of pixels. So its header is checked before anything
is decoded: no picture may have more than `MOST_PIXELS`, and threads that look through many wait for
each other where theirs together would have more than `_PIXELS_IN_HAND`. Only decoders of the
formats in `_FORMATS` are tried, whatever the file is called: others that Pillow knows start
programs, such as Ghostscript for EPS.

Note: more than 8 bits
----------------------
A file of 16 bits does not tell how many of them its camera used. If white were 65535 for all, data
of 12 bits would come down to 16 grays; if each picture had its own white, a dark one would become
as bright as the others. So a data set has one white, `white_of` its training pictures: the largest
number of as many bits as their values need. It is kept with the run, for new pictures. A single hot
pixel must not decide it, so a picture counts by the value that 99.9 % of its pixels do not exceed;
what is brighter than white becomes white.

Note: large JPEGs
-----------------
The look before training only needs the size, the mean colors, and whether the file can be read.
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
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
import numpy as np
import torch

from onefold.errors import DataError
from onefold.files import open_plain
from onefold_jobs.data.files import BadFile, ReadData, name_below, readable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = [
    "ArrayPictures",
    "Look",
    "Mode",
    "PictureData",
    "PictureFiles",
    "Pictures",
    "Sums",
    "count_levels",
    "deep_values",
    "in_bytes",
    "load_picture",
    "look_at",
    "look_through",
    "open_picture",
    "picture_paths",
    "require_folder",
    "sum_looks",
    "visible_folders",
    "white_of",
]

Mode = Literal["L", "RGB"]
_PIXELS_AT_ONCE = 1 << 20
"""Pixels that are counted at a time: NumPy widens each to eight bytes for it."""
_LOOKED_AT = 512
"""A JPEG may be decoded at a fraction of its size, but no side below so many pixels."""
_Item = TypeVar("_Item")
_Seen = TypeVar("_Seen")
_READERS = 4
"""Threads that look through the pictures: Pillow decodes without holding Python's lock."""
_FILES_AT_ONCE = 16
"""Files that make one task: a task in the queue takes more memory than what is kept of a file."""
_SUFFIXES = frozenset({
    ".avif", ".bmp", ".gif", ".heic", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm",
    ".tif", ".tiff", ".webp",
})  # fmt: skip
"""Includes formats that not every Pillow reads: such a file is reported, not passed over."""
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "AVIF", "HEIF")
"""Decoders that are tried; the last one is there only if a plugin has added it to Pillow."""
MOST_PIXELS = 1 << 27
"""The most that a picture may have: 512 MiB as Pillow holds RGB, in 4 bytes a pixel."""
_PIXELS_IN_HAND = 1 << 26
"""The most that threads decode at the same time, unless a single picture has more."""
_SHOWN_BYTES = 16
"""How much of a file of no known format an error shows."""
_GRAY_MODES = frozenset({"1", "L", "LA"})
_TURNED = range(5, 9)
"""EXIF orientations that swap width and height."""
_ORIENTATION = 0x0112
"""The EXIF tag for how a camera was held."""


def is_picture(path: Path) -> bool:
    """Whether a file's name is that of a picture, and not hidden."""
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")


def open_picture(path: Path, *, white: int | None = None) -> Image:
    """Read a whole picture, in mode ``L`` if it is gray, and in ``RGB`` otherwise.

    Args:
        path: path of the file.
        white: the value that becomes white in a picture of more than 8 bits. None takes 65535 for
            16 bits, and else the first of 1 (fractions), 255 and 65535 that no value exceeds.

    Raises:
        DataError: the picture cannot be read; the message names the file.
    """
    with _pillow_quiet():
        return in_bytes(load_picture(path), path, white)


@contextmanager
def _pillow_quiet() -> Iterator[None]:
    """Silence Pillow's warnings of damaged EXIF notes and large pictures, which are read anyway.

    Warning filters belong to the process: enter this before threads start, never in one of several.
    """
    # Threads that left in another order than they entered would put back each other's filters, and
    # the process would keep ours for good.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def load_picture(path: Path, *, weight: int = 1) -> Image:
    """Read a picture in the file's own mode, turned upright; for threads of `look_through`.

    Args:
        path: path of the file.
        weight: how many pictures of its size it counts for, if what is done with it needs as much.

    Raises:
        DataError: the picture cannot be read; the message names the file.
    """
    with _reading(path), _opened(path) as opened:
        return _loaded(opened, weight)


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile]:
    """Open a picture, reading no more than its header, and refuse it if it is too large.

    Raises:
        ValueError: the picture has more than `MOST_PIXELS`, or is of no known format.
    """
    # By file and not by path: Pillow would open whatever the path stands for, a FIFO as well. Links
    # are followed: large data sets are often folders of links to one copy.
    with open_plain(path, follow=True) as file, _recognized(file) as opened:
        # Our own bound: Pillow only warns up to twice its own, and programs may switch that off.
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise ValueError(
                f"it has {width}x{height} pixels, more than the {MOST_PIXELS:,} that a picture may "
                f"have: make it smaller, or cut it into several"
            )
        yield opened


def _recognized(file: BufferedReader) -> ImageFile:
    """Have Pillow read a picture's header.

    Raises:
        ValueError: the file is of no known format.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        # Without init, Image.OPEN lacks the formats that Pillow loads on demand; and open() raises
        # KeyError for one that this Pillow was built without.
        Image.init()
        return Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
    except UnidentifiedImageError as error:
        # Of the file that is open: another one may have its name by now, or none.
        file.seek(0)
        start = file.read(_SHOWN_BYTES)
        came = f"a file of no known format that begins with {start!r}; known are "
        raise ValueError(came + ", ".join(_FORMATS) if start else "an empty file") from error


def _loaded(opened: ImageFile, weight: int = 1) -> Image:
    """Decode the pixels and turn them upright; nothing is copied if they are upright already."""
    from PIL import ImageOps

    # Before load, which allocates all of them. Until then a picture is a header and a descriptor.
    _in_hand.take(opened.width * opened.height * weight)
    opened.load()
    # Asked after loading: a PNG may have its EXIF note behind the pixels.
    turned = opened.getexif().get(_ORIENTATION, 1) != 1
    return ImageOps.exif_transpose(opened) if turned else opened


class _InHand:
    """Bounds how many pixels the threads of `look_through` hold at the same time.

    Other threads are not counted and never wait: a loader's worker has one picture at a time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # By the identity of the thread; guarded by the condition's lock.
        self._pixels: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what this thread takes, until the block ends."""
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
        """Wait until so many pixels fit, or nobody else holds any."""
        thread = threading.get_ident()
        with self._changed:
            if thread not in self._pixels:
                return
            # What it held counts no more while it waits: two threads that each waited for the
            # other's pixels would wait for ever.
            self._pixels[thread] = 0
            self._changed.wait_for(lambda: self._fits(pixels))
            self._pixels[thread] = pixels

    def _fits(self, pixels: int) -> bool:
        # Alone, any picture fits, or one larger than the bound could never be read.
        others = sum(self._pixels.values())
        return not others or others + pixels <= _PIXELS_IN_HAND


_in_hand = _InHand()
"""One for the process, as its memory is."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever decoding raises into one error that names the file.

    Raises:
        DataError: the block raised it, or any exception other than MemoryError.
    """
    try:
        yield
    # The one says nothing about the file, as the next may fit no better; the other says it all.
    except (MemoryError, DataError):
        raise
    # On crafted bytes decoders raise nearly anything: SyntaxError, struct.error, IndexError.
    except Exception as error:
        came = error.strerror if isinstance(error, OSError) else None
        # Its whole text would repeat the path.
        came = came or f"{error}" or type(error).__name__
        raise DataError(f"{readable(path)}: expected a picture that can be read: {came}") from error


def deep_values(picture: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    """Return the values of a picture of more than 8 bits a pixel, (h, w) float64; else None.

    Values that are not finite become 0.
    """
    if not picture.mode.startswith(("I", "F")):
        return None
    return np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)


def in_bytes(picture: Image, path: Path, white: int | None) -> Image:
    """Bring a picture to mode ``L`` or ``RGB``, on white where it is transparent.

    Args:
        picture: what `load_picture` returned, or any of Pillow's.
        path: path of the file, or a name for the error.
        white: as `open_picture` takes it.

    Raises:
        DataError: its values would all become black.
    """
    from PIL import Image

    with _reading(path):
        # Pillow's own convert knows nothing of our white, and in most of these modes cuts off
        # what is above 255.
        values = deep_values(picture)
        if values is not None:
            white = white or _usual_white(picture.mode, values.max())
            scaled = (values.clip(0, white) * (255 / white)).astype(np.uint8)
            least, most = values.min(), values.max()
            if least < most and not scaled.any():
                raise DataError(
                    f"{readable(path)}: values of {least:g} to {most:g} would all become black, "
                    f"as white is {white}: expected one of {white / 255:.3g} or more"
                )
            picture = Image.fromarray(scaled)
        mode = "L" if picture.mode in _GRAY_MODES else "RGB"
        # Colors of transparent pixels are arbitrary, and nobody sees them.
        if picture.has_transparency_data:
            white_page = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white_page, picture.convert("RGBA"))
        return picture if picture.mode == mode else picture.convert(mode)


def _usual_white(mode: str, largest: float) -> int:
    """Guess the white of a single picture; only a mode of 16 bits states it."""
    whites = [1, 255] if mode == "F" else [] if mode.startswith("I;16") else [255]
    return next((white for white in whites if largest <= white), 65535)


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
        return readable(Path(name_below(self.paths[index], self.root)))


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPictures:
    """Pictures in memory."""

    pixels: torch.Tensor  # (n, h, w) uint8, gray
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


Pictures = PictureFiles | ArrayPictures
"""A sequence of pictures, each read when it is asked for."""


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
        # At least one level: pictures of one color would otherwise be divided by 0.
        return means, tuple(max(math.sqrt(variance), 1 / 255) for variance in variances)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureData(ReadData):
    """What all data sets of pictures have."""

    sums: Sums
    """Sums over the pixels of the training pictures."""
    white: int | None = None
    """White of pictures of more than 8 bits a pixel; None if there are none."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="picture"):
    """What is remembered of a picture that has been read: a few numbers."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    gray: bool
    sums: Sums
    """Over its pixels, of one channel if it is gray."""
    bright: float | None = None
    """The value that 99.9 % of its pixels do not exceed, where it has more than 8 bits a pixel."""
    fractions: bool = False
    """Whether it holds floating point values, and that value is at most 1."""
    white: int | None = None
    """The white by which the sums were taken, where it has more than 8 bits a pixel."""
    several: bool = False
    """Whether the file has further pages or frames, which nobody reads."""


def white_of(looks: Iterable[Look]) -> int | None:
    """Find the common white of the pictures with more than 8 bits a pixel; None without any.

    >>> deep = [Look((1, 1), True, Sums(), bright=value) for value in (90.0, 4000.0)]
    >>> white_of(deep)
    4095
    """
    deep = [look for look in looks if look.bright is not None]
    if not deep:
        return None
    if all(look.fractions for look in deep):
        return 1
    brightest = max(look.bright or 0.0 for look in deep)
    bits = max(8, math.ceil(brightest).bit_length())
    return int((1 << bits) - 1)


def look_through(
    look: Callable[[_Item], _Seen],
    items: Sequence[_Item],
    watch: Callable[[int, int], None] | None = None,
) -> list[_Seen]:
    """Call a function that reads pictures with each item, in several threads.

    An exception, Ctrl-C among them, ends it after the pictures that are being read.

    Args:
        look: reads pictures by `load_picture` or `look_at`.
        items: what the function is called with, one after another.
        watch: called for every item by the calling thread, as soon as those before it are done,
            with how many have been looked at, and how many there are.

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
            with _in_hand.counted():
                seen.append(look(item))
        return seen

    # Before the threads: Pillow loads formats on demand, and while one thread does so, another may
    # find a half-filled table and take its format for unknown.
    Image.init()
    groups = [items[i : i + _FILES_AT_ONCE] for i in range(0, len(items), _FILES_AT_ONCE)]
    seen: list[_Seen] = []
    with _pillow_quiet(), ThreadPoolExecutor(_READERS) as readers:
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


def sum_looks(looks: Iterable[Look], *, gray: bool) -> Sums:
    """Add up the sums of pictures as RGB, or as gray if all of them are."""
    whole = Sums()
    for look in looks:
        # A gray picture in RGB has its one channel three times.
        times = 3 if look.gray and not gray else 1
        whole.join(Sums(look.sums.count, look.sums.totals * times, look.sums.squares * times))
    return whole


def look_at(path: Path, white: int | None = None) -> Look:
    """Read a picture for what is to be remembered of it; for threads of `look_through`.

    Args:
        path: path of the file.
        white: white of a picture of more than 8 bits; None takes that of this picture alone, 0 the
            usual one, as `open_picture` does without one.

    Raises:
        DataError: the picture cannot be read; the message names the file.
    """
    picture, size, factor, several = _load_small(path)
    bright, fractions = None, False
    with _reading(path):
        values = deep_values(picture)
        if values is None:
            white = None
        else:
            # In whole numbers, so that no rounding decides; of fewer than 1,000 it is the largest.
            at = -(-values.size * 999 // 1000) - 1
            bright = float(np.partition(values, at, axis=None)[at])
            fractions = picture.mode == "F" and bright <= 1
            alone = Look(size, True, Sums(), bright, fractions)
            white = white_of([alone]) if white is None else white
    picture = in_bytes(picture, path, white)
    sums = Sums()
    sums.add_picture(picture, times=factor)
    return Look(size, picture.mode == "L", sums, bright, fractions, white, several)


def _load_small(path: Path) -> tuple[Image, tuple[int, int], int, bool]:
    """Read a picture with as little detail as will do.

    Returns:
        The picture, its full width and height, how many full pixels each of its pixels stands for,
        and whether others follow it in the file.
    """
    with _reading(path), _opened(path) as opened:
        width, height = opened.size
        # No mode is passed to draft: it would make the decoder convert colors to gray.
        if opened.format in ("JPEG", "MPO"):
            opened.draft(None, (_LOOKED_AT, _LOOKED_AT))
        step = round(width / opened.width)
        # Decodes nothing. A telephone's MPO is a photograph that has a preview or depths behind it.
        several = opened.format != "MPO" and bool(getattr(opened, "is_animated", False))
        picture = _loaded(opened)
        # Those were the sides before `_loaded` turned the picture.
        if opened.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
        return picture, (width, height), step * step, several


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


_SYSTEM_FOLDERS = frozenset({
    "$recycle.bin", "@eadir", "__macosx", "lost+found", "system volume information",
})  # fmt: skip
"""Folders that systems and archives put beside data, in lower case."""


def visible_folders(directory: Path) -> list[Path]:
    """List the folders of a folder, and links to folders, by name.

    Hidden ones are left out, and those that a system or an archive has made.

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
    """Whether a path is a folder, or a link to one, and is neither hidden nor a system's.

    Raises:
        OSError: that cannot be seen, as in a folder that may be read and not searched.
    """
    if path.name.startswith(".") or path.name.lower() in _SYSTEM_FOLDERS:
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
