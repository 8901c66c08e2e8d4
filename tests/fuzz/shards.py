"""What each shard makes of a step by itself, put together in the plainest way there is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import onefold
from onefold.core.mean import Means
from onefold.core.randomness import derive_seed, kept_generators, seed_generators
from onefold.core.shard import cut_bounds
from tests.fuzz.case import Case
from tests.fuzz.data import Fields
from tests.fuzz.hooks import HOOKS
from tests.fuzz.script import Script

__all__ = ["ShardByShard"]

Term = tuple[torch.Tensor, float | None]
"""A total, and its weight; None where it is not divided."""


class ShardByShard:
    """Runs the shards of a step one after the other on a plain model.

    Args:
        case: which tells what can be compared.
        model: has the parameters and buffers of before the step; buffers are put back.
        loss: of a shard.
    """

    def __init__(
        self, case: Case, model: nn.Module, loss: Callable[[nn.Module, Fields], object]
    ) -> None:
        self._case = case
        self._model = model
        self._loss = loss
        self._start = {name: b.clone() for name, b in model.named_buffers()}
        self._after: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.gradients: dict[str, torch.Tensor] | None = None
        """Their sum over the shards, by parameter; None where no number can be expected."""

    def run(self, script: Script) -> None:
        """The step that a script has made."""
        shards = last_round(script.shards_seen)
        terms = [self._terms(script, shard, fields) for shard, fields in shards_of(script, shards)]
        self._restore()
        if not self._can_compare() or not any(terms):
            return
        columns = zip(*terms, strict=True)
        divisors = [_divisor(list(column)) for column in columns]
        if not any(divisors):
            self.gradients = {}
            return
        sums: dict[str, torch.Tensor] = {}
        for shard, fields in shards_of(script, shards):
            self._add_gradients(sums, script, shard, fields, divisors)
            self._restore()
        self.gradients = sums

    def wrong_buffers(self, script: Script) -> list[str]:
        """Buffers that are not what the rules make of the shards' ones."""
        now = dict(script.model.named_buffers())
        wrong = []
        for name, start in self._start.items():
            values = [(size, after[name]) for size, after in self._after]
            expected = _combined(values, start, self._case.buffers)
            if not _holds(expected, start.dtype):
                continue
            far = (expected - _wide(now[name])).abs()
            near = {1: 0.2, 2: 2e-2}.get(start.element_size(), 1e-6)
            if far.numel() and float(far.max()) > near * max(1.0, float(expected.abs().max())):
                wrong.append(f"{script.where}: buffer {name} is off by {float(far.max())}")
        return wrong

    def _can_compare(self) -> bool:
        """Where rounding does not decide, and hooks do not see more than one shard's gradient."""
        case = self._case
        rough = case.dtype == "bfloat16" or "half" in case.blocks or case.loss == "autocast"
        return not rough and all(HOOKS[name][1].exact for name in case.hooks)

    def _terms(self, script: Script, shard: int, fields: Fields) -> list[Term]:
        """Forward alone; notes what the shard makes of the buffers."""
        self._restore()
        with self._seeded(script, shard):
            found = terms_of(self._loss(self._model, fields), len(fields.y))
        after = {name: b.detach().clone() for name, b in self._model.named_buffers()}
        self._after.append((len(fields.y), after))
        self._drop()
        return [(total.detach(), weight) for total, weight in found]

    def _add_gradients(
        self,
        sums: dict[str, torch.Tensor],
        script: Script,
        shard: int,
        fields: Fields,
        divisors: list[float],
    ) -> None:
        with self._seeded(script, shard):
            terms = terms_of(self._loss(self._model, fields), len(fields.y))
            parts = [
                total / divisor
                for (total, _), divisor in zip(terms, divisors, strict=True)
                if divisor and total.requires_grad
            ]
            if parts:
                sum(parts[1:], parts[0]).backward()
        for name, p in self._model.named_parameters():
            if p.grad is not None:
                sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
        self._drop()

    def _drop(self) -> None:
        for p in self._model.parameters():
            p.grad = None

    def _seeded(self, script: Script, shard: int) -> Seeded:
        return Seeded(derive_seed("shard", self._case.seed, script.trainer.steps, shard))

    def _restore(self) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.data = self._start[name].clone()


class Seeded:
    """Generators with a seed, and as they were afterwards.

    Args:
        seed: of all of them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept = kept_generators()

    def __enter__(self) -> None:
        self._kept.__enter__()
        seed_generators(self._seed)

    def __exit__(self, *exception: object) -> None:
        self._kept.__exit__(None, None, None)


def shards_of(script: Script, shards: list[Fields]) -> list[tuple[int, Fields]]:
    """The numbers of the shards that have samples, and these."""
    samples = sum(len(fields.y) for fields in shards)
    bounds = cut_bounds(samples, script.trainer.shards)
    filled = [number for number, (start, stop) in enumerate(bounds) if stop > start]
    return list(zip(filled, shards, strict=True))


def last_round(shards: list[Fields]) -> list[Fields]:
    """Where a loss has several terms, the shards are run for its weights first; in the first step,
    they are begun once before that is known."""
    for rounds in (3, 2):
        length = len(shards) // rounds
        parts = [shards[start : start + length] for start in range(0, len(shards), length or 1)]
        if length and len(parts) == rounds and all(_alike(part, parts[-1]) for part in parts):
            return parts[-1]
    return shards


def _alike(one: list[Fields], other: list[Fields]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(mine.index, theirs.index) and torch.equal(mine.x, theirs.x)
        for mine, theirs in zip(one, other, strict=True)
    )


def terms_of(result: object, samples: int) -> list[Term]:
    """Totals and weights of what a loss returned."""
    if isinstance(result, torch.Tensor):
        return [(result.sum() if result.dim() else result * samples, float(samples))]
    terms = result.terms if isinstance(result, Means) else (result,)
    return [
        (term.total, None if isinstance(term, onefold.Sum) else float(term.weight))
        for term in terms
    ]


def _divisor(terms: list[Term]) -> float:
    weights = [weight for _, weight in terms]
    return 1.0 if None in weights else float(sum(w for w in weights if w is not None))


def _combined(
    values: list[tuple[int, torch.Tensor]], start: torch.Tensor, rule: str | None
) -> torch.Tensor:
    """As `Trainer(buffers=)` has it, in float64."""
    after = [_wide(value) for _, value in values]
    begin = _wide(start)
    fractions = start.is_floating_point() or start.is_complex()
    rule = rule or ("mean" if fractions else "max")
    if len(after) == 1:
        return after[0]
    if rule == "sum":
        return begin + sum(value - begin for value in after)
    if rule == "max":
        return torch.stack(after).amax(dim=0)
    if rule == "first":
        return next((value for value in after if not torch.equal(value, begin)), begin)
    total = sum(value * size for (size, _), value in zip(values, after, strict=True))
    mean = total / sum(size for size, _ in values)
    if start.dtype == torch.bool:
        return (mean != 0).double()
    return mean if fractions else mean.trunc()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers are in the range of a type; a sum of differences may leave it."""
    if dtype.is_complex or not value.numel():
        return True
    if dtype.is_floating_point:  # beyond it numbers of 8 bits are the largest
        return float(value.abs().max()) <= torch.finfo(dtype).max
    if dtype == torch.bool:
        return bool(((value == 0) | (value == 1)).all())
    limits = torch.iinfo(dtype)
    return limits.min <= float(value.min()) and float(value.max()) <= limits.max
