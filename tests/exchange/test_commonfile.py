"""Memory that processes of a host share, in a file without a name."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

import pytest
import torch

from onefold.exchange import shared as commonfile
from onefold.exchange.shared import memory_of, new_file, take_file
from tests.exchange.together import mailboxes


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("size", [1, 4096, 100_001])
def test_new_memory_is_of_zeros(size: int) -> None:
    descriptor, memory = new_file(size)
    os.close(descriptor)
    assert (memory.numel(), memory.dtype) == (size, torch.uint8)
    assert not memory.any()
    memory[-1] = 3
    assert memory[-1] == 3, "it outlives the descriptor"
    del memory


def test_there_is_memory_for_nothing_as_well() -> None:
    """No mapping is of no length."""
    descriptor, memory = new_file(0)
    os.close(descriptor)
    assert memory.numel() == 1
    del memory


def test_what_one_writes_all_see() -> None:
    descriptor, one = new_file(8)
    other = memory_of(descriptor)
    os.close(descriptor)
    one[2] = 7
    other[5] = 9
    assert one.tolist() == other.tolist() == [0, 0, 7, 0, 0, 9, 0, 0]
    del one, other


def test_memory_begins_where_tensors_of_any_type_may() -> None:
    descriptor, memory = new_file(1000)
    os.close(descriptor)
    assert memory.data_ptr() % 64 == 0
    del memory


def test_a_file_is_taken_from_another_device() -> None:
    descriptor, sent = new_file(4)
    with mailboxes(2) as boxes:
        boxes[0].send_file(1, descriptor)
        received = take_file(boxes[1], 0)
    os.close(descriptor)
    sent[1] = 5
    assert received.tolist() == [0, 5, 0, 0]
    del sent, received


def test_pages_that_nobody_touches_take_no_room() -> None:
    descriptor, memory = new_file(1 << 40)
    blocks = os.fstat(descriptor).st_blocks
    os.close(descriptor)
    assert memory.numel() == 1 << 40
    assert blocks == 0
    del memory


@pytest.mark.parametrize("refused", ["ftruncate", "mmap"])
def test_memory_that_is_refused_is_named_with_its_limits(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    place = commonfile.os if refused == "ftruncate" else commonfile.mmap
    monkeypatch.setattr(place, refused, refuse)
    words = r"expected 12,345 bytes of memory that all devices of this host share, got: Cannot all"
    with pytest.raises(OSError, match=words) as caught:
        new_file(12_345)
    assert caught.value.errno == errno.ENOMEM
    assert "ulimit -v" in str(caught.value)


def test_a_limit_of_files_holds_for_memory() -> None:
    """The kernel asks for it by a signal, which Python ignores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"expected 2,097,152 bytes .* got: File too large"):
            new_file(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
