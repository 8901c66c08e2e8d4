"""Two devices in two threads of one process, with a transport between them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from onefold.errors import PeerLost
from onefold.exchange.transport import Transport

Result = TypeVar("Result")
LIMIT_S = 20.0


class Table:
    """Where devices meet, round after round."""

    def __init__(self, seats: int = 2) -> None:
        self.seats = seats
        self._rounds: dict[int, dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition()
        self._left = False

    def trade(self, number: int, turn: int, thing: Any) -> list[Any]:
        """What every device has put on the table in this round."""
        with self._changed:
            there = self._rounds[turn]
            there[number] = thing
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(there) == self.seats or self._left, LIMIT_S)
            if len(there) < self.seats:
                raise PeerLost("another device has left the table, or did not come")
            return [there[each] for each in range(self.seats)]

    def leave(self) -> None:
        """Nobody is to wait for one more round."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


class Seat(Transport):
    """One device's place at a table."""

    def __init__(self, table: Table, number: int) -> None:
        self.number, self.rounds = number, 0
        self._table = table
        self._room = torch.empty(0, dtype=torch.uint8)

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        return self._trade(word)

    def room(self, nbytes: int) -> torch.Tensor:
        self._room = torch.empty(nbytes, dtype=torch.uint8)
        return self._room

    def bring(self) -> list[torch.Tensor]:
        rooms = self._trade(self._room)
        return rooms if self.number == 0 else []

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        made = None if make is None else [make(number) for number in range(self._table.seats)]
        return self._trade(made)[0][self.number]  # type: ignore[no-any-return]

    def close(self, failure: BaseException | None = None) -> None:
        self._table.leave()

    def _trade(self, thing: Any) -> list[Any]:
        self.rounds += 1
        return self._table.trade(self.number, self.rounds, thing)


def together(work: Callable[[Seat], Result], seats: int = 2) -> list[Result | Exception]:
    """What the work came to at each seat, or raised there."""
    table = Table(seats)
    found: list[Result | Exception] = [TimeoutError("nothing came of it")] * seats

    def run(number: int) -> None:
        try:
            found[number] = work(Seat(table, number))
        except Exception as error:
            found[number] = error
            table.leave()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(seats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return found
