"""The order of a pass, who asks for its batches, and who reads them.

`Order` cuts the batches of a pass. `draw_samples` and `draw_batches` draw one from a sampler, alike
on every device. `Requests` asks for the batches in turn, and `Workers` says which processes answer.

Note: what makes a sampler's order repeat
-----------------------------------------
A sampler may draw from PyTorch's, Python's and NumPy's generators, or from one that it holds. All
of them are seeded from the run's seed, the number of the pass and that of the loader before the
order is drawn, and are put back afterwards. The whole order is drawn at once, so that the script's
own draws during the pass cannot get between, and so that a resumed run draws the same order and
goes on at the place where it was. What a sampler keeps of earlier passes cannot be seen from here:
that is why devices compare the digest of each order, and a resumed run that of the pass it is in.

Note: samplers of ten billion samples
-------------------------------------
An order longer than `WHOLE_MOST` is drawn in parts, when its batches are asked for, by
`PartialOrder`. All generators stand still between two parts, so the samples are those of an order
that is drawn at once. A resumed run draws from the beginning again, and keeps nothing of what is
used. The digest is that of the first part.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from onefold.core.late import load
from onefold.core.numbers import check_whole
from onefold.core.randomness import GeneratorStates, kept_generators, loader_seed, seed_generators
from onefold.core.shard import Shares, cut_bounds
from onefold.data_order.item_generators import kept_apart, put_back, seed_held, states_of, within
from onefold.data_order.position import WHOLE
from onefold.data_order.reader import Answer, Request, one_thread, take_items

__all__ = [
    "Order",
    "Requests",
    "Workers",
    "changes_with_epoch",
    "check_sampler",
    "disown",
    "draw_batches",
    "draw_samples",
]

_log = logging.getLogger("onefold")

WHOLE_MOST = 1 << 24
"""The longest order that is drawn at once: 16.8 million samples, for a moment 0.6 GB of them."""
_PART = 1 << 17
"""The fewest samples of a part of a longer one."""
_PART_BATCHES = 1024
"""The fewest batches of a part: more than workers read ahead, so that two parts suffice."""

_INNER = ("sampler", "batch_sampler", "base_sampler")
"""The names under which samplers usually keep another one."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one pass; its places are counted in samples, or in whole batches."""

    indices: torch.Tensor | range | PartialOrder | None
    """The numbers of the samples, or of items, (samples,) int64; None of a stream, whose order
    nobody knows."""
    batch_size: int = 1
    """Number of samples in a batch; of no meaning if there are ``ends``."""
    ends: Sequence[int] = ()
    """Where each batch ends, for batches of any sizes."""
    digest: bytes = b""
    """What differs for different orders; empty if it follows from the seed alone."""
    repeats: bool = False
    """Whether a sample may come several times in a pass."""
    of_items: bool = False
    """Whether each number is that of a whole batch, which the reader cuts."""

    @property
    def length(self) -> int:
        """How many places the pass has; `WHOLE` if nobody knows."""
        return WHOLE if self.indices is None else len(self.indices)

    def stop(self, start: int) -> int:
        """Return where the batch ends that begins at ``start``; a stream may end before."""
        if self.ends:
            return self.ends[bisect_right(self.ends, start)]
        return min(start + self.batch_size, self.length)

    def cut(
        self, start: int, stop: int, shares: Shares, own: Sequence[int]
    ) -> tuple[dict[int, list[int]], dict[int, int], int]:
        """Cut one batch for the devices ``own``: `Request.shards`, ``starts`` and ``item``."""
        if self.indices is None:
            return {}, {}, -1
        batch = self.indices[start:stop]
        # Lists of numbers, which cost less to send to a worker than tensors, each a file
        # descriptor.
        numbers = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        if self.of_items:
            return {}, {}, numbers[0]
        bounds = cut_bounds(len(numbers), shares.shards)
        shards = {
            shard: [*numbers[slice(*bounds[shard])]]
            for device in own
            for shard in shares.read_by(device)
            if bounds[shard][0] < bounds[shard][1]
        }
        starts = {shard: start + bounds[shard][0] for shard in shards} if self.repeats else {}
        return shards, starts, -1


def check_sampler(sampler: object, name: str) -> None:
    """Refuse a sampler whose passes have no end, or that is made for one device of several.

    Args:
        sampler: the user's sampler.
        name: of the argument, for errors.

    Raises:
        TypeError: it cannot be iterated or has no length, or deals samples out to devices.
        ValueError: its length is 0 in every pass.
    """
    if not hasattr(sampler, "__iter__"):
        raise TypeError(f"expected {name} to be iterable, got {type(sampler).__name__}")
    for each in samplers_within(sampler):
        kind = type(each)
        home = kind.__module__.partition(".")[0]
        deals = hasattr(each, "num_replicas") and hasattr(each, "rank")
        if deals or home in ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"):
            raise TypeError(
                f"{name} is or holds a {kind.__name__}, which deals the samples out to devices, as "
                f"onefold does itself: give the sampler that it was made of, or shuffle=True, and "
                f"the batch size over all devices. A DataLoader of Accelerate or Lightning is to "
                f"be given as it was before prepare or setup"
            )
    # One that is told the epoch may have samples in another one.
    if not _length(sampler, name) and not changes_with_epoch(sampler):
        raise ValueError(
            f"the {name} {type(sampler).__name__} has the length 0, so nothing would be trained: "
            f"expected at least one sample or batch in a pass. Its data set may be empty, or hold "
            f"less than a batch that it drops"
        )


def changes_with_epoch(sampler: object) -> bool:
    """Whether a sampler, or one within it, is told the epoch, with which its length may change."""
    return any(callable(getattr(each, "set_epoch", None)) for each in samplers_within(sampler))


def samplers_within(sampler: object) -> list[object]:
    """Return a sampler and those that it holds, each once."""

    def inner(name: str, value: object) -> list[object]:
        is_one = isinstance(value, Sampler) or (name in _INNER and value is not None)
        return [value] if is_one else []

    return within(sampler, inner)


def draw_samples(
    sampler: Iterable[int], *, batch_size: int, seed: int, epoch: int, loader: int
) -> Order:
    """Draw the order of one pass from a sampler.

    Args:
        sampler: yields the indices of samples; its length is that of the pass.
        batch_size: number of samples in a batch.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader.

    Raises:
        TypeError: the sampler yields something other than whole numbers.
    """
    drawing = _Drawing(sampler, "sampler", seed=seed, epoch=epoch, loader=loader)
    if drawing.length > WHOLE_MOST:
        parts = PartialOrder(drawing, max(_PART, _PART_BATCHES * batch_size))
        digest = _digest(parts[: parts.part], (drawing.length,))
        return Order(parts, batch_size, digest=digest, repeats=True)
    indices = _whole_numbers(drawing.all(), "sampler")
    return Order(indices, batch_size, digest=_digest(indices, ()), repeats=True)


def draw_batches(
    batch_sampler: Iterable[Iterable[int]], *, seed: int, epoch: int, loader: int
) -> Order:
    """Draw the order of one pass from a batch sampler, whose batches are those of all devices.

    Args:
        batch_sampler: yields the indices of the samples of whole batches.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader.

    Raises:
        TypeError: the batch sampler yields something other than lists of whole numbers.
        ValueError: a batch is empty, or there are more than `WHOLE_MOST` batches.
    """
    drawing = _Drawing(batch_sampler, "batch_sampler", seed=seed, epoch=epoch, loader=loader)
    if drawing.length > WHOLE_MOST:
        raise ValueError(
            f"the batch_sampler {type(batch_sampler).__name__} has {drawing.length:,} batches in a "
            f"pass, all of which would be drawn before the first: expected at most {WHOLE_MOST:,}. "
            f"Give it a shorter length and go through it again and again, or give its sampler as "
            f"sampler=, which is drawn in parts, and batch_size="
        )
    drawn = drawing.all()
    batches = [_whole_numbers(_listed(batch), "batch_sampler") for batch in drawn]
    for number, batch in enumerate(batches):
        if not len(batch):
            raise ValueError(f"batch {number} of batch_sampler is empty: expected samples in it")
    indices = torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64)
    ends = list(accumulate(len(batch) for batch in batches))
    return Order(indices, 1, ends, digest=_digest(indices, ends), repeats=True)


class _Drawing:
    """One pass of a sampler, drawn bit by bit; the generators stand still in between.

    Args:
        sampler: the user's sampler.
        name: of the argument, for errors.
        seed: seed of the run.
        epoch: number of the pass.
        loader: number of the loader.
    """

    def __init__(self, sampler: Any, name: str, *, seed: int, epoch: int, loader: int) -> None:
        self.name = name
        self._sampler = sampler
        self._samplers = samplers_within(sampler)
        self._seed = loader_seed("sampler", seed, epoch, loader=loader)
        # One thread: the bits of what multinomial adds up may depend on how many there are.
        with kept_generators(), one_thread(), kept_apart(self._samplers):
            seed_held(self._samplers, self._seed, "held by a sampler")
            for each in self._samplers:
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
            # Now, as some samplers only know it once they know the epoch.
            self.length = _length(sampler, name)
            seed_generators(self._seed)
            self._states = GeneratorStates(), states_of(self._samplers)
        self._items: Iterator[Any] | None = None

    def all(self) -> list[Any]:
        """Draw the whole pass."""
        # One more than its length: an endless sampler must not be read to its end.
        found = self.next(self.length + 1)
        if len(found) > self.length:
            _log.warning(
                "the %s yields more than its length, %d: a pass ends there, and the rest is left "
                "out",
                self.name,
                self.length,
            )
        return found[: self.length]

    def next(self, most: int) -> list[Any]:
        """Draw the next items, at most so many."""
        with kept_generators(), one_thread(), kept_apart(self._samplers):
            own, held = self._states
            own.restore()
            put_back(held)
            self._items = iter(self._sampler) if self._items is None else self._items
            found = list(take_items(self._items, most))
            self._states = GeneratorStates(), states_of(self._samplers)
        return found


class PartialOrder:
    """The numbers of a pass's samples, of which the last two parts are kept.

    Args:
        drawing: of the pass, from its beginning.
        part: how many numbers are drawn at a time.
    """

    def __init__(self, drawing: _Drawing, part: int) -> None:
        self._drawing = drawing
        self.part = part
        self._kept: dict[int, torch.Tensor] = {}
        self._next = 0

    def __len__(self) -> int:
        return self._drawing.length

    def __getitem__(self, places: slice) -> torch.Tensor:  # (n,) int64
        """Return the numbers at some places, which lie at most one part before the last ones."""
        start, stop, _ = places.indices(len(self))
        found = []
        for number in range(start // self.part, -(-stop // self.part)):
            first = number * self.part
            found.append(self._numbers(number)[max(start - first, 0) : stop - first])
        return torch.cat(found)

    def _numbers(self, number: int) -> torch.Tensor:
        while self._next <= number:
            wanted = min(self.part, len(self) - self._next * self.part)
            drawn = self._drawing.next(wanted)
            if len(drawn) < wanted:
                raise ValueError(
                    f"the {self._drawing.name} ended after {self._next * self.part + len(drawn):,} "
                    f"samples: expected its length, {len(self):,}"
                )
            # What a resumed run leaves behind is drawn, and no more.
            if self._next >= number - 1:
                self._kept[self._next] = _whole_numbers(drawn, self._drawing.name)
            self._kept.pop(self._next - 2, None)
            self._next += 1
        return self._kept[number]


def _length(sampler: Any, name: str) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"the {name} {type(sampler).__name__} has no length: expected one, as it says where a "
            f"pass ends. Give it a __len__; for batches without end, trainer.batches takes a "
            f"function and how many batches are an epoch"
        ) from error


def _listed(batch: Any) -> list[Any]:
    if not hasattr(batch, "__iter__") or isinstance(batch, str):
        raise TypeError(
            f"expected batch_sampler to yield a list of samples for each batch, got {batch!r}: "
            f"what yields single samples is a sampler"
        )
    return list(batch)


def _whole_numbers(indices: list[Any], name: str) -> torch.Tensor:  # (n,) int64
    for index in indices:
        # Anything that stands for a whole number, also NumPy's and PyTorch's.
        try:
            operator.index(index)
        except TypeError:
            raise TypeError(
                f"expected {name} to yield the numbers of samples, got {index!r}: samples are "
                f"dealt out and seeded by number, so give the data set an index of whole numbers"
            ) from None
    return torch.tensor([operator.index(index) for index in indices], dtype=torch.int64)


def _digest(indices: torch.Tensor, ends: Iterable[int]) -> bytes:
    joined = hashlib.blake2b(indices.numpy().tobytes(), digest_size=16)
    joined.update(np.array([*ends], dtype=np.int64).tobytes())
    return joined.digest()


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
    compares: bool = True
    """Whether the next request asks for the digest of a data set, as the first of a pass does."""
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
        digest = self.order.digest if self.compares else None
        self.compares = False
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
