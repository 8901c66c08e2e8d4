"""The block in which a script may change model and optimizer between steps: `Trainer.modifying`.

`Modifying` is about the model and the settings. `FullOptimizerState` brings the optimizer's state
together, so that the script may change it in the block.

Note: a gradient inside the block
---------------------------------
In the block, devices may differ: where processes have their parameters in common memory, all but
the lead write to copies. A gradient has to be computed with the same values everywhere. So the
block is closed for as long as that takes: the lead's values become everybody's, and afterwards
everybody goes on from there, in new copies. What the script holds are the parameters themselves,
which stay the same objects; the gradients in their ``.grad`` are each process's own, and stay too.

Note: whose state it is
-----------------------
A device keeps the state of the segments that it updates, under the tensors of these segments.
Between steps the optimizers' own ``state`` is therefore another mapping,
`onefold.update.optimizers.DividedState`. In a block that asks for it, all devices have the state of
whole parameters there. When the block ends, the lead's is cut again, and each device takes that of
its own segments. Where one device has all of it, in segments that are whole parameters, nothing is
divided, and nothing of this is done.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onefold.core.call_digest import Call, CallDigest
from onefold.core.flat import storage_order
from onefold.core.late import load
from onefold.core.structure import tensors_of
from onefold.errors import StateError
from onefold.passes.collectives import broadcast, written
from onefold.shard.gradients import keeping_gradients
from onefold.step.engine import Engine
from onefold.system.process import ctrl_c_later
from onefold.update.optimizer import PartitionedOptimizer
from onefold.update.optimizers import Optimizers, optimizers_in, settings_of
from onefold.update.staging import SegmentState
from onefold.update.state import packed, unpack

__all__ = ["Modifying"]


_KNOWN = frozenset(dir(torch.optim.Optimizer))
_NO_READS = ("__deepcopy__", "__repr__", "dim", "size")


class FullOptimizerState:
    """The whole state of an optimizer, for the length of a block.

    Args:
        engine: the devices of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._left: Mapping[Any, Any] | None = None
        """What the script has left, if it is still to be handed out."""
        self.is_read = any(map(_has_methods, optimizers_in(self._update.optimizer).values()))
        """Whether the optimizers have methods of their own, which may look at their state."""

    @property
    def _update(self) -> PartitionedOptimizer:
        return self._engine.context.update

    def show(self) -> None:
        """Have the script see the whole state on every device; called on all of them."""
        several = isinstance(self._update.optimizer, Optimizers)
        # Several have theirs in one place, and each is to see its own. And a process that owns all
        # of a small model has its state whole, but must meet the others, which have none.
        if self._update.is_undivided and not (self._engine.context.with_others or several):
            self._update.view.is_whole = True
            return
        context = self._engine.context
        own: torch.Tensor | str
        try:
            own = packed(self._update.optimizer_states())
        except TypeError as error:  # of a state that cannot be sent, all devices are to know
            own = str(error)
        given = dict.fromkeys(context.own, None) | {context.first.number: own}
        found = context.exchange.transport.all_gather_values(given)
        bad = next((each for each in found if isinstance(each, str)), None)
        if bad is not None:
            self._update.view.refuse(bad)
            return
        memories = [each for each in found if each is not None]
        self._update.view.show(self._joined([s for each in memories for s in unpack(each)]))

    def hide(self) -> None:
        """Have nobody see it any more, and keep what has become of it."""
        self._update.adopt_assigned()
        self._left = self._update.view.hide(undivided=self._update.is_undivided)
        if not self._engine.context.with_others:
            # Also where the block has failed, as parameters stay changed as well.
            self.adopt_from_lead()

    def adopt_from_lead(self) -> None:
        """Have owners take their part of the lead's; called on all devices."""
        left, self._left = self._left, None
        if left is None:
            return
        numbers = range(len(self._update.storage.segments))
        made = packed([*self._update.cut(left, numbers)]) if self._engine.context.leads else None
        make = None if made is None else lambda device: made
        self._update.replace_states(
            unpack(self._engine.context.exchange.transport.scatter_from_lead(make))
        )

    def _joined(self, states: list[SegmentState]) -> dict[torch.Tensor, dict[str, Any]]:
        storage, users = self._update.storage, self._update.users
        whole: dict[torch.Tensor, dict[str, Any]] = {}
        for number, key, value, by_element in sorted(states, key=lambda state: state.segment):
            segment = storage.segments[number]
            entry, user = storage.masters.entries[segment.entry], users[segment.entry]
            mine = whole.setdefault(user, {})
            if by_element:
                if key not in mine:
                    mine[key] = torch.empty_strided(
                        entry.shape, entry.stride, dtype=value.dtype, device=user.device
                    )
                storage_order(mine[key])[segment.start : segment.stop] = value
            elif isinstance(value, torch.Tensor):
                mine[key] = value.to("cpu" if key == "step" else user.device, copy=True)
            else:
                mine[key] = value
        return whole


def _has_methods(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class has methods that none of PyTorch's has."""
    own = [each for each in type(optimizer).__mro__ if not each.__module__.startswith("torch.")]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    return any(name not in _KNOWN and not name.startswith("_") for name in names)


class _Reads(TorchFunctionMode):
    """Refuses to compute with tensors that shards have left on modules.

    Args:
        left: the tensors, and where they are.
    """

    def __init__(self, left: Iterable[tuple[weakref.ref[torch.Tensor], str]]) -> None:
        super().__init__()
        self._left = {id(tensor()): (tensor, place) for tensor, place in left}

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(function, "__name__", "") not in _NO_READS:
            for tensor in tensors_of([*args, *given.values()]):
                left, place = self._left.get(id(tensor), (None, ""))
                if left is not None and left() is tensor and not _is_in_forward():
                    raise StateError(f"{place} {load('shard.advice').LEFT_READ}")
        return function(*args, **given)


def _is_in_forward() -> bool:
    """Whether a module is called: what it has kept for itself (a table, a mask) it may read."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame.f_back is not None


class Modifying:
    """Lets the lead's process change parameters, buffers and settings for everybody.

    Args:
        engine: the devices of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._held, self._reading = engine, ExitStack(), ExitStack()
        self._state = FullOptimizerState(engine)
        self._with_state = False
        self.blocks = 0
        """How many blocks the script has opened so far."""

    @property
    def _private(self) -> bool:
        """Whether this process must not write to the memory that its parameters lie in."""
        context = self._engine.context
        return context.exchange.memory.is_common and not context.leads

    @property
    def number(self) -> int:
        """Which block the script is in, counted from 1; 0 outside of any."""
        return self.blocks if self._engine.agreement.modifying else 0

    @contextmanager
    def block(self, step: int, *, state: bool | None = None) -> Iterator[None]:
        """Open the block; when it ends, the lead's values are everybody's.

        Args:
            step: the number of the next step.
            state: whether the optimizer's state is there; None if its methods may want it.
        """
        self._engine.agreement.refuse_inside(Call.CHANGING)
        self.blocks += 1
        self._with_state = self._state.is_read if state is None else state
        try:
            with ctrl_c_later():
                self._open(step)
            yield
        finally:
            with ctrl_c_later():
                self._leave()
        with ctrl_c_later():
            self._settle(step)

    @contextmanager
    def closed(self, step: int) -> Iterator[None]:
        """Close the block that the script is in for the length of this context; see the head.

        Args:
            step: the number of the next step.
        """
        if not self._engine.agreement.modifying:
            yield
            return
        self._leave()
        self._settle(step)
        try:
            yield
        except BaseException:
            # The script may catch it, alone: then it still is in its block.
            self._engine.agreement.modifying = True
            raise
        self._open(step)

    def _open(self, step: int) -> None:
        agreement, first = self._engine.agreement, self._engine.context.first
        named = first.parts.named.values()
        if self._private:
            # What this process writes must not reach the common memory, so it gets copies; made
            # before the devices meet, after which the lead may already be writing.
            first.check_places()
            copies = [parameter.data.clone() for parameter in named]
        agreement.start_call(CallDigest(Call.CHANGING, step, arguments=int(self._with_state)))
        agreement.modifying = True
        self._held.enter_context(self._engine.placement.gathered())
        if self._with_state:
            self._state.show()
        if self._private:
            for parameter, copy in zip(named, copies, strict=True):
                parameter.data = copy
        if (left := self._engine.external.left) is not None and left.tensors:
            self._reading.enter_context(_Reads(left.tensors))

    def _leave(self) -> None:
        """Drop what this process has written to copies."""
        self._reading.close()
        self._engine.agreement.modifying = False
        self._state.hide()
        if self._private:
            first = self._engine.context.first
            with keeping_gradients(first.parts.named.values()):
                first.attach()

    def _settle(self, step: int) -> None:
        """Make the lead's values everybody's."""
        agreement, context = self._engine.agreement, self._engine.context
        first = context.first
        first.check_places()
        first.buffers.places.check()
        first.buffers.absorb()
        agreement.modifying = True
        try:
            agreement.start_call(CallDigest(Call.CHANGED, step))
        finally:
            agreement.modifying = False
        context.exchange.memory.broadcast_from_lead(first.buffers.flat)
        first.buffers.note_changes()
        if context.with_others:
            settings = written(settings_of(context.update.optimizer)) if context.leads else None
            agreement.settings.adopt(broadcast(context.exchange, settings))
        context.copy_first()
        context.update.follow_parameters()
        self._state.adopt_from_lead()
        self._held.close()
        context.guard.note()
