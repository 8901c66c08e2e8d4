"""Memory that processes of a host share, in a file without a name; here they are threads."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
import torch

from onefold.exchange import shared
from onefold.exchange.shared import HostTransport, memory_of, new_file, take_file
from tests.exchange.together import mailboxes, together
from tests.tables import for_each


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@for_each("size", [1, 4096, 100_001, 1 << 40])
def test_new_memory_is_of_zeros_which_take_no_room(size: int) -> None:
    descriptor, memory = new_file(size)
    blocks = os.fstat(descriptor).st_blocks
    os.close(descriptor)
    assert (memory.numel(), memory.dtype, blocks) == (size, torch.uint8, 0)
    assert memory.data_ptr() % 64 == 0, "tensors of any type may begin here"
    assert not memory[-100_001:].any()
    memory[-1] = 3
    assert memory[-1] == 3, "it outlives the descriptor"
    del memory


def test_what_one_writes_all_see() -> None:
    descriptor, one = new_file(8)
    other = memory_of(descriptor)
    with mailboxes(2) as boxes:
        boxes[0].send_file(1, descriptor)
        taken = take_file(boxes[1], 0)
    os.close(descriptor)
    one[2], other[5], taken[7] = 7, 9, 1
    assert one.tolist() == other.tolist() == taken.tolist() == [0, 0, 7, 0, 0, 9, 0, 1]
    del one, other, taken


@for_each("refused", ["ftruncate", "mmap"])
def test_memory_that_is_refused_is_named_with_its_limits(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared.os if refused == "ftruncate" else shared.mmap, refused, refuse)
    words = r"expected 12,345 bytes of memory that all devices of this host share, got: Cannot all"
    with pytest.raises(OSError, match=words) as caught:
        new_file(12_345)
    assert caught.value.errno == errno.ENOMEM
    assert "ulimit -v" in str(caught.value)


# What processes hand to each other between steps


@pytest.fixture
def pair() -> Iterator[list[HostTransport]]:
    with mailboxes(2) as boxes:
        ends = [HostTransport(box) for box in boxes]
        yield ends
        for end in ends:
            end.close()


def test_rooms_are_not_copied_and_one_that_was_brought_is_not_written_over(
    pair: list[HostTransport],
) -> None:
    rooms = [end.room(100) for end in pair]
    assert pair[0].room(20).data_ptr() == rooms[0].data_ptr()
    brought, _ = together(2, lambda rank: pair[rank].bring())
    rooms[0][3], rooms[1][3] = 5, 6
    assert [memory[3].item() for memory in brought] == [5, 6]
    larger = pair[0].room(101)
    larger[:] = 1
    assert (larger.numel() >= 101, brought[0][3].item(), brought[0][4].item()) == (True, 5, 0)


def test_what_was_handed_out_is_everybodys_own(pair: list[HostTransport]) -> None:
    source = torch.zeros(4, dtype=torch.uint8)
    _, got = together(2, lambda rank: pair[rank].hand_out(None if rank else lambda _: source))
    source.fill_(9)
    assert got.tolist() == [0] * 4
    nothing = torch.empty(0, dtype=torch.uint8)
    lead, _ = together(2, lambda rank: pair[rank].hand_out(None if rank else lambda _: nothing))
    assert lead.tolist() == []
