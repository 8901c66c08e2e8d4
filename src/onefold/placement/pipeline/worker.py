"""Computation of one device's stages for the shards that pass through a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from onefold.core.gatherer import GatherRequest, gathering
from onefold.core.results import Gradients, ShardResult, code_of
from onefold.core.shard import microbatch_bounds
from onefold.core.stages import ROOT, Move, in_groups, moves
from onefold.core.values import ShardValues
from onefold.errors import PipelineError
from onefold.exchange.reduction import GradientSend, StageReduction
from onefold.exchange.shard_table import ShardTable
from onefold.exchange.transport import Message, Transport
from onefold.placement.base import StepContext
from onefold.placement.pipeline.boundary import (
    PipelineContext,
    ShardState,
    StageBoundary,
    StageHandover,
    StageInputs,
    StageOutputs,
)
from onefold.placement.pipeline.shape_stages import LossProgress, ShapeTensor, are_left, marks_of
from onefold.shard.advice import explain
from onefold.shard.replica import Replica
from onefold.shard.task import Microbatch, ShardTask, add_microbatch, end_notes, sum_of_digests

__all__ = ["PipelineWorker"]


class PipelineWorker:
    """One device of a pipeline, in one step.

    Args:
        replica: the model on the device.
        boundary: cuts the model for the device.
        context: this process's part of the run.
        task: the task that all shards of the step share.
    """

    def __init__(
        self, replica: Replica, boundary: StageBoundary, context: StepContext, task: ShardTask
    ) -> None:
        exchange = context.exchange
        assert isinstance(exchange.reduction, StageReduction)
        self._replica = replica
        self._boundary = boundary
        self._attached = context.attached
        self._task = task
        self._transport: Transport = exchange.transport
        self._reduction: StageReduction = exchange.reduction
        self._table: ShardTable = exchange.table
        self._device, self._devices = replica.number, task.batch.shares.pipeline
        self._place = self._device % self._devices
        self._is_one_of_several = len(exchange.memory.trained) > 1
        self._is_last = self._place == self._devices - 1
        stages = self._reduction.stages
        self._own = [s for s, place in enumerate(stages.places) if place == self._place and s]
        self._foreign = [s for s, place in enumerate(stages.places) if place != self._place and s]
        self._microbatches = self._in_order()
        self._moves = deque(moves(self._place, self._devices, len(self._microbatches)))
        self._underway: dict[int, PipelineContext] = {}
        self._left: dict[int, tuple[ShardState, ShardResult]] = {}
        """State and result of the last microbatch, for the next one, by shard number."""

    def _in_order(self) -> list[Microbatch | None]:
        task = self._task
        batch = task.batch
        shards = [s for s in batch.shares.read_by(self._device) if s in batch.shards]
        sizes = [batch.count_of(shard).samples for shard in shards]
        cuts = [microbatch_bounds(size, task.microbatch) for size in sizes]
        order = in_groups([len(cut) for cut in cuts], self._devices)

        def at(place: int, part: int) -> Microbatch:
            where = f"step {task.step}, shard {shards[place]}"
            return Microbatch(shards[place], *cuts[place][part], sizes[place], task, where)

        return [None if each is None else at(*each) for each in order]

    @property
    def is_done(self) -> bool:
        """Whether all shards have run forward and backward."""
        return not self._moves

    def can_go(self) -> bool:
        """Return whether the next move's message has arrived; always True if devices run in
        parallel."""
        move, number = self._moves[0]
        step = -1 if move is Move.FORTH else 1
        if self._microbatches[number] is None or not 0 <= self._place + step < self._devices:
            return True
        return self._transport.has_message(self._device, self._device + step)

    def go(self) -> None:
        """Make the next move; block until its message arrives.

        Raises:
            PipelineError: the model cannot be computed by a pipeline.
            LossError, GradientError, StateError: see `Replica.compute`.
            PeerError: another device is lost or has failed.
        """
        move, number = self._moves.popleft()
        microbatch = self._microbatches[number]
        if microbatch is None:
            return
        try:
            if move is Move.FORTH:
                self._forth(number, microbatch)
            else:
                self._back(number, microbatch)
        except Exception as error:
            self._replica.put_back(self._task)
            explain(error, self._replica, microbatch.shard, self._task, microbatch.where)
            raise

    def _forth(self, number: int, microbatch: Microbatch) -> None:
        """Compute this device's stages of a microbatch, and send the outputs of the last one."""
        replica, task, where = self._replica, self._task, microbatch.where
        context = self._underway[number] = PipelineContext(
            LossProgress(where, replica.device), self._arrival(), microbatch.shard, replica
        )
        with self._attached(replica), self._discarding():
            replica.begin_shard(microbatch.shard, task)
            begun = self._go_on(microbatch, context)
            payload = replica.on_device(microbatch)
            marks = marks_of(payload)
            gatherer = microbatch.gatherer
            start = replica.watch.now()
            try:
                with gathering(gatherer), self._boundary.followed(context):
                    context.part, context.values = replica.loss_of(microbatch, payload, gatherer)
            except StageHandover as passed:
                self._send_on(context, passed.outputs, begun)
            except GatherRequest:
                raise PipelineError(
                    f"{where}: the loss calls onefold.gather (or the model has SyncBatchNorm), "
                    f"which needs all shards at the same time, but a pipeline computes them one "
                    f"after the other. Use --placement partition"
                ) from None
            if context.values is not None and context.values.rows:
                raise PipelineError(
                    f"{where}: the loss returned outputs, which a pipeline does not gather. Return "
                    f"(loss, metrics), or use --placement partition"
                )
            self._check_end(context, where)
            self._boundary.refuse_written(context)
            # All devices of a process would write to the same memory.
            if self._is_one_of_several and not are_left(marks, payload):
                raise PipelineError(
                    f"{where}: the loss changes its batch, which all devices of this process "
                    f"share. Change a copy (x = x.clone(), or dict(batch)), launch one process per "
                    f"device (onefold run --devices), or use --placement partition"
                )
            replica.watch.note("forward", f"forward shard {microbatch.shard}", start)
            if self._is_last:
                context.ended = ShardState.of(replica)
            replica.put_back(task)

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Discard buffers without values after an error, or they would raise another one and hide
        it."""
        try:
            yield
        except Exception:
            self._replica.buffers.discard(ShapeTensor)
            raise

    def _go_on(self, microbatch: Microbatch, context: PipelineContext) -> ShardState | None:
        """Restore the final state of the previous microbatch; return that state, if there is
        one."""
        if not microbatch.start:
            return None
        inputs = context.inputs
        begun = self._left[microbatch.shard][0] if inputs is None else inputs.begun
        assert begun is not None
        begun.put(self._replica, microbatch.shard)
        return begun

    def _arrival(self) -> StageInputs | None:
        """Wait for the message of the previous device."""
        if self._place == 0:
            return None
        message = self._receive(self._device - 1)
        here = [self._on(tensor) for tensor in message.tensors if tensor is not None]
        stage, *others = message.head["outputs"]
        state, begun = message.head["state"], message.head["begun"]
        return StageInputs(
            StageOutputs(stage, here, *others), ShardState(*state), begun and ShardState(*begun)
        )

    def _send_on(
        self, context: PipelineContext, outputs: StageOutputs, begun: ShardState | None
    ) -> None:
        # Keep them with their graph, from which backward continues when their gradients arrive.
        context.outputs = outputs.tensors
        others = [outputs.order, outputs.shared, outputs.words, outputs.with_gradient]
        head = {
            "outputs": [outputs.stage, *others],
            "state": ShardState.of(self._replica).parts,
            "begun": None if begun is None else begun.parts,
        }
        self._transport.send(self._device, self._device + 1, Message(head, outputs.tensors))

    def _check_end(self, context: PipelineContext, where: str) -> None:
        """Check that a loss ends on the last device, after calls of all stages."""
        part = context.part
        if part is None:
            return
        if not self._is_last or (context.inputs is not None and not context.progress.arrived):
            raise PipelineError(
                f"{where}: the loss ended on device {self._device} without calling a stage of "
                f"{'this' if self._is_last else 'the next'} device, but a pipeline needs every "
                f"stage in every shard. Use --placement partition"
            )
        if part.kind == "means":
            raise PipelineError(
                f"{where}: the loss has several terms with separate denominators (Mean + Mean, or "
                f"Mean + Sum), which are known only after every shard's forward pass, but a "
                f"pipeline runs backward shard by shard. Use --placement partition"
            )

    def _back(self, number: int, microbatch: Microbatch) -> None:
        """Run a microbatch backward through this device's stages, and send their gradients."""
        replica, task = self._replica, self._task
        context = self._underway.pop(number)
        gradients: list[torch.Tensor | None] = []
        state, theirs = context.ended, None
        if not self._is_last:
            state, gradients, theirs = self._back_from_next(context)
        assert state is not None
        with self._attached(replica), self._discarding():
            state.put(replica, microbatch.shard)
            start = replica.watch.now()
            # Layers in torch.utils.checkpoint will be recomputed.
            context.progress.arrived, context.progress.is_shaped = "", False
            context.backward = state
            with self._boundary.followed(context):
                if context.part is not None:
                    task.backward(context.part, ())
                both = zip(context.outputs, gradients, strict=True)
                pairs = [(tensor, gradient) for tensor, gradient in both if gradient is not None]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            replica.buffers.discard(ShapeTensor)
            replica.watch.note("backward", f"backward shard {microbatch.shard}", start)
            self._end(microbatch, self._gather_up(microbatch, context, theirs), context)
            replica.put_back(task)

    def _back_from_next(
        self, context: PipelineContext
    ) -> tuple[ShardState, list[torch.Tensor | None], ShardResult]:
        """Wait for the next device's message: state, gradients of our outputs, and result."""
        message = self._receive(self._device + 1)
        head, count = message.head, len(context.outputs)
        here = [None if tensor is None else self._on(tensor) for tensor in message.tensors]
        values = None
        if head["values"] is not None:
            lines, numbers = head["values"]
            values = ShardValues(tuple(lines), self._on(numbers))
        given, total = [bool(each) for each in head["given"]], self._on(head["total"])
        digest = head["digest"]
        result = ShardResult(
            *(here[count:], total, head["weight"]),
            values=values,
            given=given,
            digest=self._on(digest) if isinstance(digest, torch.Tensor) else digest,
        )
        return ShardState(*head["state"]), here[:count], result

    def _gather_up(
        self, microbatch: Microbatch, context: PipelineContext, theirs: ShardResult | None
    ) -> ShardResult:
        """Send the gradients of own stages; return the microbatch's result up to this device."""
        stages = self._reduction.stages
        given = [False] * len(stages.stage_of)
        for stage in reversed(self._own):
            gradients = self._taken(stage, given, microbatch)
            send = GradientSend(microbatch.shard, stage, microbatch.is_last, gradients)
            self._reduction.give(send)
        self._refuse_foreign(microbatch)
        root = self._taken(ROOT, given, microbatch)
        digest = end_notes(self._task, microbatch.shard, None)
        if theirs is None:
            part = context.part
            assert part is not None
            return ShardResult(
                *(root, part.total(), code_of(part)),
                values=context.values,
                given=given,
                digest=digest,
            )
        # Only one device may have computed the gradient of a parameter outside all stages.
        pairs = list(zip(root, theirs.gradients, strict=True))
        for name, (own, other) in zip(self._replica.of_stages[ROOT].names, pairs, strict=True):
            if own is not None and other is not None:
                raise PipelineError(
                    f"{microbatch.where}: parameter {name} is used on device {self._device} and on "
                    f"a later one (its weights may be tied), but a pipeline cannot add up the "
                    f"gradients of both as one device does. Use --placement partition"
                )
        return theirs._replace(
            gradients=[own if other is None else other for own, other in pairs],
            given=[one or other for one, other in zip(given, theirs.given, strict=True)],
            digest=sum_of_digests(digest, theirs.digest),
        )

    def _taken(self, stage: int, given: list[bool], microbatch: Microbatch) -> Gradients:
        numbers = self._reduction.stages.entries[stage]
        gradients = self._replica.taken(self._replica.of_stages[stage], microbatch)
        for number, gradient in zip(numbers, gradients, strict=True):
            given[number] = gradient is not None
        return gradients

    def _refuse_foreign(self, microbatch: Microbatch) -> None:
        for stage in self._foreign:
            taken = self._replica.of_stages[stage]
            for name, parameter in zip(taken.names, taken.parameters, strict=True):
                if parameter.grad is not None:
                    stage_name = self._reduction.stages.names[stage]
                    raise PipelineError.outside_of_stage(name, stage_name, self._device)

    def _end(self, microbatch: Microbatch, result: ShardResult, context: PipelineContext) -> None:
        """Send the result to the previous device, or record it on the first one."""
        state = ShardState.of(self._replica)
        inputs = context.inputs
        last = microbatch.is_last
        if inputs is not None:
            self._send_back(inputs, result, state)
            # Break the reference cycle.
            inputs.entered, inputs.gradients, context.watched = [], {}, []
            inputs.outputs = replace(inputs.outputs, tensors=())
            return
        self._reduction.give(GradientSend(microbatch.shard, ROOT, last, result.gradients))
        before = self._left.pop(microbatch.shard, None)
        result = result._replace(gradients=[])
        if before is not None:
            result = add_microbatch(before[1], result, self._task.step)
        if not last:
            self._left[microbatch.shard] = state, result
            return
        buffers = self._replica.buffers.changed()
        left_out = self._task.batch.size_of(microbatch.shard) - microbatch.of
        ended = result._replace(buffers=buffers, left_out=left_out)
        self._table.record(self._device, microbatch.shard, ended)

    def _send_back(self, inputs: StageInputs, result: ShardResult, state: ShardState) -> None:
        values = result.values
        head: Mapping[str, Any] = {
            "state": state.parts,
            "total": result.total,
            "digest": result.digest,
            "weight": result.known_weight,
            "given": bytes(result.given),
            "values": None if values is None else (values.lines, values.numbers),
        }
        count = len(inputs.outputs.tensors)
        gradients = [inputs.gradients.get(number) for number in range(count)]
        message = Message(head, [*gradients, *result.gradients])
        self._transport.send(self._device, self._device - 1, message)

    def _receive(self, source: int) -> Message:
        with self._replica.watch.timed("exchange", f"wait for device {source}"):
            return self._transport.receive(self._device, source)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._replica.device)
