"""What any transport makes of meetings, and the one of a process that is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Barrier

import pytest
import torch

from onefold.exchange.transport import Alone, Transport
from tests.exchange.together import CPU, LIMIT_S, together
from tests.tables import for_each


class Meeting(Transport):
    """One device of several threads that meet with words of the same length."""

    frame_bytes = 8

    def __init__(self, rank: int, barrier: Barrier, words: list[bytes]) -> None:
        self._rank, self._barrier, self._words = rank, barrier, words

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        self._words[self._rank] = word
        self._barrier.wait()
        said = list(self._words)
        self._barrier.wait()
        assert {len(each) for each in said} == {len(word)}
        assert len(word) <= self.frame_bytes
        return said

    def close(self, failure: BaseException | None = None) -> None:
        raise NotImplementedError

    def room(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def bring(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        raise NotImplementedError


def on_each(size: int, call: Callable[[Meeting, int], object]) -> list[object]:
    barrier, words = Barrier(size, timeout=LIMIT_S), [b""] * size
    return together(size, lambda rank: call(Meeting(rank, barrier, words), rank))


@for_each("sizes", [[0], [0, 0, 0], [3, 3], [8, 8], [9, 9], [0, 1], [20, 0, 5], [1, 17]])
def test_texts_of_any_length_are_gathered(sizes: list[int]) -> None:
    texts = [(bytes(range(65, 65 + n)) + b"\0")[-n:] if n else b"" for n in sizes]
    gathered = on_each(len(sizes), lambda device, rank: device.gather_bytes({rank: texts[rank]}))
    assert gathered == [texts] * len(sizes)


@for_each("numel", [0, 1, 2, 7])
def test_rows_are_shared_with_their_bits(numel: int) -> None:
    def row(rank: int) -> torch.Tensor:
        numbers = [-0.0, 9, torch.inf, 9, torch.nan, 9, rank / 3, 9, 5e-324, 9, 1.0, 9, -2.0]
        return torch.tensor(numbers, dtype=torch.float64)[::2][:numel]

    wanted = torch.stack([row(rank) for rank in range(3)]).view(torch.int64)
    for table in on_each(3, lambda device, rank: device.share({rank: row(rank)})):
        assert isinstance(table, torch.Tensor)
        assert table.view(torch.int64).equal(wanted)


def test_who_is_alone_has_all_of_its_devices() -> None:
    alone = Alone(CPU)
    assert list(alone.meet(b"word")) == [b"word"]
    rows = {n: torch.tensor([n, 0.5], dtype=torch.float64) for n in (2, 1, 0)}
    assert alone.share(rows).tolist() == [[n, 0.5] for n in range(3)]
    assert alone.gather_bytes({n: bytes(n) for n in (2, 1, 0)}) == [bytes(n) for n in range(3)]
    with pytest.raises(ValueError, match="there is nothing to bring: fill a room first"):
        alone.bring()
    room = alone.room(10)
    room[:10] = 7
    (brought,) = alone.bring()
    assert brought.data_ptr() == room.data_ptr() == alone.room(4).data_ptr()
    assert alone.room(11).numel() >= 11
    given = alone.hand_out(lambda device: torch.full((3,), device + 5, dtype=torch.uint8))
    assert given.tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match="expected the lead's process to say what"):
        alone.hand_out(None)
    alone.close(ValueError("over"))
    alone.close()
