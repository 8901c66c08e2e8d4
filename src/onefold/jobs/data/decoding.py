"""Opens pictures of unknown origin: by known decoders, within bounds, and turned upright.

Note: what a picture may cost
-----------------------------
A file of a few kilobytes may claim any number of pixels. So its header is checked before anything
is decoded: no picture may have more than `MOST_PIXELS`, and threads that look through many wait for
each other where theirs together would have more than `_PIXELS_IN_HAND`. Only decoders of the
formats in `_FORMATS` are tried, whatever the file is called: others that Pillow knows start
programs, such as Ghostscript for EPS.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onefold.errors import DataError, LaunchError
from onefold.jobs.data.files import open_regular, readable

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = [
    "ORIENTATION",
    "TURNED",
    "finite",
    "in_bytes",
    "in_hand",
    "is_deep",
    "is_picture",
    "load_picture",
    "loaded",
    "open_picture",
    "opened_picture",
    "pillow_quiet",
    "reading",
    "require_pillow",
]

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
_GREY_MODES = frozenset({"1", "L", "LA"})
TURNED = range(5, 9)
"""EXIF orientations that swap width and height."""
ORIENTATION = 0x0112
"""The EXIF tag for how a camera was held."""


def require_pillow() -> None:
    """Refuse to go on without Pillow, the library that reads pictures.

    Raises:
        LaunchError: Pillow is not installed.
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
    """Read a whole picture, in mode ``L`` if it is grey, and in ``RGB`` otherwise.

    Args:
        path: path of the file.
        white: the value that becomes white in a picture of more than 8 bits. None takes 65535 for
            16 bits, and else the first of 1 (fractions), 255 and 65535 that no value exceeds.

    Raises:
        DataError: the picture cannot be read; the message names the file.
    """
    with pillow_quiet():
        return in_bytes(load_picture(path), path, white)


@contextmanager
def pillow_quiet() -> Iterator[None]:
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
    with reading(path), opened_picture(path) as opened:
        return loaded(opened, weight)


@contextmanager
def opened_picture(path: Path) -> Iterator[ImageFile]:
    """Open a picture, reading no more than its header, and refuse it if it is too large.

    Raises:
        ValueError: the picture has more than `MOST_PIXELS`, or is of no known format.
    """
    # By file and not by path: Pillow would open whatever the path stands for, a FIFO as well.
    with open_regular(path) as file, _recognised(file) as opened:
        # Our own bound: Pillow only warns up to twice its own, and programs may switch that off.
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise ValueError(
                f"it has {width}x{height} pixels, more than the {MOST_PIXELS:,} that a picture may "
                f"have: make it smaller, or cut it into several"
            )
        yield opened


def _recognised(file: BufferedReader) -> ImageFile:
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


def loaded(opened: ImageFile, weight: int = 1) -> Image:
    """Decode the pixels and turn them upright; nothing is copied if they are upright already."""
    from PIL import ImageOps

    # Before load, which allocates all of them. Until then a picture is a header and a descriptor.
    in_hand.take(opened.width * opened.height * weight)
    opened.load()
    # Asked after loading: a PNG may have its EXIF note behind the pixels.
    turned = opened.getexif().get(ORIENTATION, 1) != 1
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


in_hand = _InHand()
"""One for the process, as its memory is."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever decoding raises into one error that names the file.

    Raises:
        DataError: the block raised an exception other than MemoryError.
    """
    try:
        yield
    # Says nothing about the file: the next one may fit no better.
    except MemoryError:
        raise
    # On crafted bytes decoders raise nearly anything: SyntaxError, struct.error, IndexError.
    except Exception as error:
        came = error.strerror if isinstance(error, OSError) else None
        # Its whole text would repeat the path.
        came = came or f"{error}" or type(error).__name__
        raise DataError(f"{readable(path)}: expected a picture that can be read: {came}") from error


def is_deep(picture: Image) -> bool:
    """Whether a picture has more than 8 bits a pixel."""
    return picture.mode.startswith(("I", "F"))


def in_bytes(picture: Image, path: Path, white: int | None) -> Image:
    """Bring a picture to mode ``L`` or ``RGB``; see `open_picture` for ``white``."""
    from PIL import Image

    with reading(path):
        # Pillow's own convert knows nothing of our white, and in most of these modes cuts off
        # what is above 255.
        if is_deep(picture):
            values = finite(picture)
            white = white or _usual_white(picture.mode, values.max())
            scaled = values.clip(0, white) * (255 / white)
            picture = Image.fromarray(scaled.astype(np.uint8))
        mode = "L" if picture.mode in _GREY_MODES else "RGB"
        return picture if picture.mode == mode else picture.convert(mode)


def finite(picture: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the values of a picture, (h, w) float64, with 0 for any that is not finite."""
    return np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)


def _usual_white(mode: str, largest: float) -> int:
    """Guess the white of a single picture; only a mode of 16 bits states it."""
    whites = [65535] if mode.startswith("I;16") else [255, 65535]
    if mode == "F":
        whites.insert(0, 1)
    return next((white for white in whites if largest <= white), 65535)
