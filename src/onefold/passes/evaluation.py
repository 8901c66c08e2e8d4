"""Passes over a data set: every sample once, with the same bits on any number of devices.

`evaluate` computes metrics, `predict` returns values for each sample, and `recompute_statistics`
computes batch norm statistics for averaged weights. Averaged weights have never run the model, so
an average of the recorded statistics does not belong to them. As in
`torch.optim.swa_utils.update_bn`, every batch norm starts from scratch, the model runs over the
data in training mode without gradients, and all batches have equal weight.

Note: the order of addition
---------------------------
Every shard starts from empty statistics, and its result is added in float64 to a sum for its shard
number, in the order of the batches. At the end the sums are folded over shard numbers. So the order
does not depend on which device ran which shard.
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
from onefold.shard.gradients import gradients_of, put_gradients
from onefold.shard.kernels import calls_compiled
from onefold.shard.model_parts import QUICK, modules_of
from onefold.shard.replica import Replica
from onefold.step.engine import Engine
from onefold.system.compat import BatchNorm
from onefold.system.process import ctrl_c_later

__all__ = ["DataCall", "ScoreFunction", "evaluate", "predict", "recompute_statistics"]


_GATHERED = (
    "onefold.gather cannot be called here, because it is for losses, and this function only sees "
    "its own shard. For a metric over the whole data set, compute it from the values that "
    "trainer.predict returns for every sample; for the loss of a batch, call the function outside "
    "the trainer's calls"
)

_SAME = {"clone", "cpu", "detach", "double", "float", "reshape", "squeeze", "to", "view"}
_SAME |= {"add", "neg", "sub"}
"""Functions that change the dtype, device or sign of a scalar, or add others, without dividing
it."""

ScoreFunction = Callable[[Any, Any], object]
"""Maps the model and one shard to a dict of values, which are read as in `onefold.core.mean`."""


class _Mode(AbstractContextManager[None]):
    """Set a module's mode inside this context; restore each part's mode afterwards.

    It is safe to exit twice, after an interrupted exit.
    """

    def __init__(self, module: torch.nn.Module, *, training: bool) -> None:
        # List all parts now instead of using `Modes`: parts may have been added since.
        self._parts = list(module.modules())
        self._before = [part.training for part in self._parts]
        self._module, self._training = module, training

    def __enter__(self) -> None:
        # A part that overrides train() may do more than set the flag (merge weights, for instance),
        # so call it even if all flags are already right.
        if not all(part.training is self._training and _is_plain(part) for part in self._parts):
            self._module.train() if self._training else self._module.eval()

    def __exit__(self, *_: object) -> None:
        # First the parts that override train(), which undoes their eval() (unmerges the weights).
        # train() also sets the children; they come later in the list.
        for part, mode in zip(self._parts, self._before, strict=True):
            if part.training is not mode and not _is_plain(part):
                part.train(mode)
        # Then set single flags: module.train() would reach parts that the user keeps in eval mode.
        for part, mode in zip(self._parts, self._before, strict=True):
            if part.training is not mode:
                part.training = mode


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether setting a module's mode only sets the flag."""
    return type(module).train is torch.nn.Module.train and "train" not in module.__dict__


@contextmanager
def _evaluating(engine: Engine, *, training: bool = False) -> Iterator[ctrl_c_later]:
    """Enter the state for evaluation, and restore the previous state afterwards.

    Args:
        engine: the devices of this process.
        training: whether to use training mode instead of evaluation mode.

    Yields:
        The context manager that delays Ctrl-C.
    """
    context = engine.context
    trained = list(context.parts.trained.values())
    mode = _Mode(context.module, training=training)
    # Devices of a process compute one after the other; each must find an empty `.grad`.
    restore = partial(put_gradients, trained, gradients_of(trained))
    with ctrl_c_later() as ctrl_c, ExitStack() as at_end:
        at_end.callback(restore)
        at_end.enter_context(context.computing())
        context.begun += [mode.__exit__, restore]
        with mode, torch.no_grad():
            yield ctrl_c


def evaluate(
    engine: Engine, score: ScoreFunction, batches: Iterable[ShardedBatch], call: DataCall
) -> dict[str, float]:
    """Compute every metric's total over its weight, over all samples of all batches.

    Args:
        engine: the devices of this process.
        score: the user's metric function.
        batches: batches of the data set, each with this process's shards.
        call: arguments that must be the same on all devices.

    Raises:
        LossError: a value cannot be read, or its shape does not match the samples.
        DisagreementError: the metric function does not return the same names for every shard, or
            another device received other data.
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

    with call.at_hand(engine), _evaluating(engine) as ctrl_c:
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
    # In the order of the fold: over shards, then over batches.
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
    """Compute this process's shards of all batches, with writes to parameters blocked.

    Args:
        engine: the devices of this process.
        function: the user's function.
        batches: batches of the data set, each with this process's shards.
        call: arguments that must be the same on all devices.
        what: name of the pass, for errors.
        compute: called for each shard.
        ctrl_c: delivers Ctrl-C between two batches.

    Returns:
        The number of samples in each batch, and the last batch, if there was one.
    """
    sizes: list[int] = []
    batch, seed = None, engine.context.settings.seed
    with ExitStack() as during:
        for number, batch in enumerate(batches):
            first = number == 0
            ctrl_c.deliver()
            # Agree after the first batch is read, because the data's digest is not known earlier.
            if first:
                call.agree(engine, call.samples, batch)
                during.enter_context(engine.context.with_generators_of(function))
                function = during.enter_context(engine.placement.parameters.forward(function))
            sizes.append(batch.samples)
            # A single shard may write to parameters, as in a plain loop, but not to gathered ones.
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
    """A call that iterates over a data set; it must be the same on all devices."""

    call: Call
    step: int
    """Step number of the next step."""
    samples: int
    """Number of samples in the data set; 0 for a stream."""
    batch_size: int
    """Samples per batch, over all devices."""
    function: object
    """The user's function."""

    def at_hand(self, engine: Engine) -> AbstractContextManager[None]:
        """Gather all parameters if gathering one stage at a time is not enough."""
        # Compiled code takes all of its parameters as arguments.
        return engine.gathered(self.step) if self._is_compiled(engine) else nullcontext()

    def may_note_sums(self, engine: Engine, batch: ShardedBatch) -> bool:
        """Return whether to look for sums in a batch.

        A sum is correct if one shard is the whole data set. Do not look either if it would make
        PyTorch choose other kernels or recompile.
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
        """Wait until all devices have read this many samples, and compare their arguments.

        Args:
            engine: the devices of this process.
            samples: number of samples; 0 for a stream that has begun.
            batch: the last batch; None if there was none.

        Raises:
            DisagreementError: another device has other arguments.
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
        """Compare the lengths of a stream after all batches, because they are unknown before.

        Raises:
            ValueError: the stream is empty.
            DisagreementError: another device received another number of samples.
        """
        if self.samples:
            return
        data = 0 if last is None else last.data_digest
        head = CallDigest(call=self.call, step=self.step, samples=samples, data=data)
        engine.agree(head, function=self.function)
        if last is None:
            raise ValueError("the stream yielded no samples, but at least one is required")


class _Sums(TorchFunctionMode):
    """Tracks scalars that are sums by an argument of their loss; metrics have no graph to tell.

    Not for steps: which steps are checked depends on where a run was resumed, and the mode may
    affect their bits. See `onefold.shard.loss_watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, torch.Tensor] = {}  # references keep the ids unique

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = function(*args, **given)
        name = getattr(function, "__name__", "")
        kept = name in _SAME and any(id(each) in self._found for each in args[:1])
        if kept or given.get("reduction") == "sum" or given.get("size_average") is False:
            self._found[id(result)] = result
        else:
            self._found.pop(id(result), None)  # other functions divide it
        return result

    def refuse(self, values: dict[str, Any], where: str) -> None:
        """Reject tracked scalars; any other value is read as one value per sample."""
        for name, value in values.items():
            if id(value) in self._found and not value.dim():
                raise LossError(
                    f"the value {name!r} of {where} is a sum over the shard (reduction='sum'), but "
                    f"onefold reads a scalar as the mean over the shard's samples. Return "
                    f"onefold.Sum(total) for a sum over the data set, or the values with "
                    f"reduction='none' for a mean"
                )


class _Tally:
    """Collects the contributions of one device's shards, batch by batch."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        """Lines for the parts of all values, as in `ShardValues`."""
        self._shards: dict[tuple[int, int], tuple[torch.Tensor, list[float]]] = {}
        """Totals, (lines,) float64 on the device, and weights, by batch and shard."""

    def add(self, own: DataShard, values: dict[str, object], where: str) -> None:
        """Add the values of one shard."""
        samples = own.batch.count_of(own.shard).samples
        found = [
            (f"{part.kind} {name}", part)
            for name, value in values.items()
            for part in weigh(value, samples, f"the value {name!r} of {where}").parts
        ]
        lines, parts = map(list, zip(*found, strict=True))
        if self._lines and lines != self._lines:
            raise DisagreementError(
                f"{where}: the metric function must return the same names, and terms of the same "
                f"kind, for every shard, but returned {list(values)} after {names_of(self._lines)}"
            )
        self._lines = lines
        # Leave totals and weights where they are: reading totals here, or copying weights to a GPU,
        # would block on the GPU in every shard.
        totals = torch.stack([part.total() for part in parts])
        self._shards[own.number, own.shard] = totals, [part.weight for part in parts]

    def report(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Return the lines, (n, 2) int64 indices, and (n, lines, 2) float64 totals and weights."""
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
    """The replica that computes it."""
    function: ScoreFunction
    """The user's function."""
    batch: ShardedBatch
    number: int
    """Number of the batch."""
    shard: int
    seed: int
    """Seed of the run."""

    def compute(self, purpose: str) -> object:
        """Compute the function from the same state as a shard of a step, without earlier effects.

        Args:
            purpose: purpose of the random numbers.
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
        """Compute the function's values, and check their names.

        Args:
            where: names of the batch and shard, for errors.

        Raises:
            LossError: the function did not return a dict of values by name.
        """
        refusal = partial(LossError, f"{where}: {_GATHERED}")
        with gathering(Refusing(refusal, is_of_step=False)):
            values = self.compute("evaluate")
        if not isinstance(values, dict) or not values:
            raise LossError(
                f"{where}: the function must return a dict of values by name, such as "
                f'{{"loss": ..., "accuracy": ...}}, but got {type(values).__name__}'
            )
        for name in values:
            if not isinstance(name, str) or not name or "\n" in name:
                raise LossError(f"{where}: value names must be single lines, but got {name!r}")
        return values


def _alike(found: Sequence[list[str]]) -> list[str]:
    """Return the lines that all devices share; a device whose shards are empty has none.

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
        batches: batches of the data set, each with this process's shards.
        call: arguments that must be the same on all devices.

    Raises:
        LossError: a value is neither a tensor with one row per sample nor a list with one tensor,
            or dict of tensors, per sample.
        DisagreementError: names, dtypes or shapes differ between shards.
    """
    context = engine.context
    own: list[Column] = []
    # Values of each batch, by shard and column, on the host.
    rows: dict[int, dict[int, dict[Column, Rows]]] = defaultdict(dict)

    def add(shard: DataShard) -> None:
        where = f"batch {shard.number} of a prediction, shard {shard.shard}"
        samples = shard.batch.size_of(shard.shard)
        left = shard.batch.count_of(shard.shard).samples
        if left < samples:
            raise LossError(
                f"{where}: collate returned {left} rows for {samples} samples, but a prediction "
                f"needs one row per sample, in the order of the data set. Remove samples from the "
                f"data set instead, with torch.utils.data.Subset"
            )
        found: dict[Column, Rows] = {}
        for name, value in shard.values(where).items():
            found |= columns_of(name, value, samples, where)
        if own and own != [*found]:
            raise DisagreementError(
                f"{where}: the function must return the same names, dtypes and shapes for every "
                f"shard, but returned {[*found]} after {own}"
            )
        own[:] = found
        rows[shard.number][shard.shard] = found

    with call.at_hand(engine), _evaluating(engine) as ctrl_c:
        sizes, last = compute_shards(engine, function, batches, call, "a prediction", add, ctrl_c)
    call.agree_on_end(engine, sum(sizes), last)
    given = dict.fromkeys(context.own, own)
    columns = _alike(context.exchange.transport.all_gather_values(given))
    # Batch by batch: messages stay small, and each batch's own rows are freed after sending.
    parts: list[dict[Column, Rows]] = []
    for number in range(len(sizes)):
        parts += context.of_all_shards(rows.pop(number, {})).values()
    return values_by_name(parts, columns)


_TAKEN_WITH = ("running_mean", "running_var", "num_batches_tracked")


def recompute_statistics(engine: Engine, batches: Iterable[ShardedBatch], call: DataCall) -> None:
    """Recompute batch norm statistics over a data set, on all devices; no-op without batch norms.

    Layers that the model does not use, or keeps in evaluation mode, do not change.

    Args:
        engine: the devices of this process; its loss runs the model.
        batches: batches of the data set, each with this process's shards.
        call: arguments that must be the same on all devices.

    Raises:
        DisagreementError: another device received other data.
        ValueError: a batch norm is an `onefold.SyncBatchNorm`, which shards alone cannot compute.
    """
    first = engine.context.replicas[0]
    kept = _kept(first.module)
    layers = [layer for layer in _layers(first.module) if layer not in kept]
    for layer in layers:
        if isinstance(layer, SyncBatchNorm):
            raise ValueError(
                "update_bn does not support onefold.SyncBatchNorm, because the variance over a "
                "whole batch is not that of its shards. Omit update_bn: the block shows averaged "
                "statistics"
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
    """Return the batch norms that the script keeps in evaluation mode in a model that trains."""
    if not module.training:
        return set()
    return {m for m in module.modules() if isinstance(m, BatchNorm) and not m.training}


def _layers(module: torch.nn.Module) -> list[Any]:
    """Return the batch norms that have running statistics."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, BatchNorm)
        and all(getattr(layer, name) is not None for name in _TAKEN_WITH)
    ]


@contextmanager
def _beginning_anew(layers: Sequence[Any]) -> Iterator[None]:
    """Reset batch norms, and let them compute the plain mean over their inputs."""
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
    """Add up the statistics of all shards of all batches, with equal weight per batch.

    Returns:
        (k,) float64 for each shard, layer by layer; empty if there were no batches.
    """
    sums: dict[int, torch.Tensor] = {}

    def add(own: DataShard) -> None:
        own.compute("update_bn")
        own.replica.buffers.absorb()
        share = own.batch.count_of(own.shard).samples / own.batch.samples
        found = _read(own.replica, places, share)
        sums[own.shard] = sums[own.shard] + found if own.shard in sums else found

    with engine.gathered(call.step), _evaluating(engine, training=True) as ctrl_c:
        for layer in kept:
            layer.training = False  # restored with all other modes
        _, last = compute_shards(engine, engine.loss, batches, call, "update_bn", add, ctrl_c)
    found = engine.context.of_all_shards(sums)
    if last is None:
        return []
    empty = torch.zeros_like(found[0])
    return [found.get(shard, empty) for shard in range(last.shares.shards)]


def _read(replica: Replica, places: list[list[int]], weight: float) -> torch.Tensor:
    """Return the weighted statistics of one shard, and its counts: (k,) float64."""
    views = replica.buffers.flat.views
    parts = []
    for mean, variance, counted in places:
        seen = views[counted].double().reshape(1)
        # If the layer did not run, its initial statistics must not count.
        share = weight * (seen > 0)
        parts += [views[mean].double() * share, views[variance].double() * share, share, seen]
    return torch.cat(parts)


def _write(first: Replica, places: list[list[int]], sums: Sequence[torch.Tensor]) -> None:
    """Write the means over all batches that ran a layer to the first device's buffers."""
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
