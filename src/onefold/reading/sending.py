"""How worker processes send what they have read: each tensor by a descriptor of its memory.

Note: when descriptors run out
------------------------------
A process may have so many files open. A worker that has no descriptor left to hand its tensors over
does not fail: the thread that hands them over tries again for ever, and whoever wants them waits
for ever, where no limit of ours holds. So the limit is raised as far as this process may, and a
worker looks at what is left before it sends.
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

from onefold.reading.reader import Answer, BadSample

__all__ = ["Sending", "allow_open_files", "count_tensors", "sends_by_socket"]

_MOST_OPEN_FILES = 1 << 16
"""Programs that a script starts may look through all descriptors that they could have."""
_EACH = 2
"""Descriptors of a tensor that waits to be sent: that of its memory, and the one to be sent."""
_PLENTY = 1 << 14
_PAUSE_S = 0.02
_PLAIN = frozenset({int, float, str, bytes, bool, complex, type(None)})
_SPARE = 16
"""Those of connections, and of what the data set opens to read a sample."""


def sends_by_socket() -> bool:
    """Whether processes send each other the memory of tensors by descriptors, through sockets."""
    found: str = get_sharing_strategy()  # type: ignore[no-untyped-call]
    return found == "file_descriptor"


def allow_open_files() -> None:
    """Let this process have as many files open as the system allows it, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Sending:
    """Looks, in a worker, whether an answer can be sent; hands on what says so if it cannot.

    It waits until earlier answers have been taken, if that is what is missing: whoever wants this
    one takes those first, and has a limit for its wait.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        """The files that this process has open while nothing waits to be sent."""
        self._before = 0
        """The tensors of the answer before, which may not be on its way yet."""

    def __call__(self, answer: Answer) -> Answer:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = _open_files()
        if self._first is None:
            self._first = used
        # To count takes time, and so many tensors nobody has in a batch.
        if not sends_by_socket() or most == resource.RLIM_INFINITY or most - used > _PLENTY:
            return answer
        before, self._before = self._before, count_tensors(answer.payloads)
        needed = _EACH * self._before + _SPARE
        if used + needed + _EACH * before <= most:
            return answer
        if self._first + needed > most:
            return self._refused(answer, needed, most)
        time.sleep(_PAUSE_S)  # by now the one before is on its way, and counted
        while _open_files() + needed > most:
            time.sleep(_PAUSE_S)
        return answer

    def _refused(self, answer: Answer, needed: int, most: int) -> Answer:
        text = (
            f"expected room for {needed} more open files in a worker process, which may have "
            f"{most} and has {self._first} from the start: each of the {self._before} tensors of a "
            f"batch takes {_EACH} until it is used. Raise the limit (ulimit -n), have fewer and "
            f"larger tensors in a batch, or use workers=0"
        )
        request = answer.request
        bad = BadSample(
            request.stop, request.epoch, "OSError", text, "", "sending the batch up to sample"
        )
        return answer._replace(payloads=bad)


def count_tensors(value: Any) -> int:
    """Count the tensors in containers and in attributes of objects, however nested.

    >>> count_tensors({"images": torch.zeros(2), "boxes": [torch.zeros(1), torch.zeros(1)]})
    3
    """
    found, rest, seen = 0, [value], set()
    while rest:
        each = rest.pop()
        if isinstance(each, torch.Tensor):
            found += 1
            continue
        parts = _parts_of(each)
        if parts is not None and id(each) not in seen:
            seen.add(id(each))
            # Of numbers and texts there may be very many.
            rest += [part for part in parts if type(part) not in _PLAIN]
    return found


def _parts_of(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else None


def _open_files() -> int:
    """How many files this process has open, at least: a new one has the lowest number."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most
    os.close(descriptor)
    return descriptor
