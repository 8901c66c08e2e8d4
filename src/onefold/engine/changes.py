"""The block in which a script may change the model between two steps: `Trainer.changing`.

Note: a gradient inside the block
---------------------------------
In the block, devices may differ: where processes have their parameters in common memory, all but
the lead write to copies. A gradient has to be computed with the same values everywhere. So the
block is closed for as long as that takes: the lead's values become everybody's, and afterwards
everybody goes on from there, in new copies. What the script holds are the parameters themselves,
which stay the same objects; the gradients in their ``.grad`` are each process's own, and stay too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from onefold.core.head import Call, StepHead
from onefold.engine.agreement import Agreement, Siblings
from onefold.engine.gradients import keeping_gradients
from onefold.engine.replica import Replica
from onefold.engine.update import SpanOptimizer
from onefold.engine.wholestate import WholeState
from onefold.exchange.exchange import Exchange

__all__ = ["Changes"]


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
