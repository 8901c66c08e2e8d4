"""Puts Ctrl-C off while it would be lost.

Note: where Ctrl-C is lost
--------------------------
Python raises KeyboardInterrupt wherever the main thread is. In a destructor, and in what runs
before and after a fork, an exception is printed and dropped: the program goes on. PyTorch ends the
worker processes of a pass in a destructor and forks them for the next one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["ctrl_c_as_before", "ctrl_c_later"]

_Handler = Callable[[int, FrameType | None], Any]


class _Later:
    """Notes that Ctrl-C was pressed."""

    def __init__(self, before: _Handler) -> None:
        self.before = before
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Have Ctrl-C do what it does once the block is left."""
    before = signal.getsignal(signal.SIGINT)
    # Where nothing in Python handles it, and in other threads, nothing is raised either.
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    later = _Later(before)
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if later.came:
            before(signal.SIGINT, None)


def ctrl_c_as_before() -> None:
    """Have Ctrl-C do at once what it does, in a process that was forked in such a block."""
    handler = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _Later):
        handler = handler.before
    signal.signal(signal.SIGINT, handler)
