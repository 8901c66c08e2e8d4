"""Tensors that lie in a file without a name, and memory that takes no room until it is provided."""

import errno
import gc
import mmap
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from onefold.system.allocator import DEFAULT_ALLOCATOR
from onefold.system.file_memory import MmapAllocator, SparseAllocator, naming_limits, new_disk_file
from tests.tables import for_each

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def allocator(tmp_path: Path) -> MmapAllocator:
    return MmapAllocator(tmp_path)


def in_a_file(tensor: torch.Tensor) -> bool:
    """Whether the first byte of a tensor lies in a mapping of one of our files."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split(maxsplit=1)[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return "(deleted)" in line and "memfd" not in line
    raise AssertionError("no mapping has it")


def counted() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), len(maps)


ROWS = torch.arange(6000.0).reshape(60, 100)


@for_each(
    "tensor",
    [
        ROWS.t(),
        torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
        torch.randn(6000).to(torch.bfloat16),
        ROWS[:, ::2],
        torch.randn(1).expand(60, 100),
        torch.tensor(3.0),
        torch.zeros(0, 7),
    ],
)
def test_a_copy_has_the_strides_of_pytorchs_own(tmp_path: Path, tensor: torch.Tensor) -> None:
    expected = torch.empty_like(tensor)
    for allocator in (MmapAllocator(tmp_path), DEFAULT_ALLOCATOR):
        copy, wide = (
            allocator.copy(tensor),
            allocator.like(torch.nn.Parameter(tensor), torch.float64),
        )
        assert torch.equal(copy, tensor)
        assert (copy.stride(), copy.dtype) == (expected.stride(), expected.dtype)
        assert (wide.shape, wide.stride()) == (expected.shape, expected.stride())
        assert (wide.dtype, wide.requires_grad) == (torch.float64, False)
        for nbytes in (0, 1, PAGE - 1, PAGE + 1):
            assert allocator.empty(nbytes).shape == (nbytes,)
            assert allocator.zeros(nbytes).tolist() == [0] * nbytes


def test_a_tensor_is_copied_only_if_it_lies_elsewhere(allocator: MmapAllocator) -> None:
    outside, small = torch.randn(5000), torch.randn(3)
    inside = allocator.kept(outside)
    assert torch.equal(inside, outside)
    assert in_a_file(inside)
    assert in_a_file(allocator.like(torch.empty(PAGE // 4)))
    assert not in_a_file(allocator.empty(PAGE - 1))
    assert (allocator.on_disk, DEFAULT_ALLOCATOR.on_disk) == (True, False)
    assert not list(allocator.folder.iterdir())  # no name is left
    view = inside[8:].detach()
    for each in (inside, view, small):
        assert allocator.kept(each) is each
    assert DEFAULT_ALLOCATOR.kept(outside) is outside


def test_a_place_is_used_again_once_no_tensor_refers_to_it(allocator: MmapAllocator) -> None:
    one = allocator.empty(5 * PAGE).fill_(9)
    view = one.view(torch.float32)[7:]
    del one
    taken = view.untyped_storage().data_ptr()
    other = allocator.empty(5 * PAGE)
    assert other.untyped_storage().data_ptr() != taken
    del view
    gc.collect()
    again = allocator.empty(5 * PAGE - 1)
    assert again.untyped_storage().data_ptr() == taken
    del again
    gc.collect()
    assert not allocator.zeros(5 * PAGE).any()
    kept = {}
    for number in range(200):
        tensor = allocator.empty((1 + number % 3) * PAGE).fill_(number)
        if number % 7 == 0:
            kept[number] = tensor[100:200]
    for number, view in kept.items():
        assert view.tolist() == [number] * 100


def test_a_folder_of_no_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        with pytest.raises(
            OSError, match=r"^\[Errno \d+\] cannot create a file in .*--offload-dir"
        ):
            MmapAllocator(tmp_path / name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert MmapAllocator.at("").folder == tmp_path
    assert MmapAllocator.at(str(tmp_path / "..")).folder == tmp_path / ".."


def test_on_a_full_disk_nothing_is_lost(
    allocator: MmapAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = allocator.copy(torch.arange(4000.0))
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
        with pytest.raises(OSError, match=r"8,192 more bytes for the model in .*: No sp") as caught:
            allocator.empty(2 * PAGE)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="No space"):
            new_disk_file(allocator.folder, PAGE)
    assert torch.equal(kept, torch.arange(4000.0))
    assert allocator.empty(2 * PAGE).numel() == 2 * PAGE
    # Room is there before it is mapped: a page without would end the process when it is written.
    descriptor = new_disk_file(allocator.folder, 3 * PAGE)
    found = os.fstat(descriptor)
    os.close(descriptor)
    assert found.st_blocks * 512 >= found.st_size == 3 * PAGE


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_folder_that_is_no_disk_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    MmapAllocator.at("/dev/shm")
    assert "in /dev/shm, which is itself in memory (tmpfs)" in caplog.text


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(each.split()[1]) for each in lines if each.startswith("RssAnon:"))


def test_it_takes_no_memory_and_holds_values_once_it_is_provided(tmp_path: Path) -> None:
    allocator, before = SparseAllocator(tmp_path), resident_bytes()
    files = counted()[0]
    rooms = [allocator.room(50 * MIB) for _ in range(3)]
    for each in rooms:  # no numbers
        assert bool((each[:: 1 << 16] == 255).all())
    address = rooms[1].data_ptr()
    allocator.provide(rooms[1])
    assert rooms[1].data_ptr() == address
    assert not rooms[1].any()
    rooms[1].fill_(7)
    assert resident_bytes() < before + 10 * MIB, "its pages are a file's"
    assert bool((rooms[0][:: 1 << 16] == 255).all())
    assert (counted()[0], list(tmp_path.iterdir())) == (files, [])
    # What is written too early is the writer's alone.
    one, other = allocator.room(100), allocator.room(100)
    one.zero_()
    assert bool((other == 255).all())
    assert bool((allocator.room(100) == 255).all())
    mappings = counted()[1]
    for _ in range(20):
        allocator.provide(allocator.room(9 * MIB))
    assert counted()[1] <= mappings + 2


def test_each_limit_is_named() -> None:
    for number, words in (
        (errno.ENOSPC, ".*--offload-dir or ONEFOLD_OFFLOAD_DIR; `onefold plan` shows how much"),
        (errno.EDQUOT, ".*--offload-dir or ONEFOLD_OFFLOAD_DIR"),
        (errno.EFBIG, r".*\(ulimit -f\)$"),
        (errno.ENOMEM, r".*\(ulimit -v\)"),
        (errno.EIO, "$"),
    ):
        text = rf"cannot get two pages: {os.strerror(number)}{words}"
        with pytest.raises(OSError, match=text) as caught, naming_limits("two pages"):
            raise OSError(number, os.strerror(number))
        assert caught.value.errno == number
