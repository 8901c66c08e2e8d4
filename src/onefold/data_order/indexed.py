"""Sources of a loader's batches: map-style data sets, and whole batches.

`Indexed` reads a map-style data set of samples or of whole batches. Whole batches are items of a
data set (`Items`), or come from a function of the script (`FunctionBatches`). Every process makes
each whole batch and keeps its own shards, as `trainer.step` does with a batch of the script, so
devices do not share the cost of making it.

All sources, including `onefold.data_order.stream.Stream`, have the same methods: in each pass the
loader calls ``order``, and then ``reader`` for the object that answers its requests, in this
process or in a worker.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from onefold.core.batch import DataPass, cut_batch
from onefold.core.late import load
from onefold.core.numbers import check_whole
from onefold.core.randomness import (
    MOST_SHUFFLED,
    loader_seed,
    order_by_length,
    sample_order,
    seed_generators,
)
from onefold.data_order.order import LoaderSize, Order
from onefold.data_order.position import BATCH_FUNCTION, LoaderTrack
from onefold.data_order.reader import (
    Answer,
    BadSample,
    Collate,
    HeldGenerators,
    Reader,
    Request,
    SizedDataset,
    bad_sample,
    digest_of,
)
from onefold.errors import CheckpointError, StateError

__all__ = ["BatchFunction", "Choices", "FunctionBatches", "Indexed", "Items", "short_digest"]


class Choices(TypedDict, total=False):
    """Arguments that determine the order of the samples and their batches."""

    batch_size: int | None
    """Global batch size, in samples; None with a ``batch_sampler``."""
    shuffle: bool
    """Whether to visit the samples in a different order in each pass."""
    lengths: Sequence[int] | None
    """Length of every sample, to batch samples of similar length; None to ignore lengths."""
    drop_last: bool
    """Whether to drop the last batch if it is short."""
    sampler: Iterable[int] | None
    """Yields sample indices in the order of a pass."""
    batch_sampler: Iterable[Sequence[int]] | None
    """Yields lists of sample indices, each a global batch."""


class Indexed:
    """A map-style data set, visited in an order that is known in advance.

    Args:
        dataset: an object with a length and an item for each index; or `Items` or a
            `FunctionBatches`, which determine the order themselves.
        collate: makes a shard's payload; PyTorch's default if None. For whole batches, it converts
            each batch before the batch is cut.
        seed: the run's seed.
        choices: order of the samples and size of the batches.

    Raises:
        TypeError, ValueError: the arguments do not fit together, every pass would be empty, or
            there are too many samples to shuffle.
    """

    def __init__(
        self,
        dataset: SizedDataset | Items | FunctionBatches,
        collate: Collate | None,
        seed: int,
        choices: Choices,
    ) -> None:
        self._whole = whole = dataset if isinstance(dataset, Items | FunctionBatches) else None
        if whole is not None:
            choices = {"batch_size": 1, "shuffle": whole.shuffle, "sampler": whole.sampler}
        sampler, batch_sampler = choices.get("sampler"), choices.get("batch_sampler")
        batch_size, lengths = choices.get("batch_size"), choices.get("lengths")
        # Convert to bool: a script may pass 0 or 1, which a checkpoint would store as numbers.
        shuffle, drop_last = bool(choices.get("shuffle")), bool(choices.get("drop_last"))
        self.dataset: Any = dataset if whole is None else whole.dataset
        samples = len(dataset)
        if samples == 0:
            one = "sample" if whole is None else "batch"
            raise ValueError(f"the data set is empty: expected at least one {one}")
        alone = {"shuffle": shuffle, "lengths": lengths is not None}
        if batch_sampler is not None:
            sizes = {"batch_size": batch_size is not None, "drop_last": drop_last}
            check_alone("batch_sampler", {**alone, **sizes, "sampler": sampler is not None})
            load("data_order.from_pytorch").check_sampler(batch_sampler, "batch_sampler")
        else:
            check_whole("batch_size", batch_size, least=1)
        if sampler is not None:
            check_alone("sampler", alone)
            load("data_order.from_pytorch").check_sampler(sampler, "sampler")
        if shuffle:
            check_shuffled(samples)
        self._collate, self._seed = collate, seed
        self._sampler, self._batch_sampler = sampler, batch_sampler
        by_length = None if lengths is None else _checked_lengths(lengths, samples, shuffle)
        self._by_length = by_length
        self.size = LoaderSize(
            samples=samples,
            batch_size=batch_size or 1,
            drop_last=drop_last,
            shuffle=shuffle,
            lengths="" if by_length is None else short_digest(by_length.numpy().tobytes()),
            subset=self._subset(),
            kind=self._kind(),
        )
        if drop_last and not self.batches() and not _changes_with_epoch(sampler):
            raise ValueError(
                f"drop_last=True drops every batch: a pass has {self._places()} samples, but a "
                f"batch has batch_size={batch_size}, so nothing would be trained. Reduce "
                f"batch_size, or omit drop_last=True"
            )

    def batches(self) -> int:
        """Return the number of batches in a pass."""
        own: Any = self._batch_sampler
        return self.size.batches(self._places()) if own is None else len(own)

    def order(self, this: DataPass, loader: int) -> Order:
        """Return the order of a pass."""
        # The order depends only on seed, epoch and loader: a resumed run computes it again.
        numbers = {"seed": self._seed, "epoch": this.number, "loader": loader}
        samples, batch_size = self._samples(), self.size.batch_size
        order: Order
        if self._batch_sampler is not None:
            order = load("data_order.from_pytorch").draw_batches(self._batch_sampler, **numbers)
            return order
        if self._sampler is not None:
            draw = load("data_order.from_pytorch").draw_samples
            order = draw(self._sampler, batch_size=batch_size, **numbers)
        elif not self.size.shuffle:
            # Number items consecutively over all passes: a function gets its batch's number in the
            # run.
            first = this.number * samples if isinstance(self._whole, FunctionBatches) else 0
            order = Order(range(first, first + samples), batch_size)
        elif self._by_length is None:
            check_shuffled(samples)
            order = Order(sample_order(samples, **numbers), batch_size)
        else:
            by_length = _checked_lengths(self._by_length, samples, shuffle=True)
            order = Order(order_by_length(by_length, batch_size=batch_size, **numbers), batch_size)
        if samples != self.size.samples and not order.digest:
            # Digest the present length, which determines the order together with the seed.
            order = replace(order, digest=struct.pack("<q", samples))
        return order if self._whole is None else replace(order, of_items=True)

    def reader(self, this: DataPass, track: LoaderTrack) -> Dataset[Answer]:
        """Return the object that answers the requests of a pass."""
        if self._whole is None:
            return Reader(self.dataset, self._collate, self._seed)
        return _WholeReader(self._whole, self._collate, self._seed, track.last_to_check())

    @property
    def skips(self) -> bool:
        """Whether a resumed script may skip completed batches without making them."""
        return not isinstance(self._whole, FunctionBatches) or self._whole.stateless

    def _samples(self) -> int:
        """Return the present length of the data set, which may change between passes."""
        return len(self.dataset if self._whole is None else self._whole)

    def _places(self) -> int:
        """Return the number of samples in a pass."""
        sampler: Any = self._sampler
        return self._samples() if sampler is None else len(sampler)

    def _subset(self) -> str:
        if isinstance(self.dataset, ConcatDataset | Subset):
            return str(load("data_order.from_pytorch").subset_digest(self.dataset))
        return ""

    def _kind(self) -> str:
        order = self._sampler if self._batch_sampler is None else self._batch_sampler
        kind = "samples" if self._batch_sampler is None else "batches"
        if self._whole is not None:
            kind = self._whole.kind
        elif order is None:
            return ""
        return kind if order is None else f"{kind} by {type(order).__name__}"


def _changes_with_epoch(sampler: object) -> bool:
    return sampler is not None and bool(load("data_order.from_pytorch").changes_with_epoch(sampler))


def check_alone(name: str, others: dict[str, bool]) -> None:
    """Refuse arguments that another argument makes redundant.

    Args:
        name: the argument that decides.
        others: for each other argument, whether it was given.

    Raises:
        ValueError: one of the other arguments was given.
    """
    given = [other for other, is_given in others.items() if is_given]
    if given:
        raise ValueError(f"{name} determines what {' and '.join(given)} would: pass {name} alone")


def check_shuffled(samples: int) -> None:
    """Refuse to shuffle too many samples.

    Raises:
        ValueError: there are more than `MOST_SHUFFLED`.
    """
    if samples > MOST_SHUFFLED:
        raise ValueError(
            f"the order of {samples:,} shuffled samples would take {samples * 8 / 1e9:.0f} GB in "
            f"each process; the maximum is {MOST_SHUFFLED:,}. Draw random samples in parts, with "
            f"replacement, instead of using shuffle=True: sampler=RandomSampler(dataset, "
            f"replacement=True, num_samples=...)"
        )


def _checked_lengths(
    lengths: Sequence[int] | torch.Tensor, samples: int, shuffle: bool
) -> torch.Tensor:
    if not shuffle:
        raise ValueError("lengths requires shuffle=True: it makes batches from shuffled samples")
    if len(lengths) != samples:
        raise ValueError(
            f"expected one length for each of the {samples} samples, but got {len(lengths)} lengths"
        )
    return torch.as_tensor(lengths).to(torch.int64)


def short_digest(content: bytes) -> str:
    """Return a digest of 16 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


BatchFunction = Callable[[int, torch.Generator], object]
"""Makes a whole batch from its number in the run and a CPU generator."""


@dataclass(frozen=True, slots=True)
class FunctionBatches:
    """Whole batches from a function of the script."""

    dataset: BatchFunction
    """The function."""
    per_epoch: int
    """Number of batches per pass."""
    stateless: bool = False
    """Whether a batch depends only on the arguments, so that a resumed run can skip it."""
    kind: ClassVar = BATCH_FUNCTION
    shuffle: ClassVar = False
    sampler: ClassVar = None

    def __len__(self) -> int:
        return self.per_epoch

    def __post_init__(self) -> None:
        if not callable(self.dataset):
            raise TypeError(
                f"expected a function of step and generator that returns a whole batch, but got "
                f"{self.dataset!r}"
            )
        check_whole("per_epoch", self.per_epoch, least=1)

    @property
    def made_twice(self) -> bool:
        """Whether a batch may be made twice; a function with state might count its calls."""
        return self.stateless

    @property
    def owners(self) -> tuple[object, ...]:
        """Objects whose generators are seeded: none, because the function continues its own."""
        return ()

    def read(self, request: Request, seed: int, held: HeldGenerators) -> object:
        """Make a whole batch."""
        # Seed both kinds: the function may draw from its argument or from the global generators.
        drawn = loader_seed("batch", seed, request.item, loader=request.loader)
        seed_generators(drawn)
        return self.dataset(request.item, torch.Generator().manual_seed(drawn))


@dataclass(frozen=True, slots=True)
class Items:
    """A data set whose items are whole batches."""

    dataset: SizedDataset
    shuffle: bool = False
    sampler: Iterable[int] | None = None
    """The script's order of the items; None for the numeric or shuffled order."""
    kind: ClassVar = "batches as items"
    made_twice: ClassVar = True

    @property
    def owners(self) -> tuple[object, ...]:
        """Objects whose generators are seeded."""
        return (self.dataset,)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, request: Request, seed: int, held: HeldGenerators) -> object:
        """Read a whole batch."""
        # Seed by position in the pass, because a sampler may yield an item twice.
        numbers = seed, request.epoch, request.stop
        drawn = loader_seed("item", *numbers, loader=request.loader)
        seed_generators(drawn)
        held.seed(drawn)
        return self.dataset[request.item]


class _WholeReader(Dataset[Answer]):
    """Answers requests for whole batches, of which each process keeps its own shards."""

    def __init__(
        self,
        given: FunctionBatches | Items,
        convert: Collate | None,
        seed: int,
        last: tuple[int, int, int] | None,
    ) -> None:
        self._given, self._convert, self._seed = given, convert, seed
        self.dataset, self.collate = given.dataset, convert
        self._last = last
        self._held = HeldGenerators(*given.owners, *([convert] if given.owners else []))

    def __getitem__(self, request: Request) -> Answer:
        return self._held.read(lambda: self._answer(request))

    def _answer(self, request: Request) -> Answer:
        twice = request.check is not None and self._given.made_twice
        try:
            if self._last is not None and not self._given.made_twice:
                self._check_last(request, *self._last)
            before = digest_of(self._made(request)) if twice else b""
            batch = self._made(request)
        except CheckpointError:
            raise
        except Exception as error:
            return Answer(request, self._bad(request, error))
        if twice and digest_of(batch) != before:
            return Answer(request, BadSample.of_change(request, self._given.kind))
        return self._cut(request, batch)

    def _bad(self, request: Request, error: Exception) -> BadSample:
        if isinstance(error, StateError) and not self._given.made_twice:
            error = StateError(
                f"{error}. After a resume, the function given to trainer.batches is called again "
                f"for completed batches; with stateless=True it is not"
            )
        return bad_sample(request.item, request.epoch, error, "making batch")

    def _made(self, request: Request) -> Any:
        batch: Any = self._given.read(request, self._seed, self._held)
        return batch if self._convert is None else self._convert(batch)

    def _cut(self, request: Request, batch: Any) -> Answer:
        shards = [shard for device in request.own for shard in request.shares.read_by(device)]
        cut = cut_batch(batch, request.shares, shards, digest=True)
        found = replace(request, samples=cut.samples)
        return Answer(found, dict(cut.shards), cut.digest, others=cut.others)

    def _check_last(self, request: Request, data_pass: int, stop: int, digest: int) -> None:
        """Refuse a function that does not reproduce the last batch used by the saved run."""
        self._last = None
        item = data_pass * len(self._given) + stop - 1
        made = self._cut(request, self._made(replace(request, item=item)))
        if made.digest != digest:
            raise CheckpointError(
                f"the function given to trainer.batches returned a different batch {item} than in "
                f"the saved run, which this run continues. The function keeps state, such as a "
                f"generator or a position in the data, which trainer.load and runs without a "
                f"record do not restore. Draw from the generator passed to the function, or resume "
                f"with onefold run --checkpoint and its record, which calls the function again for "
                f"completed batches. If the batch depends only on the model or on trainer.steps, "
                f"pass stateless=True"
            )
