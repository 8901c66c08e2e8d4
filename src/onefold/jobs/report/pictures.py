"""Puts pictures of a run's folder into the page."""

from __future__ import annotations

import struct
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

from onefold.data.files import read_whole

__all__ = ["Picture", "read_picture"]

_BEGINNING = struct.Struct(">8s8xII")
"""Of a PNG: signature, length and name of the first chunk (not read), width and height."""
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 1 << 23
"""Of one picture; those that a run keeps as examples are far smaller."""


class Picture(NamedTuple):
    """A PNG that is part of the page."""

    source: str
    """A ``data:`` URL that holds the whole file."""
    width: int
    """In pixels."""
    height: int
    """In pixels."""


def read_picture(folder: Path, name: object) -> Picture | None:
    """Read a PNG of a run's folder; files elsewhere are not the report's to show.

    Args:
        folder: folder of the run.
        name: path of the file below it.

    Returns:
        The picture; None where the folder holds no such PNG.
    """
    try:
        # Resolved first: "..", an absolute path or a link could lead to any file of this machine,
        # and a page is made to be shared.
        path = (folder / str(name or "")).resolve()
        if not path.is_relative_to(folder.resolve()):
            return None
        content = read_whole(path, _MOST_BYTES)
        signature, width, height = _BEGINNING.unpack_from(content)
    # ValueError for a file that is too large, and for a NUL in the name.
    except (OSError, ValueError, struct.error):
        return None
    source = "data:image/png;base64," + b64encode(content).decode("ascii")
    return Picture(source, width, height) if signature == _PNG else None
