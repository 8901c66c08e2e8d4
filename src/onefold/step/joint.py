"""Runs the shards of a step together if the loss needs the tensors of all of them.

`JointShards` finds what shards must know of each other beforehand. `RowExchange` sends gathered
tensors to all devices, and returns their summed gradients. `ValueExchange` gathers the metrics and
outputs that losses return in addition to the loss.

Note: two runs
--------------
A loss that gathers cannot finish in one shard before it has started in all others. Keeping the
activations of every shard until then would take the memory of the whole batch. So shards run twice
(Gao et al., 2021). The first run computes the gathered tensors, and the gradient of the whole
batch's loss with respect to them. The second run is the usual one, shard by shard: `gather` returns
the known tensors, and backward starts from the loss and from the tensors that were gathered, with
their gradients. This is the chain rule.

Note: one run
-------------
With batch norm over the whole batch, nearly all of a model follows the first gather, and the first
run would keep all of it. Such models run once and keep the activations of all shards of a device,
as a plain loop with the whole batch does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import all_finite
from onefold.core.fold import Block, blocks_of, fold, fold_shards, published_by
from onefold.core.gatherer import GatheredRows
from onefold.core.gathering import SyncBatchNorm, packed_bytes, unpacked_bytes
from onefold.core.results import ShardResult
from onefold.core.settings import added_up_in
from onefold.core.values import Column, ShardValues, StepValues, names_of, values_by_name
from onefold.errors import DisagreementError, LossError
from onefold.placement.base import StepContext
from onefold.shard.gather import GatherCall, GatherPosition, GatherReplay, JointShard
from onefold.shard.replica import Replica, ShardTask, Weighed
from onefold.step.result import Objective
from onefold.watch.timing import Phase

__all__ = ["JointShards", "RowExchange", "ValueExchange"]


class JointShards:
    """Prepares the steps of losses that gather, or that have several terms.

    Args:
        context: this process's part of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        modules = context.module.modules()
        # The model alone decides between one run and two. If the number of shards on a device
        # decided, the bits would depend on the shares.
        self._once = any(isinstance(module, SyncBatchNorm) for module in modules)

    def prepared(
        self, objective: Objective, task: ShardTask
    ) -> tuple[ShardTask, dict[int, ShardResult]]:
        """Complete the task of a step. Call it on all devices.

        Returns:
            The task for running shards one by one, and the results of shards that ran already.

        Raises:
            LossError: shards gather differently, or have different numbers of terms.
        """
        if task.is_plain:
            return task, {}
        if objective.gathers and self._once:
            run = _JointRun(self._context, task)
            run.drive()
            return replace(task, divisors=run.divisors), run.results
        if objective.gathers:
            return self._first_run(task).known(task), {}
        if objective.several_terms:
            # Run only forward passes: backward requires the denominators of all terms.
            found: dict[int, Sequence[tuple[str, float]]] = {}
            for replica in self._context.replicas:
                with self._context.attached(replica):
                    found.update(replica.weigh_shards(task))
            task = replace(task, divisors=trade_divisors(self._context, task, found))
        return task, {}

    def spoilt(self, task: ShardTask) -> str:
        """Run again to describe the first gradient of a gathered tensor that is not finite.

        `gather` spreads such a gradient to all shards, so that their own gradients do not show
        where it started.

        Returns:
            Which shard produced it; empty if there is none.
        """
        found = self._first_run(task, looks=True).spoilt
        # Backward visits the last call first, so that is where the value started.
        own = min(((-call, shard) for shard, call in found), default=None)
        transport = self._context.exchange.transport
        rows = transport.all_gather_values(dict.fromkeys(self._context.own, own))
        first = min(filter(None, rows), default=None)
        if first is None:
            return ""
        call, shard = -first[0] + 1, first[1]
        return (
            f"step {task.step}, shard {shard} ({task.batch.describe(shard)}): the gradient of the "
            f"tensor that call {call} of onefold.gather (or onefold.SyncBatchNorm) returned is not "
            f"finite"
        )

    def _first_run(self, task: ShardTask, *, looks: bool = False) -> _JointRun:
        parts = self._context.parts
        # Freezing parameters saves the memory: autograd then keeps only the part of the model that
        # follows a gather and depends on it.
        parts.restore_frozen([False] * len(parts.named))
        try:
            frozen = replace(task, trainable=parts.trainable())
            run = _JointRun(self._context, frozen, looks=looks)
            run.drive()
        finally:
            parts.restore_frozen(task.trainable)
        return run


class _JointRun:
    """Runs all shards of this process once, in turns, each from one stop to the next.

    Args:
        context: this process's part of the run.
        task: the task that all shards of the step share.
        looks: whether to look for gradients that are not finite.
    """

    def __init__(self, context: StepContext, task: ShardTask, *, looks: bool = False) -> None:
        self._context, self._replicas = context, context.replicas
        self._task, self._looks = task, looks
        self._trade = RowExchange(context, task)
        self._current = context.first
        self._turns = self._make_turns()
        self._phase: Phase = "forward"
        self._calls: list[tuple[Gathered, dict[int, GatheredRows]]] = []
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}
        self.divisors: Sequence[float] | None = None
        """Denominators of a loss with several terms."""
        self.results: dict[int, ShardResult] = {}
        """Result of each shard."""
        self.spoilt: list[tuple[int, int]] = []
        """Shard and call of each gradient that is not finite, if ``looks``."""

    def drive(self) -> None:
        """Run all shards to their end."""
        for replica in self._replicas:
            replica.start_step(self._task)
        try:
            self._backward(self._forward())
        finally:
            # End the threads on errors too: none may live on and use the module that it borrowed.
            for turn in self._turns.values():
                turn.end()
            self._put_back()

    def known(self, task: ShardTask) -> ShardTask:
        """Return the task of the second run, with all that this run found."""

        def gatherer(shard: int) -> GatherReplay:
            return GatherReplay(
                [
                    GatherCall(joined[shard], self._gradients.get((shard, call.number)))
                    for call, joined in self._calls
                ]
            )

        return replace(task, gatherers=gatherer, divisors=self.divisors)

    def _make_turns(self) -> dict[int, JointShard]:
        batch = self._task.batch
        homes = {
            shard: replica
            for replica in self._replicas
            for shard in batch.shares.shards_of(replica.number)
            if shard in batch.shards
        }
        turns: dict[int, JointShard] = {}
        task = replace(self._task, gatherers=turns.__getitem__)
        for shard, replica in homes.items():
            compute = partial(replica.compute, shard, task)
            # A shard that is alone in its process finds its state unchanged, so it saves none.
            turns[shard] = JointShard(replica, shard, compute, alone=len(homes) == 1)
        return turns

    def _forward(self) -> dict[int, GatherPosition]:
        """Run all shards until backward needs other shards; return their positions."""
        stops = self._resume(dict.fromkeys(self._turns))
        while True:
            standings = self._trade.agree({shard: _standing(stop) for shard, stop in stops.items()})
            if standings[0].at == "end":
                # All shards are at the same call, so the first one decides for all devices.
                break
            stops = self._resume(self._join(standings, stops))
        if max(standing.terms for standing in standings.values()) > 1:
            terms = {shard: stop.terms for shard, stop in stops.items()}
            self.divisors = trade_divisors(self._context, self._task, terms)
        self._phase = "backward"
        return self._resume(dict.fromkeys(stops, self.divisors))

    def _backward(self, stops: dict[int, GatherPosition]) -> None:
        # Autograd reaches the calls in reverse order.
        for call, _ in reversed(self._calls):
            if call.differentiable:
                stops = self._resume(self._add_up(call, stops))
        for shard, stop in stops.items():
            # Autograd has visited every call once, the last one first, so every shard has finished.
            assert stop.result is not None
            self.results[shard] = stop.result

    def _join(
        self, standings: Mapping[int, ShardPosition], stops: Mapping[int, GatherPosition]
    ) -> dict[int, GatheredRows]:
        """Gather one call's tensors of all shards."""
        first = standings[0]
        call = Gathered(
            number=len(self._calls),
            dtype=getattr(torch, first.dtype.removeprefix("torch.")),
            shapes={shard: standing.shape for shard, standing in standings.items()},
            differentiable=first.differentiable,
        )
        tensors = {s: stop.tensor for s, stop in stops.items() if stop.tensor is not None}
        with self._context.timed("exchange", "gather"):
            whole = self._trade.join(call, tensors)
        # A single copy per device; shards clone it before a loss may write to it.
        on = {tensor.device: whole.to(tensor.device) for tensor in tensors.values()}
        joined = {s: GatheredRows(on[t.device], call.own(s)) for s, t in tensors.items()}
        self._calls.append((call, joined))
        return joined

    def _add_up(
        self, call: Gathered, stops: Mapping[int, GatherPosition]
    ) -> dict[int, torch.Tensor]:
        """Sum the gradients of one call over all shards; return each shard its rows."""
        given = {s: stop.tensor for s, stop in stops.items() if stop.tensor is not None}
        if self._looks:
            # Check before summing: afterwards every shard has the bad gradient.
            self.spoilt += [(s, call.number) for s, g in given.items() if not all_finite(g)]
        with self._context.timed("exchange", "gather gradients"):
            whole = self._trade.add_up(call, given)
        rows = {shard: whole[call.own(shard)].to(g.device) for shard, g in given.items()}
        self._gradients |= {(shard, call.number): gradient for shard, gradient in rows.items()}
        return rows

    def _resume(self, answers: Mapping[int, Any]) -> dict[int, GatherPosition]:
        """Let each shard run to its next stop, one after the other."""
        stops = {}
        # Resume shards one at a time, by number: concurrent threads would change the order.
        for shard, answer in answers.items():
            turn = self._turns[shard]
            self._attach(turn.replica)
            with turn.replica.watch.timed(self._phase, f"{self._phase} shard {shard}, together"):
                stops[shard] = turn.resume(answer)
        return stops

    def _attach(self, replica: Replica) -> None:
        # Attaching rebinds parameters and buffers, so skip it between shards of the same replica.
        if replica is not self._current:
            self._current = replica
            replica.attach()

    def _put_back(self) -> None:
        """Restore the state that a step expects, however far the shards got."""
        for replica in self._replicas:
            self._attach(replica)
            # Frees the gradients that shards left in `.grad`.
            replica.start_step(self._task)
            replica.buffers.restore()
            replica.end()
        self._attach(self._replicas[0])
        parts = self._context.parts
        parts.modes.restore(self._task.modes)
        parts.restore_frozen(self._task.trainable)


def _standing(stop: GatherPosition) -> ShardPosition:
    tensor = stop.tensor
    dtype, shape = ("", ()) if tensor is None else (str(tensor.dtype), tuple(tensor.shape))
    return ShardPosition(stop.at, len(stop.terms), dtype, shape, stop.differentiable)


def trade_divisors(
    context: StepContext, task: ShardTask, found: Weighed
) -> tuple[float, ...] | None:
    """Sum the weight of each loss term over the whole batch; None if the loss has one term.

    Call it on all devices; each gets the same numbers.

    Args:
        context: this process's part of the run.
        task: the task that all shards of the step share.
        found: for each shard of this process, the kind and weight of each term.

    Raises:
        LossError: shards have different numbers of terms.
    """
    given, size_of = context.of_all_shards(found), task.batch.size_of
    # A shard without samples does not run, and so has no terms.
    rows: list[Sequence[tuple[str, float]]] = [given.get(s, ()) for s in range(task.shards)]
    terms = max(map(len, rows))
    wrong = next((s for s, row in enumerate(rows) if size_of(s) and len(row) != terms), None)
    if wrong is not None:
        raise LossError(
            f"the loss of step {task.step}, shard {wrong} has {len(rows[wrong])} terms, but "
            f"another shard has {terms}. Return the same terms for every shard; a term with "
            f"nothing to count has the weight 0"
        )
    if terms == 1:
        return None
    columns = zip(*(row or [("mean", 0.0)] * terms for row in rows), strict=True)
    # Add in the order of the fold: denominators affect the bits of the result, as gradients do.
    return tuple(
        1.0
        if any(kind == "sum" for kind, _ in column)
        else fold_shards([float(weight) for _, weight in column], operator.add)
        for column in columns
    )


_Names = tuple[tuple[str, ...], tuple[Column, ...]]
"""Names of a shard's metrics, and of its outputs."""


class ValueExchange:
    """Keeps the names of a run's metrics, which define the layout of their part of the table.

    `onefold.core.values` describes how they are sent.

    Args:
        context: this process's part of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        # Filled only from values that all devices see, so it is the same on all devices.
        self._known: dict[int, _Names] = {}

    def of_step(self, batch: ShardedBatch, step: int) -> StepValues:
        """Return the metrics of a step. Call it on all devices, before ``publish_parameters``.

        Raises:
            DisagreementError: shards returned different names.
        """
        shards = self._context.table
        # Empty shards do not run, so they have no names.
        kinds = {kind for kind, n in zip(shards.kinds.tolist(), batch.sizes, strict=True) if n}
        known = self._known.get(kinds.pop()) if len(kinds) == 1 else None
        if known is None:
            (lines, columns), table = self._first_of(batch, step)
        else:
            # Clone, because the script may read the values long after the table is overwritten.
            (lines, columns), table = known, shards.values[:, : len(known[0])].clone()
        return StepValues(lines, table, self._outputs(batch, columns) if columns else {})

    def _given(self, batch: ShardedBatch) -> dict[int, ShardValues]:
        """Metrics of this process's shards that returned any."""
        given, shares = self._context.table.given, batch.shares
        own = (shard for number in self._context.own for shard in shares.shards_of(number))
        return {shard: given[shard] for shard in own if shard in given}

    def _outputs(self, batch: ShardedBatch, columns: Sequence[Column]) -> dict[str, Any]:
        """Gather the outputs of all shards, in the order of shards."""
        own = {shard: values.rows for shard, values in self._given(batch).items()}
        return values_by_name([*self._context.of_all_shards(own).values()], columns)

    def _first_of(self, batch: ShardedBatch, step: int) -> tuple[_Names, torch.Tensor]:
        """Agree on new names, and gather their values in a separate message."""
        # The table may have no room for new names yet, so this message brings their values too.
        shards = self._context.table
        own = {s: ((v.lines, tuple(v.rows)), v.numbers) for s, v in self._given(batch).items()}
        given = self._context.of_all_shards(own)
        known = _agreed({shard: names for shard, (names, _) in given.items()}, batch, step)
        # (V, lines, 2) float64: zeros for empty shards, as in the table.
        table = torch.zeros(batch.shares.shards, len(known[0]), 2, dtype=torch.float64)
        for shard, (_, numbers) in given.items():
            table[shard] = numbers
        # In later steps the values fit into the table, and need no separate message.
        shards.widen(max(shards.width, len(known[0])))
        self._known[next(kind for kind in shards.kinds.tolist() if kind)] = known
        return known, table.to(self._context.first.device)


def _agreed(found: Mapping[int, _Names], batch: ShardedBatch, step: int) -> _Names:
    """Return the names that all shards with samples share."""
    first = found[min(found)]
    for shard in range(batch.shares.shards):
        lines, columns = names = found.get(shard, ((), ()))
        if batch.size_of(shard) and names != first:
            these, those = f"the metrics {names_of(lines)}", f"{names_of(first[0])}"
            if lines == first[0]:
                these, those = f"the outputs {list(columns)}", f"{list(first[1])}"
            raise DisagreementError(
                f"step {step}, shard {shard}: the loss returned {these}, but {those} for shard "
                f"{min(found)}. Return the same names, with terms of the same kind, for every "
                f"shard, and outputs with the same dtype and row shape. If there is nothing to "
                f"count, return onefold.Mean(total, 0); for rows of different sizes, return a list "
                f"with one tensor per sample"
            )
    return first


_Sum = tuple[torch.Tensor | None]
"""Sum over a block, or None without gradient; in a tuple, because a bare None means "not here"."""


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where a shard stopped, as all devices see it."""

    at: str
    terms: int = 0
    """Number of terms that the loss has; set at its end."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    differentiable: bool = False

    @property
    def must_agree(self) -> tuple[object, ...]:
        """Properties that must be equal in all shards."""
        return self.at, self.dtype, self.shape[1:], len(self.shape), self.differentiable

    def __str__(self) -> str:
        if self.at != "gather":
            return "has finished"
        plain = "" if self.differentiable else ", without a gradient"
        return f"gathers {self.dtype.removeprefix('torch.')} {self.shape}{plain}"


@dataclass(frozen=True, slots=True)
class Gathered:
    """The tensors that all shards pass to one call of `gather`."""

    number: int
    dtype: torch.dtype
    shapes: Mapping[int, tuple[int, ...]]
    """Shape for each shard with samples."""
    differentiable: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenated tensor, (N, ...)."""
        return (sum(shape[0] for shape in self.shapes.values()), *self.shapes[0][1:])

    def own(self, shard: int) -> slice:
        """Return the rows of one shard."""
        start = sum(shape[0] for other, shape in self.shapes.items() if other < shard)
        return slice(start, start + self.shapes[shard][0])


class RowExchange:
    """Gathers tensors for one batch. Every process makes the same calls in the same order.

    Tensors are sent as bits in rows of float64, the only format that `Transport.all_gather_rows`
    sends.

    Args:
        context: this process's part of the run.
        task: the task that all shards of the step share.
    """

    def __init__(self, context: StepContext, task: ShardTask) -> None:
        self._context = context
        self._homes = {replica.number: replica.device for replica in context.replicas}
        self._shares, self._step = task.batch.shares, task.step
        self._sizes = task.batch.sizes

    def agree(self, own: Mapping[int, ShardPosition]) -> dict[int, ShardPosition]:
        """Gather the positions of all shards with samples.

        Args:
            own: the position of each of this process's shards with samples.

        Raises:
            LossError: shards are at different calls, or pass tensors of different types.
        """
        given = self._context.of_all_shards({shard: astuple(each) for shard, each in own.items()})
        found = {shard: ShardPosition(*fields) for shard, fields in given.items()}
        first = found[0]
        for shard, standing in found.items():
            if standing.must_agree != first.must_agree:
                raise LossError(
                    f"the loss of step {self._step} does not gather the same in all shards: shard "
                    f"0 {first}, but shard {shard} {standing}. Make the same calls of "
                    f"onefold.gather (and onefold.SyncBatchNorm) in the same order, with tensors "
                    f"that differ only in their first dimension; a shard with nothing to gather "
                    f"passes tensor[:0]"
                )
        return found

    def join(self, call: Gathered, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Concatenate the tensors of all shards, (N, ...), on this process's first device.

        Args:
            call: the call of `gather`.
            tensors: the tensor of each of this process's shards with samples.
        """
        shapes = {
            number: [call.shapes[shard] for shard in self._filled(number)]
            for number in range(self._shares.devices)
        }
        # All rows of a message have one length, so shorter ones are padded.
        most = max(sum(torch.Size(s).numel() for s in each) for each in shapes.values())
        own = {n: [tensors[shard] for shard in self._filled(n)] for n in self._homes}
        table = self._share(own, most * call.dtype.itemsize)
        parts = {
            shard: part
            for n, each in shapes.items()
            if each
            for shard, part in zip(
                self._filled(n), unpacked_bytes(table[n], call.dtype, each), strict=True
            )
        }
        # Sort by shard, whichever device sent the rows.
        return torch.cat([parts[shard] for shard in sorted(parts)])

    def add_up(self, call: Gathered, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Sum all shards' gradients of a call, (N, ...), on this process's first device.

        The sum follows the order of the fold, in float32 or better.

        Args:
            call: the call of `gather`.
            gradients: the gradient of each of this process's shards with samples, (N, ...).
        """
        dtype = added_up_in(call.dtype)

        def leaf(node: Block) -> _Sum | None:
            if node.stop - node.start > 1:
                return None
            given = gradients.get(node.start)
            return (None if given is None else given.to(dtype),)

        own = {}
        for number in self._homes:
            # Sum inside this device's blocks only; all devices sum the rest in the same order.
            blocks = blocks_of(self._shares.shards_of(number), self._shares.shards)
            sums = [fold(leaf, block, _add)[0] for block in blocks]
            own[number] = [each for each in sums if each is not None]
        slots = 1 + max(slot for _, slot in published_by(self._shares).values())
        size = torch.Size(call.shape).numel() * dtype.itemsize
        table = self._share(own, slots * size)
        placed = published_by(self._shares)

        def part(node: Block) -> _Sum | None:
            if node not in placed:
                return None
            # Empty shards come last: if the first shard of a block is empty, so are all others.
            if not self._sizes[node.start]:
                return (None,)
            device, slot = placed[node]
            shapes = [call.shape] * (slot + 1)
            return (unpacked_bytes(table[device], dtype, shapes)[slot],)

        total = fold(part, Block(0, self._shares.shards), _add)[0]
        assert total is not None  # a batch has samples
        return total.to(call.dtype)

    def _filled(self, number: int) -> list[int]:
        """List the shards of a device that have samples."""
        return [shard for shard in self._shares.shards_of(number) if self._sizes[shard]]

    def _share(self, own: Mapping[int, Sequence[torch.Tensor]], nbytes: int) -> torch.Tensor:
        """Gather tensors of each device of this process as (D, k) float64, on its first device."""
        rows = {}
        for number, home in self._homes.items():
            # A loss may gather tensors of another device than the replica's, such as CPU tensors.
            tensors = [tensor.to(home) for tensor in own[number]]
            empty = torch.empty(0, dtype=torch.uint8, device=home)
            rows[number] = packed_bytes(tensors or [empty], max(nbytes, 1))
        return self._context.exchange.transport.all_gather_rows(rows)


def _add(left: _Sum, right: _Sum) -> _Sum:
    one, other = left[0], right[0]
    return (other if one is None else one if other is None else one + other,)
