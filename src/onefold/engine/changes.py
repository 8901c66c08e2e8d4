"""The block in which a script may change model and optimizer between steps: `Trainer.changing`.

`Changes` is about the model and the settings. `WholeState` brings the optimizer's state together,
so that the script may change it in the block.

Note: a gradient inside the block
---------------------------------
In the block, devices may differ: where processes have their parameters in common memory, all but
the lead write to copies. A gradient has to be computed with the same values everywhere. So the
block is closed for as long as that takes: the lead's values become everybody's, and afterwards
everybody goes on from there, in new copies. What the script holds are the parameters themselves,
which stay the same objects; the gradients in their ``.grad`` are each process's own, and stay too.

Note: whose state it is
-----------------------
A device keeps the state of the pieces that it updates, under the tensors of these pieces. Between
steps the optimizers' own ``state`` is therefore another mapping,
`onefold.engine.optimizers.DividedState`. In a block that asks for it, all devices have the state of
whole parameters there. When the block ends, the lead's is cut again, and each device takes that of
its own pieces. Where one device has all of it, in pieces that are whole parameters, nothing is
divided, and nothing of this is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from onefold.core.flat import laid_out, storage_order
from onefold.core.head import Call, StepHead
from onefold.engine.agreement import Agreement, Siblings
from onefold.engine.gradients import keeping_gradients
from onefold.engine.optimizers import Optimizers, optimizers_in
from onefold.engine.optimizerstate import PieceState, is_by_element, packed, unpack
from onefold.engine.replica import Replica
from onefold.engine.update import SpanOptimizer
from onefold.exchange.exchange import Exchange

__all__ = ["Changes"]


_KNOWN = frozenset(dir(torch.optim.Optimizer))


class WholeState:
    """The whole state of an optimizer, for the length of a block.

    Args:
        update: the optimizer on this process's spans.
        exchange: with all devices.
        devices: numbers of this process's.
    """

    def __init__(self, update: SpanOptimizer, exchange: Exchange, devices: Iterable[int]) -> None:
        self._update, self._exchange = update, exchange
        self._devices = sorted(devices)
        self._left: Mapping[Any, Any] | None = None
        """What the script has left, if it is still to be handed out."""
        self.is_read = any(map(_has_methods, optimizers_in(update.optimizer).values()))
        """Whether the optimizers have methods of their own, which may look at their state."""

    def show(self) -> None:
        """Have the script see the whole state on every device; called on all of them."""
        several = isinstance(self._update.optimizer, Optimizers)
        # Several have theirs in one place, and each is to see its own. And a process that owns all
        # of a small model has its state whole, but must meet the others, which have none.
        if self._update.is_undivided and self._has_all_devices and not several:
            self._update.view.is_whole = True
            return
        texts = dict.fromkeys(self._devices, b"")
        try:
            own = packed(self._update.optimizer_states()).numpy().tobytes()
            texts[self._devices[0]] = b"+" + own
        except TypeError as error:  # of a state that cannot be sent, all devices are to know
            texts[self._devices[0]] = b"-" + str(error).encode()
        found = [text for text in self._exchange.transport.gather_bytes(texts) if text]
        bad = [text[1:].decode() for text in found if text[:1] == b"-"]
        if bad:
            self._update.view.refuse(bad[0])
            return
        memories = [torch.frombuffer(bytearray(text[1:]), dtype=torch.uint8) for text in found]
        self._update.view.show(self._joined([s for each in memories for s in unpack(each)]))

    def hide(self) -> None:
        """Have nobody see it any more, and keep what has become of it."""
        self._update.adopt_assigned()
        self._left = self._update.view.hide(undivided=self._update.is_undivided)
        if self._has_all_devices:
            self.hand_out()  # also where the block has failed, as parameters stay changed as well

    @property
    def _has_all_devices(self) -> bool:
        return len(self._devices) == self._exchange.board.shape.devices

    def hand_out(self) -> None:
        """Have owners take their part of the lead's; called on all devices."""
        left, self._left = self._left, None
        if left is None:
            return
        made = packed(self._cut(left)) if self._devices[0] == 0 else None
        make = None if made is None else lambda device: made
        self._update.replace_states(unpack(self._exchange.transport.hand_out(make)))

    def _joined(self, states: list[PieceState]) -> dict[torch.Tensor, dict[str, Any]]:
        storage, users = self._update.storage, self._update.users
        whole: dict[torch.Tensor, dict[str, Any]] = {}
        for number, key, value, by_element in sorted(states, key=lambda state: state.piece):
            piece = storage.pieces[number]
            entry, user = storage.masters.entries[piece.entry], users[piece.entry]
            mine = whole.setdefault(user, {})
            if by_element:
                if key not in mine:
                    mine[key] = torch.empty_strided(
                        entry.shape, entry.stride, dtype=value.dtype, device=user.device
                    )
                storage_order(mine[key])[piece.start : piece.stop] = value
            elif isinstance(value, torch.Tensor):
                mine[key] = value.to("cpu" if key == "step" else user.device, copy=True)
            else:
                mine[key] = value
        return whole

    def _cut(self, whole: Mapping[Any, Any]) -> list[PieceState]:
        storage, cut = self._update.storage, []
        for number, piece in enumerate(storage.pieces):
            entry = storage.masters.entries[piece.entry]
            for key, value in whole.get(self._update.users[piece.entry], {}).items():
                stride = entry.stride if piece.whole else None
                by_element = is_by_element(key, value, entry.shape, stride)
                if by_element:
                    value = storage_order(laid_out(value, entry.stride))[piece.start : piece.stop]
                cut.append(PieceState(number, key, value, by_element))
        return cut


def _has_methods(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class has methods that none of PyTorch's has."""
    own = [each for each in type(optimizer).__mro__ if not each.__module__.startswith("torch.")]
    names = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    return any(name not in _KNOWN and not name.startswith("_") for name in names)


class Changes:
    """Lets the lead's process change parameters, buffers and settings for everybody.

    Args:
        replicas: the model on each device of this process.
        exchange: with all devices.
        update: the optimizer on this process's spans.
        agreement: meets the other devices.
        siblings: brings what the first device of this process has to the others.
        whole: a block in which this device has all parameters.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        exchange: Exchange,
        update: SpanOptimizer,
        agreement: Agreement,
        siblings: Siblings,
        whole: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._whole, self._held = whole, ExitStack()
        self._replicas = replicas
        self._exchange = exchange
        self._update = update
        self._agreement = agreement
        self._siblings = siblings
        self._private = exchange.memory.is_common and replicas[0].number != 0
        """Whether this process must not write to the memory that its parameters lie in."""
        self._state = WholeState(update, exchange, [replica.number for replica in replicas])
        self._with_state = False
        self.blocks = 0
        """How many blocks the script has opened so far."""

    @property
    def number(self) -> int:
        """Which block the script is in, counted from 1; 0 outside of any."""
        return self.blocks if self._agreement.changing else 0

    @contextmanager
    def block(self, step: int, *, state: bool | None = None) -> Iterator[None]:
        """Open the block; when it ends, the lead's values are everybody's.

        Args:
            step: the number of the next step.
            state: whether the optimizer's state is there; None if its methods may want it.
        """
        self._agreement.refuse_inside(Call.CHANGING)
        self.blocks += 1
        self._with_state = self._state.is_read if state is None else state
        try:
            self._open(step)
            yield
        finally:
            self._leave()
        self._settle(step)

    @contextmanager
    def closed(self, step: int) -> Iterator[None]:
        """Close the block that the script is in for the length of this context; see the head.

        Args:
            step: the number of the next step.
        """
        if not self._agreement.changing:
            yield
            return
        self._leave()
        self._settle(step)
        try:
            yield
        except BaseException:
            # The script may catch it, alone: then it still is in its block.
            self._agreement.changing = True
            raise
        self._open(step)

    def _open(self, step: int) -> None:
        agreement, first = self._agreement, self._replicas[0]
        named = first.parts.named.values()
        if self._private:
            # What this process writes must not reach the common memory, so it gets copies; made
            # before the devices meet, after which the lead may already be writing.
            first.check_places()
            copies = [parameter.data.clone() for parameter in named]
        agreement.begin(StepHead(Call.CHANGING, step, arguments=int(self._with_state)))
        agreement.changing = True
        self._held.enter_context(self._whole())
        if self._with_state:
            self._state.show()
        if self._private:
            for parameter, copy in zip(named, copies, strict=True):
                parameter.data = copy

    def _leave(self) -> None:
        """Drop what this process has written to copies."""
        self._agreement.changing = False
        self._state.hide()
        if self._private:
            first = self._replicas[0]
            with keeping_gradients(first.parts.named.values()):
                first.attach()

    def _settle(self, step: int) -> None:
        """Make the lead's values everybody's."""
        agreement, exchange, first = self._agreement, self._exchange, self._replicas[0]
        first.check_places()
        first.buffers.places.check()
        first.buffers.absorb()
        agreement.changing = True
        try:
            agreement.begin(StepHead(Call.CHANGED, step))
        finally:
            agreement.changing = False
        exchange.memory.follow_lead(first.buffers.flat)
        first.buffers.note_changes()
        if len(self._replicas) < exchange.board.shape.devices:
            agreement.settings.adopt(self._settings_of_lead())
        self._siblings.copy_first()
        self._update.follow_parameters()
        self._state.hand_out()
        self._held.close()
        agreement.guard.note()

    def _settings_of_lead(self) -> list[dict[str, Any]]:
        leads = self._replicas[0].number == 0
        settings = self._agreement.settings.as_json() if leads else None
        own = {replica.number: json.dumps(settings).encode() for replica in self._replicas}
        found: list[dict[str, Any]] = json.loads(self._exchange.transport.gather_bytes(own)[0])
        return found
