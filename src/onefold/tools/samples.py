"""Inspects the samples of a shard: their contents, their losses, and which ones are bad.

Note: how samples are separated
-------------------------------
If the loss returns a value per sample, these are the samples' losses. Otherwise each sample is
computed alone. If that does not identify the sample that is not finite, the shard is bisected: the
search continues in the half that is still not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onefold.core.flat import all_finite
from onefold.core.results import split
from onefold.core.shard import rows_of
from onefold.core.structure import parts_of, tensors_of
from onefold.errors import OnefoldError
from onefold.record.findings import SampleFinding
from onefold.shard.operations import bits_digest
from onefold.shard.replica import Replica
from onefold.shard.task import Microbatch, ShardTask

__all__ = ["ShardSamples", "finite_or_none", "words_of"]

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
