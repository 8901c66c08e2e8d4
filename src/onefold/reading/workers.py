"""The worker processes that read ahead for a pass."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from onefold.core.numbers import check_whole
from onefold.reading.reader import Answer
from onefold.reading.requests import Requests
from onefold.reading.sending import Sending, allow_open_files, sends_by_socket
from onefold.system.interrupt import ctrl_c_as_before
from onefold.system.ownfiles import LONGEST_TEMPORARY_PATH
from onefold.system.process import die_with_parent

__all__ = ["Workers", "disown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How many processes read ahead for a loader, and how they are made."""

    number: int
    """0 to read in this process."""
    init: Callable[[int], object] | None = None
    """Called in each worker with its number, before it reads."""
    prefetch: int | None = None
    """How many batches each worker reads ahead; PyTorch's usual number if None."""
    context: Any = None
    """How processes are made, as `torch.utils.data.DataLoader` takes it; the usual way if None."""

    def __post_init__(self) -> None:
        check_whole("workers", self.number, least=0)
        if self.init is not None and not callable(self.init):
            raise TypeError(f"expected worker_init_fn to be a function, got {self.init!r}")
        if self.number:
            _check_temporary_path(self.number)

    def answers(
        self, reader: Dataset[Answer], requests: Requests, *, pin_memory: bool, timeout_s: float
    ) -> Iterator[Answer]:
        """Start the processes, and return the iterator over their answers, which ends them."""
        # Of this process, which has all that they send open; the workers inherit it.
        allow_open_files()
        return iter(
            DataLoader(
                reader,
                # Requests are whole batches already.
                batch_size=None,
                sampler=requests,
                num_workers=self.number,
                # What is called with each answer before it is sent.
                collate_fn=Sending(),  # type: ignore[arg-type]  # of answers, not of lists
                worker_init_fn=_Tied(self.context, self.init),
                # Persistent workers would keep the data set as it was in the first pass.
                persistent_workers=False,
                pin_memory=pin_memory,
                timeout=timeout_s,
                prefetch_factor=self.prefetch,
                multiprocessing_context=self.context,
                # Without one, DataLoader would draw a seed from the caller's generator.
                generator=torch.Generator().manual_seed(0),
            )
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
        if context is None or isinstance(context, str):
            context = multiprocessing.get_context(context)
        self._served = context.get_start_method() == "forkserver"
        self._dtype = torch.get_default_dtype()
        self._init = init

    def __call__(self, worker: int) -> None:
        torch.set_default_dtype(self._dtype)
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


def disown(answers: Iterator[Answer]) -> None:
    """Let go of the workers in a forked child that leaves the pass: they still read for its parent.

    PyTorch ends them when the iterator is destroyed, whichever process destroys it.
    """
    # DataLoader's own mark for an iterator whose workers have been ended already. An iterator of
    # ours, without workers, has nothing to let go of.
    if hasattr(answers, "_shutdown"):
        answers._shutdown = True


def _check_temporary_path(workers: int) -> None:
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
