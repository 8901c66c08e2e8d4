"""Memory that processes of a host share, in a file without a name; here they are threads."""

import errno
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from onefold.exchange.shared import make_own, new_file
from onefold.system.compat import FakeTensorMode
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

    monkeypatch.setattr(os if refused == "ftruncate" else mmap, refused, refuse)
    words = r"cannot get 12,345 bytes of memory that all devices of this host share: Cannot all"
    with pytest.raises(OSError, match=words) as caught:
        new_file(12_345)
    assert caught.value.errno == errno.ENOMEM
    assert "ulimit -v" in str(caught.value)


@for_each("mode", ["meta", "fake"])
def test_memory_becomes_a_processs_own_whatever_mode_is_on(mode: str) -> None:
    """A trainer is dropped whenever garbage is collected."""
    descriptor, memory = new_file(4096)
    memory.fill_(7)
    with torch.device("meta") if mode == "meta" else FakeTensorMode():
        make_own(memory)
    os.pwrite(descriptor, bytes(4096), 0)
    os.close(descriptor)
    assert memory.unique().tolist() == [7]
    del memory
