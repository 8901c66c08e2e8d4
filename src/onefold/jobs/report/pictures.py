"""Pictures of a run's folder, as parts of the page."""

from __future__ import annotations

import struct
from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

from onefold.data.files import read_whole

__all__ = ["Picture", "read_picture"]

_BEGINNING = struct.Struct(">8s8xII")
"""Of a PNG: what all have in common, a length and a name, width and height."""
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 1 << 23
"""Of a picture as a run keeps it, which is small."""


class Picture(NamedTuple):
    """A PNG inside the page."""

    source: str
    """A URL that holds all of it."""
    width: int
    """In pixels."""
    height: int
    """In pixels."""


def read_picture(folder: Path, name: object) -> Picture | None:
    """A PNG of the run's own; files elsewhere are not the report's to show.

    Args:
        folder: of the run.
        name: path of the file in it.

    Returns:
        The picture; None where the folder holds no such PNG.
    """
    try:
        path = (folder / str(name or "")).resolve()
        if not path.is_relative_to(folder.resolve()):
            return None
        content = read_whole(path, _MOST_BYTES)
        signature, width, height = _BEGINNING.unpack_from(content)
    except (OSError, ValueError, struct.error):
        return None
    source = "data:image/png;base64," + b64encode(content).decode("ascii")
    return Picture(source, width, height) if signature == _PNG else None
