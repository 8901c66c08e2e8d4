"""Whole batches as the source of a loader: by the script's own rule, or the items of a data set.

Every process makes the whole batch and keeps its own shards of it, as `trainer.step` does with a
batch of the script's own; so what it costs to make a batch is not divided between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from onefold.core.batch import DataPass, cut_batch
from onefold.core.numbers import check_whole
from onefold.core.randomness import loader_seed, sample_order, seed_generators
from onefold.reading.indexed import check_shuffled
from onefold.reading.order import BatchOrder, Counting, Order
from onefold.reading.position import LoaderSize, LoaderTrack
from onefold.reading.reader import Answer, Collate, Request, SizedDataset, bad_sample
from onefold.reading.samplers import check_sampler, draw_samples

__all__ = ["BatchRule", "Items", "Rule", "WholeBatches"]

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


class WholeBatches:
    """Whole batches, which each process cuts; the places of a pass are counted in batches.

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
        self._given = given
        self._convert = convert
        self._seed = seed
        self._own = own
        if isinstance(given, Rule):
            self.dataset: Any = given.function
            length, kind = given.per_epoch, "batches by a rule"
        else:
            self.dataset = given.dataset
            length, kind = len(given.dataset), "batches as items"
            if given.sampler is not None:
                kind += f" by {type(given.sampler).__name__}"
        shuffle = isinstance(given, Items) and given.shuffle
        self.size = LoaderSize(
            samples=length, batch_size=1, drop_last=False, shuffle=shuffle, kind=kind
        )

    def batches(self) -> int:
        """Return the number of batches in a pass."""
        sampler: Any = self._given.sampler if isinstance(self._given, Items) else None
        return self.size.samples if sampler is None else len(sampler)

    def order(self, this: DataPass, loader: int) -> Order:
        """Find the order of a pass."""
        length, seed, epoch = self.size.samples, self._seed, this.number
        if isinstance(self._given, Rule):
            # Numbered on from pass to pass: the rule is given the number of the batch in the run.
            return BatchOrder(Counting(length, epoch * length))
        if self._given.sampler is not None:
            drawn = draw_samples(
                self._given.sampler, batch_size=1, seed=seed, epoch=epoch, loader=loader
            )
            return BatchOrder(drawn.indices, drawn.digest)
        if not self._given.shuffle:
            return BatchOrder(Counting(length))
        return BatchOrder(sample_order(length, seed=seed, epoch=epoch, loader=loader))

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Make what answers the requests of a pass."""
        return _Cutter(self._given, self._convert, self._seed, self._own)


class _Cutter(Dataset[Answer]):
    """Makes whole batches, and keeps the shards of this process."""

    def __init__(
        self, given: Rule | Items, convert: Collate | None, seed: int, own: Sequence[int]
    ) -> None:
        self._given = given
        self.dataset: Any = given.dataset if isinstance(given, Items) else given.function
        self._convert = convert
        self._seed = seed
        self._own = own

    def __getitem__(self, request: Request) -> Answer:
        try:
            batch = self._batch(request)
        except Exception as error:
            return Answer(request, bad_sample(request.item, request.epoch, error, "making batch"))
        shards = [shard for device in self._own for shard in request.plan.read_by(device)]
        cut = cut_batch(batch, request.plan, shards, digest=request.digest is not None)
        found = replace(request, samples=cut.samples)
        return Answer(found, dict(cut.shards), cut.digest, others=cut.others)

    def _batch(self, request: Request) -> Any:
        number, given = request.item, self._given
        if isinstance(given, Rule):
            # Both: a rule may draw from its own generator or, as many do, from the global ones.
            seed = loader_seed("batch", self._seed, number, loader=request.loader)
            seed_generators(seed)
            batch = given.function(number, torch.Generator().manual_seed(seed))
        else:
            # By the place in the pass, for a sampler may give an item twice.
            numbers = self._seed, request.epoch, request.stop
            seed_generators(loader_seed("item", *numbers, loader=request.loader))
            batch = given.dataset[number]
        return batch if self._convert is None else self._convert(batch)  # type: ignore[arg-type]
