"""Converts PyTorch's loaders: the settings of a DataLoader, and the order of a sampler.

Note: the settings of a DataLoader
----------------------------------
Used: ``dataset``, ``batch_size`` (as the global batch size), ``shuffle``, ``sampler``,
``batch_sampler``, ``collate_fn``, ``drop_last``, ``num_workers``, ``worker_init_fn``,
``prefetch_factor``, ``multiprocessing_context``.

Ignored, because they do not change the batches: ``pin_memory`` and ``pin_memory_device`` (memory is
pinned if the devices are GPUs), ``persistent_workers`` (workers are started for each pass),
``timeout`` (``timeout_s`` of Trainer applies), ``in_order`` (batches always come in order) and,
with ``shuffle``, ``generator`` (the order follows from Trainer's seed).

Note: how a sampler's order is made repeatable
----------------------------------------------
A sampler may draw from PyTorch's, Python's and NumPy's generators, or from its own. All of them are
seeded from the run's seed and the numbers of the pass and the loader before the order is drawn, and
are restored afterwards. The whole order is drawn at once, so that the script's draws during the
pass cannot interleave, and a resumed run draws the same order and continues at its position. State
that a sampler keeps from earlier passes is invisible here. Devices therefore compare the digest of
each order, and a resumed run compares it with the saved one.

Note: samplers of ten billion samples
-------------------------------------
`PartialOrder` draws an order longer than `WHOLE_MOST` in parts, when its batches are requested. No
generator advances between two parts, so the samples are the same as in an order that is drawn at
once. A resumed run draws from the beginning again, without keeping the used part. The digest covers
only the first part.
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
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from onefold.core.randomness import (
    GeneratorStates,
    OwnGenerators,
    kept_generators,
    loader_seed,
    seed_generators,
)
from onefold.data_order.indexed import Items, short_digest
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
    "subset_digest",
]

_log = logging.getLogger("onefold")

WHOLE_MOST = 1 << 24
"""Longest order that is drawn at once: 16.8 million samples, which briefly take 0.6 GB."""
_PART = 1 << 17
"""Minimum number of samples per part of a longer order."""
_PART_BATCHES = 1024
"""Minimum number of batches per part: more than workers prefetch, so that two parts suffice."""

_INNER = ("sampler", "batch_sampler", "base_sampler")
"""Attributes in which samplers usually hold another sampler."""
_MOST_NESTED = 20
_STATEFUL = "StatefulDataLoader"
"""torchdata's class, which is made like PyTorch's; compared by name, as few install torchdata."""


def arguments_of(loader: DataLoader[Any], given: Sequence[str], in_order: bool) -> dict[str, Any]:
    """Convert a DataLoader to arguments of `onefold.data_order.loader.Loader`.

    Args:
        loader: PyTorch's loader.
        given: names of additional arguments.
        in_order: visit samples in the order of the data set, even if the DataLoader would shuffle.

    Raises:
        TypeError: there are additional arguments, or the DataLoader's class reads differently.
    """
    if given:
        raise TypeError(
            f"a DataLoader was passed together with {', '.join(given)}, but has its own settings. "
            f"Pass it alone, or pass its data set with all settings here"
        )
    _check_class(loader)
    dataset: Any = loader.dataset
    stream = is_stream(dataset)
    workers = Workers(
        # One process reads a stream, even if several would share it in PyTorch.
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
                f"of whole batches. Use a stream of samples, with the global batch size in the "
                f"DataLoader; or pass each batch to trainer.step, or create batches in a function "
                f"for trainer.batches"
            )
        if _is(loader.sampler, BatchSampler):
            raise TypeError(
                f"the DataLoader has batch_size=None and a BatchSampler as its sampler, so "
                f"{type(dataset).__name__} gets the indices of a whole batch at once. Use "
                f"DataLoader(..., batch_sampler=...), which reads single samples, or create whole "
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
        # This includes a BatchSampler of the script, whose size PyTorch's loader does not show.
        batches: Any = loader.batch_sampler
        order = _order_of(batches.sampler, dataset, in_order)
        # An evaluation or prediction must include every sample.
        drop_last = batches.drop_last and not in_order
        return {**same, "batch_size": batches.batch_size, "drop_last": drop_last, **order}
    return {**same, "batch_size": None, "batch_sampler": loader.batch_sampler}


def of_batches(loader: object) -> TypeError:
    """Return the error for webdataset's loader, which wraps a DataLoader of batches."""
    return TypeError(
        f"{type(loader).__name__} makes batches in its own way. Pass its data set, without "
        f".batched(), and the global batch size: "
        f"trainer.loader(webdataset.WebDataset(...), batch_size=64, workers=1)"
    )


def _check_class(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    if kind is DataLoader or (kind.__name__ == _STATEFUL and _is_torchdata(kind)):
        return
    # Check samplers first, for a better message: Accelerate's and Lightning's split the samples.
    for name in ("sampler", "batch_sampler"):
        if getattr(loader, name, None) is not None and not is_stream(loader.dataset):
            check_sampler(getattr(loader, name), name)
    # `_get_iterator` is private: if PyTorch removes it, both classes lack it.
    ways = ("__iter__", "_get_iterator")
    own = any(getattr(kind, way, None) != getattr(DataLoader, way, None) for way in ways)
    if own or kind.__module__.startswith("accelerate."):
        raise TypeError(
            f"{kind.__name__} reads its data in its own way, which onefold cannot reproduce. Pass "
            f"a plain torch.utils.data.DataLoader, such as the one passed to Accelerate or "
            f"Lightning; or pass the data set, with batch_size and collate_fn here"
        )


def subset_digest(dataset: object) -> str:
    """Return a digest of the indices of all subsets in a data set; empty if it has none."""
    if isinstance(dataset, ConcatDataset):
        own, inner = "", list(map(subset_digest, dataset.datasets))
    elif isinstance(dataset, Subset):
        places = np.asarray(dataset.indices)
        # Indices may be other objects than integers; these are not digested.
        known = places.dtype.kind in "iu"
        own = short_digest(places.astype(np.int64).tobytes()) if known else ""
        inner = [subset_digest(dataset.dataset)]
    else:
        return ""
    return short_digest(" ".join([own, *inner]).encode()) if any(inner) else own


def _order_of(sampler: Any, dataset: Any, in_order: bool) -> dict[str, Any]:
    """Detect PyTorch's two usual orders; any other sampler is the script's own."""
    usual = _is(sampler, RandomSampler) or _is(sampler, SequentialSampler)
    # Compare lengths: a sampler of a part of the data set does not have the usual order.
    if usual and len(sampler.data_source) == len(sampler) == len(dataset):
        if _is(sampler, SequentialSampler):
            return {}
        if not sampler.replacement:
            return {"shuffle": not in_order}
    return {"sampler": sampler}


def _is(sampler: object, kind: type) -> bool:
    """Whether a sampler is PyTorch's own of this class, or torchdata's replacement."""
    same = type(sampler).__name__ == kind.__name__ and _is_torchdata(type(sampler))
    return type(sampler) is kind or same


def _is_torchdata(kind: type) -> bool:
    return kind.__module__.startswith("torchdata.")


def check_sampler(sampler: object, name: str) -> None:
    """Refuse a sampler with endless passes, or one for a single device of several.

    Args:
        sampler: the user's sampler.
        name: name of the argument, for errors.

    Raises:
        TypeError: the sampler is not iterable, has no length, or splits samples across devices.
        ValueError: the sampler's length is 0 in every pass.
    """
    if not hasattr(sampler, "__iter__"):
        raise TypeError(f"expected {name} to be iterable, but got {type(sampler).__name__}")
    for each in samplers_within(sampler):
        kind = type(each)
        home = kind.__module__.partition(".")[0]
        deals = hasattr(each, "num_replicas") and hasattr(each, "rank")
        if deals or home in ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"):
            raise TypeError(
                f"{name} contains a {kind.__name__}, which splits samples across devices; onefold "
                f"does that itself. Pass the underlying sampler, or shuffle=True, and the global "
                f"batch size. Pass a DataLoader before Accelerate or Lightning prepares it"
            )
    # A sampler with set_epoch may have samples in another epoch.
    if not _length(sampler, name) and not changes_with_epoch(sampler):
        raise ValueError(
            f"the {name} {type(sampler).__name__} has length 0, so nothing would be trained. Its "
            f"data set may be empty, or smaller than one batch with drop_last"
        )


def changes_with_epoch(sampler: object) -> bool:
    """Whether a sampler, or one that it holds, has ``set_epoch``, so that its length may change."""
    return any(callable(getattr(each, "set_epoch", None)) for each in samplers_within(sampler))


def samplers_within(sampler: object) -> list[object]:
    """Return a sampler and the samplers that it holds, each once, the outer ones first."""
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
        sampler: yields sample indices; its length is the length of the pass.
        batch_size: number of samples in a batch.
        seed: the run's seed.
        epoch: number of the pass.
        loader: number of the loader.

    Raises:
        TypeError: the sampler yields something other than integers.
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
    """Draw the order of one pass from a batch sampler, which yields global batches.

    Args:
        batch_sampler: yields the sample indices of whole batches.
        seed: the run's seed.
        epoch: number of the pass.
        loader: number of the loader.

    Raises:
        TypeError: the batch sampler yields something other than lists of integers.
        ValueError: a batch is empty, or there are more than `WHOLE_MOST` batches.
    """
    drawing = _Drawing(batch_sampler, "batch_sampler", seed=seed, epoch=epoch, loader=loader)
    if drawing.length > WHOLE_MOST:
        raise ValueError(
            f"the batch_sampler {type(batch_sampler).__name__} has {drawing.length:,} batches in a "
            f"pass, all of which would be drawn before the first; the maximum is {WHOLE_MOST:,}. "
            f"Use shorter passes, and more of them; or pass its sampler as sampler=, which is "
            f"drawn in parts, with batch_size="
        )
    drawn = drawing.all()
    batches = [_whole_numbers(_listed(batch), "batch_sampler") for batch in drawn]
    for number, batch in enumerate(batches):
        if not len(batch):
            raise ValueError(f"batch {number} of batch_sampler is empty: yield at least one sample")
    indices = torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64)
    ends = list(accumulate(len(batch) for batch in batches))
    return Order(indices, 1, ends, digest=_digest(indices, ends), repeats=True)


class _Drawing:
    """One pass of a sampler, drawn in steps; no generator advances between them.

    Args:
        sampler: the user's sampler.
        name: name of the argument, for errors.
        seed: the run's seed.
        epoch: number of the pass.
        loader: number of the loader.
    """

    def __init__(self, sampler: Any, name: str, *, seed: int, epoch: int, loader: int) -> None:
        self.name = name
        self._sampler = sampler
        self._generators = OwnGenerators(generators_in(sampler))
        self._seed = loader_seed("sampler", seed, epoch, loader=loader)
        # Use one thread: the bits of sums in multinomial may depend on the number of threads.
        with kept_generators(), one_thread(), self._generators.kept():
            self._generators.seed(self._seed, "held by a sampler")
            for each in samplers_within(sampler):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
            # Read the length here: some samplers know it only after set_epoch.
            self.length = _length(sampler, name)
            seed_generators(self._seed)
            self._states = GeneratorStates(), self._generators.states()
        self._items: Iterator[Any] | None = None

    def all(self) -> list[Any]:
        """Draw the whole pass."""
        # Draw one more than the length, not all: the sampler may be endless.
        found = self.next(self.length + 1)
        if len(found) > self.length:
            _log.warning(
                "the %s yields more samples than its length, %d: a pass ends there, and the rest "
                "is dropped",
                self.name,
                self.length,
            )
        return found[: self.length]

    def next(self, most: int) -> list[Any]:
        """Draw the next items, at most ``most``."""
        with kept_generators(), one_thread(), self._generators.kept():
            own, held = self._states
            own.restore()
            self._generators.put_back(held)
            self._items = iter(self._sampler) if self._items is None else self._items
            found = list(take_items(self._items, most))
            self._states = GeneratorStates(), self._generators.states()
        return found


class PartialOrder:
    """The sample indices of a pass, drawn in parts; the last two parts are kept.

    Args:
        drawing: draws the pass, from its beginning.
        part: number of indices per part.
    """

    def __init__(self, drawing: _Drawing, part: int) -> None:
        self._drawing = drawing
        self.part = part
        self._kept: dict[int, torch.Tensor] = {}
        self._next = 0

    def __len__(self) -> int:
        return self._drawing.length

    def __getitem__(self, places: slice) -> torch.Tensor:  # (n,) int64
        """Return the indices at some positions, which start at most one part before the last
        ones."""
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
                    f"samples, but its length is {len(self):,}"
                )
            # Draw skipped parts, which a resumed run has used already, without storing them.
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
            f"the {name} {type(sampler).__name__} has no length, which determines the end of a "
            f"pass. Give it a __len__; for endless batches, pass a function and the number of "
            f"batches per epoch to trainer.batches"
        ) from error


def _listed(batch: Any) -> list[Any]:
    if not hasattr(batch, "__iter__") or isinstance(batch, str):
        raise TypeError(
            f"expected batch_sampler to yield a list of sample indices for each batch, but got "
            f"{batch!r}. Pass an object that yields single indices as sampler"
        )
    return list(batch)


def _whole_numbers(indices: list[Any], name: str) -> torch.Tensor:  # (n,) int64
    for index in indices:
        # Accept any integer type, including NumPy's and PyTorch's.
        try:
            operator.index(index)
        except TypeError:
            raise TypeError(
                f"expected {name} to yield integer sample indices, but got {index!r}: onefold "
                f"divides and seeds samples by index. Give the data set integer indices"
            ) from None
    return torch.tensor([operator.index(index) for index in indices], dtype=torch.int64)


def _digest(indices: torch.Tensor, ends: Iterable[int]) -> bytes:
    joined = hashlib.blake2b(indices.numpy().tobytes(), digest_size=16)
    joined.update(np.array([*ends], dtype=np.int64).tobytes())
    return joined.digest()
