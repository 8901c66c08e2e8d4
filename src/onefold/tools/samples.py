"""Inspects samples: those of a shard, and drawn ones, which the hosts of a run compare.

`ShardSamples` finds their contents, their losses, and which ones are bad. `SameData` is a hook.

Note: how samples are separated
-------------------------------
If the loss returns a value per sample, these are the samples' losses. Otherwise each sample is
computed alone. If that does not identify the sample that is not finite, the shard is bisected: the
search continues in the half that is still not finite.

Note: samples of several hosts
------------------------------
Each host reads its own copy of the data. Every pass compares three samples, which does not show
that some files of a host are old or damaged. On several hosts, the first pass of each loader
therefore compares 64 of its samples as well, drawn from the seed. They are read once, a few with
each batch and where batches are read, so that workers share the work and the first step does not
wait for all of them. Their digest is part of the batch's, which devices compare in every step. Only
after a difference do the devices exchange descriptions, to name the sample.

A sample is seeded by its index alone, as for the other three, and the generators are restored, so
neither random transforms nor the draws of the run are affected. A sample that cannot be read counts
as its type of error: if a sampler never reaches it, no run may fail by it. Every batch of a stream,
and every batch that each device reads as a whole, is compared in any case, so none are drawn.
"""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from onefold.core.batch import DataPass
from onefold.core.flat import all_finite
from onefold.core.randomness import derive_seed
from onefold.core.results import split
from onefold.core.shard import rows_of
from onefold.core.structure import parts_of, tensors_of
from onefold.data_order.position import LoaderTrack
from onefold.data_order.reader import Answer, Reader, Request, digest_of, join_digests
from onefold.errors import DisagreementError, OnefoldError
from onefold.record.findings import SampleFinding
from onefold.session.run import RunSetup, RunView
from onefold.shard.operations import bits_digest
from onefold.shard.replica import Replica
from onefold.shard.task import Microbatch, ShardTask
from onefold.step.hook import Hook, Make, ScriptCall, Surrounds

__all__ = ["ComparedSource", "SameData", "ShardSamples", "finite_or_none", "prepare", "words_of"]

_MOST_ALONE = 512
"""Maximum number of a shard's samples that are computed alone."""


class ShardSamples:
    """The samples of a shard.

    replica: replica that computes the samples.
    shard: number of the shard.
    task: task that all shards of the step share.
    datasets: data sets of the loaders, by loader number.
    digests: whether to digest the contents of samples.
    """

    def __init__(
        self,
        replica: Replica,
        shard: int,
        task: ShardTask,
        datasets: Mapping[int, Any],
        *,
        digests: bool,
    ) -> None:
        self._digests = digests
        self._replica, self._shard, self._task = replica, shard, task
        self._batch = batch = task.batch
        self._count = batch.count_of(shard).samples
        self._first = sum(batch.size_of(each) for each in range(shard))
        self._dataset = datasets.get(batch.loader)

    def findings(self, seen: Sequence[object], *, spoilt: bool) -> list[SampleFinding]:
        """Return the findings about each sample.

        Args:
            seen: results of the loss for the shard's microbatches.
            spoilt: whether the shard's loss or gradient is not finite.
        """
        losses, rows = self._returned(seen) or self._alone(), self._rows()
        finite = [loss is None or math.isfinite(loss) for loss in losses]
        if spoilt and finite.count(False) != 1:
            # Batch norm spreads NaN over the shard, and losses do not show bad gradients.
            whole = [all(map(all_finite, filter(_has_floats, tensors_of(row)))) for row in rows]
            halved = self._halved() if all(whole) else whole
            finite = halved if all(finite) or halved.count(False) < finite.count(False) else finite
        numbers: list[int | None] = [*self._batch.numbers.get(self._shard, ())]
        if len(numbers) != self._count:
            numbers = [None] * self._count
        return [
            SampleFinding(
                place=self._first + place,
                number=number,
                loss=None if loss is None else finite_or_none(loss),
                finite=good,
                words=", ".join([*self._said(number), *([words_of(rows[place])] if rows else [])]),
                digest=bits_digest(tensors_of(rows[place])) if self._digests and rows else "",
            )
            for place, (number, loss, good) in enumerate(zip(numbers, losses, finite, strict=True))
        ]

    def _returned(self, seen: Sequence[object]) -> list[float | None]:
        """Return the loss of each sample if the loss function returned them; otherwise nothing."""
        found: list[float | None] = []
        for result in seen:
            loss = split(result, "the loss")[0]
            if not isinstance(loss, torch.Tensor) or not loss.dim():
                return []
            found += loss.detach().double().flatten(1).mean(1).tolist() if loss.dim() > 1 else (
                loss.detach().double().tolist()
            )  # fmt: skip
        return found if len(found) == self._count else []

    def _alone(self) -> list[float | None]:
        """Compute each sample alone and return its loss; None if that is not possible."""
        found: list[float | None] = []
        for place in range(self._count if self._count <= _MOST_ALONE else 0):
            try:
                part = self._microbatch(place, place + 1, self._replica.run_forward)
                weight = part.known_weight
                found.append(float(part.total()) / (weight if weight > 0 else 1.0))
            except (OnefoldError, ValueError, RuntimeError, TypeError, IndexError):
                # Batch norm needs more than one sample, and some payloads cannot be cut.
                return [None] * self._count
        return found or [None] * self._count

    def _halved(self) -> list[bool]:
        """Bisect to the smallest part that is not finite; return which samples are outside it."""
        start, stop = 0, self._count
        while stop - start > 1:
            middle = (start + stop) // 2
            if self._is_bad(start, middle):
                stop = middle
            elif self._is_bad(middle, stop):
                start = middle
            else:
                break
        return [not start <= place < stop for place in range(self._count)]

    def _is_bad(self, start: int, stop: int) -> bool:
        try:
            result = self._microbatch(start, stop, self._replica.compute_microbatch)
        except (OnefoldError, ValueError, RuntimeError, TypeError, IndexError):
            return False
        gradients = [each for each in result.gradients if each is not None]
        total = 0.0 if result.total is None else float(result.total)
        return not math.isfinite(total) or not all(map(all_finite, gradients))

    def _microbatch(self, start: int, stop: int, run: Callable[..., Any]) -> Any:
        where = self._replica.begin_shard(self._shard, self._task)
        microbatch = Microbatch(self._shard, start, stop, self._count, self._task, where)
        try:
            return run(microbatch)
        finally:
            self._replica.put_back(self._task)
            self._replica.start_step(self._task)

    def _rows(self) -> list[Any]:
        """Return the contents of each sample; nothing if the payload cannot be cut."""
        payload, dim = self._batch.shards[self._shard], self._batch.dim
        try:
            return [
                rows_of(payload, (place, place + 1), self._count, dim=dim)
                for place in range(self._count)
            ]
        except (TypeError, ValueError, OnefoldError):
            return []

    def _said(self, number: int | None) -> list[str]:
        """Return the data set's description of a sample, if it has a `describe` method."""
        describe = getattr(self._dataset, "describe", None)
        return [str(describe(number))] if callable(describe) and number is not None else []


def _has_floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def words_of(value: Any) -> str:
    """Describe a payload briefly: dtypes, shapes and the range of its numbers."""
    parts = parts_of(value)
    if parts is not None:
        return ", ".join(filter(None, (words_of(part) for _, part in parts)))
    if not isinstance(value, torch.Tensor):
        return str(value)[:60]
    if value.numel() == 1:
        return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())
    words = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if not value.numel() or value.is_complex():
        return words
    if value.is_floating_point():
        bad = int(value.numel() - value.isfinite().sum())
        kept = value[value.isfinite()]
        words += f", {bad} not finite" if bad else ""
        if not kept.numel():
            return words
        return f"{words}, from {float(kept.min()):.4g} to {float(kept.max()):.4g}"
    return f"{words}, from {value.min().item()} to {value.max().item()}"


def finite_or_none(value: float) -> float | None:
    """Return the number if it is finite, otherwise None: JSON has no others."""
    return value if math.isfinite(value) else None


_OF_DATA = ("other samples than that of device 0", "received another batch than device 0")
"""Words of `onefold.core.call_digest` about a loader's batch, and about one that contains some."""
_SAMPLES, _AT_ONCE, _SHOWN = 64, 16, 120
"""Samples to compare, maximum number to read with one batch, and length of a description."""


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Compare samples unless the run resumes, because its first start has compared them."""
    return lambda run: None if run.begun_after else SameData(run, start.settings.seed)


class SameData(Hook):
    """Compares drawn samples of each loader with the other hosts.

    Args:
        run: the run.
        seed: the seed of the run.
    """

    def __init__(self, run: RunView, seed: int) -> None:
        self._run, self._seed = run, seed
        self._sources: list[ComparedSource] = []

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Draw samples for a new loader, until the run resumes."""
        made = make()
        if asked.kind == "loader":
            made.source = ComparedSource(made.source, self._seed)
            self._sources.append(made.source)
        elif asked.kind == "load" and self._run.position.step:
            for each in self._sources:
                each.compares = False
        return made

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except DisagreementError as error:
            # All devices raise these errors, because they have compared the same heads.
            if any(words in str(error) for words in _OF_DATA):
                self._name(str(error).partition(": ")[0])
            raise

    def around(self, asked: ScriptCall) -> Surrounds:
        """Name a sample that differs, as long as samples are compared."""
        return self._naming() if any(each.compares for each in self._sources) else None

    def _name(self, where: str) -> None:
        """Raise an error with the first sample that differs, if one does."""
        found: dict[str, tuple[str, str]] = {}
        for number, source in enumerate(self._sources):
            found |= source.describe(number)
        given = {own: [socket.gethostname(), found] for own in self._run.devices.own}
        transport = self._run.engine.context.exchange.transport
        (host, ours), *others = transport.all_gather_values(given)
        for device, (other, theirs) in enumerate(others, start=1):
            for name, (digest, words) in ours.items():
                its_digest, its_words = theirs.get(name, (digest, words))
                if its_digest != digest:
                    raise DisagreementError(
                        f"{where}: {name} differs between hosts: on device 0 ({host}) it is "
                        f"{words} (digest {digest[:8]}), but on device {device} ({other}) it is "
                        f"{its_words} (digest {its_digest[:8]}). Copy the same data to every host"
                    )


class ComparedSource:
    """A source of batches whose first reader reads drawn samples as well.

    Args:
        source: the source; see `onefold.data_order.indexed`.
        seed: the seed of the run.
    """

    def __init__(self, source: Any, seed: int) -> None:
        self._source, self._seed = source, seed
        self._reader: _ComparingReader | None = None
        self.compares = True
        """Whether samples are compared, or will be in the first pass."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def order(self, this: DataPass, loader: int) -> Any:
        """Return the order of a pass."""
        self._order = self._source.order(this, loader)
        return self._order

    def reader(self, this: DataPass, track: LoaderTrack) -> Any:
        """Return the reader of a pass, which reads a few drawn samples with each batch."""
        reader, order = self._source.reader(this, track), self._order
        self.compares &= self._reader is None and isinstance(reader, Reader)
        if not self.compares:
            return reader
        # If an order is drawn in parts, only its first part exists here.
        length = getattr(order.indices, "part", order.length)
        draw = random.Random(derive_seed("compared", self._seed))
        places = draw.sample(range(length), min(_SAMPLES, length))
        drawn = [*{int(order.indices[place : place + 1][0]): None for place in places}]
        stops, stop = list[int](), this.given
        while stop < this.end and len(stops) < len(drawn):
            stops.append(stop := min(order.stop(stop), this.end))
        each = min(_AT_ONCE, -(-len(drawn) // max(1, len(stops))))
        plan = {stop: drawn[n * each :][:each] for n, stop in enumerate(stops)}
        self._reader = _ComparingReader(reader, self._seed, plan)
        return self._reader

    def describe(self, loader: int) -> dict[str, tuple[str, str]]:
        """Read the drawn samples again; return the digest and a description of each, by name."""
        if (reader := self._reader) is None:
            return {}
        drawn = chain.from_iterable(reader.plan.values())
        return {f"sample {index} of loader {loader}": reader.describe(index) for index in drawn}


class _ComparingReader(Reader):
    """Reads drawn samples after certain batches, and adds their digests to those of the batches.

    Args:
        reader: reads the same samples.
        seed: the seed of the run.
        plan: indices of the samples, by the end of the batch.
    """

    def __init__(self, reader: Reader, seed: int, plan: Mapping[int, Sequence[int]]) -> None:
        super().__init__(reader.dataset, reader.collate, seed)
        self.plan = plan

    def __getitem__(self, request: Request) -> Answer:
        answer = super().__getitem__(request)
        digests = [self.describe(n)[0].encode() for n in self.plan.get(request.stop, ())]
        digest = join_digests(answer.digest, digests) if digests else answer.digest
        return answer._replace(digest=digest)

    def describe(self, index: int) -> tuple[str, str]:
        """Return the digest and a description of a sample, or of the error of reading it."""
        return self._held.read(lambda: self._described(index))

    def _described(self, index: int) -> tuple[str, str]:
        digest = b""
        try:
            self._seed_all(derive_seed("digest", self._seed, index), ("digest", (self._seed,)))
            sample = self._dataset[index]
            digest = digest_of(sample)
            words = words_of(sample)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        return (digest or digest_of(words.partition(":")[0])).hex(), words[:_SHOWN]
