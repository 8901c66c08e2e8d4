"""Gathers the parameters of a stage on this device while they are needed, and then frees them.

`PrefetchOrder` records the order in which stages are used, to prefetch the next one.

Note: saved tensors
-------------------
Backward needs the parameters of a stage long after its forward pass. If autograd saves a parameter
or a view of one, its location in the stage is saved instead, and the stage is gathered again when
backward unpacks it. The graph does not change, so gradients are added in the order of a plain loop.

Note: between uses
------------------
A partitioned parameter has its shape, dtype and device, but no values. Reading it in a step,
outside its stage, gathers the stage; outside a step it is an error.

Note: prefetching
-----------------
While a stage is computed, the one that followed it the last time is prefetched. If another stage
follows this time, that stage is gathered on demand, and the prefetched one is dropped.

Note: PyTorch's fast paths
--------------------------
In evaluation mode PyTorch computes transformers with a fast path, which has other bits, if their
modules have no hooks and all parameters are plain ones, which partitioned parameters are not. So
the hooks here are global, which PyTorch does not count, and the parameters that PyTorch inspects
are gathered before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onefold.core.call_digest import Call
from onefold.core.stages import ROOT
from onefold.deferred.access import Replace, ResidentError
from onefold.errors import PipelineError
from onefold.exchange.reduction import ParameterRequest, StageReduction
from onefold.placement.base import Function, ResidentParameters, StepContext
from onefold.placement.stage_buffers import StageBuffers
from onefold.shard.advice import is_about_hooks
from onefold.shard.gradients import keeping_gradients
from onefold.shard.model_parts import QUICK
from onefold.shard.task import ShardTask

__all__ = ["PartitionedParameters"]


_AT_HAND = 2
"""Number of stages besides the root that are resident during backward; one more is in transit."""


_WITH_ALL = (
    "devices that do not keep all parameters (--placement) gather them with such hooks, which "
    "torch.func does not allow. Use torch.autograd.grad, or call trainer.evaluate and "
    "trainer.predict in `with trainer.gathered():`"
)


class _Saved(NamedTuple):
    """Location in a stage of a tensor that autograd saved."""

    stage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset of its first element, in elements of its dtype."""


class PartitionedParameters(ResidentParameters):
    """The parameters of the model on a device that keeps only its partition of them.

    Args:
        context: this process's part of the run; its only device keeps a partition.
    """

    def __init__(self, context: StepContext) -> None:
        self._exchange = exchange = context.exchange
        modules = context.first.stages
        assert isinstance(exchange.reduction, StageReduction)
        assert modules is not None
        self._replica = replica = context.first
        self._stage_at_module = {
            part: stage for stage, part in enumerate(modules.modules, start=ROOT + 1)
        }
        self._update = context.update
        self._memory = exchange.memory
        self._flat = exchange.memory.trained[replica.number]
        self._reduction = exchange.reduction
        self._place = replica.number % self._reduction.stages.pipeline
        self._buffers = StageBuffers(context, self._gather_used)
        self._stages = self._buffers.layout.stages
        self._is_serving = self._is_pipeline = False
        self._resident: dict[int, torch.Tensor] = {}
        """Memory of each resident stage, the latest last."""
        self._stage_at: dict[int, int] = {}
        """Stage whose memory begins at an address."""
        self._reduction.exchange.serve(self._buffers.values_of)
        self._prefetched: dict[int, torch.Tensor] = {}
        """Memory of the prefetched stage, if any."""
        self._steps, self._passes = PrefetchOrder(), PrefetchOrder()
        self._order: PrefetchOrder | None = None
        """Order of the current shard; None outside shards."""
        self._done_forward: set[int] = set()
        """Resident stages whose forward pass is over."""
        self._gathers = 0
        self._in_backward = self._run_checks = self._looks_at_trained = False
        self._shard()

    @property
    def partitioned(self) -> Sequence[torch.nn.Parameter]:
        return () if self._gathers else self._buffers.parameters

    def refuse_call(self, call: Call) -> None:
        if self._is_serving:
            raise RuntimeError(
                f"{call.words} was called while a shard was computed, whose parameters are "
                f"gathered (--placement). Call the trainer between shards. trainer.evaluate and "
                f"trainer.predict allow calls in `with trainer.gathered():`"
            )

    @contextmanager
    def gathered(self, *, detect_writes: bool = False) -> Iterator[None]:
        self.stay_gathered()
        try:
            yield
            # Check only at the end of the outermost block, because parameters stay resident until
            # then.
            if self._gathers == 1:
                self._buffers.refuse_written()
            if self._gathers == 1 and detect_writes:
                self._buffers.refuse_changed()
        finally:
            self._gathers -= 1
            if not self._gathers:
                self._shard()

    def stay_gathered(self) -> None:
        if not self._gathers:
            self._unshard()
        self._gathers += 1

    @contextmanager
    def rounds(self, task: ShardTask) -> Iterator[ShardTask]:
        if self._gathers:
            yield task
            return
        with self._serving(detect_writes=task.run_checks):
            self._gather(ROOT)
            yield replace(task, gathered=partial(self._gathering, self._steps))

    @contextmanager
    def forward(self, function: Function) -> Iterator[Function]:
        if self._gathers:
            yield function
            return

        def brought(model: torch.nn.Module, batch: Any) -> object:
            try:
                with self._gathering(self._passes):
                    return function(model, batch)
            except RuntimeError as error:
                if is_about_hooks(error):
                    error.add_note(_WITH_ALL)
                raise
            finally:
                # A model that writes to parameters in evaluation does so in the first call.
                # Checking costs as much as reading all values that this device keeps.
                self._looks_at_trained = False

        self._looks_at_trained = True
        with self._serving(detect_writes=True):
            self._gather(ROOT)
            yield brought
        self._reduction.end_round()

    def read_stages(
        self, read: Callable[[Mapping[str, torch.Tensor]], Mapping[str, str]]
    ) -> dict[int, str]:
        parameters, own = self.partitioned, dict[str, str]()
        if not parameters:
            return {}

        def visit_stage(numbers: Sequence[int]) -> None:
            own.update(read({str(number): parameters[number] for number in numbers}))

        number, exchange = self._replica.number, self._exchange
        devices = exchange.table.storage.devices
        self._visit(range(number, len(self._reduction.stages), devices), visit_stage)
        given = exchange.transport.all_gather_values({number: own})
        return {int(number): line for each in given for number, line in each.items()}

    def _visit(self, stages: Iterable[int], visit_stage: Callable[[Sequence[int]], None]) -> None:
        """Gather one stage after the other for reading; called on all devices.

        Args:
            stages: stages that this device reads; other devices may read other ones.
            visit_stage: called with the numbers of a stage's parameters while it is resident.
        """
        with self._serving():
            for stage in stages:
                self._gather(stage)
                visit_stage(self._stages.entries[stage])
                self._free(stage)
        self._reduction.end_round()

    @contextmanager
    def _serving(self, *, detect_writes: bool = False) -> Iterator[None]:
        """Surround code that gathers parameters, while all devices serve each other's requests.

        Args:
            detect_writes: whether to compare gathered parameters before they are freed.
        """
        try:
            self._is_serving, self._run_checks = True, detect_writes
            yield
            self._free_all()
            self._buffers.refuse_written()
        finally:
            self._run_checks = False
            self._free_all()
            self._is_serving = False

    def _free_all(self) -> None:
        for stage in list(self._resident):
            self._free(stage)

    @contextmanager
    def in_pipeline(self, *, run_checks: bool) -> Iterator[None]:
        if self._gathers:
            with self._reduction.exchange.in_pipeline():
                yield
            return
        own = [s for s, place in enumerate(self._stages.places) if place == self._place]
        try:
            self._is_pipeline = True
            with self._serving(detect_writes=run_checks):
                # On all devices together, because the first device of each pipeline has a part of
                # the root.
                self._gather(ROOT)
                with self._reduction.exchange.in_pipeline():
                    for stage in own:
                        self._gather(stage, own)
                    yield
        finally:
            self._is_pipeline = False

    @contextmanager
    def _gathering(self, order: PrefetchOrder) -> Iterator[Callable[[], None]]:
        """Surround a forward pass and its backward.

        Args:
            order: record of the order in which stages are used.

        Yields:
            A function to call between the two.
        """
        self._in_backward = False
        self._done_forward.clear()
        self._order = order
        order.start_shard()
        # Global hooks: PyTorch skips its fast paths for modules that have hooks of their own.
        try:
            with (
                register_module_forward_pre_hook(lambda part, _: self._before_forward(part)),
                register_module_forward_hook(
                    lambda part, *_: self._after_forward(part), always_call=True
                ),
                torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked),
            ):
                yield self._begin_backward
        finally:
            self._prefetched.clear()
            for stage in [stage for stage in self._resident if stage != ROOT]:
                self._free(stage)
            self._order = None

    def _begin_backward(self) -> None:
        self._in_backward = True
        # Keep the last stage, because backward needs it first.
        self._done_forward.clear()

    def _before_forward(self, part: torch.nn.Module) -> None:
        stage = self._stage_at_module.get(part)
        if stage is not None:
            self._gather(stage)
        looked_at = _looked_at(part)
        if looked_at:
            self._gather_used(looked_at)

    def _after_forward(self, part: torch.nn.Module) -> None:
        # A layer that backward recomputes is needed immediately afterwards.
        stage = self._stage_at_module.get(part)
        if stage is not None and not self._in_backward:
            self._done_forward.add(stage)

    def _gather(self, stage: int, together: Collection[int] = ()) -> torch.Tensor:
        """Gather a stage, and free stages no longer needed, except those in ``together``."""
        if stage in self._resident:
            self._done_forward.discard(stage)
            return self._resident[stage]
        # In order of arrival: free the oldest stages beyond the limit, and those that forward has
        # left.
        here = [each for each in self._resident if each != ROOT]
        for each in {*self._done_forward, *here[: max(0, len(here) + 1 - _AT_HAND)]} - {*together}:
            self._free(each)
        self._resident[stage] = buffer = self._gathered(stage)
        if buffer.numel():
            # `_packed` recognizes tensors of a stage by the address of their storage.
            self._stage_at[buffer.data_ptr()] = stage
        if self._order is not None:
            self._prefetch(self._order, stage)
        self._buffers.show(stage, buffer)
        if self._run_checks:
            self._buffers.note(stage)
        return buffer

    def _gathered(self, stage: int) -> torch.Tensor:
        """Return the memory of a stage, filled with its parameters."""
        buffer = self._buffers.own_buffer(stage)
        if buffer is not None:
            return buffer
        buffer = self._prefetched.pop(stage, None)
        if buffer is None:
            buffer = self._buffers.new_buffer(stage)
            self._reduction.request(ParameterRequest(stage, buffer))
        else:
            self._reduction.exchange.await_prefetched()
        return buffer

    def _prefetch(self, order: PrefetchOrder, stage: int) -> None:
        """Prefetch the stage that will probably be used next."""
        if not self._reduction.exchange.prefetches:
            return
        following = order.after(stage, self._in_backward)
        if following is None or following in self._resident or following in self._prefetched:
            return
        if self._buffers.own_buffer(following) is not None:
            return
        self._prefetched = {following: self._buffers.new_buffer(following)}
        self._reduction.request(
            ParameterRequest(following, self._prefetched[following], ahead=True)
        )

    def _gather_used(self, tensors: Sequence[torch.Tensor]) -> Replace | None:
        """Gather the stages of parameters that are about to be read outside their stage.

        Before values arrive at a device of a pipeline, everything that it computes lacks values
        anyway.
        """
        found = [(t, stage) for t in tensors if (stage := self._buffers.stage_of(t)) is not None]
        progress = self.progress
        if progress is not None and self._place and not progress.arrived:
            stage_of = self._buffers.stage_of
            return lambda t: t if stage_of(t) is None else progress.stand_in(t)
        if self._is_pipeline:
            missing, stage = next(each for each in found if each[1] not in self._resident)
            name, stage_name = self._buffers.name_of(missing), self._stages.names[stage]
            raise PipelineError.outside_of_stage(name, stage_name, self._replica.number)
        if not self._is_serving:
            raise ResidentError(
                f"parameter {self._buffers.name_of(found[0][0])} was read on device "
                f"{self._replica.number}, which has its values only while computing with it "
                f"(--placement). Read the model in `with trainer.gathered():`, change it in `with "
                f"trainer.modifying():`, and save it with trainer.save, each on every device"
            )
        together = {stage for _, stage in found}
        for stage in sorted(together):
            # Pass ``together``, so that none of these stages is freed for another.
            self._gather(stage, together)
        return None

    def _free(self, stage: int) -> None:
        self._done_forward.discard(stage)
        buffer = self._resident.pop(stage)
        self._stage_at.pop(buffer.data_ptr(), None)
        if self._run_checks:
            trained = self._looks_at_trained or self._order is not self._passes
            self._buffers.refuse_foreign_writes(stage, buffer, trained=trained)
        self._buffers.hide(self._stages.entries[stage])

    def _packed(self, tensor: torch.Tensor) -> object:
        """Replace a saved tensor in a stage by its location."""
        stage = self._stage_at.get(tensor.untyped_storage().data_ptr())
        if stage is None or stage == ROOT or tensor.is_conj() or tensor.is_neg():
            # Detached: PyTorch attaches the graph again when it unpacks. A saved result would
            # otherwise keep its operation, and all before it, alive if backward never passes
            # through it.
            return tensor.detach()
        return _Saved(
            stage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _unpacked(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Saved):
            found: torch.Tensor = kept
            return found
        # Gather again, perhaps into other memory than in forward.
        buffer = self._gather(kept.stage)
        empty = torch.empty(0, dtype=kept.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), kept.offset, kept.shape, kept.stride)

    def _unshard(self) -> None:
        """Allocate memory for all parameters, and fill it with the values of all owners."""
        self._flat.get_back()
        self._update.show()
        self._memory.publish_parameters()
        if self._memory.frozen is not None:
            self._memory.frozen.flat.get_back()
            self._visit(self._memory.frozen.stages, self._buffers.copy_frozen)
        with keeping_gradients(self._replica.parts.named.values()):
            self._buffers.show_all()
            self._replica.attach()
        self._replica.note_places()

    def _shard(self) -> None:
        """Free the memory of all parameters."""
        self._buffers.hide_all()
        self._replica.note_places()
        self._flat.let_go()


def _looked_at(part: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that PyTorch inspects to choose a fast path; see the note above."""
    if isinstance(part, torch.nn.TransformerEncoder):
        parts = [*part.layers[:1]]
    else:
        parts = [part] if isinstance(part, QUICK) else []
    return [p for each in parts if not each.training for p in each.parameters()]


class PrefetchOrder:
    """The order in which stages that were not resident were requested."""

    def __init__(self) -> None:
        self._following: dict[tuple[int, bool], int] = {}
        self._last: tuple[int, bool] | None = None

    def start_shard(self) -> None:
        """Start a shard, with no stage resident."""
        self._last = None

    def after(self, stage: int, in_backward: bool) -> int | None:
        """Record a request for a stage; return the stage that followed it last time, if any."""
        if self._last is not None:
            self._following[self._last] = stage
        self._last = stage, in_backward
        return self._following.get(self._last)
