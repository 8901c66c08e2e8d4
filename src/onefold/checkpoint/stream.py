"""Brings what the devices keep of a run to the lead's writer, one tensor after the other.

Note: who does what
-------------------
The lead writes in a thread, as ever. When it comes to the bytes of a tensor that the devices keep
in pieces, it asks for them and waits. The training threads of all devices meet, learn what is asked
for, send the lead their pieces, and meet again; also while nothing is asked for, so that they know
that the lead is at work (see `onefold.checkpoint.lead`). So the lead has its own span and one
tensor, or two while one comes and the other is being let go. Training waits for all of it.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from onefold.checkpoint.background import Background
from onefold.checkpoint.lead import Lead
from onefold.checkpoint.states import VALUES
from onefold.core.names import own_name
from onefold.engine.engine import Engine
from onefold.engine.optimizerstate import PieceState, described, join, pack, read_described, unpack
from onefold.errors import CheckpointError
from onefold.system.tensorfile import Bytes, TensorParts

__all__ = ["Stream"]

_NOTHING, _ENDED = -1, -2


class Stream:
    """The parameters and the optimizer's state of devices that keep their parts of them alone.

    All devices make one together, and then call `feed`.

    Args:
        engine: the device of this process.
        lead: the lead's work.

    Raises:
        TypeError: a value is neither a tensor nor JSON, or of a dtype that a file cannot hold.
    """

    def __init__(self, engine: Engine, lead: Lead) -> None:
        self._lead = lead
        self._update = update = engine.update
        self._storage = storage = update.storage
        self._transport = engine.exchange.transport
        own = update.states()
        texts = self._transport.gather_bytes({engine.replicas[0].number: described(own)})
        states = [*chain.from_iterable(map(read_described, texts))]
        self.optimizer = join(states, storage.pieces, storage.masters, self._coming)
        """The optimizer's state, whose tensors come when they are asked for."""
        self._own: dict[tuple[int, str], list[PieceState]] = defaultdict(list)
        for state in own:
            self._own[self._place(state)].append(state)
        self._lent, self._pieces = storage.lent_layout().layout, storage.lent_pieces()
        self._frozen = engine.exchange.memory.frozen
        values = [(number, VALUES) for number in range(len(self._lent.entries))]
        self._places = [*values, *dict.fromkeys(map(self._place, states))]
        self._numbers = {place: number for number, place in enumerate(self._places)}
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Bytes] | None] = queue.SimpleQueue()

    def parameter(self, name: str, number: int) -> TensorParts:
        """The values of a parameter that is elsewhere; they come when they are asked for."""
        entry, dtype = self._lent.entries[number], self._lent.dtype_of(number)
        return TensorParts(
            own_name(name), dtype, entry.shape, entry.stride, self._coming(number, VALUES)
        )

    def feed(self, writing: Background, write: Callable[[], None] | None) -> None:
        """Bring the lead what its writer asks for, until it has ended; called on all devices.

        Args:
            writing: runs the writer. What that has raised is left for whoever waits for it.
            write: writes the files, on the lead's process; None elsewhere.
        """
        try:
            if write is not None:
                writing.start(partial(self._run, write))
            patience = self._lead.patience(writing)
            while (number := self._next()) != _ENDED:
                if number == _NOTHING:
                    patience.look()
                else:
                    self._supply(*self._places[number])
        except BaseException:
            # Or the writer would wait for ever, and whoever ends this process for the writer.
            self._answers.put(None)
            writing.abandon()
            raise

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:
            self._asked.put(_ENDED)

    def _next(self) -> int:
        """What the lead's writer asks for: the number of a place, or that there is nothing."""
        number = _ENDED
        if self._lead.is_here:
            try:
                number = self._asked.get(timeout=self._lead.look_s)
            except queue.Empty:
                number = _NOTHING
        return int(self._lead.share(number))

    def _supply(self, entry: int, key: str) -> None:
        """Bring the lead a tensor of one parameter, and hand it to the writer there."""
        pack(self._states(entry, key), self._transport.room)
        brought = self._transport.bring()
        if self._lead.is_here:
            states = chain.from_iterable(map(unpack, brought))
            (tensor,) = join(states, self._pieces, self._lent).tensors
            self._answers.put([*tensor.parts])

    def _states(self, entry: int, key: str) -> list[PieceState]:
        if key != VALUES:
            return self._own.get((entry, key), [])
        update, frozen = self._update, self._frozen
        values = {item.number: update.values_of for item in update.owned}
        values |= {} if frozen is None else dict.fromkeys(frozen.numbers, frozen.part)
        return [
            PieceState(number, VALUES, value_of(number), True)
            for number, value_of in values.items()
            if self._pieces[number].entry == entry
        ]

    def _coming(self, entry: int, key: str) -> Iterator[Bytes]:
        """Ask for a tensor, in the writer's thread, once its bytes are looked at."""
        self._asked.put(self._numbers[entry, key])
        # The training thread answers or, if it fails, says so.
        found = self._answers.get()
        if found is None:
            raise CheckpointError("the checkpoint was given up, as another device did not answer")
        yield from found

    def _place(self, state: PieceState) -> tuple[int, str]:
        return self._storage.pieces[state.piece].entry, state.key
