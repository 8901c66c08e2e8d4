"""Takes over PyTorch's own loaders: the settings of a DataLoader, and the order of a sampler.

Note: what becomes of a DataLoader's settings
---------------------------------------------
Honored: ``dataset``, ``batch_size`` (over all devices), ``shuffle``, ``sampler``,
``batch_sampler``, ``collate_fn``, ``drop_last``, ``num_workers``, ``worker_init_fn``,
``prefetch_factor``, ``multiprocessing_context``.

Left alone, as none of them changes what a model is given: ``pin_memory`` and ``pin_memory_device``
(memory is pinned where the devices are GPUs), ``persistent_workers`` (workers are started for each
pass), ``timeout`` (the Trainer's ``timeout_s`` holds), ``in_order`` (batches always come in order)
and, with ``shuffle``, ``generator`` (the order follows from the Trainer's seed).

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from onefold.core.randomness import (
    GeneratorStates,
    OwnGenerators,
    kept_generators,
    loader_seed,
    seed_generators,
)
from onefold.data_order.indexed import Items
from onefold.data_order.kept_state import generators_in
from onefold.data_order.order import Order, Workers
from onefold.data_order.reader import is_stream, one_thread, take_items

__all__ = [
    "WHOLE_MOST",
    "PartialOrder",
    "arguments_of",
    "changes_with_epoch",
    "check_sampler",
    "draw_batches",
    "draw_samples",
    "of_batches",
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
_MOST_NESTED = 20
_STATEFUL = "StatefulDataLoader"
"""torchdata's, which is made like PyTorch's own; known by its name, as few have torchdata."""


def arguments_of(loader: DataLoader[Any], given: Sequence[str], in_order: bool) -> dict[str, Any]:
    """Read the arguments of `onefold.data_order.loader.Loader` from a DataLoader.

    Args:
        loader: PyTorch's.
        given: names of arguments that were given in addition.
        in_order: visit samples in the order of the data set if the DataLoader would shuffle.

    Raises:
        TypeError: there are such arguments, or the DataLoader reads in a way of its own.
    """
    if given:
        raise TypeError(
            f"a DataLoader was given together with {', '.join(given)}: expected it alone, as "
            f"it has settings of its own; or give its data set, with all settings here"
        )
    _check_class(loader)
    dataset: Any = loader.dataset
    stream = is_stream(dataset)
    workers = Workers(
        # A stream is read by one process, whatever number would share it in PyTorch.
        number=min(loader.num_workers, 1) if stream else loader.num_workers,
        init=loader.worker_init_fn,
        prefetch=loader.prefetch_factor if loader.num_workers and not stream else None,
        context=loader.multiprocessing_context,
    )
    collate: Any = loader.collate_fn
    same: dict[str, Any] = {"dataset": dataset, "workers": workers}
    if loader.batch_size is None and loader.batch_sampler is None:
        if stream:
            raise TypeError(
                f"the DataLoader has batch_size=None, and its {type(dataset).__name__} is a stream "
                f"of whole batches: expected one of samples, with the batch size over all devices "
                f"in the DataLoader; or give each batch to trainer.step itself, or make them in a "
                f"function for trainer.batches"
            )
        if _is(loader.sampler, BatchSampler):
            raise TypeError(
                f"the DataLoader has batch_size=None and a BatchSampler as its sampler, so that "
                f"{type(dataset).__name__} gets the numbers of a whole batch at once: expected "
                f"DataLoader(..., batch_sampler=...), which reads sample by sample; or make whole "
                f"batches in a function for trainer.batches"
            )
        order = _order_of(loader.sampler, dataset, in_order)
        items = Items(dataset, **order)
        return {**same, "dataset": items, "collate": collate, "batch_size": None}
    same["collate"] = None if collate is default_collate else collate
    if stream:
        drop_last = loader.drop_last and not in_order
        return {**same, "batch_size": loader.batch_size, "drop_last": drop_last}
    if _is(loader.batch_sampler, BatchSampler):
        # Also where a script has made it itself: PyTorch then says nothing of its size.
        batches: Any = loader.batch_sampler
        order = _order_of(batches.sampler, dataset, in_order)
        # Each sample counts in an evaluation, and has a row in a prediction.
        drop_last = batches.drop_last and not in_order
        return {**same, "batch_size": batches.batch_size, "drop_last": drop_last, **order}
    return {**same, "batch_size": None, "batch_sampler": loader.batch_sampler}


def of_batches(loader: object) -> TypeError:
    """The error for webdataset's loader, which reads batches by a DataLoader inside of it."""
    return TypeError(
        f"{type(loader).__name__} makes batches in its own way: expected the data set that it was "
        f"given, without .batched(), and the batch size over all devices: "
        f"trainer.loader(webdataset.WebDataset(...), batch_size=64, workers=1)"
    )


def _check_class(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    if kind is DataLoader or (kind.__name__ == _STATEFUL and _is_torchdata(kind)):
        return
    # First, as its message says more: what Accelerate or Lightning prepared deals samples out.
    for name in ("sampler", "batch_sampler"):
        if getattr(loader, name, None) is not None and not is_stream(loader.dataset):
            check_sampler(getattr(loader, name), name)
    # The second is private: where a PyTorch has no such method, neither has the class.
    ways = ("__iter__", "_get_iterator")
    own = any(getattr(kind, way, None) != getattr(DataLoader, way, None) for way in ways)
    if own or kind.__module__.startswith("accelerate."):
        raise TypeError(
            f"{kind.__name__} reads its data in its own way, which onefold would not follow: "
            f"expected a plain torch.utils.data.DataLoader, such as the one that Accelerate or "
            f"Lightning was given; or give the data set, with batch_size and collate_fn here"
        )


def _order_of(sampler: Any, dataset: Any, in_order: bool) -> dict[str, Any]:
    """Recognize PyTorch's two usual orders; any other sampler is the script's own."""
    usual = _is(sampler, RandomSampler) or _is(sampler, SequentialSampler)
    # The sampler of a part of the data set is not the usual order of all of it.
    if usual and len(sampler.data_source) == len(sampler) == len(dataset):
        if _is(sampler, SequentialSampler):
            return {}
        if not sampler.replacement:
            return {"shuffle": not in_order}
    return {"sampler": sampler}


def _is(sampler: object, kind: type) -> bool:
    """Whether a sampler is PyTorch's own of this kind, or what torchdata puts in its place."""
    same = type(sampler).__name__ == kind.__name__ and _is_torchdata(type(sampler))
    return type(sampler) is kind or same


def _is_torchdata(kind: type) -> bool:
    return kind.__module__.startswith("torchdata.")


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
    """Return a sampler and those that it holds, each once, the outer ones first."""
    found: list[object] = []
    waiting = [sampler]
    while waiting and len(found) < _MOST_NESTED:
        each = waiting.pop(0)
        if any(each is known for known in found):
            continue
        found.append(each)
        for name, value in getattr(each, "__dict__", {}).items():
            if isinstance(value, Sampler) or (name in _INNER and value is not None):
                waiting.append(value)
    return found


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
        self._generators = OwnGenerators(generators_in(sampler))
        self._seed = loader_seed("sampler", seed, epoch, loader=loader)
        # One thread: the bits of what multinomial adds up may depend on how many there are.
        with kept_generators(), one_thread(), self._generators.kept():
            self._generators.seed(self._seed, "held by a sampler")
            for each in samplers_within(sampler):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
            # Now, as some samplers only know it once they know the epoch.
            self.length = _length(sampler, name)
            seed_generators(self._seed)
            self._states = GeneratorStates(), self._generators.states()
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
        with kept_generators(), one_thread(), self._generators.kept():
            own, held = self._states
            own.restore()
            self._generators.put_back(held)
            self._items = iter(self._sampler) if self._items is None else self._items
            found = list(take_items(self._items, most))
            self._states = GeneratorStates(), self._generators.states()
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
