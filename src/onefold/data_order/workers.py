"""Which batches of a pass are to be read, and whether this process or workers read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from onefold.core.late import load
from onefold.core.numbers import check_whole
from onefold.core.randomness import kept_generators
from onefold.core.shard import Shares
from onefold.data_order.order import Order
from onefold.data_order.reader import Answer, Request, one_thread

__all__ = ["Requests", "Workers", "disown"]


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
            load("data_order.worker_processes").check_temporary_path(self.number)

    def answers(
        self, reader: Dataset[Answer], requests: Requests, *, pin_memory: bool, timeout_s: float
    ) -> Iterator[Answer]:
        """Start the processes, and return the iterator over their answers, which ends them."""
        if not self.number:
            return _read_here(reader, requests)
        start = load("data_order.worker_processes").start_workers
        answers: Iterator[Answer]
        answers = start(self, reader, requests, pin_memory=pin_memory, timeout_s=timeout_s)
        return answers


def _read_here(reader: Dataset[Answer], requests: Requests) -> Iterator[Answer]:
    for request in requests:
        # The yield stays outside: generators and threads must be the caller's again by then.
        with kept_generators(), one_thread():
            answer = reader[request]
        yield answer


def disown(answers: Iterator[Answer]) -> None:
    """Let go of the workers in a forked child that leaves the pass: they still read for its parent.

    PyTorch ends them when the iterator is destroyed, whichever process destroys it.
    """
    # DataLoader's own mark for an iterator whose workers have been ended already. An iterator of
    # ours, without workers, has nothing to let go of.
    if hasattr(answers, "_shutdown"):
        answers._shutdown = True


@dataclass
class Requests:
    """The batches of a pass that are to be read in turn; starts over if shares or devices change.

    Note: shares that change while workers read ahead
    --------------------------------------------------
    A batch has the shares of the moment at which it is handed out, so that devices agree however
    far ahead each of them reads. If the shares have changed, the requests go back to the first
    batch that was not handed out, and the loader drops the answers to requests of an earlier turn.
    DataLoader draws another request for each answer that it receives, even if there was none left
    before: so ``__next__`` may continue after it has raised StopIteration.

    It does not refer to the loader: see the note on who keeps the workers alive.
    """

    epoch: int
    """Number of the pass."""
    start: int
    """The place in it of the next batch."""
    end: int
    """Where the pass ends."""
    order: Order
    loader: int
    """Number of the loader."""
    shares: Shares
    """The shares of the next batch."""
    own: Sequence[int]
    """Numbers of this process's devices."""
    digest: int
    """How many of the requests ask for a digest: 0, 1 (the first), or 2 for all of them."""
    turn: int = 0
    """How often shares or devices have changed during this pass."""

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> Request:
        if self.start >= self.end:
            raise StopIteration
        start = self.start
        self.start = stop = min(self.order.stop(start), self.end)
        cut = self.order.cut(start, stop, self.shares, self.own)
        digest = self.order.digest if self.digest else None
        # The data set is compared once in a pass; what is only known batch by batch, in each.
        self.digest = 2 if self.digest == 2 else 0
        numbers = self.loader, self.epoch, stop - start, stop
        return Request(*numbers, self.shares, self.own, self.turn, digest, *cut)

    def follow(self, shares: Shares, own: Sequence[int], start: int) -> None:
        """Go back to place ``start`` of the pass if the shares or this process's devices differ."""
        # The identity first: it settles nearly every step without comparing the counts.
        if (shares is not self.shares or own is not self.own) and (
            (shares, own) != (self.shares, self.own)
        ):
            self.turn += 1
            self.shares, self.own, self.start = shares, own, start
