"""Runs a shard in a thread of its own, so that it can stop in the middle and others go on.

Note: threads that take turns
-----------------------------
A loss stops inside a call of the user's function, and later inside autograd's backward, whose
C++ frames only a thread can keep. Two threads never compute at the same time: whoever resumes one
waits for its next stop. So the order of all computing is fixed, and nothing needs a lock. A thread
ends before `end` returns: at its next stop an exception is raised in it, which unwinds its frames.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

__all__ = ["Ended", "ShardThread", "ThreadSettings"]

Stop = TypeVar("Stop")
Answer = TypeVar("Answer")


class Ended(BaseException):
    """Raised inside a thread that is no longer needed; never reaches a script."""

    # Not an Exception: a loss may well catch those.


class ShardThread(Generic[Stop, Answer]):
    """Work that stops now and then, to be resumed with an answer.

    Args:
        name: of the thread.
        work: runs in the thread; it calls `stop`, and returns the last stop itself.
    """

    def __init__(self, name: str, work: Callable[[], Stop]) -> None:
        self._work = work
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._stops: SimpleQueue[Stop | BaseException] = SimpleQueue()
        self._ended = False
        # What a library keeps in context variables (the compiler does) holds in the thread as well.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    def resume(self, answer: Answer | None = None) -> Stop:
        """Start the work, or go on with the answer to its last stop; return the next one.

        Raises:
            BaseException: whatever the work has raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        stop = self._stops.get()
        if isinstance(stop, BaseException):
            raise stop
        return stop

    def stop(self, stop: Stop) -> Answer | None:
        """Called by the work: hand over, and wait for the answer.

        Raises:
            Ended: the work is not to go on.
        """
        # Also where the work has caught the exception and stops once more.
        if not self._ended:
            self._stops.put(stop)
            answer = self._answers.get()
            if not self._ended:
                return answer
        raise Ended

    def end(self) -> None:
        """End the work at its next stop, if it has not come to its end, and wait for that."""
        self._ended = True
        if self._thread.ident is not None:
            self._answers.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._stops.put(self._work())
        except BaseException as error:  # raised again by whoever waits in `resume`
            self._stops.put(error)


class ThreadSettings:
    """Those of PyTorch's settings of the current thread that decide what a model computes.

    Args:
        device: where the thread will compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({device.type, "cpu"})
            if torch.is_autocast_enabled(kind)
        ]
        self._made_on = torch.get_default_device()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Give the current thread the same settings, until it ends.

        Backward computes in this thread as well, and not in one that PyTorch has for each GPU: it
        could not stop there.
        """
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            if self._made_on.type != "cpu":
                stack.enter_context(self._made_on)
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield
