"""Brings an optimizer's state together in `Trainer.changing`, where a script may change it.

Note: whose state it is
-----------------------
A device keeps the state of the pieces that it updates, under the tensors of these pieces. Between
steps the optimizers' own ``state`` is therefore another mapping, `DividedState`. In a block that
asks for it, all devices have the state of whole parameters there. When the block ends, the lead's
is cut again, and each device takes that of its own pieces. Where one device has all of it, in
pieces that are whole parameters, nothing is divided, and nothing of this is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from onefold.core.flat import laid_out, storage_order
from onefold.engine.optimizers import Optimizers, optimizers_in
from onefold.engine.optimizerstate import PieceState, is_by_element, packed, unpack
from onefold.engine.update import SpanOptimizer
from onefold.exchange.exchange import Exchange

__all__ = ["WholeState"]

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
        # Several have theirs in one place, and each is to see its own.
        if self._update.is_undivided and not isinstance(self._update.optimizer, Optimizers):
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
        if len(self._devices) == self._exchange.board.shape.devices:
            self.hand_out()  # also where the block has failed, as parameters stay changed as well

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
