"""Sources of a loader's batches: a data set with an index, and whole batches.

`Indexed` is a data set with an index. `WholeBatches` has whole batches, by the script's own `Rule`
or as the `Items` of a data set: every process makes the whole batch and keeps its own shards of it,
as `trainer.step` does with a batch of the script's own; so what it costs to make a batch is not
divided between devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from onefold.core.batch import DataPass, cut_batch
from onefold.core.numbers import check_whole
from onefold.core.randomness import (
    MOST_SHUFFLED,
    loader_seed,
    order_by_length,
    sample_order,
    seed_generators,
)
from onefold.data_order.order import BatchOrder, Counting, Order, SampleOrder
from onefold.data_order.position import LoaderSize, LoaderTrack
from onefold.data_order.reader import Answer, Collate, Reader, Request, SizedDataset, bad_sample
from onefold.data_order.samplers import (
    changes_with_epoch,
    check_sampler,
    draw_batches,
    draw_samples,
)

__all__ = ["BatchRule", "Indexed", "Items", "Rule", "Source", "WholeBatches"]


class Source(Protocol):
    """Where batches come from; the loader calls `order` and then `reader` in each pass."""

    dataset: Any
    """What the user gave."""
    size: LoaderSize
    """Everything that determines the batches, apart from the seed."""
    digests: int
    """How many batches of a pass are compared between devices: 1 for the first, 2 for all."""

    def batches(self) -> int:
        """Return the number of batches in a pass."""

    def order(self, this: DataPass, loader: int) -> Order:
        """Find the order of a pass."""

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Make what answers the requests of a pass, in this process or in a worker."""


class Indexed:
    """A data set with an index, whose samples are visited in an order that is known beforehand.

    Args:
        dataset: an object with a length and an item for each index.
        collate: makes a shard's payload; PyTorch's default if None.
        seed: seed of the run.
        batch_size: number of samples in a whole batch; None with a ``batch_sampler``.
        shuffle: visit the samples in a different order in each pass.
        lengths: of the samples, to have similar ones in one batch.
        drop_last: leave out the last batch if it is short.
        sampler: the user's own order of the samples.
        batch_sampler: the user's own batches, those of all devices together.

    Raises:
        TypeError, ValueError: the arguments do not fit together, no pass would have a batch, or
            there are too many samples to shuffle.
    """

    digests = 1

    def __init__(
        self,
        dataset: SizedDataset,
        collate: Collate | None,
        seed: int,
        *,
        batch_size: int | None,
        shuffle: bool = False,
        lengths: Sequence[int] | None = None,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
    ) -> None:
        if len(dataset) == 0:
            raise ValueError("the data set is empty: expected at least one sample")
        alone = {"shuffle": shuffle, "lengths": lengths is not None}
        if batch_sampler is not None:
            sizes = {"batch_size": batch_size is not None, "drop_last": drop_last}
            check_alone("batch_sampler", {**alone, **sizes, "sampler": sampler is not None})
            check_sampler(batch_sampler, "batch_sampler")
        else:
            check_whole("batch_size", batch_size, least=1)
        if sampler is not None:
            check_alone("sampler", alone)
            check_sampler(sampler, "sampler")
        if shuffle:
            check_shuffled(len(dataset))
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._sampler, self._batch_sampler = sampler, batch_sampler
        by_length = None if lengths is None else _checked_lengths(lengths, len(dataset), shuffle)
        self._by_length = by_length
        self.size = LoaderSize(
            samples=len(dataset),
            batch_size=batch_size or 1,
            drop_last=drop_last,
            shuffle=shuffle,
            lengths="" if by_length is None else _digest(by_length),
            subset=_subset(dataset),
            kind=_kind(sampler, batch_sampler),
        )
        if drop_last and not self.batches() and not changes_with_epoch(sampler):
            one: Any = sampler
            raise ValueError(
                f"drop_last=True leaves out every batch: expected at least batch_size={batch_size} "
                f"samples in a pass, got {len(dataset if one is None else one)}, so that nothing "
                f"would be trained. Make batch_size smaller, or leave out drop_last=True"
            )

    def batches(self) -> int:
        """Return the number of batches in a pass."""
        own: Any = self._batch_sampler
        if own is not None:
            return len(own)
        sampler: Any = self._sampler
        return self.size.batches(self.size.samples if sampler is None else len(sampler))

    def order(self, this: DataPass, loader: int) -> Order:
        """Find the order of a pass."""
        # A function of (seed, epoch, loader) alone: a resumed run computes it again.
        size, seed, epoch = self.size, self._seed, this.number
        batch_size = size.batch_size
        if self._batch_sampler is not None:
            return draw_batches(self._batch_sampler, seed=seed, epoch=epoch, loader=loader)
        if self._sampler is not None:
            return draw_samples(
                self._sampler, batch_size=batch_size, seed=seed, epoch=epoch, loader=loader
            )
        if not size.shuffle:
            return SampleOrder(Counting(size.samples), batch_size)
        if self._by_length is None:
            order = sample_order(size.samples, seed=seed, epoch=epoch, loader=loader)
        else:
            order = order_by_length(
                self._by_length, batch_size=batch_size, seed=seed, epoch=epoch, loader=loader
            )
        return SampleOrder(order, batch_size)

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Make what answers the requests of a pass."""
        return Reader(self.dataset, self._collate, self._seed)


def check_alone(name: str, others: dict[str, bool]) -> None:
    """Refuse arguments that another one leaves nothing to decide.

    Args:
        name: the argument that decides.
        others: for each other argument whether it was given.

    Raises:
        ValueError: one of them was given.
    """
    given = [other for other, is_given in others.items() if is_given]
    if given:
        raise ValueError(
            f"{name} decides itself what {' and '.join(given)} would: expected {name} alone"
        )


def check_shuffled(samples: int) -> None:
    """Refuse to shuffle more than can be.

    Raises:
        ValueError: there are too many.
    """
    if samples > MOST_SHUFFLED:
        raise ValueError(
            f"the order of {samples:,} shuffled samples would take {samples * 8 / 1e9:.0f} GB in "
            f"each process: expected at most {MOST_SHUFFLED:,}. Draw them in parts, each time from "
            f"all of them: sampler=RandomSampler(dataset, replacement=True, num_samples=...) in "
            f"the place of shuffle=True"
        )


def _kind(sampler: object, batch_sampler: object) -> str:
    if sampler is None and batch_sampler is None:
        return ""
    kind = "samples by" if batch_sampler is None else "batches by"
    return f"{kind} {type(sampler if batch_sampler is None else batch_sampler).__name__}"


def _checked_lengths(lengths: Sequence[int], samples: int, shuffle: bool) -> torch.Tensor:
    if not shuffle:
        raise ValueError("batches by length are made of shuffled samples: expected shuffle=True")
    if len(lengths) != samples:
        raise ValueError(
            f"expected one length for each of the {samples} samples, got {len(lengths)} lengths"
        )
    return torch.as_tensor(lengths).to(torch.int64)


def _digest(lengths: torch.Tensor) -> str:
    return hashlib.blake2b(lengths.numpy().tobytes(), digest_size=8).hexdigest()


def _subset(dataset: object) -> str:
    places = np.asarray(dataset.indices) if isinstance(dataset, Subset) else np.array([""])
    # Samples may have other names than numbers.
    return _digest(torch.from_numpy(places.astype(np.int64))) if places.dtype.kind in "iu" else ""


BatchRule = Callable[[int, torch.Generator], object]
"""Makes a whole batch from its number in the run and a generator on the host."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Batches by a rule of the script's own, for `Loader` in the place of a data set."""

    function: BatchRule
    per_epoch: int
    """How many batches a pass has."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"expected a function of step and generator that returns a whole batch, got "
                f"{self.function!r}"
            )
        check_whole("per_epoch", self.per_epoch, least=1)

    @property
    def dataset(self) -> Any:
        """Where batches come from."""
        return self.function

    @property
    def size(self) -> LoaderSize:
        """What determines the batches."""
        return _size_of(self.per_epoch, "batches by a rule")

    def batches(self) -> int:
        """Return the number of batches in a pass."""
        return self.per_epoch

    def order(self, seed: int, epoch: int, loader: int) -> BatchOrder:
        """Find the order of a pass."""
        # Numbered on from pass to pass: the rule is given the number of the batch in the run.
        return BatchOrder(Counting(self.per_epoch, epoch * self.per_epoch))

    def read(self, request: Request, seed: int) -> object:
        """Make a whole batch."""
        # Both: a rule may draw from its own generator or, as many do, from the global ones.
        drawn = loader_seed("batch", seed, request.item, loader=request.loader)
        seed_generators(drawn)
        return self.function(request.item, torch.Generator().manual_seed(drawn))


@dataclass(frozen=True, slots=True)
class Items:
    """A data set whose items are whole batches, for `Loader` in the place of a data set."""

    dataset: SizedDataset
    shuffle: bool = False
    sampler: Iterable[int] | None = None
    """The script's own order of the items; None for that of their numbers, or shuffled."""

    def __post_init__(self) -> None:
        if len(self.dataset) == 0:
            raise ValueError("the data set is empty: expected at least one batch")
        if self.sampler is not None:
            check_sampler(self.sampler, "sampler")
        if self.shuffle:
            check_shuffled(len(self.dataset))

    @property
    def size(self) -> LoaderSize:
        """What determines the batches."""
        by = "" if self.sampler is None else f" by {type(self.sampler).__name__}"
        return _size_of(len(self.dataset), f"batches as items{by}", shuffle=self.shuffle)

    def batches(self) -> int:
        """Return the number of batches in a pass."""
        sampler: Any = self.sampler
        return len(self.dataset if sampler is None else sampler)

    def order(self, seed: int, epoch: int, loader: int) -> BatchOrder:
        """Find the order of a pass."""
        if self.sampler is not None:
            drawn = draw_samples(self.sampler, batch_size=1, seed=seed, epoch=epoch, loader=loader)
            return BatchOrder(drawn.indices, drawn.digest)
        length = len(self.dataset)
        if not self.shuffle:
            return BatchOrder(Counting(length))
        return BatchOrder(sample_order(length, seed=seed, epoch=epoch, loader=loader))

    def read(self, request: Request, seed: int) -> object:
        """Read a whole batch."""
        # By the place in the pass, for a sampler may give an item twice.
        numbers = seed, request.epoch, request.stop
        seed_generators(loader_seed("item", *numbers, loader=request.loader))
        return self.dataset[request.item]


def _size_of(length: int, kind: str, *, shuffle: bool = False) -> LoaderSize:
    return LoaderSize(samples=length, batch_size=1, drop_last=False, shuffle=shuffle, kind=kind)


class WholeBatches(Dataset[Answer]):
    """Whole batches, of which each process keeps its shards; places of a pass count batches.

    It answers requests itself.

    Args:
        given: where they come from.
        convert: changes each batch before it is cut; None to leave it as it is.
        seed: seed of the run.
        own: numbers of this process's devices.
    """

    digests = 2

    def __init__(
        self, given: Rule | Items, convert: Collate | None, seed: int, own: Sequence[int]
    ) -> None:
        self._given, self._convert, self._seed, self._own = given, convert, seed, own
        self.dataset: Any = given.dataset
        self.size = given.size

    def batches(self) -> int:
        """Return the number of batches in a pass."""
        return self._given.batches()

    def order(self, this: DataPass, loader: int) -> Order:
        """Find the order of a pass."""
        return self._given.order(self._seed, this.number, loader)

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Make what answers the requests of a pass."""
        return self

    def __getitem__(self, request: Request) -> Answer:
        try:
            batch: Any = self._given.read(request, self._seed)
            if self._convert is not None:
                batch = self._convert(batch)
        except Exception as error:
            return Answer(request, bad_sample(request.item, request.epoch, error, "making batch"))
        shards = [shard for device in self._own for shard in request.plan.read_by(device)]
        cut = cut_batch(batch, request.plan, shards, digest=request.digest is not None)
        found = replace(request, samples=cut.samples)
        return Answer(found, dict(cut.shards), cut.digest, others=cut.others)
