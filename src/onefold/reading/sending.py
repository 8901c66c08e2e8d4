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
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

from onefold.core.structure import parts_of
from onefold.reading.reader import Answer, BadSample

__all__ = ["Sending", "allow_open_files", "sends_by_socket"]

_MOST_OPEN_FILES = 1 << 16
"""Programs that a script starts may look through all descriptors that they could have."""
_EACH = 2
"""Descriptors of a tensor that waits to be sent: that of its memory, and the one to be sent."""
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
    """Looks, in a worker, whether an answer can be sent; hands on what says so if it cannot."""

    def __init__(self) -> None:
        self._tensors = 0
        """Those of the answer before, which may not be sent yet."""

    def __call__(self, answer: Answer) -> Answer:
        before, self._tensors = self._tensors, _tensors_in(answer.payloads)
        needed = _EACH * (before + self._tensors) + _SPARE
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not sends_by_socket() or most == resource.RLIM_INFINITY:
            return answer
        used = _open_files()
        if used + needed <= most:
            return answer
        text = (
            f"expected room for {needed} more open files in a worker process, which has {used} of "
            f"{most}: each of the {self._tensors} tensors of a batch takes one until it is used. "
            f"Raise the limit (ulimit -n), have fewer and larger tensors in a batch, read fewer "
            f"batches ahead (prefetch_factor), or use workers=0"
        )
        request = answer.request
        bad = BadSample(
            request.stop, request.epoch, "OSError", text, "", "sending the batch up to sample"
        )
        return answer._replace(payloads=bad)


def _tensors_in(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    return sum(_tensors_in(part) for _, part in parts_of(value) or ())


def _open_files() -> int:
    """How many files this process has open, at least: a new one has the lowest number."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most
    os.close(descriptor)
    return descriptor
