"""Scores a whole data set: every sample once, and the same bits on any number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onefold.core.batch import ShardedBatch, move
from onefold.core.calldigest import Call, CallDigest, plan_number
from onefold.core.fold import fold_shards
from onefold.core.gathering import Refusing, gathering
from onefold.core.mean import weigh
from onefold.core.randomness import derive_seed, seed_generators
from onefold.core.values import Column, Rows, columns_of, values_by_name
from onefold.core.wire import decode, encode
from onefold.errors import DisagreementError, LossError
from onefold.exchange.exchange import Exchange
from onefold.placement.parameters import QUICK
from onefold.shard.kernels import calls_compiled
from onefold.shard.modelparts import modules_of
from onefold.shard.replica import Replica
from onefold.step.engine import Engine

__all__ = ["DataCall", "Place", "ScoreFunction", "compute_shards", "evaluate", "predict"]


_UNDIVIDED = " (not divided)"
_GATHERED = (
    "onefold.gather is for losses; here expected a function of a shard's own samples. For a score "
    "over the whole data set: trainer.predict gives the values of every sample, and then score "
    "those; for the loss of a batch: call it outside of the trainer's calls"
)

_SAME = {"clone", "cpu", "detach", "double", "float", "reshape", "squeeze", "to", "view"}
_SAME |= {"add", "neg", "sub"}
"""What gives a scalar another dtype, device or sign, or adds others, and divides it by nothing."""

Place = tuple[int, int]
"""Numbers of a batch and of a shard in it."""

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
    tallies = {replica.number: _Tally() for replica in engine.context.replicas}
    seed = engine.context.settings.seed

    def add(replica: Replica, score: ScoreFunction, batch: ShardedBatch, place: Place) -> None:
        number, shard = place
        where = f"batch {number} of an evaluation, shard {shard}"
        sums = _Sums() if number == 0 and call.may_note_sums(engine, batch) else None
        with sums or nullcontext():
            values = values_of_shard(replica, score, batch, place, seed, where)
        if sums:
            sums.refuse(values, where)
        tallies[replica.number].add(place, values, batch.count_of(shard).samples, where)

    with call.at_hand(engine), engine.evaluating():
        sizes, last = compute_shards(engine, score, batches, call, "an evaluation", add)
    call.agree_on_end(engine, sum(sizes), last)
    shape = len(sizes), 0 if last is None else last.plan.shards
    return _combine(engine.context.exchange, tallies, shape)


def compute_shards(
    engine: Engine,
    function: ScoreFunction,
    batches: Iterable[ShardedBatch],
    call: DataCall,
    what: str,
    compute: Callable[[Replica, ScoreFunction, ShardedBatch, Place], None],
) -> tuple[list[int], ShardedBatch | None]:
    """Compute this process's shards of all batches, while nobody may write to parameters.

    Args:
        engine: the devices of this process.
        function: the user's function.
        batches: the data set's, each with this process's shards.
        call: what all devices must have been given alike.
        what: the pass, for errors.
        compute: called for each shard, with the device, the function and the shard's place.

    Returns:
        The number of samples in each batch; and the last batch, if there was one.
    """
    sizes: list[int] = []
    batch = None
    with ExitStack() as during:
        for number, batch in enumerate(batches):
            first = number == 0
            # Only now: the data's digest is known once the first batch has been read.
            if first:
                call.agree(engine, batch)
                function = during.enter_context(engine.placement.forward(function))
            sizes.append(batch.samples)
            # One shard may write, as in a plain loop; but not to gathered parameters.
            free = engine.placement.may_write(batch.plan.shards)
            guarded = nullcontext() if free else engine.context.guard.refusing_writing(values=first)
            with engine.noting(f"the first batch of {what}", wanted=first), guarded:
                for replica in engine.context.replicas:
                    with engine.context.attached(replica):
                        for shard in batch.plan.shards_of(replica.number):
                            if shard in batch.shards:
                                compute(replica, function, batch, (number, shard))
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
        return engine.unsharded(self.step) if self._is_compiled(engine) else nullcontext()

    def may_note_sums(self, engine: Engine, batch: ShardedBatch) -> bool:
        """Whether to look for sums in a batch: not where one shard is all, and right in any case.

        Nor where PyTorch would choose other kernels, or compile anew, as it sees the looking.
        """
        alone = batch.plan.shards == 1 and batch.samples == self.samples
        modules = self._modules(engine)
        quick = any(isinstance(part, QUICK) for module in modules for part in module.modules())
        return not (alone or quick or self._is_compiled(engine))

    def _modules(self, engine: Engine) -> list[torch.nn.Module]:
        return [engine.context.replicas[0].module, *modules_of(self.function)]

    def _is_compiled(self, engine: Engine) -> bool:
        return any(calls_compiled(module, self.function) for module in self._modules(engine))

    def agree(self, engine: Engine, batch: ShardedBatch) -> None:
        """Wait for all devices to have read their first batch, and compare what they were given.

        Raises:
            DisagreementError: another device was given something else.
        """
        head = CallDigest(
            call=self.call,
            step=self.step,
            samples=self.samples,
            batch_size=self.batch_size,
            plan=plan_number(batch.plan),
            data=batch.data_digest,
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
        head = CallDigest(
            call=self.call,
            step=self.step,
            samples=samples,
            data=0 if last is None else last.data_digest,
        )
        engine.agree(head, function=self.function)
        if last is None:
            raise ValueError("the stream yields nothing: expected at least one sample")


class _Sums(TorchFunctionMode):
    """Notes scalars that are sums by an argument of their loss, as scores have no graph to say so.

    Not for steps: in which of them one looks depends on where a run was resumed, and a mode may
    show in their bits. See `onefold.shard.losscheck`.
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
        self.names: list[str] = []
        """One line for each part of each value: its name, and whether it is not divided."""
        self.shards: dict[Place, tuple[torch.Tensor, list[float]]] = {}
        """Totals, (lines,) float64 on the device, and weights."""

    def add(self, place: Place, values: dict[str, object], samples: int, where: str) -> None:
        """Add one shard's values."""
        found = [
            (name, part)
            for name, value in values.items()
            for part in weigh(value, samples, f"the value {name!r} of {where}").parts
        ]
        names = [name + (_UNDIVIDED if part.kind == "sum" else "") for name, part in found]
        if self.names and names != self.names:
            before = list(dict.fromkeys(name.removesuffix(_UNDIVIDED) for name in self.names))
            raise DisagreementError(
                f"{where}: the score function returned {list(values)}, and {before} before; "
                f"expected the same names, and terms of the same kind, for every shard"
            )
        self.names = names
        parts = [part for _, part in found]
        # Each stays where it is: to read totals here, or to bring weights to a GPU, would wait for
        # the GPU in every shard.
        totals = torch.stack([part.total() for part in parts])
        self.shards[place] = totals, [part.weight for part in parts]

    def table(self, shape: tuple[int, int], names: int) -> torch.Tensor:
        """Return (batches, V, lines, 2) float64 on the host, zeros for other devices' shards."""
        table = torch.zeros(*shape, names, 2, dtype=torch.float64)
        if self.shards:
            totals = torch.stack([total for total, _ in self.shards.values()]).cpu()
            for (place, (_, weights)), total in zip(self.shards.items(), totals, strict=True):
                table[place][:, 0] = total
                table[place][:, 1] = torch.tensor(weights, dtype=torch.float64)
        return table


def values_of_shard(
    replica: Replica,
    function: ScoreFunction,
    batch: ShardedBatch,
    place: Place,
    seed: int,
    where: str,
) -> dict[str, Any]:
    """Compute a function's values for one shard, and check that they have names.

    Args:
        replica: computes it.
        function: the user's function.
        batch: holds the shard.
        place: numbers of the batch and the shard.
        seed: the seed of the run.
        where: batch and shard, for errors.

    Raises:
        LossError: the function returned something other than a dict of values by name.
    """
    number, shard = place
    payload = move(batch.shards[shard], replica.device)
    # As before a shard of a step: nothing that ran before on this device may show.
    replica.buffers.restore()
    common = "evaluate", (seed, number)
    seed_generators(derive_seed("evaluate", seed, number, shard), replica.device, common=common)
    refusal = partial(LossError, f"{where}: {_GATHERED}")
    with gathering(Refusing(refusal, is_of_step=False)), replica.autocast():
        values = function(replica.module, payload)
    if not isinstance(values, dict) or not values:
        raise LossError(
            f"{where}: expected the function to return a dict of values by name, such as "
            f'{{"loss": ..., "accuracy": ...}}, got {type(values).__name__}'
        )
    # Names travel between devices one per line.
    for name in values:
        if not isinstance(name, str) or not name or "\n" in name:
            raise LossError(f"{where}: expected names of one line for values, got {name!r}")
    return values


def _combine(
    exchange: Exchange, tallies: dict[int, _Tally], shape: tuple[int, int]
) -> dict[str, float]:
    # Lines first: a device whose shards were all empty needs them for the size of its table.
    names = agree_on_lines(exchange, {number: t.names for number, t in tallies.items()})
    tables = {number: tally.table(shape, len(names)) for number, tally in tallies.items()}
    rows = exchange.transport.all_gather_rows(
        {number: table.flatten() for number, table in tables.items()}
    )
    # A shard was computed by one device and is zero in the others' tables: the order of this sum is
    # of no matter. That over shards and then batches is the fold's.
    table = rows.cpu().sum(dim=0).view(*shape, len(names), 2)  # (batches, V, lines, 2)
    by_batch = fold_shards(list(table.unbind(dim=1)), torch.add)  # (batches, lines, 2)
    totals = fold_shards(list(by_batch.unbind(dim=0)), torch.add)
    scores: dict[str, float] = {}
    seen: set[str] = set()
    for line, (total, weight) in zip(names, totals.tolist(), strict=True):
        name = line.removesuffix(_UNDIVIDED)
        scores.setdefault(name, math.nan)
        if name == line and not weight:
            continue
        value = total if name != line else total / weight
        # A value of several terms has a line for each: its number is the sum of those with weight.
        scores[name] = scores[name] + value if name in seen else value
        seen.add(name)
    return scores


def agree_on_lines(exchange: Exchange, own: dict[int, list[str]]) -> list[str]:
    """Return the lines that all devices have alike; a device with empty shards only learns them.

    Args:
        exchange: with all devices.
        own: for each own device the names of its values, or other lines; empty if it has no values.

    Raises:
        DisagreementError: two devices have different lines.
    """
    texts = {number: "\n".join(names).encode() for number, names in own.items()}
    received = [text.decode() for text in exchange.transport.all_gather_objects(texts)]
    filled = [text for text in received if text]
    if not filled:
        return []
    for number, text in enumerate(received):
        if text and text != filled[0]:
            raise DisagreementError(
                f"device {number} has {text.splitlines()} and another one "
                f"{filled[0].splitlines()}: expected the same names for every shard"
            )
    return filled[0].split("\n")


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
    own = {replica.number: _Said() for replica in engine.context.replicas}
    seed = engine.context.settings.seed

    def add(replica: Replica, function: ScoreFunction, batch: ShardedBatch, place: Place) -> None:
        number, shard = place
        where = f"batch {number} of a prediction, shard {shard}"
        _refuse_left_out(batch, shard, where)
        values = values_of_shard(replica, function, batch, place, seed, where)
        own[replica.number].add(values, number, batch.size_of(shard), where)

    with call.at_hand(engine), engine.evaluating():
        sizes, last = compute_shards(engine, function, batches, call, "a prediction", add)
    call.agree_on_end(engine, sum(sizes), last)
    columns = agree_on_lines(engine.context.exchange, {n: said.columns for n, said in own.items()})
    # Batch by batch: messages stay small, and each batch's own rows are freed once they are sent.
    parts: list[dict[Column, Rows]] = []
    for number in range(len(sizes)):
        texts = {device: said.message(number) for device, said in own.items()}
        for message in engine.context.exchange.transport.all_gather_objects(texts):
            parts += decode(message)
    return values_by_name(parts, columns)


def _refuse_left_out(batch: ShardedBatch, shard: int, where: str) -> None:
    samples, left = batch.size_of(shard), batch.count_of(shard).samples
    if left < samples:
        raise LossError(
            f"{where}: collate returned {left} rows for {samples} samples: expected a row for each "
            f"sample, as predictions are in the order of the data set and have one for each. Leave "
            f"samples out of the data set instead, with torch.utils.data.Subset"
        )


class _Said:
    """Collects the values of one device's shards, batch by batch."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self._batches: dict[int, list[dict[Column, Rows]]] = {}
        """Batch to its shards' values, by column, on the host."""

    def add(self, values: dict[str, Any], number: int, samples: int, where: str) -> None:
        """Add one shard's values to those of batch ``number``."""
        found: dict[Column, Rows] = {}
        for name, value in values.items():
            found |= columns_of(name, value, samples, where)
        columns = list(found)
        if self.columns and columns != self.columns:
            raise DisagreementError(
                f"{where}: the function returned {columns}, and {self.columns} before; expected "
                f"the same names, dtypes and shapes for every shard"
            )
        self.columns = columns
        self._batches.setdefault(number, []).append(found)

    def message(self, number: int) -> bytes:
        """Return a batch's values as bytes, and forget them."""
        return encode(self._batches.pop(number, []), "values")
