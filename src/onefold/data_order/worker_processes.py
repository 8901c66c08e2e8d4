"""Starts the worker processes of a loader, which read ahead and send what they have read.

`Sending` checks whether a worker can send: each tensor needs a descriptor of its memory.

Note: when descriptors run out
------------------------------
A process may have so many files open. A worker that has no descriptor left to hand its tensors over
does not fail: the thread that hands them over tries again for ever, and whoever wants them waits
for ever, where no limit of ours holds. So the limit is raised as far as this process may, and a
worker looks at what is left before it sends.

Note: garbage of the parent
---------------------------
A forked worker inherits objects that nobody refers to but in a circle. To collect one that owns
something of a GPU aborts the worker, as a forked process cannot speak to the GPU. So collection is
off while workers are forked, and each of them sets aside what it has inherited.
"""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader, Dataset, get_worker_info

from onefold.data_order.kept_state import files_in
from onefold.data_order.order import Requests, Workers
from onefold.data_order.reader import Answer, BadSample
from onefold.errors import SampleError
from onefold.system.process import ctrl_c_as_before, die_with_parent
from onefold.system.safe_files import LONGEST_TEMPORARY_PATH

__all__ = ["Sending", "check_temporary_path", "start_workers"]

_log = logging.getLogger("onefold")
_WARNED: set[str] = set()
"""The names of files that this process has warned of."""
_NAMED = 5
"""The most files that a warning names."""


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def start_workers(
    workers: Workers,
    reader: Dataset[Answer],
    requests: Requests,
    *,
    pin_memory: bool,
    timeout_s: float,
) -> Iterator[Answer]:
    """Start the processes, and return the iterator over their answers, which ends them."""
    # Of this process, which has all that they send open; the workers inherit it.
    allow_open_files()
    _warn_of_files(workers, reader, requests)
    loader = DataLoader(
        reader,
        # Requests are whole batches already.
        batch_size=None,
        sampler=requests,
        num_workers=workers.number,
        # What is called with each answer before it is sent.
        collate_fn=Sending(),  # type: ignore[arg-type]  # of answers, not of lists
        worker_init_fn=_Tied(workers.context, workers.init),
        # Persistent workers would keep the data set as it was in the first pass.
        persistent_workers=False,
        pin_memory=pin_memory,
        timeout=timeout_s,
        prefetch_factor=workers.prefetch,
        multiprocessing_context=workers.context,
        # Without one, DataLoader would draw a seed from the caller's generator.
        generator=torch.Generator().manual_seed(0),
    )
    before = set(multiprocessing.active_children())
    with _collecting_nothing():
        answers = iter(loader)
    # PyTorch hears of the end of workers that it knows, and of those alone.
    if len(set(multiprocessing.active_children()) - before) < workers.number:
        raise SampleError(
            f"expected {workers.number} worker processes of a loader, one has ended while they "
            f"were started: it was killed, as where memory runs out. Use fewer workers"
        )
    return answers


def _context(given: Any) -> Any:
    named = given is None or isinstance(given, str)
    return multiprocessing.get_context(given) if named else given


def _warn_of_files(workers: Workers, reader: Any, requests: Requests) -> None:
    """Warn of files that a data set holds open, whose position all forked workers share."""
    forks = _context(workers.context).get_start_method() == "fork"
    files = files_in(reader.dataset, reader.collate) if forks and 0 in requests.own else []
    if new := [name for name in files if name not in _WARNED]:
        _WARNED.update(new)
        _log.warning(
            "the data set or collate holds %s open, and workers are forked: %s. They share the "
            "file's position with this process and with each other, so one may read what another "
            "one has moved to. Open the file in the worker, when the first sample is read",
            *("a file" if len(new) == 1 else f"{len(new)} files", ", ".join(new[:_NAMED])),
        )


class _Tied:
    """Ties a worker process to the process that it reads for: it ends with it, and has its dtype.

    A worker that is not forked starts with PyTorch's own default dtype, and would draw other random
    numbers than ``workers=0`` does.

    Note: the parent is a thread
    ----------------------------
    When the kernel kills a process with its parent, the parent is the thread that created the
    process. If that thread may end before the process does, nothing is asked of the kernel, and
    PyTorch's workers are left to notice the end by themselves. A fork server is the parent of the
    processes that it creates, and ends with the process that it serves.
    """

    def __init__(self, context: Any, init: Callable[[int], object] | None) -> None:
        # Noted in the process that is read for, and forked or pickled into its workers.
        self._parent = os.getpid()
        self._lasting = threading.current_thread() is threading.main_thread()
        self._served = _context(context).get_start_method() == "forkserver"
        self._dtype = torch.get_default_dtype()
        self._environment = type(os.environ)  # which may hide the place of a device
        self._collects = gc.isenabled()
        self._init = init

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._collects:
            gc.enable()
        torch.set_default_dtype(self._dtype)
        os.environ.__class__ = self._environment
        if self._lasting:
            # The parent of a worker that a fork server made is the server, whatever its number is.
            die_with_parent(os.getppid() if self._served else self._parent)
        # The fork happened inside `ctrl_c_later`, whose handler nobody in here will ever undo.
        ctrl_c_as_before()
        # There PyTorch shows what this worker reads: the data set and not our reader, for functions
        # and streams look at it, and change it.
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self._init is not None:
            self._init(worker)


def check_temporary_path(workers: int) -> None:
    """Refuse a temporary folder whose path is too long for the sockets of worker processes.

    In a worker this would fail in a thread of its queue, and the answer would simply never arrive.
    """
    folder = os.fsencode(tempfile.gettempdir())
    if sends_by_socket() and len(folder) > LONGEST_TEMPORARY_PATH:
        raise ValueError(
            f"workers={workers}: worker processes send tensors through sockets in the temporary "
            f"folder, so expected its path to have at most {LONGEST_TEMPORARY_PATH} bytes, got "
            f"{len(folder)}: {os.fsdecode(folder)}; set TMPDIR to a shorter path, or use workers=0"
        )


_MOST_OPEN_FILES = 1 << 16
"""Programs that a script starts may look through all descriptors that they could have."""


_EACH = 2
"""Descriptors of a tensor that waits to be sent: that of its memory, and the one to be sent."""


_PLENTY = 1 << 14


_PAUSE_S = 0.02


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


class _Counting(ForkingPickler):
    """Counts the tensors in what it pickles, as a worker's queue does to send it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors = 0

    def reducer_override(self, value: Any) -> Any:
        """Count a tensor in place of pickling it, which would share its memory."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        self.tensors += 1
        return str, ()


def count_tensors(value: object) -> int:
    """Count the tensors that are sent with a value, however nested.

    >>> count_tensors({"images": torch.zeros(2), "boxes": [torch.zeros(1), torch.zeros(1)]})
    3
    """
    counting = _Counting()
    counting.dump(value)
    return counting.tensors


def _open_files() -> int:
    """How many files this process has open, at least: a new one has the lowest number."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most
    os.close(descriptor)
    return descriptor
