"""Passes over a data set: every sample once, and the same bits on any number of devices.

`evaluate` scores, `predict` returns values for each sample, and `recompute_statistics` computes
batch-norm statistics for averaged weights. The weights of an average never computed with each
other, so the mean of the statistics that others have left is not theirs. As
`torch.optim.swa_utils.update_bn` does: every batch norm starts from nothing, the model runs over
the data in training mode and without gradients, and all batches count alike.

Note: the order of addition
---------------------------
Every shard starts from empty statistics, and its own are added to a sum for its number, in float64,
in the order of the batches; in the end the sums are folded over shard numbers. So the order does
not depend on which device ran which shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from onefold.core.batch import ShardedBatch, move
from onefold.core.call_digest import Call, CallDigest, digest
from onefold.core.fold import fold_rows, fold_shards
from onefold.core.gatherer import Refusing, gathering
from onefold.core.gathering import SyncBatchNorm
from onefold.core.mean import weigh
from onefold.core.randomness import derive_seed, seed_generators
from onefold.core.values import Column, Rows, StepValues, columns_of, names_of, values_by_name
from onefold.errors import DisagreementError, LossError
from onefold.passes.collectives import check_names
from onefold.shard.kernels import calls_compiled
from onefold.shard.model_parts import QUICK, modules_of
from onefold.shard.replica import Replica
from onefold.step.engine import Engine
from onefold.system.compat import BatchNorm
from onefold.system.process import ctrl_c_later

__all__ = ["DataCall", "ScoreFunction", "evaluate", "predict", "recompute_statistics"]


_GATHERED = (
    "onefold.gather is for losses; here expected a function of a shard's own samples. For a score "
    "over the whole data set: trainer.predict gives the values of every sample, and then score "
    "those; for the loss of a batch: call it outside of the trainer's calls"
)

_SAME = {"clone", "cpu", "detach", "double", "float", "reshape", "squeeze", "to", "view"}
_SAME |= {"add", "neg", "sub"}
"""What gives a scalar another dtype, device or sign, or adds others, and divides it by nothing."""

ScoreFunction = Callable[[torch.nn.Module, Any], object]
"""Takes the model and one shard; returns a dict of values as `onefold.core.mean` reads them."""


def evaluate(
    engine: Engine, score: ScoreFunction, batches: Iterable[ShardedBatch], call: DataCall
) -> dict[str, float]:
    """Compute every value's total over its weight, over all samples of all batches.

    Args:
        engine: the devices of this process.
        score: the user's score function.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.

    Raises:
        LossError: a value cannot be read, or has another shape than its samples.
        DisagreementError: the score function does not return the same names for every shard, or
            another device was given other data.
    """
    tallies = {number: _Tally() for number in engine.context.own}

    def add(own: DataShard) -> None:
        where = f"batch {own.number} of an evaluation, shard {own.shard}"
        sums = _Sums() if own.number == 0 and call.may_note_sums(engine, own.batch) else None
        with sums or nullcontext():
            values = own.values(where)
        if sums:
            sums.refuse(values, where)
        tallies[own.replica.number].add(own, values, where)

    with call.at_hand(engine), engine.evaluating() as ctrl_c:
        sizes, last = compute_shards(engine, score, batches, call, "an evaluation", add, ctrl_c)
    call.agree_on_end(engine, sum(sizes), last)
    own = {number: tally.report() for number, tally in tallies.items()}
    found = engine.context.exchange.transport.all_gather_values(own)
    lines = _alike([lines for lines, _, _ in found])
    # (batches, V, lines, 2) float64, zeros for empty shards.
    table = torch.zeros(
        len(sizes), 0 if last is None else last.shares.shards, len(lines), 2, dtype=torch.float64
    )
    for own_lines, places, numbers in found:
        if own_lines:
            table[places[:, 0], places[:, 1]] = numbers
    # In the fold's order: over shards, and then over batches.
    by_batch = fold_rows(table.transpose(0, 1))  # (batches, lines, 2)
    values = StepValues(tuple(lines), by_batch).finished()
    return {name: float(value) for name, value in values.items()}


def compute_shards(
    engine: Engine,
    function: ScoreFunction,
    batches: Iterable[ShardedBatch],
    call: DataCall,
    what: str,
    compute: Callable[[DataShard], None],
    ctrl_c: ctrl_c_later,
) -> tuple[list[int], ShardedBatch | None]:
    """Compute this process's shards of all batches, while nobody may write to parameters.

    Args:
        engine: the devices of this process.
        function: the user's function.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.
        what: the pass, for errors.
        compute: called for each shard.
        ctrl_c: delivers Ctrl-C between two batches.

    Returns:
        The number of samples in each batch; and the last batch, if there was one.
    """
    sizes: list[int] = []
    batch, seed = None, engine.context.settings.seed
    with ExitStack() as during:
        for number, batch in enumerate(batches):
            first = number == 0
            ctrl_c.deliver()
            # Only now: the data's digest is known once the first batch has been read.
            if first:
                call.agree(engine, call.samples, batch)
                during.enter_context(engine.context.with_generators_of(function))
                function = during.enter_context(engine.placement.parameters.forward(function))
            sizes.append(batch.samples)
            # One shard may write, as in a plain loop; but not to gathered parameters.
            free = engine.placement.may_write(batch.shares.shards)
            guarded = nullcontext() if free else engine.context.guard.refusing_writing(values=first)
            noted = engine.external.watched(
                f"the first batch of {what}", wanted=first, function=function
            )
            with noted, guarded:
                for replica in engine.context.replicas:
                    with engine.context.attached(replica):
                        for shard in batch.shares.shards_of(replica.number):
                            if shard in batch.shards:
                                replica.note_shard(shard)
                                compute(DataShard(replica, function, batch, number, shard, seed))
                        replica.note_shard(-1)
    return sizes, batch


@dataclass(frozen=True, slots=True)
class DataCall:
    """A call that goes through a data set, as all devices must make it."""

    call: Call
    step: int
    """Number of the next step."""
    samples: int
    """Number of samples in the data set; 0 for a stream."""
    batch_size: int
    """Samples per batch, over all devices."""
    function: object
    """The user's function that is computed."""

    def at_hand(self, engine: Engine) -> AbstractContextManager[None]:
        """Have all parameters on this device where those of one stage will not do."""
        # Compiled code takes all of its parameters as arguments.
        return engine.gathered(self.step) if self._is_compiled(engine) else nullcontext()

    def may_note_sums(self, engine: Engine, batch: ShardedBatch) -> bool:
        """Whether to look for sums in a batch: not where one shard is all, and right in any case.

        Nor where PyTorch would choose other kernels, or compile anew, as it sees the looking.
        """
        alone = batch.shares.shards == 1 and batch.samples == self.samples
        modules = self._modules(engine)
        quick = any(isinstance(part, QUICK) for module in modules for part in module.modules())
        return not (alone or quick or self._is_compiled(engine))

    def _modules(self, engine: Engine) -> list[torch.nn.Module]:
        return [engine.context.replicas[0].module, *modules_of(self.function)]

    def _is_compiled(self, engine: Engine) -> bool:
        return any(calls_compiled(module, self.function) for module in self._modules(engine))

    def agree(self, engine: Engine, samples: int, batch: ShardedBatch | None) -> None:
        """Wait for all devices to have read so many samples, and compare what they were given.

        Args:
            engine: the devices of this process.
            samples: how many; 0 of a stream that has begun.
            batch: the last one; None if there was none.

        Raises:
            DisagreementError: another device was given something else.
        """
        head = CallDigest(
            call=self.call,
            step=self.step,
            samples=samples,
            batch_size=self.batch_size,
            shares=0 if batch is None else digest(batch.shares.counts),
            data=0 if batch is None else batch.data_digest,
        )
        engine.agree(head, function=self.function)

    def agree_on_end(self, engine: Engine, samples: int, last: ShardedBatch | None) -> None:
        """After all batches: compare how much a stream has yielded, which nobody knew before.

        Raises:
            ValueError: there was nothing at all.
            DisagreementError: another device was given another number of samples.
        """
        if self.samples:
            return
        data = 0 if last is None else last.data_digest
        head = CallDigest(call=self.call, step=self.step, samples=samples, data=data)
        engine.agree(head, function=self.function)
        if last is None:
            raise ValueError("the stream yields nothing: expected at least one sample")


class _Sums(TorchFunctionMode):
    """Notes scalars that are sums by an argument of their loss, as scores have no graph to say so.

    Not for steps: in which of them one looks depends on where a run was resumed, and a mode may
    show in their bits. See `onefold.shard.loss_watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, torch.Tensor] = {}  # kept: another tensor would get the same id

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = function(*args, **given)
        name = getattr(function, "__name__", "")
        kept = name in _SAME and any(id(each) in self._found for each in args[:1])
        if kept or given.get("reduction") == "sum" or given.get("size_average") is False:
            self._found[id(result)] = result
        else:
            self._found.pop(id(result), None)  # divided where it is
        return result

    def refuse(self, values: dict[str, Any], where: str) -> None:
        """Refuse values that are noted; all but scalars are read as one value a sample."""
        for name, value in values.items():
            if id(value) in self._found and not value.dim():
                raise LossError(
                    f"the value {name!r} of {where} is a sum over the shard (reduction='sum'), and "
                    f"onefold reads a scalar as the mean over the shard's samples. Return "
                    f"onefold.Sum(total) for a sum over the data set, and the values with "
                    f"reduction='none' for a mean"
                )


class _Tally:
    """Collects what one device's shards contribute, batch by batch."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        """One for each part of each value, as `ShardValues` has them."""
        self._shards: dict[tuple[int, int], tuple[torch.Tensor, list[float]]] = {}
        """By batch and shard: totals, (lines,) float64 on the device, and weights."""

    def add(self, own: DataShard, values: dict[str, object], where: str) -> None:
        """Add one shard's values."""
        samples = own.batch.count_of(own.shard).samples
        found = [
            (f"{part.kind} {name}", part)
            for name, value in values.items()
            for part in weigh(value, samples, f"the value {name!r} of {where}").parts
        ]
        lines, parts = map(list, zip(*found, strict=True))
        if self._lines and lines != self._lines:
            raise DisagreementError(
                f"{where}: the score function returned {list(values)}, and "
                f"{names_of(self._lines)} before; expected the same names, and terms of the same "
                f"kind, for every shard"
            )
        self._lines = lines
        # Each stays where it is: to read totals here, or to bring weights to a GPU, would wait for
        # the GPU in every shard.
        totals = torch.stack([part.total() for part in parts])
        self._shards[own.number, own.shard] = totals, [part.weight for part in parts]

    def report(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Return the lines, (n, 2) int64 places, and (n, lines, 2) float64 totals and weights."""
        places = torch.tensor(list(self._shards), dtype=torch.int64).view(-1, 2)
        numbers = torch.zeros(len(places), len(self._lines), 2, dtype=torch.float64)
        if self._shards:
            totals, weights = zip(*self._shards.values(), strict=True)
            numbers[..., 0] = torch.stack(totals)
            numbers[..., 1] = torch.tensor(weights, dtype=torch.float64)
        return self._lines, places, numbers


class DataShard(NamedTuple):
    """One shard of a batch in a pass over a data set."""

    replica: Replica
    """Computes it."""
    function: ScoreFunction
    """The user's."""
    batch: ShardedBatch
    number: int
    """Of the batch."""
    shard: int
    seed: int
    """Of the run."""

    def compute(self, purpose: str) -> object:
        """Compute the function, as before a shard of a step: nothing earlier may show.

        Args:
            purpose: what random numbers are for.
        """
        replica, place = self.replica, (self.seed, self.number)
        payload = move(self.batch.shards[self.shard], replica.device)
        replica.buffers.restore()
        own = derive_seed(purpose, *place, self.shard)
        seed_generators(own, replica.device, common=(purpose, place))
        replica.own_generators.seed(own, "held by a loss")
        with replica.autocast():
            return self.function(replica.module, payload)

    def values(self, where: str) -> dict[str, Any]:
        """Compute the function's values, and check that they have names.

        Args:
            where: names batch and shard in errors.

        Raises:
            LossError: the function returned something other than a dict of values by name.
        """
        refusal = partial(LossError, f"{where}: {_GATHERED}")
        with gathering(Refusing(refusal, is_of_step=False)):
            values = self.compute("evaluate")
        if not isinstance(values, dict) or not values:
            raise LossError(
                f"{where}: expected the function to return a dict of values by name, such as "
                f'{{"loss": ..., "accuracy": ...}}, got {type(values).__name__}'
            )
        for name in values:
            if not isinstance(name, str) or not name or "\n" in name:
                raise LossError(f"{where}: expected names of one line for values, got {name!r}")
        return values


def _alike(found: Sequence[list[str]]) -> list[str]:
    """Return the lines that all devices have alike; one with empty shards has none.

    Raises:
        DisagreementError: two devices have different lines.
    """
    first = next(filter(None, found), [])
    check_names([lines or first for lines in found])
    return first


def predict(
    engine: Engine, function: ScoreFunction, batches: Iterable[ShardedBatch], call: DataCall
) -> dict[str, Any]:
    """Compute a function's values for all samples of all batches, in order, on every device.

    Args:
        engine: the devices of this process.
        function: the user's function.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.

    Raises:
        LossError: a value is neither a tensor with one row per sample nor a list with one tensor,
            or dict of tensors, per sample.
        DisagreementError: names, dtypes or shapes differ between shards.
    """
    context = engine.context
    own: list[Column] = []
    # For each batch its shards' values, by shard and column, on the host.
    rows: dict[int, dict[int, dict[Column, Rows]]] = defaultdict(dict)

    def add(shard: DataShard) -> None:
        where = f"batch {shard.number} of a prediction, shard {shard.shard}"
        samples = shard.batch.size_of(shard.shard)
        left = shard.batch.count_of(shard.shard).samples
        if left < samples:
            raise LossError(
                f"{where}: collate returned {left} rows for {samples} samples: expected a row for "
                f"each sample, as predictions are in the order of the data set and have one for "
                f"each. Leave samples out of the data set instead, with torch.utils.data.Subset"
            )
        found: dict[Column, Rows] = {}
        for name, value in shard.values(where).items():
            found |= columns_of(name, value, samples, where)
        if own and own != [*found]:
            raise DisagreementError(
                f"{where}: the function returned {[*found]}, and {own} before; expected the same "
                f"names, dtypes and shapes for every shard"
            )
        own[:] = found
        rows[shard.number][shard.shard] = found

    with call.at_hand(engine), engine.evaluating() as ctrl_c:
        sizes, last = compute_shards(engine, function, batches, call, "a prediction", add, ctrl_c)
    call.agree_on_end(engine, sum(sizes), last)
    given = dict.fromkeys(context.own, own)
    columns = _alike(context.exchange.transport.all_gather_values(given))
    # Batch by batch: messages stay small, and each batch's own rows are freed once they are sent.
    parts: list[dict[Column, Rows]] = []
    for number in range(len(sizes)):
        parts += context.of_all_shards(rows.pop(number, {})).values()
    return values_by_name(parts, columns)


_TAKEN_WITH = ("running_mean", "running_var", "num_batches_tracked")


def recompute_statistics(engine: Engine, batches: Iterable[ShardedBatch], call: DataCall) -> None:
    """Give batch norms the statistics of a data set, on all devices; nothing without batch norms.

    Layers that the model does not use, or keeps in evaluation mode, stay as they are.

    Args:
        engine: the devices of this process; its loss is what runs the model.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.

    Raises:
        DisagreementError: another device was given other data.
        ValueError: a batch norm is one over the whole batch, which shards alone cannot compute.
    """
    first = engine.context.replicas[0]
    kept = _kept(first.module)
    layers = [layer for layer in _layers(first.module) if layer not in kept]
    for layer in layers:
        if isinstance(layer, SyncBatchNorm):
            raise ValueError(
                "update_bn: the model has an onefold.SyncBatchNorm, whose variance over a whole "
                "batch is not that of its shards: expected batch norms that normalize by the "
                "shard. Open the block without update_bn: averaged statistics are there"
            )
    if not layers:
        return
    first.buffers.absorb()
    number_of = {id(tensor): n for n, tensor in enumerate(first.buffers.places.tensors)}
    places = [[number_of[id(getattr(layer, name))] for name in _TAKEN_WITH] for layer in layers]
    before = first.buffers.flat.clone()
    try:
        with _beginning_anew(layers):
            sums = _sums(engine, batches, call, places, kept)
    finally:
        first.buffers.flat.copy_(before)
    if sums:
        _write(first, places, sums)


def _kept(module: torch.nn.Module) -> set[torch.nn.Module]:
    """The batch norms that the script keeps in evaluation mode in a model that trains."""
    if not module.training:
        return set()
    return {m for m in module.modules() if isinstance(m, BatchNorm) and not m.training}


def _layers(module: torch.nn.Module) -> list[Any]:
    """The batch norms that keep statistics."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, BatchNorm)
        and all(getattr(layer, name) is not None for name in _TAKEN_WITH)
    ]


@contextmanager
def _beginning_anew(layers: Sequence[Any]) -> Iterator[None]:
    """Have batch norms compute the plain mean of what they see, from nothing."""
    before = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


def _sums(
    engine: Engine,
    batches: Iterable[ShardedBatch],
    call: DataCall,
    places: list[list[int]],
    kept: Iterable[torch.nn.Module],
) -> list[torch.Tensor]:
    """Add up the statistics of all shards of all batches, which count alike.

    Returns:
        For each shard (k,) float64, layer by layer; nothing where there were no batches.
    """
    sums: dict[int, torch.Tensor] = {}

    def add(own: DataShard) -> None:
        own.compute("update_bn")
        own.replica.buffers.absorb()
        share = own.batch.count_of(own.shard).samples / own.batch.samples
        found = _read(own.replica, places, share)
        sums[own.shard] = sums[own.shard] + found if own.shard in sums else found

    with engine.gathered(call.step), engine.evaluating(training=True) as ctrl_c:
        for layer in kept:
            layer.training = False  # put back with the modes of all others
        _, last = compute_shards(engine, engine.loss, batches, call, "update_bn", add, ctrl_c)
    found = engine.context.of_all_shards(sums)
    if last is None:
        return []
    empty = torch.zeros_like(found[0])
    return [found.get(shard, empty) for shard in range(last.shares.shards)]


def _read(replica: Replica, places: list[list[int]], weight: float) -> torch.Tensor:
    """The statistics of one shard, weighted, and its counts: (k,) float64."""
    views = replica.buffers.flat.views
    parts = []
    for mean, variance, counted in places:
        seen = views[counted].double().reshape(1)
        # Where the layer did not run, what it began with must not count.
        share = weight * (seen > 0)
        parts += [views[mean].double() * share, views[variance].double() * share, share, seen]
    return torch.cat(parts)


def _write(first: Replica, places: list[list[int]], sums: Sequence[torch.Tensor]) -> None:
    """Write the means over all batches in which a layer ran to the first device's buffers."""
    total, most = fold_shards(sums, torch.add), fold_shards(sums, torch.maximum)
    views, start = first.buffers.flat.views, 0
    for mean, variance, counted in places:
        numel = views[mean].numel()
        share = total[start + 2 * numel]
        if share > 0:
            views[mean].copy_(total[start : start + numel] / share)
            views[variance].copy_(total[start + numel : start + 2 * numel] / share)
            views[counted].copy_(most[start + 2 * numel + 1])
        start += 2 * numel + 2
