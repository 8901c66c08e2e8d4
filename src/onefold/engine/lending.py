"""Has the parameters of a stage brought to this device while they are needed, and not longer.

`Course` remembers in which order stages are wanted, so that the next one can come early.

Note: what autograd keeps
-------------------------
Backward needs the parameters of a stage long after its forward pass. What autograd keeps of them,
and of views of them, is replaced by a note of where it lay in its stage; the stage is brought once
more when backward asks for it. Nothing is put into the graph, so gradients are added in the order
of a plain loop.

Note: between uses
------------------
A parameter that is not here has its shape, dtype and device, and no values. Whoever computes with
it in a step, outside of its stage, has the stage brought; outside of a step it is an error.

Note: ahead of use
------------------
While a stage is computed, the one that followed it the last time is brought. If another one follows
this time, that one is waited for, and what came in vain is dropped.

Note: PyTorch's quick paths
---------------------------
In evaluation PyTorch computes transformers in another way, with other bits, if no module of them
has a hook and all parameters are of its own class, as those are not that are elsewhere. So hooks
are those of all modules, which it does not count, and what it looks at is brought before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onefold.core.head import Call
from onefold.core.stages import ROOT
from onefold.engine.advice import is_about_hooks
from onefold.engine.gradients import keeping_gradients
from onefold.engine.hollow import Hollow, Reach
from onefold.engine.lendable import Lendable
from onefold.engine.lentparameter import Elsewhere, Function, Lending, Replace
from onefold.engine.replica import Replica
from onefold.engine.shardtask import ShardTask
from onefold.engine.stagemodules import StageModules
from onefold.engine.update import SpanOptimizer
from onefold.errors import LineError
from onefold.exchange.carrier import Want
from onefold.exchange.exchange import Exchange

__all__ = ["QUICK", "lending_of"]


_AT_HAND = 2
"""Stages, besides the root, that are in use at one time in backward; one more is on its way."""


QUICK = torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention
"""Modules for which PyTorch has quick paths; see the head."""
_WITH_ALL = (
    "devices that do not keep all parameters (--keep) have them brought by such hooks, which "
    "torch.func does not allow: use torch.autograd.grad, or call trainer.evaluate and "
    "trainer.predict in `with trainer.whole():`"
)


class _Lent(NamedTuple):
    """Where something that autograd keeps lay in a stage."""

    stage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of its first element, counted in elements of its dtype."""


def lending_of(replicas: Sequence[Replica], update: SpanOptimizer, exchange: Exchange) -> Lending:
    """Find out whether the devices of this process keep all parameters, or their spans."""
    stages = replicas[0].stages
    if not exchange.memory.is_lent or stages is None:
        return Lending()
    return SpanLending(replicas[0], stages, update, exchange)


class SpanLending(Lending):
    """The parameters of the model on a device that keeps its span of them.

    Args:
        replica: the model on the only device of this process.
        modules: the stages.
        update: has the values of this device's pieces.
        exchange: with all devices.
    """

    def __init__(
        self,
        replica: Replica,
        modules: StageModules,
        update: SpanOptimizer,
        exchange: Exchange,
    ) -> None:
        assert exchange.stages is not None
        self._replica = replica
        self._stage_at_module = {
            part: stage for stage, part in enumerate(modules.modules, start=ROOT + 1)
        }
        self._update = update
        self._memory = exchange.memory
        self._flat = exchange.memory.trained[replica.number]
        self._fold = exchange.stages
        self._place = replica.number % self._fold.stages.line
        self._lent = Lendable(
            replica.parts, update, self._memory.frozen, self._flat.device, self._bring_used
        )
        self._stages = self._lent.layout.stages
        self._is_answered = self._is_line = False
        self._reach: Reach | None = None
        self._rooms: dict[int, torch.Tensor] = {}
        """The memory of each stage that is here, the latest last."""
        self._stage_at: dict[int, int] = {}
        """The stage of which the memory begins at an address."""
        self._fold.lend(self._lent.values_of)
        self._coming: dict[int, torch.Tensor] = {}
        """The memory of the stage that is brought ahead of its use, if one is."""
        self._steps, self._passes = Course(), Course()
        self._course: Course | None = None
        """Of the shard that is computed, if one is."""
        self._left: set[int] = set()
        """Those of them whose forward pass is over."""
        self._blocks = 0
        self._in_backward = self._is_due = self._looks_at_trained = False
        self._hide()

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self._lent.parameters

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return self._blocks > 0

    def refuse_call(self, call: Call) -> None:
        if self._is_answered:
            raise RuntimeError(
                f"{call.words} was called while a shard was computed, for which parameters are "
                f"brought to each device (--keep): expected calls of the trainer between "
                f"shards. trainer.evaluate and trainer.predict allow them in "
                f"`with trainer.whole():`"
            )

    @contextmanager
    def whole(self, *, look: bool = False) -> Iterator[None]:
        if not self._blocks:
            self._fetch_all()
        self._blocks += 1
        try:
            yield
            if self._blocks == 1:
                self._lent.refuse_written()
            if self._blocks == 1 and look:
                self._lent.refuse_changed()
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._hide()

    def stay_whole(self) -> None:
        if not self._blocks:
            self._fetch_all()
        self._blocks += 1

    @contextmanager
    def rounds(self, task: ShardTask) -> Iterator[ShardTask]:
        if self.is_whole:
            yield task
            return
        with self._answered(look=task.due):
            self._bring(ROOT)
            yield replace(task, bringing=partial(self._bringing, self._steps))

    @contextmanager
    def passes(self, function: Function) -> Iterator[Function]:
        if self.is_whole:
            yield function
            return

        def brought(model: torch.nn.Module, batch: Any) -> object:
            try:
                with self._bringing(self._passes):
                    return function(model, batch)
            except RuntimeError as error:
                if is_about_hooks(error):
                    error.add_note(_WITH_ALL)
                raise
            finally:
                # A model that writes when it is evaluated does so at once; to look costs as much as
                # reading all that this device keeps.
                self._looks_at_trained = False

        self._looks_at_trained = True
        with self._answered(look=True):
            self._bring(ROOT)
            yield brought
        self._fold.end_round()

    def visit(self, stages: Iterable[int], look: Callable[[Sequence[int]], None]) -> None:
        with self._answered():
            for stage in stages:
                self._bring(stage)
                look(self._stages.entries[stage])
                self._take_away(stage)
        self._fold.end_round()

    @contextmanager
    def _answered(self, *, look: bool = False) -> Iterator[None]:
        """Surround what has parameters brought, while all devices answer each other.

        Args:
            look: whether to look at what was brought before it goes, to find what was written.
        """
        self._is_answered, self._is_due = True, look
        try:
            yield
            self._take_all_away()
            self._lent.refuse_written()
        finally:
            self._is_due = False
            self._take_all_away()
            self._is_answered = False

    def _take_all_away(self) -> None:
        for stage in list(self._rooms):
            self._take_away(stage)

    @contextmanager
    def in_line(self, *, due: bool) -> Iterator[None]:
        if self.is_whole:
            with self._fold.in_line():
                yield
            return
        own = [s for s, place in enumerate(self._stages.places) if place == self._place]
        self._is_line = True
        try:
            with self._answered(look=due):
                # All devices together: the first one of each line has some of it.
                self._bring(ROOT)
                with self._fold.in_line():
                    for stage in own:
                        self._bring(stage, own)
                    yield
        finally:
            self._is_line = False

    @contextmanager
    def on_the_way(self, reach: Reach) -> Iterator[None]:
        self._reach = reach
        try:
            yield
        finally:
            self._reach = None

    @contextmanager
    def _bringing(self, course: Course) -> Iterator[Callable[[], None]]:
        """Surround a forward pass and its backward.

        Args:
            course: in which order stages are wanted.

        Yields:
            What is to be called between the two.
        """
        self._in_backward = False
        self._left.clear()
        self._course = course
        course.begin()
        handles = [
            register_module_forward_pre_hook(lambda part, _: self._enter(part)),
            register_module_forward_hook(lambda part, *_: self._leave(part), always_call=True),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
                yield self._begin_backward
        finally:
            for handle in handles:
                handle.remove()
            self._coming.clear()
            for stage in [stage for stage in self._rooms if stage != ROOT]:
                self._take_away(stage)
            self._course = None

    def _begin_backward(self) -> None:
        self._in_backward = True
        # The last one is the first that backward needs.
        self._left.clear()

    def _enter(self, part: torch.nn.Module) -> None:
        stage = self._stage_at_module.get(part)
        if stage is not None:
            self._bring(stage)
        looked_at = _looked_at(part)
        if looked_at:
            self._bring_used(looked_at)

    def _leave(self, part: torch.nn.Module) -> None:
        # Layers that are computed once more in backward are needed right afterwards.
        stage = self._stage_at_module.get(part)
        if stage is not None and not self._in_backward:
            self._left.add(stage)

    def _bring(self, stage: int, together: Collection[int] = ()) -> torch.Tensor:
        """Have a stage here, and let others go, but for those to be had together with it."""
        if stage in self._rooms:
            self._left.discard(stage)
            return self._rooms[stage]
        here = [each for each in self._rooms if each != ROOT]
        for each in {*self._left, *here[: max(0, len(here) + 1 - _AT_HAND)]} - {*together}:
            self._take_away(each)
        self._rooms[stage] = room = self._brought(stage)
        if room.numel():
            self._stage_at[room.data_ptr()] = stage
        if self._course is not None:
            self._look_ahead(self._course, stage)
        self._lent.show(stage, room)
        if self._is_due:
            self._lent.note(stage)
        return room

    def _brought(self, stage: int) -> torch.Tensor:
        """The memory of a stage, with its parameters."""
        room = self._lent.kept_room(stage)
        if room is not None:
            return room
        room = self._coming.pop(stage, None)
        if room is None:
            room = self._lent.room_for(stage)
            self._fold.want(Want(stage, room))
        else:
            self._fold.await_rooms()
        return room

    def _look_ahead(self, course: Course, stage: int) -> None:
        """Have the stage brought that is likely to be the next one after this."""
        if not self._fold.brings_ahead:
            return
        following = course.after(stage, self._in_backward)
        if following is None or following in self._rooms or following in self._coming:
            return
        if self._lent.kept_room(following) is not None:
            return
        self._coming = {following: self._lent.room_for(following)}
        self._fold.want(Want(following, self._coming[following], ahead=True))

    def _bring_used(self, tensors: Sequence[torch.Tensor]) -> Replace | None:
        """Bring what somebody is about to compute with, outside of its stage.

        What a device of a line computes before values have arrived is hollow in any case.
        """
        found = [(t, stage) for t in tensors if (stage := self._lent.stage_of(t)) is not None]
        reach = self._reach
        if reach is not None and self._place and not reach.arrived:
            stage_of = self._lent.stage_of
            return lambda t: t if stage_of(t) is None else Hollow.like(t, reach)
        if self._is_line:
            missing, stage = next(each for each in found if each[1] not in self._rooms)
            name, stage_name = self._lent.name_of(missing), self._stages.names[stage]
            raise LineError.outside_of_stage(name, stage_name, self._replica.number)
        if not self._is_answered:
            raise Elsewhere(
                f"parameter {self._lent.name_of(found[0][0])} was read on device "
                f"{self._replica.number}, which has it only while it computes with it (--keep): "
                f"read the model in `with trainer.whole():`, change it in `with "
                f"trainer.changing():`, and save it with trainer.save, each on every device"
            )
        together = {stage for _, stage in found}
        for stage in sorted(together):
            # None of them may make room for another.
            self._bring(stage, together)
        return None

    def _take_away(self, stage: int) -> None:
        self._left.discard(stage)
        room = self._rooms.pop(stage)
        self._stage_at.pop(room.data_ptr(), None)
        if self._is_due:
            trained = self._looks_at_trained or self._course is not self._passes
            self._lent.look(stage, room, trained=trained)
        self._lent.hide(self._stages.entries[stage])

    def _packed(self, tensor: torch.Tensor) -> object:
        """Replace what lies in a stage by a note of where."""
        stage = self._stage_at.get(tensor.untyped_storage().data_ptr())
        if stage is None or stage == ROOT or tensor.is_conj() or tensor.is_neg():
            # Without its graph, which PyTorch puts back: what an operation has made and keeps would
            # keep the operation, and all before it, where no backward pass comes through there.
            return tensor.detach()
        return _Lent(
            stage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _unpacked(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Lent):
            found: torch.Tensor = kept
            return found
        room = self._bring(kept.stage)
        empty = torch.empty(0, dtype=kept.dtype, device=room.device)
        return empty.set_(room.untyped_storage(), kept.offset, kept.shape, kept.stride)

    def _fetch_all(self) -> None:
        """Have memory for all parameters, and the values of all owners in it."""
        self._flat.get_back()
        self._update.show()
        self._memory.hand_on()
        self._fetch_frozen()
        with keeping_gradients(self._replica.parts.named.values()):
            self._lent.show_all()
            self._replica.attach()
        self._replica.note_places()

    def _fetch_frozen(self) -> None:
        """Have memory for all frozen parameters, and the values of all devices in it."""
        if self._memory.frozen is not None:
            self._memory.frozen.flat.get_back()
            self.visit(self._memory.frozen.stages, self._lent.copy_frozen)

    def _hide(self) -> None:
        """Free the memory of all parameters."""
        self._lent.hide_all()
        self._replica.note_places()
        self._flat.let_go()


def _looked_at(part: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that PyTorch looks at before it chooses how to compute; see the head."""
    if isinstance(part, torch.nn.TransformerEncoder):
        parts = [*part.layers[:1]]
    else:
        parts = [part] if isinstance(part, QUICK) else []
    return [p for each in parts if not each.training for p in each.parameters()]


class Course:
    """The order in which the stages were wanted that were not at hand."""

    def __init__(self) -> None:
        self._following: dict[tuple[int, bool], int] = {}
        self._last: tuple[int, bool] | None = None

    def begin(self) -> None:
        """Begin a shard, with no stage at hand."""
        self._last = None

    def after(self, stage: int, in_backward: bool) -> int | None:
        """Note that a stage is wanted now; say which one followed it last time, if one did."""
        if self._last is not None:
            self._following[self._last] = stage
        self._last = stage, in_backward
        return self._following.get(self._last)
