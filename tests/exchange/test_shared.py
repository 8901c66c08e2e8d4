"""Memory that processes of a host share, in a file without a name; here they are threads."""

import errno
import os
from collections.abc import Iterator

import pytest
import torch

from onefold.exchange import shared
from onefold.exchange.shared import new_file
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


@for_each("refused", ["ftruncate", "mmap"])
def test_refused_memory_is_named(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared.os if refused == "ftruncate" else shared.mmap, refused, refuse)
    words = r"expected 12,345 bytes of memory that all devices of this host share, got: Cannot all"
    with pytest.raises(OSError, match=words) as caught:
        new_file(12_345)
    assert caught.value.errno == errno.ENOMEM
    assert "ulimit -v" in str(caught.value)
