"""Holds back the output of a resumed script until it is known whether it was shown before.

A resumed script runs again from its beginning. Whether the run is replayed from its record, and all
its output was therefore shown before, is known once Trainer is created. So the lead's process holds
the output until then: `drop_output` discards it, and `show_output` shows it, at the end of the
process at the latest. Output that does not pass through ``sys.stdout``, such as that of other
programs, is always shown.

The replacement of ``sys.stdout`` stays in place until the end, because the script may have stored
it, or changed it with ``reconfigure``.
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
        # A forked child prints directly, and must not print what its parent holds.
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
"""Output of this process while it is held or dropped, else None."""


def hold_output() -> None:
    """Hold the output from here on."""
    global _output
    # A process may have no standard output, and a replaced one may not accept bytes.
    if _output is None and hasattr(sys.stdout, "buffer"):
        _output = _Output(sys.stdout)
        sys.stdout = _output.text
        atexit.register(show_output)


def drop_output() -> None:
    """Drop the held output and all output from here on."""
    hold_output()
    if _output is not None:
        _output.drop()


def show_output() -> None:
    """Show the held output and all output from here on."""
    global _output
    output, _output = _output, None
    if output is not None:
        output.show()
