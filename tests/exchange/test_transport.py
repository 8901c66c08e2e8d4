"""What any transport makes of meetings, and the one of a process that is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Barrier

import pytest
import torch

from onefold.exchange.transport import Alone, Transport, roomy
from onefold.system.heap import ORDINARY
from tests.exchange.together import CPU, LIMIT_S, together
from tests.tables import for_each


class Room:
    """Where devices that are threads meet."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size, timeout=LIMIT_S)
        self._words = [b""] * size

    def meet(self, rank: int, word: bytes) -> list[bytes]:
        self._words[rank] = word
        self._barrier.wait()
        said = list(self._words)
        self._barrier.wait()
        return said

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Nobody is waited for after an error."""
        try:
            yield
        except BaseException:
            self._barrier.abort()
            raise


class Meeting(Transport):
    """One device in a room; it notes how long the words were."""

    frame_bytes = 8

    def __init__(self, room: Room, rank: int) -> None:
        self.lengths: list[int] = []
        self._room = room
        self._rank = rank

    def meet(self, word: bytes = b"") -> Sequence[bytes]:
        self.lengths.append(len(word))
        return self._room.meet(self._rank, word)

    def close(self, failure: BaseException | None = None) -> None:
        raise NotImplementedError

    def room(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def bring(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def hand_out(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        raise NotImplementedError


def on_each(size: int, call: Callable[[Meeting, int], object]) -> tuple[list[object], list[int]]:
    """What a call returns on each device, and the lengths of the words of all in turn."""
    room = Room(size)
    devices = [Meeting(room, rank) for rank in range(size)]

    def run(rank: int) -> object:
        with room.entered():
            return call(devices[rank], rank)

    returned = together(size, run)
    lengths = [device.lengths for device in devices]
    assert lengths == [lengths[0]] * size, "all must say equally much in each meeting"
    return returned, lengths[0]


# Bytes of any length


@for_each(
    ("sizes", "lengths"),
    [
        ([0], [8, 0]),
        ([0, 0, 0], [8, 0]),
        ([3, 3], [8, 3]),
        ([8, 8], [8, 8]),
        ([9, 9], [8, 8, 1]),
        ([0, 1], [8, 1]),
        ([20, 0, 5], [8, 8, 8, 4]),
        ([1, 17], [8, 8, 8, 1]),
    ],
    ids=str,
)
def test_texts_of_any_length_are_gathered(sizes: list[int], lengths: list[int]) -> None:
    texts = [bytes(range(65 + rank, 65 + rank + size)) for rank, size in enumerate(sizes)]
    gathered, said = on_each(len(sizes), lambda t, rank: t.gather_bytes({rank: texts[rank]}))
    assert gathered == [texts] * len(sizes)
    assert said == lengths, "first how long each is, then frames of the longest"


@for_each("end", [b"\0", b"\0\0\0\0\0\0\0\0\0", b"a\0"])
def test_zeros_at_the_end_belong_to_the_text(end: bytes) -> None:
    texts = [end, b"as long as that and longer"]
    gathered, _ = on_each(2, lambda t, rank: t.gather_bytes({rank: texts[rank]}))
    assert gathered == [texts] * 2


def test_bytes_are_given_and_got() -> None:
    gathered, _ = on_each(2, lambda t, rank: t.gather_bytes({rank: bytes(rank)}))
    assert all(type(text) is bytes for texts in gathered for text in texts)  # type: ignore[attr-defined]


# Rows of numbers


@for_each("numel", [0, 1, 2, 7])
def test_rows_are_shared_with_their_bits(numel: int) -> None:
    def row(rank: int) -> torch.Tensor:
        return torch.tensor([-0.0, torch.inf, torch.nan, rank / 3, 5e-324, 1.0, -2.0])[
            :numel
        ].double()

    def share(device: Meeting, rank: int) -> torch.Tensor:
        return device.share({rank: row(rank)})

    shared, said = on_each(3, share)
    wanted = torch.stack([row(rank) for rank in range(3)])
    for table in shared:
        assert isinstance(table, torch.Tensor)
        assert (table.shape, table.dtype) == ((3, numel), torch.float64)
        assert table.view(torch.int64).equal(wanted.view(torch.int64))
    assert said == [8] * numel if numel else [0]


def test_a_row_need_not_be_contiguous() -> None:
    shared, _ = on_each(2, lambda t, rank: t.share({rank: torch.arange(6.0).double()[rank::2]}))
    assert all(table.tolist() == [[0, 2, 4], [1, 3, 5]] for table in shared)  # type: ignore[attr-defined]


def test_what_was_shared_can_be_written_to() -> None:
    (table,), _ = on_each(1, lambda t, rank: t.share({rank: torch.ones(2, dtype=torch.float64)}))
    assert isinstance(table, torch.Tensor)
    table += 1
    assert table.tolist() == [[2, 2]]


def test_the_step_is_noted_for_errors() -> None:
    device = Meeting(Room(1), 0)
    assert device.step == 1
    device.begin_step(7)
    assert device.step == 7
    assert Meeting(Room(1), 0).step == 1


# Alone


def test_who_is_alone_meets_itself() -> None:
    alone = Alone(CPU)
    assert list(alone.meet(b"word")) == [b"word"]
    assert list(alone.meet()) == [b""]


@for_each("devices", [1, 3])
def test_who_is_alone_has_the_rows_of_all_its_devices(devices: int) -> None:
    alone = Alone(CPU)
    rows = {n: torch.tensor([n, 0.5], dtype=torch.float64) for n in reversed(range(devices))}
    assert alone.share(rows).tolist() == [[n, 0.5] for n in range(devices)]
    texts = {n: bytes(n) for n in reversed(range(devices))}
    assert alone.gather_bytes(texts) == [bytes(n) for n in range(devices)]


def test_who_is_alone_brings_its_own_room() -> None:
    alone = Alone(CPU)
    room = alone.room(10)
    room[:10] = 7
    (brought,) = alone.bring()
    assert brought.data_ptr() == room.data_ptr()
    assert alone.room(4).data_ptr() == room.data_ptr(), "the same memory again and again"
    assert alone.room(11).numel() >= 11


def test_there_is_nothing_to_bring_before_a_room_was_filled() -> None:
    with pytest.raises(ValueError, match="there is nothing to bring: fill a room first"):
        Alone(CPU).bring()


def test_who_is_alone_hands_out_to_itself() -> None:
    given = Alone(CPU).hand_out(lambda device: torch.full((3,), device + 5, dtype=torch.uint8))
    assert given.tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match="expected the lead's process to say what"):
        Alone(CPU).hand_out(None)


def test_who_is_alone_may_leave_twice() -> None:
    alone = Alone(CPU)
    alone.close(ValueError("over"))
    alone.close()


# Rooms


def test_a_room_is_made_anew_only_where_it_is_too_small() -> None:
    first = roomy(None, 16, CPU, ORDINARY)
    assert (first.dtype, first.device, first.numel()) == (torch.uint8, CPU, 16)
    assert roomy(first, 16, CPU, ORDINARY) is first
    assert roomy(first, 0, CPU, ORDINARY) is first
    assert roomy(first, 17, CPU, ORDINARY).numel() == 17
