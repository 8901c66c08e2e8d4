"""Pictures of a run's folder, as parts of the page."""

from __future__ import annotations

import struct
from base64 import b64encode
from pathlib import Path

from onefold.data.files import read_whole
from onefold.jobs.report.markup import Markup, tag

__all__ = ["picture"]

_PNG = b"\x89PNG\r\n\x1a\n"
_SIZE = struct.Struct(">II")
_SIZE_AT = 16
_MOST_BYTES = 1 << 23
"""Of a picture as a run keeps it, which is small."""
_FEW_PIXELS = 100
"""Of width, under which pixels are shown as squares: smoothed, they would only be a blur."""


def picture(folder: Path, name: object, *, alt: str) -> Markup:
    """A PNG file inside the page.

    Args:
        folder: of the run.
        name: path of the file in it.
        alt: what is to be seen.

    Returns:
        The picture; words in its place where the folder holds no such PNG.
    """
    content = _read(folder, str(name or ""))
    if content is None:
        return tag(
            "div", "no picture", class_="missing", role="img", aria_label=f"no picture: {alt}"
        )
    width, height = _SIZE.unpack_from(content, _SIZE_AT)
    return tag(
        "img",
        src="data:image/png;base64," + b64encode(content).decode("ascii"),
        alt=alt,
        width=width,
        height=height,
        loading="lazy",
        class_="few-pixels" if width < _FEW_PIXELS else None,
    )


def _read(folder: Path, name: str) -> bytes | None:
    """A PNG of the run's own; files elsewhere are not the report's to show."""
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            return None
        content = read_whole(path, _MOST_BYTES)
    except (OSError, ValueError):
        return None
    whole = content.startswith(_PNG) and len(content) >= _SIZE_AT + _SIZE.size
    return content if whole else None
