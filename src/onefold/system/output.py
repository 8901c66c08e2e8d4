"""Holds back what a resumed script prints until it is known whether it was shown before.

A resumed script runs again from its beginning. Whether it is answered from the record of its run,
so that all it prints has been shown, is known once its Trainer is made. So the lead's process holds
what is printed before: `drop_output` if it was shown, else `show_output`, at the end of the process
at the latest. What does not pass through ``sys.stdout``, as of other programs, is always shown.

The stream in its place stays there to the end: the script may have kept it, or have changed it by
``reconfigure``.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["drop_output", "hold_output", "show_output"]


class _Output(io.BufferedIOBase):
    """The bytes of a stream, which are held, dropped or passed on."""

    name = "<stdout>"

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._stream = stream
        self._held: deque[bytes] | None = deque()
        # A child that the script forks prints as ever, and not a second time what is held here.
        os.register_at_fork(after_in_child=self._forget)
        self.text = io.TextIOWrapper(
            self,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=getattr(stream, "line_buffering", False),
            write_through=True,
        )

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def flush(self) -> None:
        self._stream.flush()

    def write(self, data: ReadableBuffer) -> int:
        if self._held is None:
            return self._stream.buffer.write(data)
        self._held.append(written := bytes(data))
        return len(written)

    def drop(self) -> None:
        self._held = deque(maxlen=0)

    def show(self) -> None:
        held, self._held = self._held, None
        self._stream.buffer.writelines(held or ())

    def _forget(self) -> None:
        self._held = None


_output: _Output | None = None
"""Of this process, while it holds or drops what is printed."""


def hold_output() -> None:
    """Hold what is printed from here on."""
    global _output
    # A process may have no standard output, and one that is not its own may have no bytes.
    if _output is None and hasattr(sys.stdout, "buffer"):
        _output = _Output(sys.stdout)
        sys.stdout = _output.text
        atexit.register(show_output)


def drop_output() -> None:
    """Drop what is held, and what is printed from here on."""
    hold_output()
    if _output is not None:
        _output.drop()


def show_output() -> None:
    """Show what is held, and what is printed from here on."""
    global _output
    output, _output = _output, None
    if output is not None:
        output.show()
