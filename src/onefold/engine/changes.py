"""The block in which a script may change the model between two steps: `Trainer.changing`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onefold.core.head import Call, StepHead
from onefold.engine.agreement import Agreement
from onefold.engine.replica import Replica
from onefold.engine.siblings import Siblings
from onefold.engine.update import SpanOptimizer
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
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        exchange: Exchange,
        update: SpanOptimizer,
        agreement: Agreement,
        siblings: Siblings,
    ) -> None:
        self._replicas = replicas
        self._exchange = exchange
        self._update = update
        self._agreement = agreement
        self._siblings = siblings

    @contextmanager
    def block(self, step: int) -> Iterator[None]:
        """Open the block; when it ends, the lead's values are everybody's.

        Args:
            step: the number of the next step.
        """
        agreement, exchange, first = self._agreement, self._exchange, self._replicas[0]
        named = first.parts.named.values()
        private = exchange.memory.is_common and first.number != 0
        try:
            if private:
                # What this process writes must not reach the common memory, so it gets copies; made
                # before the devices meet, after which the lead may already be writing.
                first.check_places()
                copies = [parameter.data.clone() for parameter in named]
            agreement.begin(StepHead(Call.CHANGING, step))
            agreement.changing = True
            if private:
                for parameter, copy in zip(named, copies, strict=True):
                    parameter.data = copy
            yield
        finally:
            agreement.changing = False
            if private:
                first.attach()
        first.check_places()
        first.buffers.places.check()
        first.buffers.absorb()
        agreement.changing = True
        try:
            agreement.begin(StepHead(Call.CHANGED, step))
        finally:
            agreement.changing = False
        exchange.memory.follow_lead(first.buffers.flat)
        if len(self._replicas) < exchange.board.shape.devices:
            agreement.settings.adopt(self._settings_of_lead())
        self._siblings.copy_first()
        self._update.follow_parameters()
        agreement.guard.note()

    def _settings_of_lead(self) -> list[dict[str, Any]]:
        leads = self._replicas[0].number == 0
        settings = self._agreement.settings.as_json() if leads else None
        own = {replica.number: json.dumps(settings).encode() for replica in self._replicas}
        found: list[dict[str, Any]] = json.loads(self._exchange.transport.gather_bytes(own)[0])
        return found
