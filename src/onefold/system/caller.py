"""Finds the line of the script that made a call, for messages."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

__all__ = ["script_line"]

_OURS = str(Path(__file__).parent.parent)


def script_line() -> str:
    """The file and line of the innermost caller that is not part of onefold.

    >>> script_line().endswith(":1")
    True
    """
    frame = sys._getframe(1)
    # A block is entered and left by way of contextlib.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (_OURS, contextlib.__file__)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
