"""Starts the worker processes of a loader, which prefetch batches and send them.

`Sending` checks whether a worker can send its batch: each tensor needs a file descriptor.

Note: when descriptors run out
------------------------------
The number of open files per process is limited. A worker without a free descriptor for its tensors
does not fail: PyTorch's sending thread retries forever, and the receiver waits forever, beyond the
reach of any timeout of onefold. The limit is therefore raised as far as this process may, and a
worker checks the number of free descriptors before it sends.

Note: garbage of the parent
---------------------------
A forked worker inherits objects that are only kept by reference cycles. Collecting one that owns
GPU resources aborts the worker, because a forked process cannot use the parent's GPU context.
Garbage collection is therefore disabled while workers are forked, and each worker excludes the
inherited objects from it.
"""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import resource
import sys
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
from onefold.data_order.reader import Answer, BadSample, is_stream
from onefold.errors import SampleError
from onefold.system.process import ctrl_c_as_before, die_with_parent
from onefold.system.safe_files import LONGEST_TEMPORARY_PATH

__all__ = ["Sending", "check_temporary_path", "no_batch", "start_workers"]

_log = logging.getLogger("onefold")
_WARNED: set[str] = set()
"""Names of files that this process has already reported."""
_NAMED = 5
"""Maximum number of files named in a warning."""


def no_batch(timeout_s: float) -> SampleError:
    """Return the error of a loader whose workers sent no batch in time."""
    return SampleError(
        f"the loader's workers sent no batch within {timeout_s:g} s. If reading takes longer, "
        f"raise timeout_s of Trainer, or onefold run --timeout. If a worker could not send its "
        f"batch, it reported the reason above; workers=0 reads in this process"
    )


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
    """Start the workers; return the iterator over their answers, which ends the workers."""
    # This process has all sent tensors open, too; the workers inherit its limit.
    allow_open_files()
    _warn_of_files(workers, reader, requests)
    loader = DataLoader(
        reader,
        # Do not batch: each request is a whole batch.
        batch_size=None,
        sampler=requests,
        num_workers=workers.number,
        # The collate function gets each answer before it is sent.
        collate_fn=Sending(),  # type: ignore[arg-type]  # of answers, not of lists
        worker_init_fn=_Tied(workers.context, workers.init),
        # Persistent workers would keep the data set's state of the first pass.
        persistent_workers=False,
        pin_memory=pin_memory,
        timeout=timeout_s,
        prefetch_factor=workers.prefetch,
        multiprocessing_context=workers.context,
        # Without a generator, DataLoader would draw a seed from the caller's.
        generator=torch.Generator().manual_seed(0),
    )
    before = set(multiprocessing.active_children())
    with _collecting_nothing():
        answers = iter(loader)
    # Check this ourselves: PyTorch only reports workers that end after they have been registered.
    if len(set(multiprocessing.active_children()) - before) < workers.number:
        raise SampleError(
            f"started {workers.number} worker processes of a loader, but one ended at once: it was "
            f"killed, possibly because memory ran out. Use fewer workers"
        )
    return answers


def _context(given: Any) -> Any:
    named = given is None or isinstance(given, str)
    return multiprocessing.get_context(given) if named else given


def _warn_of_files(workers: Workers, reader: Any, requests: Requests) -> None:
    """Warn if a data set holds open files, whose position all forked workers would share."""
    forks = _context(workers.context).get_start_method() == "fork"
    files = files_in(reader.dataset, reader.collate) if forks and 0 in requests.own else []
    if new := [name for name in files if name not in _WARNED]:
        _WARNED.update(new)
        _log.warning(
            "the data set or collate holds %s open, and workers are forked: %s. The workers and "
            "this process share the file's position, so one process may read at a position that "
            "another one has set. Open the file in the worker, when the first sample is read",
            *("a file" if len(new) == 1 else f"{len(new)} files", ", ".join(new[:_NAMED])),
        )


class _Tied:
    """Ties a worker process to the process that it reads for: it ends with it, and has its dtype.

    A worker that is not forked starts with PyTorch's default dtype, and would draw other random
    numbers than ``workers=0`` does.

    Note: the parent is a thread
    ----------------------------
    If the kernel is to kill a process with its parent, the parent is the thread that created the
    process. If that thread may end earlier than its process, onefold does not use this feature;
    PyTorch's workers then detect the end of the process themselves. A fork server is the parent of
    the processes that it creates, and ends with the process that it serves.
    """

    def __init__(self, context: Any, init: Callable[[int], object] | None) -> None:
        # Recorded in the process that the workers read for, and forked or pickled into them.
        self._parent = os.getpid()
        self._lasting = threading.current_thread() is threading.main_thread()
        self._served = _context(context).get_start_method() == "forkserver"
        self._dtype = torch.get_default_dtype()
        self._environment = type(
            os.environ
        )  # a class that may hide rank variables from data libraries
        self._collects = gc.isenabled()
        self._init = init

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._collects:
            gc.enable()
        torch.set_default_dtype(self._dtype)
        os.environ.__class__ = self._environment
        if self._lasting:
            # The parent of a worker created by a fork server is the server, whatever its pid.
            die_with_parent(os.getppid() if self._served else self._parent)
        # The fork happened inside `ctrl_c_later`, whose handler would otherwise stay in the worker.
        ctrl_c_as_before()
        # Show the user's data set in PyTorch's worker info instead of our reader: functions read it
        # there, and change it.
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self._init is not None:
            self._init(worker)
        if is_stream(info.dataset):
            # A stream has one worker at most. With the info of one, Hugging Face datasets shuffle
            # otherwise than without a worker.
            sys.modules[get_worker_info.__module__].__dict__["_worker_info"] = None
            assert get_worker_info() is None


def check_temporary_path(workers: int) -> None:
    """Refuse a temporary directory whose path is too long for the sockets of worker processes.

    In a worker, the error would be raised in a queue's thread, and the answer would never arrive.
    """
    folder = os.fsencode(tempfile.gettempdir())
    if sends_by_socket() and len(folder) > LONGEST_TEMPORARY_PATH:
        raise ValueError(
            f"workers={workers}: worker processes send tensors through sockets in the temporary "
            f"directory, whose path may have at most {LONGEST_TEMPORARY_PATH} bytes, but has "
            f"{len(folder)}: {os.fsdecode(folder)}. Set TMPDIR to a shorter path, or use workers=0"
        )


_MOST_OPEN_FILES = 1 << 16
"""Maximum limit to set: programs that a script starts may iterate over all possible descriptors."""


_EACH = 2
"""Descriptors per tensor that waits to be sent: one for its memory, and one to send."""


_PLENTY = 1 << 14


_PAUSE_S = 0.02


_SPARE = 16
"""Descriptors reserved for connections and for files that the data set opens per sample."""


def sends_by_socket() -> bool:
    """Whether processes send tensor memory to each other by descriptors, through sockets."""
    found: str = get_sharing_strategy()  # type: ignore[no-untyped-call]
    return found == "file_descriptor"


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system allows, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Sending:
    """Checks, in a worker, whether an answer can be sent; otherwise replaces it by an error.

    If earlier answers hold the missing descriptors, it waits until they are received: the receiver
    takes them first, and its wait has a timeout.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        """Number of files that this process has open while no answer waits to be sent."""
        self._before = 0
        """Number of tensors in the previous answer, which may not have been sent yet."""

    def __call__(self, answer: Answer) -> Answer:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = _open_files()
        if self._first is None:
            self._first = used
        # Skip the count, which takes time: no batch has so many tensors.
        if not sends_by_socket() or most == resource.RLIM_INFINITY or most - used > _PLENTY:
            return answer
        before, self._before = self._before, count_tensors(answer.payloads)
        needed = _EACH * self._before + _SPARE
        if used + needed + _EACH * before <= most:
            return answer
        if self._first + needed > most:
            return self._refused(answer, needed, most)
        time.sleep(_PAUSE_S)  # until the previous answer is being sent, and is counted
        while _open_files() + needed > most:
            time.sleep(_PAUSE_S)
        return answer

    def _refused(self, answer: Answer, needed: int, most: int) -> Answer:
        text = (
            f"a worker process needs {needed} more open files, but its limit is {most} and it has "
            f"{self._first} from the start: each of the {self._before} tensors of a batch takes "
            f"{_EACH} until it is used. Raise the limit (ulimit -n), use fewer and larger tensors "
            f"in a batch, or use workers=0"
        )
        request = answer.request
        bad = BadSample(
            request.stop, request.epoch, "OSError", text, "", "sending the batch up to sample"
        )
        return answer._replace(payloads=bad)


class _Counting(ForkingPickler):
    """Counts the tensors in a pickled object, with the pickler of a worker's queue."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors = 0

    def reducer_override(self, value: Any) -> Any:
        """Count a tensor instead of pickling it, which would share its memory."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        self.tensors += 1
        return str, ()


def count_tensors(value: object) -> int:
    """Count the tensors in a value, however nested.

    >>> count_tensors({"images": torch.zeros(2), "boxes": [torch.zeros(1), torch.zeros(1)]})
    3
    """
    counting = _Counting()
    counting.dump(value)
    return counting.tensors


def _open_files() -> int:
    """Return a lower bound of the open files: a new descriptor gets the lowest free number."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return most
    os.close(descriptor)
    return descriptor
