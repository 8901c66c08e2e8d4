"""Runs the shards of a step together, where the loss needs the tensors of all of them.

`JointShards` finds what the shards must know of each other beforehand.

Note: two runs
--------------
A loss that gathers cannot come to its end in one shard before it has begun in all others. To keep
what backward needs of every shard until then would take the memory of the whole batch. So shards
run twice (Gao et al., 2021). The first run computes what is gathered, and the gradient of the whole
batch's loss in it. Parameters are frozen for it, so that nothing is kept of a model but what comes
after a gather and depends on it. The second is the ordinary one, shard by shard: `gather` returns
what is known, and backward starts from the loss and from the tensors that were gathered, with their
gradients. That is the chain rule and nothing else.

Note: one run
-------------
With batch norm over the whole batch nearly all of a model comes after the first gather, and the
first run would keep all of it. So such models run once, and what is kept is that of all shards of
a device: the memory of a plain loop with the whole batch.

Which of the two it is depends on the model alone. Neither depends on how many shards a device has,
or its bits would depend on the shares.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import all_finite
from onefold.core.fold import fold_shards
from onefold.core.gatherer import GatheredRows
from onefold.core.gathering import SyncBatchNorm
from onefold.core.results import ShardResult
from onefold.errors import LossError
from onefold.placement.context import StepContext
from onefold.shard.gather import GatherCall, GatherPosition, GatherReplay, JointShard
from onefold.shard.replica import Replica, ShardTask, Weighed
from onefold.step.objective import Objective
from onefold.step.rows import Gathered, RowExchange, ShardPosition
from onefold.watch.timing import Phase

__all__ = ["JointShards"]


class JointShards:
    """Prepares the steps of losses that gather, or that have several terms.

    Args:
        context: this process's part of the run.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        modules = context.module.modules()
        self._once = any(isinstance(module, SyncBatchNorm) for module in modules)

    def prepared(
        self, objective: Objective, batch: ShardedBatch, task: ShardTask
    ) -> tuple[ShardTask, dict[int, ShardResult]]:
        """Complete the task of a step; called on all devices.

        Returns:
            The task with which shards can run one by one; and the results of those that have
            run already.

        Raises:
            LossError: shards do not gather alike, or have different numbers of terms.
        """
        if task.is_plain(batch):
            return task, {}
        if objective.gathers and self._once:
            run = _JointRun(self._context, batch, task)
            run.drive()
            return replace(task, divisors=run.divisors), run.results
        if objective.gathers:
            return self._first_run(batch, task).known(task), {}
        if objective.several_terms:
            found: dict[int, Sequence[tuple[str, float]]] = {}
            for replica in self._context.replicas:
                with self._context.attached(replica):
                    found.update(replica.weigh_shards(batch, task))
            task = replace(task, divisors=trade_divisors(self._context, batch, found, task.step))
        return task, {}

    def spoilt(self, batch: ShardedBatch, task: ShardTask) -> str:
        """Describe the first gradient of what was gathered that is not finite, by a new run.

        What is gathered carries such a gradient to all shards, so that it cannot be seen in theirs
        where it comes from.

        Returns:
            Which shard gave it; empty if there is none.
        """
        found = self._first_run(batch, task, looks=True).spoilt
        # Backward begins with the last call, and goes from it to those before.
        own = min(((-call, shard) for shard, call in found), default=None)
        transport = self._context.exchange.transport
        rows = transport.all_gather_values(dict.fromkeys(self._context.own, own))
        first = min(filter(None, rows), default=None)
        if first is None:
            return ""
        call, shard = -first[0] + 1, first[1]
        return (
            f"step {task.step}, shard {shard} ({batch.describe(shard)}): the gradient of what call "
            f"{call} of onefold.gather (or onefold.SyncBatchNorm) returned is not finite"
        )

    def _first_run(self, batch: ShardedBatch, task: ShardTask, *, looks: bool = False) -> _JointRun:
        parts = self._context.parts
        parts.restore_frozen([False] * len(parts.named))
        try:
            frozen = replace(task, trainable=parts.trainable())
            run = _JointRun(self._context, batch, frozen, looks=looks)
            run.drive()
        finally:
            parts.restore_frozen(task.trainable)
        return run


class _JointRun:
    """One run of all shards of this process, in turns, from one stop to the next.

    Args:
        context: this process's part of the run.
        batch: the batch of the step.
        task: what all shards of the step have in common.
        looks: whether to look for gradients that are not finite.
    """

    def __init__(
        self, context: StepContext, batch: ShardedBatch, task: ShardTask, *, looks: bool = False
    ) -> None:
        self._context, self._replicas = context, context.replicas
        self._batch, self._task, self._looks = batch, task, looks
        self._trade = RowExchange(context, batch, task.step)
        self._current = context.first
        self._turns = self._make_turns()
        self._phase: Phase = "forward"
        self._calls: list[tuple[Gathered, dict[int, GatheredRows]]] = []
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}
        self.divisors: Sequence[float] | None = None
        """Of a loss of several terms."""
        self.results: dict[int, ShardResult] = {}
        """For each shard."""
        self.spoilt: list[tuple[int, int]] = []
        """Shard and call of each gradient that is not finite, if they were looked for."""

    def drive(self) -> None:
        """Run all shards to their end."""
        for replica in self._replicas:
            replica.start_step(self._task)
        try:
            self._backward(self._forward())
        finally:
            # However it went: no thread outlives this, and none of them is left a borrowed module.
            for turn in self._turns.values():
                turn.end()
            self._put_back()

    def known(self, task: ShardTask) -> ShardTask:
        """Have the shards run a second time, with all that this run has found."""

        def gatherer(shard: int) -> GatherReplay:
            return GatherReplay(
                [
                    GatherCall(joined[shard], self._gradients.get((shard, call.number)))
                    for call, joined in self._calls
                ]
            )

        return replace(task, gatherers=gatherer, divisors=self.divisors)

    def _make_turns(self) -> dict[int, JointShard]:
        batch = self._batch
        homes = {
            shard: replica
            for replica in self._replicas
            for shard in batch.shares.shards_of(replica.number)
            if shard in batch.shards
        }
        turns: dict[int, JointShard] = {}
        task = replace(self._task, gatherers=turns.__getitem__)
        for shard, replica in homes.items():
            compute = partial(replica.compute, shard, batch, task)
            turns[shard] = JointShard(replica, shard, compute, alone=len(homes) == 1)
        return turns

    def _forward(self) -> dict[int, GatherPosition]:
        """Run all shards to where backward needs the others; return where that is."""
        stops = self._resume(dict.fromkeys(self._turns))
        while True:
            standings = self._trade.agree({shard: _standing(stop) for shard, stop in stops.items()})
            if standings[0].at == "end":
                break
            stops = self._resume(self._join(standings, stops))
        if max(standing.terms for standing in standings.values()) > 1:
            terms = {shard: stop.terms for shard, stop in stops.items()}
            self.divisors = trade_divisors(self._context, self._batch, terms, self._task.step)
        self._phase = "backward"
        return self._resume(dict.fromkeys(stops, self.divisors))

    def _backward(self, stops: dict[int, GatherPosition]) -> None:
        for call, _ in reversed(self._calls):
            if call.differentiable:
                stops = self._resume(self._add_up(call, stops))
        for shard, stop in stops.items():
            assert stop.result is not None  # autograd comes to every call once, the last one first
            self.results[shard] = stop.result

    def _join(
        self, standings: Mapping[int, ShardPosition], stops: Mapping[int, GatherPosition]
    ) -> dict[int, GatheredRows]:
        """Bring what is gathered to all shards."""
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
        on = {tensor.device: whole.to(tensor.device) for tensor in tensors.values()}
        joined = {s: GatheredRows(on[t.device], call.own(s)) for s, t in tensors.items()}
        self._calls.append((call, joined))
        return joined

    def _add_up(
        self, call: Gathered, stops: Mapping[int, GatherPosition]
    ) -> dict[int, torch.Tensor]:
        """Bring each shard the gradient of all losses in what it has gathered."""
        given = {s: stop.tensor for s, stop in stops.items() if stop.tensor is not None}
        if self._looks:
            self.spoilt += [(s, call.number) for s, g in given.items() if not all_finite(g)]
        with self._context.timed("exchange", "gather gradients"):
            whole = self._trade.add_up(call, given)
        rows = {shard: whole[call.own(shard)].to(g.device) for shard, g in given.items()}
        self._gradients |= {(shard, call.number): gradient for shard, gradient in rows.items()}
        return rows

    def _resume(self, answers: Mapping[int, Any]) -> dict[int, GatherPosition]:
        """Let each shard go on to its next stop, one after the other."""
        stops = {}
        for shard, answer in answers.items():
            turn = self._turns[shard]
            self._attach(turn.replica)
            with turn.replica.watch.timed(self._phase, f"{self._phase} shard {shard}, together"):
                stops[shard] = turn.resume(answer)
        return stops

    def _attach(self, replica: Replica) -> None:
        if replica is not self._current:
            self._current = replica
            replica.attach()

    def _put_back(self) -> None:
        """Leave everything as a step finds it, however far the shards have come."""
        for replica in self._replicas:
            self._attach(replica)
            replica.start_step(self._task)  # drops gradients
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
    context: StepContext, batch: ShardedBatch, found: Weighed, step: int
) -> tuple[float, ...] | None:
    """Add up the weight of each term of the loss over the whole batch; None if it has one term.

    Called on all devices; each gets the same numbers.

    Args:
        context: this process's part of the run.
        batch: the batch, with this process's shards of it.
        found: for each shard of this process, the kind and weight of each term.
        step: number of the step, for errors.

    Raises:
        LossError: shards have different numbers of terms.
    """
    given = context.of_all_shards(found)
    # A shard without samples never ran, and has no terms.
    rows: list[Sequence[tuple[str, float]]] = [
        given.get(shard, ()) for shard in range(batch.shares.shards)
    ]
    terms = max(map(len, rows))
    wrong = next((s for s, row in enumerate(rows) if batch.size_of(s) and len(row) != terms), None)
    if wrong is not None:
        raise LossError(
            f"the loss of step {step}, shard {wrong} has {len(rows[wrong])} terms and that of "
            f"another shard {terms}: expected the same terms for every shard; one in which there "
            f"is nothing to count has the weight 0"
        )
    if terms == 1:
        return None
    columns = zip(*(row or [("mean", 0.0)] * terms for row in rows), strict=True)
    # In the fold's order: the divisors are part of the result, as the gradients are.
    return tuple(
        1.0
        if any(kind == "sum" for kind, _ in column)
        else fold_shards([float(weight) for _, weight in column], operator.add)
        for column in columns
    )
