"""The samples of one shard, told apart: what each holds, what it adds to the loss, which is bad.

Note: how samples are told apart
--------------------------------
A loss that returns a value for each sample says what each of them adds. Of any other loss, each
sample is computed alone. Where that does not tell which one is not finite, the shard is halved
again and again: the half that is not finite either goes on.
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
"""The most samples of a shard that are computed alone."""


class ShardSamples:
    """The samples of a shard.

    Args:
        replica: computes them.
        shard: the number of the shard.
        task: what all shards of the step have in common.
        datasets: those of the loaders, by the loaders' numbers.
        digests: whether what samples hold is digested.
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
        """What is known of each sample.

        Args:
            seen: what the loss of the shard's microbatches returned.
            spoilt: whether loss or gradient of the shard is not finite.
        """
        losses, rows = self._returned(seen) or self._alone(), self._rows()
        finite = [loss is None or math.isfinite(loss) for loss in losses]
        if spoilt and finite.count(False) != 1:
            # Batch norm spreads what is not finite over the shard, and no loss shows a gradient.
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
        """The loss of each sample, where the loss has returned it; else nothing."""
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
        """The loss of each sample, computed alone; None where that cannot be done."""
        found: list[float | None] = []
        for place in range(self._count if self._count <= _MOST_ALONE else 0):
            try:
                part = self._microbatch(place, place + 1, self._replica.run_forward)
                weight = part.known_weight
                found.append(float(part.total()) / (weight if weight > 0 else 1.0))
            except (OnefoldError, ValueError, RuntimeError, TypeError, IndexError):
                # Batch norm has no statistics of one sample; not all payloads can be cut.
                return [None] * self._count
        return found or [None] * self._count

    def _halved(self) -> list[bool]:
        """Which samples belong to the smallest part of the shard that is not finite by itself."""
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
        """What each sample holds; nothing where the payload cannot be cut."""
        payload, dim = self._batch.shards[self._shard], self._batch.dim
        try:
            return [
                rows_of(payload, (place, place + 1), self._count, dim=dim)
                for place in range(self._count)
            ]
        except (TypeError, ValueError, OnefoldError):
            return []

    def _said(self, number: int | None) -> list[str]:
        """What the data set says of a sample, where it has a method for that."""
        describe = getattr(self._dataset, "describe", None)
        return [str(describe(number))] if callable(describe) and number is not None else []


def _has_floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def words_of(value: Any) -> str:
    """Describe a payload in a few words: dtypes, shapes and the range of its numbers."""
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
    """A number, if it is finite: JSON has no others."""
    return value if math.isfinite(value) else None
