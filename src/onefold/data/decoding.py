"""Opens pictures of anybody: by known decoders, within bounds, and turned upright.

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
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onefold.data.bad import readable
from onefold.data.files import open_regular
from onefold.errors import DataError, LaunchError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = [
    "MOST_PIXELS",
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
"""Also of formats that not every Pillow reads: such a file is told, not passed over."""
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "AVIF", "HEIF")
"""That are tried, those of `_SUFFIXES`; the last is read where somebody has added it to Pillow."""
MOST_PIXELS = 1 << 27
"""Of a picture."""
_PIXELS_IN_HAND = 1 << 26
"""That threads decode together, unless a single picture has more."""
_GREY_MODES = frozenset({"1", "L", "LA"})
TURNED = range(5, 9)
"""Orientations in an EXIF note by which width and height change places."""
ORIENTATION = 0x0112


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
    with pillow_quiet():
        return in_bytes(load_picture(path), path, white)


@contextmanager
def pillow_quiet() -> Iterator[None]:
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
    with reading(path), opened_picture(path) as opened:
        return loaded(opened, weight)


@contextmanager
def opened_picture(path: Path) -> Iterator[ImageFile]:
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


def loaded(opened: ImageFile, weight: int = 1) -> Image:
    """The pixels, turned as the note says; without a copy where there is nothing to turn."""
    from PIL import ImageOps

    in_hand.take(opened.width * opened.height * weight)
    opened.load()
    turned = opened.getexif().get(ORIENTATION, 1) != 1
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


in_hand = _InHand()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a damaged file raises, by its format, becomes one error that names it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        came = _what_came(path, error)
        raise DataError(f"{readable(path)}: expected a picture that can be read: {came}") from error


def is_deep(picture: Image) -> bool:
    """Whether a picture has more than 8 bits a pixel."""
    return picture.mode.startswith(("I", "F"))


def in_bytes(picture: Image, path: Path, white: int | None) -> Image:
    with reading(path):
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

    values = finite(picture)
    if white is None:
        white = _usual_white(picture.mode, values.max())
    return Image.fromarray((values.clip(0, white) * (255 / white)).astype(np.uint8))


def finite(picture: Image) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Its values; what is not finite is black."""
    return np.nan_to_num(np.asarray(picture, dtype=np.float64), posinf=0, neginf=0)


def _usual_white(mode: str, largest: float) -> int:
    """Of a picture alone: only 16 bits say what white is."""
    whites = [65535] if mode.startswith("I;16") else [255, 65535]
    if mode == "F":
        whites.insert(0, 1)
    return next((white for white in whites if largest <= white), 65535)
