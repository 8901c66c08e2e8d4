"""Finds the images below a folder, and reads one, or scans all to find bad ones before training.

In this file, a picture is a ``PIL.Image`` of mode ``L`` (grayscale) or ``RGB``, upright by its EXIF
orientation. Files are untrusted: only known decoders open them, with limits. `picture_paths` finds
the images below a folder. `look_through` reads all of them, and finds unreadable ones before
training.

Note: limits on images
----------------------
A file of a few kilobytes can declare any number of pixels. So its header is checked before
decoding: no image may have more than `MOST_PIXELS`, and scanning threads wait for each other if
their images together would have more than `_PIXELS_IN_HAND`. Only decoders of the formats in
`_FORMATS` are tried, whatever the file is called: other decoders of Pillow start programs, such as
Ghostscript for EPS.

Note: more than 8 bits
----------------------
A file with 16 bits does not say how many of them its camera used. If white were always 65535,
12-bit data would shrink to 16 gray levels; if each image had its own white, a dark image would
become as bright as the others. So a dataset has one white, `white_of` its training images: the
largest number with as many bits as their values need. The run stores it for new images. So that a
single hot pixel does not determine it, the 99.9th percentile of each image's values counts;
brighter values become white.

Note: large JPEGs
-----------------
The scan before training only needs the size, the mean colors, and whether the file is readable.
The decoder can skip the finest detail of a large JPEG, which takes a fraction of the time. Training
reads all of it.

Note: exact sums
----------------
Mean and standard deviation of the pixels affect every sample, so they must not depend on the order
of addition. So sums are Python integers, without limit or rounding, and are divided once at the
end.
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
"""Number of pixels to count at a time, because NumPy widens each to eight bytes for it."""
_LOOKED_AT = 512
"""JPEGs may be decoded at a fraction of their size, but no side becomes smaller than this."""
_Item = TypeVar("_Item")
_Seen = TypeVar("_Seen")
_READERS = 4
"""Number of scanning threads: Pillow decodes without holding the GIL."""
_FILES_AT_ONCE = 16
"""Files per task: a queued task takes more memory than the facts of a file."""
_SUFFIXES = frozenset({
    ".avif", ".bmp", ".gif", ".heic", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm",
    ".tif", ".tiff", ".webp",
})  # fmt: skip
"""Includes formats that some builds of Pillow cannot read: these files are reported, not
ignored."""
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "AVIF", "HEIF")
"""Decoders to try; the last one requires a plugin of Pillow."""
MOST_PIXELS = 1 << 27
"""Maximum number of pixels of an image: 512 MiB, as Pillow stores RGB in 4 bytes per pixel."""
_PIXELS_IN_HAND = 1 << 26
"""Maximum number of pixels that threads decode at the same time, unless an image has more."""
_SHOWN_BYTES = 16
"""Number of bytes that an error shows of an unknown format."""
_GRAY_MODES = frozenset({"1", "L", "LA"})
_TURNED = range(5, 9)
"""EXIF orientations that swap width and height."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation."""


def is_picture(path: Path) -> bool:
    """Whether a file name is that of an image, and not hidden."""
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")


def open_picture(path: Path, *, white: int | None = None) -> Image:
    """Read a whole image, in mode ``L`` if it is grayscale, otherwise ``RGB``.

    Args:
        path: path of the file.
        white: value that becomes white in an image with more than 8 bits. None uses 65535 for 16
            bits, otherwise the first of 1 (fractions), 255 and 65535 that no value exceeds.

    Raises:
        DataError: the image cannot be read. The message names the file.
    """
    with _pillow_quiet():
        return in_bytes(load_picture(path), path, white)


@contextmanager
def _pillow_quiet() -> Iterator[None]:
    """Silence Pillow's warnings about damaged EXIF data and large images, which are read anyway.

    Warning filters belong to the process: use this before threads start, never in one of several.
    """
    # Threads that exit in another order than they entered would restore each other's filters, and
    # the process would keep ours permanently.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def load_picture(path: Path, *, weight: int = 1) -> Image:
    """Read an image in the file's own mode, upright; for threads of `look_through`.

    Args:
        path: path of the file.
        weight: memory of its further processing, relative to the image.

    Raises:
        DataError: the image cannot be read. The message names the file.
    """
    with _reading(path), _opened(path) as opened:
        return _loaded(opened, weight)


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile]:
    """Open an image, reading only its header, and reject it if it is too large.

    Raises:
        ValueError: the image has more than `MOST_PIXELS`, or an unknown format.
    """
    # Pass a file, not a path: Pillow would open anything at the path, including a FIFO. Links are
    # followed, because large datasets often consist of links to one copy.
    with open_plain(path, follow=True) as file, _recognized(file) as opened:
        # Our own limit: Pillow only warns up to twice its limit, and programs may disable it.
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise ValueError(
                f"it has {width}x{height} pixels, more than the limit of {MOST_PIXELS:,}: make it "
                f"smaller, or split it"
            )
        yield opened


def _recognized(file: BufferedReader) -> ImageFile:
    """Read an image's header with Pillow.

    Raises:
        ValueError: the format is unknown.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        # Without init, Image.OPEN lacks the formats that Pillow loads on demand. open() raises
        # KeyError for a format that this Pillow was built without.
        Image.init()
        return Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
    except UnidentifiedImageError as error:
        # Read from the open file, because its name may refer to another file by now.
        file.seek(0)
        start = file.read(_SHOWN_BYTES)
        came = f"a file of unknown format that begins with {start!r}; known formats are "
        raise ValueError(came + ", ".join(_FORMATS) if start else "an empty file") from error


def _loaded(opened: ImageFile, weight: int = 1) -> Image:
    """Decode the pixels upright; copies nothing if they already are."""
    from PIL import ImageOps

    # Before load, which allocates all pixels. Until then, there is only a header and a descriptor.
    _in_hand.take(opened.width * opened.height * weight)
    opened.load()
    # Check after loading, because a PNG may contain its EXIF data after the pixels.
    turned = opened.getexif().get(_ORIENTATION, 1) != 1
    return ImageOps.exif_transpose(opened) if turned else opened


class _InHand:
    """Limits the number of pixels that the threads of `look_through` hold at the same time.

    Other threads are not counted and never wait: a loader's worker has one image at a time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Keyed by thread identity; guarded by the condition's lock.
        self._pixels: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the pixels of this thread until the block ends."""
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
        """Wait until the pixels fit, or no other thread holds any."""
        thread = threading.get_ident()
        with self._changed:
            if thread not in self._pixels:
                return
            # Do not count what it held while it waits: two threads that wait for each other's
            # pixels would deadlock.
            self._pixels[thread] = 0
            self._changed.wait_for(lambda: self._fits(pixels))
            self._pixels[thread] = pixels

    def _fits(self, pixels: int) -> bool:
        # Without other threads any image fits, or one above the limit could never be read.
        others = sum(self._pixels.values())
        return not others or others + pixels <= _PIXELS_IN_HAND


_in_hand = _InHand()
"""Shared by all threads of the process, like its memory."""


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any exception of decoding into an error that names the file.

    Raises:
        DataError: the block raised it, or any exception other than MemoryError.
    """
    try:
        yield
    # MemoryError does not concern this file; DataError already names it.
    except (MemoryError, DataError):
        raise
    # On crafted bytes, decoders raise nearly anything: SyntaxError, struct.error, IndexError.
    except Exception as error:
        came = error.strerror if isinstance(error, OSError) else None
        # str(error) of an OSError would repeat the path.
        came = came or f"{error}" or type(error).__name__
        raise DataError(f"{readable(path)}: cannot read the image: {came}") from error


def deep_values(picture: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    """Return the values of an image with more than 8 bits, (h, w) float64; otherwise None.

    Values that are not finite become 0.
    """
    if not picture.mode.startswith(("I", "F")):
        return None
    return np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)


def in_bytes(picture: Image, path: Path, white: int | None) -> Image:
    """Convert an image to mode ``L`` or ``RGB``, with transparent pixels on white.

    Args:
        picture: result of `load_picture`, or any Pillow image.
        path: path of the file, or a name for errors.
        white: see `open_picture`.

    Raises:
        DataError: all values would become black.
    """
    from PIL import Image

    with _reading(path):
        # Pillow's convert does not know this white, and in most of these modes clips values
        # above 255.
        values = deep_values(picture)
        if values is not None:
            white = white or _usual_white(picture.mode, values.max())
            scaled = (values.clip(0, white) * (255 / white)).astype(np.uint8)
            least, most = values.min(), values.max()
            if least < most and not scaled.any():
                raise DataError(
                    f"{readable(path)}: values of {least:g} to {most:g} would all become black, "
                    f"because white is {white}: expected a value of {white / 255:.3g} or more"
                )
            picture = Image.fromarray(scaled)
        mode = "L" if picture.mode in _GRAY_MODES else "RGB"
        # Colors of transparent pixels are arbitrary and invisible.
        if picture.has_transparency_data:
            white_page = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white_page, picture.convert("RGBA"))
        return picture if picture.mode == mode else picture.convert(mode)


def _usual_white(mode: str, largest: float) -> int:
    """Guess the white of a single image; only a 16-bit mode defines it."""
    whites = [1, 255] if mode == "F" else [] if mode.startswith("I;16") else [255]
    return next((white for white in whites if largest <= white), 65535)


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """Images in files."""

    paths: Sequence[Path]
    """Path of each image."""
    root: Path
    """Folder that names are relative to."""
    white: int | None = None
    """White of images with more than 8 bits; None uses the usual one for each."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image:
        return open_picture(self.paths[index], white=self.white)

    def name(self, index: int) -> str:
        """Return the path relative to the root of the data."""
        return readable(Path(name_below(self.paths[index], self.root)))


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPictures:
    """Images in memory."""

    pixels: torch.Tensor  # (n, h, w) uint8, grayscale
    title: str
    """Prefix of each name; its number follows."""

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.pixels[index].numpy())

    def name(self, index: int) -> str:
        """Return the title and the number, from 0."""
        return f"{self.title} {index}"


Pictures = PictureFiles | ArrayPictures
"""A sequence of images, each read on access."""


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
    """Sum of the levels per channel."""
    squares: list[int] = field(default_factory=list)
    """Sum of the squared levels per channel."""

    def add(self, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        """Add images, (..., c) uint8."""
        self._add_counts(np.stack([count_levels(part) for part in np.moveaxis(pixels, -1, 0)]))

    def add_picture(self, picture: Image, *, times: int = 1) -> None:
        """Add an image of mode ``L`` or ``RGB`` whose pixels count several times."""
        self._add_counts(np.array(picture.histogram(), dtype=np.int64).reshape(-1, 256) * times)

    def _add_counts(self, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        """Add pixels by their histogram, (c, 256) int64."""
        # Sums over 256 levels instead of millions of pixels. int64 easily holds the squares of one
        # image; sums over a dataset are Python integers.
        levels = np.arange(256)
        totals, squares = ((counts @ factors).tolist() for factors in (levels, levels * levels))
        self.join(Sums(int(counts[0].sum()), totals, squares))

    def join(self, other: Sums) -> None:
        """Add the sums of another instance."""
        if not self.totals:
            self.totals, self.squares = [0] * len(other.totals), [0] * len(other.squares)
        self.count += other.count
        self.totals = [a + b for a, b in zip(self.totals, other.totals, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, other.squares, strict=True)]

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation, at least 1/255, of pixels in [0, 1] per channel."""
        means = tuple(total / (self.count * 255) for total in self.totals)
        # Integers until the last division, so that the difference of two large squares is exact.
        variances = [
            (self.count * square - total**2) / (self.count * 255) ** 2
            for total, square in zip(self.totals, self.squares, strict=True)
        ]
        # At least one level, or images of a single color would be divided by 0.
        return means, tuple(max(math.sqrt(variance), 1 / 255) for variance in variances)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureData(ReadData):
    """Fields that all image datasets have."""

    sums: Sums
    """Sums over the pixels of the training images."""
    white: int | None = None
    """White of images with more than 8 bits per pixel; None if there are none."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="picture"):
    """Facts of an image that was read: a few numbers."""

    size: tuple[int, int]
    """Width and height, in pixels."""
    gray: bool
    sums: Sums
    """Sums over its pixels, with one channel if it is grayscale."""
    bright: float | None = None
    """99.9th percentile of its values, for more than 8 bits per pixel."""
    fractions: bool = False
    """Whether it contains floating point values, and that percentile is at most 1."""
    white: int | None = None
    """White that the sums are based on, for more than 8 bits per pixel."""
    several: bool = False
    """Whether the file contains further pages or frames, which are ignored."""


def white_of(looks: Iterable[Look]) -> int | None:
    """Find the common white of images with more than 8 bits per pixel; None without any.

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
    """Call a function that reads images for each item, in several threads.

    An exception, including Ctrl-C, ends it once the images in progress are read.

    Args:
        look: reads images by `load_picture` or `look_at`.
        items: arguments of the function, in order.
        watch: called by the calling thread for every item once all items before it are done, with
            the number of completed items and the number of all items.

    Returns:
        Results of the function, in the order of the items.
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

    # Before the threads: Pillow loads formats on demand, and while one thread does so, another
    # may see a half-filled table and treat its format as unknown.
    Image.init()
    groups = [items[i : i + _FILES_AT_ONCE] for i in range(0, len(items), _FILES_AT_ONCE)]
    seen: list[_Seen] = []
    with _pillow_quiet(), ThreadPoolExecutor(_READERS) as readers:
        try:
            # map keeps the order of the groups, whichever thread finishes first.
            for each in chain.from_iterable(readers.map(look_at_all, groups)):
                seen.append(each)
                if watch is not None:
                    watch(len(seen), len(items))
            return seen
        # Leaving the executor waits for its threads, which would first process the whole queue.
        except BaseException:
            stopped.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise


def sum_looks(looks: Iterable[Look], *, gray: bool) -> Sums:
    """Add the sums of images as RGB, or as grayscale if all of them are."""
    whole = Sums()
    for look in looks:
        # A grayscale image in RGB has its one channel three times.
        times = 3 if look.gray and not gray else 1
        whole.join(Sums(look.sums.count, look.sums.totals * times, look.sums.squares * times))
    return whole


def look_at(path: Path, white: int | None = None) -> Look:
    """Read an image and return its facts; for threads of `look_through`.

    Args:
        path: path of the file.
        white: white of an image with more than 8 bits; None uses the white of this image alone, 0
            the usual one, as `open_picture` does without a white.

    Raises:
        DataError: the image cannot be read. The message names the file.
    """
    picture, size, factor, several = _load_small(path)
    bright, fractions = None, False
    with _reading(path):
        values = deep_values(picture)
        if values is None:
            white = None
        else:
            # Integer arithmetic avoids rounding; with fewer than 1,000 values, this is the largest.
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
    """Read an image with as little detail as sufficient.

    Returns:
        The image, its full width and height, the number of full pixels that each of its pixels
        represents, and whether the file contains further frames.
    """
    with _reading(path), _opened(path) as opened:
        width, height = opened.size
        # Do not pass a mode to draft, which would make the decoder convert colors to gray.
        if opened.format in ("JPEG", "MPO"):
            opened.draft(None, (_LOOKED_AT, _LOOKED_AT))
        step = round(width / opened.width)
        # Decodes nothing. A phone's MPO is a photo followed by a preview or a depth map.
        several = opened.format != "MPO" and bool(getattr(opened, "is_animated", False))
        picture = _loaded(opened)
        # These were the sides before `_loaded` rotated the image.
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
"""Maximum depth of nested folders, which avoids a RecursionError."""
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of a link that leads nowhere, or to itself."""


def require_folder(path: Path, expected: str) -> None:
    """Reject a path that is not a folder.

    Args:
        path: argument of ``--data``.
        expected: description of the expected content.

    Raises:
        DataError: the path does not exist, or is not a folder.
    """
    if path.is_dir():
        return
    nothing = "there is no such folder" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    came = "this is a file" if path.exists() else nothing
    raise DataError(f"--data {readable(path)}: expected {expected}, but {came}")


def picture_paths(folder: Path, bad: list[BadFile]) -> list[Path]:
    """Find all images below a folder, in the order of their paths, except hidden ones.

    A folder that several links lead to is searched once.

    Args:
        folder: folder to search.
        bad: list that receives unreadable or too deep folders.
    """
    # The order of a file system is arbitrary, but an image's position seeds its augmentation and
    # determines whether it is held out.
    return sorted(_below(folder, bad, set(), _DEEPEST))


_SYSTEM_FOLDERS = frozenset({
    "$recycle.bin", "@eadir", "__macosx", "lost+found", "system volume information",
})  # fmt: skip
"""Folders that systems and archives create, in lower case."""


def visible_folders(directory: Path) -> list[Path]:
    """List the folders in a folder, including links to folders, by name.

    Hidden folders, and those created by systems or archives, are ignored.

    Raises:
        DataError: the folder cannot be read or searched.
    """
    try:
        return sorted(path for path in directory.iterdir() if _is_visible_folder(path))
    except OSError as error:
        raise DataError(
            f"{readable(Path(error.filename or directory))}: expected a readable "
            f"folder, got {error.strerror}"
        ) from error


def _is_visible_folder(path: Path) -> bool:
    """Whether a path is a folder, or a link to one, and is neither hidden nor a system's.

    Raises:
        OSError: this cannot be determined, for example in a folder without search permission.
    """
    if path.name.startswith(".") or path.name.lower() in _SYSTEM_FOLDERS:
        return False
    # is_dir raises or silently returns False depending on the version of Python.
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return False
        raise


def _below(
    folder: Path, bad: list[BadFile], seen: set[tuple[int, int]], deeper: int
) -> Iterator[Path]:
    """Yield the images of a folder and its subfolders, following links."""
    try:
        # Identify folders by inode: a link to a parent folder would be followed forever.
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            return
        seen.add(identity)
        # Sort, so that the first by name of two links to one folder is followed on every machine.
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
        # Also yield a broken link, so that reading reports it; here, it would be dropped
        # silently.
        elif is_picture(path) and (path.is_file() or path.is_symlink()):
            yield path
