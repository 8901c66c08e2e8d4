"""Computes every batch again as one shard, for the loss and gradient of a plain loop.

`Mathematics` compares them with each step, and `compare_score` compares evaluations. `tolerance_of`
returns the difference that rounding may cause, by the precision of the computation.

`relation_of` classifies a loss by its values for parts of a batch. A batch is cut into three parts,
A, B and C; the loss is computed for each part, each pair, and all three. For a mean over samples, a
sum, and a mean with other weights (tokens, classes), a rule gives the loss of two parts from their
separate losses. If a rule holds for the squares of the losses, the loss is a root. If no rule
holds, a sample's loss depends on the other samples in the batch.

Note: what is compared
----------------------
Before each step, the user's loss is computed for the whole batch at once, with the parameters and
buffers from which the shards will start. Its loss and gradient are those of the plain loop. The
step's loss and gradient, folded over V shards, before clipping and the update, must be the same
numbers, and so must the buffers after the step. Dropout is off, batch norm uses its running
statistics, and a sample gets the same random numbers in both, so only the arithmetic of the loss
can differ. All other modules keep their modes, because many change their buffers in training mode
only. In float64, the tolerance is 1e-9.

Note: no side effects
---------------------
The extra computations must not affect the run. Buffers are restored in the model's original
tensors, gradients are dropped or set aside, and generators are restored. The whole batch goes
first, while the model is as the step will find it; the closer look comes between the fold and the
update, where ``.grad`` already belongs to the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from onefold.core.batch import ShardedBatch, move
from onefold.core.call_digest import Call
from onefold.core.flat import laid_out, storage_order
from onefold.core.fold import fold_rows
from onefold.core.mean import Contribution, weigh
from onefold.core.randomness import (
    GeneratorStates,
    derive_seed,
    kept_generators,
    seed_generators,
)
from onefold.core.results import split
from onefold.core.shard import Shares, cut_bounds
from onefold.core.structure import count_of
from onefold.passes.evaluation import DataCall, evaluate
from onefold.shard.loss_watch import LossFinding, inspect_loss
from onefold.shard.replica import LossFunction
from onefold.step.engine import Engine
from onefold.system.internals import watch_differentiation
from onefold.system.words import message_of
from onefold.tools.verifying.surroundings import (
    Draws,
    KeptBuffers,
    TimeFirst,
    WholeBatch,
    WithoutDropout,
    near,
    norms_of_the_batch,
    quiet_modes,
    second_dimension,
)

__all__ = ["Comparison", "Mathematics", "compare_score", "tolerance_of"]


EXACT = 1e-9
"""Tolerance for float64."""
_TOLERANCES = {torch.float64: EXACT, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.2}


def tolerance_of(model: torch.nn.Module, rounded: Collection[torch.dtype] = ()) -> float:
    """Return the relative difference that rounding may cause between two computations.

    Args:
        model: model of both computations.
        rounded: other dtypes in which parts are computed.

    >>> model = torch.nn.Linear(3, 4).double()
    >>> tolerance_of(model), tolerance_of(model, [torch.float32])
    (1e-09, 0.0001)
    """
    dtypes = [*(p.dtype for p in model.parameters()), *rounded]
    return max((_TOLERANCES.get(dtype, 0.2) for dtype in dtypes), default=EXACT)


Relation = Literal["mean", "sum", "weighted", "root", "dependent", "unclear"]

PARTS = ("A", "B", "C", "AB", "BC", "AC", "ABC")


def relation_of(
    losses: Mapping[str, float], samples: Mapping[str, int], tolerance: float = 1e-7
) -> Relation:
    """Classify a scalar loss.

    Args:
        losses: loss of each of `PARTS`.
        samples: number of samples in A, B and C.
        tolerance: largest relative difference of numbers that count as equal.

    >>> samples = {"A": 1, "B": 2, "C": 2}
    >>> of_samples = {"A": [3.0], "B": [1.0, 2.0], "C": [6.0, 0.0]}
    >>> sums = {part: sum(sum(of_samples[p]) for p in part) for part in PARTS}
    >>> relation_of(sums, samples)
    'sum'
    >>> relation_of({part: total**0.5 for part, total in sums.items()}, samples)
    'root'
    """
    found = _rule_of(losses, samples, tolerance)
    squares = {part: losses[part] * losses[part] for part in PARTS}
    simpler = _FREEDOM[_rule_of(squares, samples, 2 * tolerance)] < _FREEDOM[found]
    return "root" if simpler and min(losses.values()) >= 0 else found


_FREEDOM = {"sum": 0, "mean": 0, "weighted": 1, "dependent": 2, "unclear": 2}
"""How much each rule allows: of two rules that hold, the one that allows less is the right one."""


def _rule_of(losses: Mapping[str, float], samples: Mapping[str, int], tolerance: float) -> Relation:
    """Return the rule by which the loss of two parts follows from their losses, if there is one."""
    if not all(math.isfinite(losses[part]) for part in PARTS):
        return "unclear"
    scale = max(abs(losses[part]) for part in PARTS)
    if scale == 0:
        return "unclear"

    def same(one: float, other: float) -> bool:
        return abs(one - other) <= tolerance * scale

    # A mean over samples is also a weighted mean, so check the simpler rules first.
    several = [part for part in PARTS if len(part) > 1]
    if all(same(losses[p], sum(losses[one] for one in p)) for p in several):
        return "sum"
    if all(same(losses[p], _mean(losses, samples, p)) for p in several):
        return "mean"
    # A and B give the weight of B, A and C the weight of C; BC and ABC must then follow.
    b, c = _ratio_of(losses, "A", "B"), _ratio_of(losses, "A", "C")
    if b is None or c is None:
        return "unclear"
    weights = {"A": 1.0, "B": b, "C": c}
    if b < 0 or c < 0:
        return "dependent"
    agrees = all(same(losses[p], _mean(losses, weights, p)) for p in ("BC", "ABC"))
    return "weighted" if agrees else "dependent"


def _mean(losses: Mapping[str, float], weights: Mapping[str, float], part: str) -> float:
    total = sum(weights[one] * losses[one] for one in part)
    return total / sum(weights[one] for one in part)


def _ratio_of(losses: Mapping[str, float], one: str, other: str) -> float | None:
    """Return the weight of the other part relative to the first; None if it cannot be determined.

    Solves both = (one + w * other) / (1 + w) for w.
    """
    both = losses["".join(sorted(one + other))]
    below = both - losses[other]
    above = losses[one] - both
    if abs(below) <= 1e-6 * max(abs(losses[one]), abs(losses[other])):
        return None
    return above / below


def relative_size(norms: Sequence[float], size: float) -> float:
    """Divide a difference by a size.

    Args:
        norms: norms of the difference, of the value folded over shards, and of the whole batch's.
        size: divisor of the difference.
    """
    difference, folded, alone = norms
    if math.isfinite(difference):
        return difference / size if size else 0.0
    # NaN is neither larger nor smaller, so it must not reach a comparison. NaN in both is
    # agreement: the plain loop would have failed too.
    return math.inf if math.isfinite(folded) or math.isfinite(alone) else 0.0


@dataclass(slots=True)
class Comparison:
    """The comparison of one step."""

    shards: int
    samples: int
    own_batch: bool
    """Whether the script made the batch itself, and the trainer cut it."""
    skipped: bool = True
    """Whether the whole batch has weight 0, so that there was no update."""
    loss: float = math.nan
    """Loss folded over all shards."""
    alone: float = math.nan
    """Loss of the whole batch as one shard."""
    loss_difference: float = math.nan
    """Relative difference of these losses."""
    gradient_difference: float = math.nan
    """Relative difference of the gradients."""
    worst: str = ""
    """Name of the parameter whose gradient differs most."""
    worst_difference: float = math.nan
    """Relative difference of this parameter's gradients."""
    returned: str = ""
    """Type of the loss's result: a scalar, one value per sample, Mean, ..."""
    finding: LossFinding | None = None
    repeats: bool = True
    """Whether the same samples with the same random numbers give the same loss again."""
    relation: Relation = "mean"
    ordered: bool = False
    """Whether the loss changes if the samples are permuted."""
    time_first: list[str] = field(default_factory=list)
    """Modules for which the batch was cut along time."""
    carried: list[str] = field(default_factory=list)
    """Per-shard buffers, which have no value for the whole batch."""
    dim: int = 0
    """Dimension of the cut through the batch."""
    differentiates: bool = False
    """Whether the loss computes gradients itself, with `torch.autograd.grad`."""
    norms: list[str] = field(default_factory=list)
    """Batch norms without running statistics."""
    second: int | None = None
    """Size of the second dimension of all tensors in a batch that the script made itself."""
    unmatched: list[str] = field(default_factory=list)
    """Random draws that have no counterpart for a part of the batch."""
    buffers: dict[str, str] = field(default_factory=dict)
    """Buffers that differ after the step, with the remedy."""
    trouble: str = ""
    """Error of a closer look, if it failed."""
    tolerance: float = EXACT
    """Relative difference that rounding may cause."""


@dataclass(frozen=True, slots=True)
class _Evaluation:
    part: Contribution
    result: object
    """The loss as returned, without metrics."""

    @property
    def loss(self) -> float:
        """The finished loss."""
        parts = self.part.parts
        return sum(float(each.total()) / each.known_weight for each in parts if each.weight)

    @property
    def values(self) -> torch.Tensor | None:
        """(n,) values per sample, if the loss returned them."""
        root = self.part.root.detach()
        return root if root.dim() else None


class Mathematics:
    """Compares each step of one trainer with a plain loop.

    Args:
        model: the model of the trainer.
        loss: the script's loss.
    """

    def __init__(self, model: torch.nn.Module, loss: LossFunction) -> None:
        self._model = model
        self.user = loss
        self._draws = Draws()
        self.inside = False
        """Whether a step is being compared."""
        self._closer_look = True
        """Whether to inspect the next step that differs closely. Done once, because it is slow."""

    def loss(self, model: torch.nn.Module, payload: object) -> object:
        """Compute the user's loss of one shard, instead of the loss that Trainer was given."""
        if not self.inside:
            return self.user(model, payload)
        # The engine does not pass the shard's number to a loss, but runs shards in order. A loss of
        # several terms runs twice, first for its weights.
        shard = self._order[self._calls % len(self._order)]
        self._calls += 1
        (start, stop), left = self._bounds[shard], self._sizes[shard]
        seed_generators(self._seed, self._device, common=self._common)
        with self._draws.replaying(range(start, stop)), self._time_first.noting("shard"):
            result = self.user(model, payload)
        if torch.is_grad_enabled():
            self._shards[shard] = found = _read(result, left, f"the loss of shard {shard}")
            kept = self._comparison
            kept.finding = kept.finding or inspect_loss(found.result, left, kept.samples)
            self._buffers_after[shard] = KeptBuffers(model)
        return result

    @contextmanager
    def step(
        self, engine: Engine, batch: ShardedBatch, whole: WholeBatch, number: int
    ) -> Iterator[Comparison]:
        """Surround the engine's step; the yielded comparison is complete afterwards."""
        self._whole = whole
        own = batch.data_pass is None
        self._comparison = Comparison(
            batch.shares.shards, batch.samples, own_batch=own, dim=batch.dim
        )
        self._seed = derive_seed("mathematics", engine.context.settings.seed, number)
        # The same as in the step's shards, for random numbers that they share.
        self._common = "step", (engine.context.settings.seed, number)
        buffers = engine.context.replicas[0].buffers
        self._comparison.carried = [buffers.places.names[n] for n in buffers.carried.indices]
        if self._comparison.carried:
            yield self._comparison
            return
        self._bounds = cut_bounds(batch.samples, batch.shares.shards)
        self._order, self._dim = sorted(batch.shards), batch.dim
        self._sizes = [batch.count_of(shard).samples for shard in range(batch.shares.shards)]
        self._calls = 0
        self._shards: dict[int, _Evaluation] = {}
        self._buffers_after: dict[int, KeptBuffers] = {}
        self._time_first = TimeFirst(self._model)
        self._engine, self._device = engine, engine.context.replicas[0].device
        with WithoutDropout(), quiet_modes(self._model):
            with kept_generators(self._device):
                self._compute_alone()
            self.inside = True
            try:
                yield self._comparison
            finally:
                self.inside = False
        folded = KeptBuffers(self._model)
        self._comparison.buffers = self._alone_after.compare(
            folded, self._start, self._buffers_after, self._sizes, self.tolerance
        )
        self._comparison.unmatched = sorted(self._draws.unmatched)

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding may cause between two computations of the loss."""
        return tolerance_of(self._model, self._draws.rounded)

    def _compute_alone(self) -> None:
        samples = self._comparison.samples
        with self._put_back() as self._start:
            with self._time_first.noting("whole"):
                found = self._evaluate(range(samples), record=True)
            _backward(found.part)
            # Clone, because .grad is dropped: the step must begin without gradients.
            self._gradients = {
                name: None if p.grad is None else p.grad.detach().clone()
                for name, p in self._model.named_parameters()
            }
            # Keep the buffers that the whole batch leaves, before they are restored.
            self._alone_after = KeptBuffers(self._model)
        self._whole_finding = inspect_loss(found.result, samples)
        self._comparison.tolerance = self.tolerance
        self._alone = found
        self._comparison.alone = found.loss
        self._comparison.returned = _words_of(found.result)

    def _evaluate(self, rows: Sequence[int], *, record: bool = False) -> _Evaluation:
        payload = move(self._whole(rows), self._device)
        seed_generators(self._seed, self._device, common=self._common)
        draws = self._draws.recording(len(rows)) if record else self._draws.replaying(rows)
        by: list[bool] = []
        try:
            with draws, watch_differentiation(lambda _, inputs: by.append(bool(inputs))):
                result = self.user(self._model, payload)
        except Exception as error:
            error.add_note("raised while onefold verify computed the whole batch as one shard")
            raise
        # Plain backward, which leaves all gradients in .grad, does not pass `inputs`.
        self._comparison.differentiates |= any(by)
        left = count_of(payload, len(rows), self._dim).samples
        return _read(result, left, "the loss of the whole batch")

    def compare(self, weight: float) -> None:
        """Compare loss and gradient, between the fold and clipping."""
        table, found = self._engine.context.exchange.table, self._comparison
        found.skipped = False
        totals = table.totals.cpu()
        found.finding = found.finding or self._whole_finding
        found.loss = float(fold_rows(totals)) / weight
        found.loss_difference = self._relative_loss(float(totals.abs().sum()) / weight)
        self._compare_gradients()
        limit = self.tolerance
        differs = not max(found.loss_difference, found.gradient_difference) <= limit
        if self._closer_look and (differs or found.worst_difference > limit):
            self._closer_look = False
            with self._put_back(), kept_generators(self._device):
                self._look_closer()

    def _relative_loss(self, size: float) -> float:
        found = self._comparison
        # If terms nearly cancel, the loss is close to 0 and its digits are rounding errors: divide
        # by the size of its terms.
        values = self._alone.values
        mean_size = 0.0 if values is None else float(values.abs().mean())
        scale = max(abs(found.loss), abs(found.alone), size, mean_size)
        return relative_size((abs(found.loss - found.alone), found.loss, found.alone), scale)

    def _compare_gradients(self) -> None:
        """Compute relative norms of the gradient differences, in total and per parameter."""
        # A parameter with a tiny gradient, mostly rounding errors, is measured by the whole
        # gradient.
        update, found = self._engine.context.update, self._comparison
        squares: dict[str, torch.Tensor] = {}  # (3,) float64
        names = list(self._engine.context.replicas[0].parts.trained)
        left_out = self._engine.objective.left_out
        for item, mine in zip(update.updated, update.gradients, strict=True):
            if item.segment.entry in left_out:
                continue
            name = names[item.segment.entry]
            entry = update.storage.gradients.entries[item.segment.entry]
            whole = self._gradients[name]
            folded = torch.zeros(item.segment.numel) if mine is None else _flat(mine)
            alone = torch.zeros(item.segment.numel)
            if whole is not None:
                alone = _flat(laid_out(whole, entry.stride))[item.segment.start : item.segment.stop]
            three = folded - alone, folded, alone
            sums = torch.stack([each.double().square().sum() for each in three])
            squares[name] = squares[name] + sums if name in squares else sums
        norms = {name: each.sqrt().tolist() for name, each in squares.items()}
        everything = torch.stack([*squares.values()]).sum(0).sqrt().tolist()
        size = max((norm for norm in everything[1:] if math.isfinite(norm)), default=0.0)
        found.gradient_difference = relative_size(everything, size)
        floor = size * 1e-4
        shares = {n: relative_size(e, max(e[1], e[2], floor)) for n, e in norms.items()}
        found.worst = max(shares, key=lambda name: shares[name])
        found.worst_difference = shares[found.worst]

    @contextmanager
    def _put_back(self) -> Iterator[KeptBuffers]:
        """Begin and end with the same buffers, which are yielded, and without gradients.

        A loss that runs backward itself must find no gradients.
        """
        start = KeptBuffers(self._model)
        self._model.zero_grad()
        try:
            yield start
        finally:
            start.put_back()
            self._model.zero_grad()

    def _look_closer(self) -> None:
        found = self._comparison
        found.time_first = self._time_first.cut_along_time()
        found.norms = norms_of_the_batch(self._model)
        if found.own_batch and not found.dim:
            found.second = second_dimension(self._whole(range(found.samples)))
        try:
            # Twice: state that depends on the batch's shape is reset by the first call with another
            # shape.
            again = [range(found.samples)] * 2
            found.repeats = all(self._gives_the_same(each, self.tolerance) for each in again)
            found.relation = self._relation() if found.repeats else "unclear"
            if found.repeats and found.relation in ("dependent", "unclear"):
                # A separate generator: the global ones belong to the run.
                generator = torch.Generator().manual_seed(0)
                order = torch.randperm(found.samples, generator=generator).tolist()
                found.ordered = not self._gives_the_same(order, max(1e-7, self.tolerance))
        except Exception as error:
            found.relation = "unclear"
            found.trouble = f"of a part of the batch: {type(error).__name__}: {message_of(error)}"

    def _gives_the_same(self, rows: Sequence[int], limit: float) -> bool:
        return math.isclose(self._loss_again(rows), self._comparison.alone, rel_tol=limit)

    def _loss_again(self, rows: Sequence[int]) -> float:
        # The previous evaluation changed buffers.
        self._start.put_back()
        with torch.set_grad_enabled(self._comparison.differentiates):
            return self._evaluate(rows).loss

    def _relation(self) -> Relation:
        part = self._alone.part
        if isinstance(self._alone.result, torch.Tensor) and not part.root.dim():
            return self._relation_of_scalars()
        values, shards = self._alone.values, [self._shards[shard] for shard in self._order]
        if values is not None:
            joined = torch.cat([each.values for each in shards if each.values is not None])
            return "mean" if near(joined, values, self.tolerance) else "dependent"
        for number, term in enumerate(part.parts):
            total = torch.stack([each.part.parts[number].total().cpu() for each in shards]).sum()
            if not near(total, term.total().cpu(), self.tolerance):
                # The total may be a root times a weight.
                return "root" if self._relation_of_scalars() == "root" else "dependent"
        return "mean"

    def _relation_of_scalars(self) -> Relation:
        third, samples = self._comparison.samples // 3, self._comparison.samples
        # Each part needs at least one sample.
        if not third:
            return "unclear"
        rows = {"A": range(third), "B": range(third, 2 * third), "C": range(2 * third, samples)}
        losses = {part: self._loss_again([r for one in part for r in rows[one]]) for part in PARTS}
        counts = {part: len(each) for part, each in rows.items()}
        return relation_of(losses, counts, max(1e-7, self.tolerance))


def compare_score(
    engine: Engine,
    score: Callable[[torch.nn.Module, Any], object],
    batch: ShardedBatch,
    whole: WholeBatch,
) -> dict[str, tuple[float, float]]:
    """Compute a score of one batch with its shards, and as one shard.

    Returns:
        For each value that differs by more than rounding: the result with the shards, and with one.
        Empty for a score that draws random numbers, because a shard draws different ones than the
        batch.
    """
    drawn: list[str] = []

    def noted(model: torch.nn.Module, payload: Any) -> object:
        before = GeneratorStates()
        found = score(model, payload)
        drawn.append(before.drawn_from())
        return found

    model, call = engine.context.replicas[0].module, DataCall(Call.EVALUATE, 0, 0, 0, score)
    shares = Shares.whole(devices=batch.shares.devices)
    one = replace(batch, shares=shares, shards={0: whole(range(batch.samples))})
    with kept_generators(engine.context.replicas[0].device):
        several, alone = (evaluate(engine, noted, [each], call) for each in (batch, one))
    limit = tolerance_of(model)
    differ = {
        name: (value, alone[name])
        for name, value in several.items()
        if not _is_near(value, alone[name], limit)
    }
    return {} if any(drawn) else differ


def _is_near(one: float, other: float, limit: float) -> bool:
    both_missing = math.isnan(one) and math.isnan(other)
    return both_missing or math.isclose(one, other, rel_tol=limit, abs_tol=limit)


def _read(result: object, samples: int, what: str) -> _Evaluation:
    loss = split(result, what)[0]
    return _Evaluation(weigh(loss, samples, what), loss)


def _backward(part: Contribution) -> None:
    """Run backward as a plain loop does, with the whole batch's own denominators."""
    if part.kind == "means":
        part = part.combine([each.known_weight for each in part.parts])
    if part.known_weight and part.root.requires_grad:
        part.backward(part.known_weight)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's elements in storage order, on the host: (numel,)."""
    return storage_order(gradient.detach()).cpu()


def _words_of(result: object) -> str:
    if not isinstance(result, torch.Tensor):
        return f"onefold.{type(result).__name__}"
    return "one value per sample" if result.dim() else "a scalar"
