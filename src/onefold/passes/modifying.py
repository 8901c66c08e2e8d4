"""The block that lets a script change model and optimizer between steps: `Trainer.modifying`.

`Modifying` handles the model and the settings. `FullOptimizerState` gathers the optimizer's state
if the script may change it in the block.

Note: a gradient inside the block
---------------------------------
In the block, devices may differ: if processes share the memory of their parameters, all but the
lead write to copies. A gradient must be computed with the same values on all devices. So the block
is closed during the computation: the lead's values are broadcast, and afterwards every device
continues from them, in new copies. The parameters that the script holds stay the same objects; the
gradients in their ``.grad`` belong to each process, and stay too.

Note: ownership of the state
----------------------------
A device keeps the state of the segments that it updates, under the tensors of these segments.
Between steps the optimizers' own ``state`` is therefore another mapping,
`onefold.update.optimizers.DividedState`. In a block that requests the state, this mapping holds the
state of whole parameters, on all devices. When the block ends, the lead's state is cut again, and
each device receives that of its own segments. If one device has all of the state, in segments that
are whole parameters, none of this is necessary.
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
from onefold.system.process import ctrl_c_later, undone_by
from onefold.update.optimizer import PartitionedOptimizer
from onefold.update.optimizers import Optimizers, optimizers_in, settings_of
from onefold.update.staging import SegmentState
from onefold.update.state import packed, unpack

__all__ = ["Modifying"]


_KNOWN = frozenset(dir(torch.optim.Optimizer))
_NO_READS = ("__deepcopy__", "__repr__", "dim", "size")


class FullOptimizerState:
    """The full state of an optimizer during a block.

    Args:
        engine: the devices of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._left: Mapping[Any, Any] | None = None
        """State that the script left in the block, if it is still to be distributed."""
        self.is_read = any(map(_has_methods, optimizers_in(self._update.optimizer).values()))
        """Whether the optimizers have their own methods, which may read their state."""

    @property
    def _update(self) -> PartitionedOptimizer:
        return self._engine.context.update

    def show(self) -> None:
        """Show the script the full optimizer state on every device. Collective."""
        several = isinstance(self._update.optimizer, Optimizers)
        # Several optimizers store their state in one place, but each must see its own. And a
        # process that owns all of a small model has its whole state, but must join the collective
        # for processes that have none.
        if self._update.is_undivided and not (self._engine.context.with_others or several):
            self._update.view.is_whole = True
            return
        context = self._engine.context
        own: torch.Tensor | str
        try:
            own = packed(self._update.optimizer_states())
        except TypeError as error:  # sent, so that all devices learn of it
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
        """Hide the full state, and keep the script's changes to it."""
        self._update.adopt_assigned()
        self._left = self._update.view.hide(undivided=self._update.is_undivided)
        if not self._engine.context.with_others:
            # Do this even if the block failed, because changes to parameters are kept as well.
            self.adopt_from_lead()

    def adopt_from_lead(self) -> None:
        """Scatter the lead's optimizer state to its owners. Collective."""
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
    """Return whether an optimizer's class has methods that PyTorch's classes lack."""
    own = [each for each in type(optimizer).__mro__ if not each.__module__.startswith("torch.")]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    return any(name not in _KNOWN and not name.startswith("_") for name in names)


class _Reads(TorchFunctionMode):
    """Rejects computation with tensors that shards left on modules.

    Args:
        left: the tensors, and their locations.
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
                    raise StateError(f"{place} {load('shard.left_state').LEFT_READ}")
        return function(*args, **given)


def _is_in_forward() -> bool:
    """Return whether a module is being called: it may read its own tensors (a table, a mask)."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame.f_back is not None


class Modifying:
    """Lets the lead's process change parameters, buffers and settings for all devices.

    Args:
        engine: the devices of this process.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._held, self._reading = engine, ExitStack(), ExitStack()
        self._state = FullOptimizerState(engine)
        self._with_state = False
        self.blocks = 0
        """Number of blocks that the script has opened so far."""

    @property
    def _private(self) -> bool:
        """Whether this process must not write to the memory of its parameters."""
        context = self._engine.context
        return context.exchange.memory.is_common and not context.leads

    @property
    def number(self) -> int:
        """Number of the current block, from 1; 0 outside a block."""
        return self.blocks if self._engine.agreement.modifying else 0

    @contextmanager
    def block(self, step: int, *, state: bool | None = None) -> Iterator[None]:
        """Open the block; at its end, the lead's values are broadcast.

        Args:
            step: number of the next step.
            state: whether to show the optimizer's state; None to show it if its methods may read
                it.
        """
        self._engine.agreement.refuse_inside(Call.CHANGING)
        self.blocks += 1
        self._with_state = self._state.is_read if state is None else state
        with undone_by(self._leave):
            with ctrl_c_later():
                self._open(step)
            yield
        with ctrl_c_later():
            self._settle(step)

    @contextmanager
    def closed(self, step: int) -> Iterator[None]:
        """Close the script's current block during this context; see the note above.

        Args:
            step: number of the next step.
        """
        if not self._engine.agreement.modifying:
            yield
            return
        self._leave()
        self._settle(step)
        try:
            yield
        except BaseException:
            # The script may catch the exception on this device alone, and then is still in its
            # block.
            self._engine.agreement.modifying = True
            raise
        self._open(step)

    def _open(self, step: int) -> None:
        agreement, first = self._engine.agreement, self._engine.context.first
        named = first.parts.named.values()
        if self._private:
            # This process gets copies, because its writes must not reach the shared memory. Copy
            # before the devices meet, because afterwards the lead may already be writing.
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
        """Drop this process's writes to copies."""
        if not self._engine.agreement.modifying:
            return
        self._reading.close()
        self._engine.agreement.modifying = False
        self._state.hide()
        if self._private:
            first = self._engine.context.first
            with keeping_gradients(first.parts.named.values()):
                first.attach()

    def _settle(self, step: int) -> None:
        """Broadcast the lead's values."""
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
