"""Tensors that lie in a file without a name."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from onefold.system.heap import ORDINARY, DiskHeap, Heap, new_disk_file
from tests.tables import for_each

PAGE = mmap.PAGESIZE
HEAPS = pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])


@pytest.fixture
def heap(tmp_path: Path) -> DiskHeap:
    return DiskHeap(tmp_path)


def made(folder: Path, on_disk: bool) -> Heap:
    return DiskHeap(folder) if on_disk else ORDINARY


def used(heap: DiskHeap) -> int:
    """What it takes of the disk."""
    return os.fstat(heap._descriptor).st_blocks * 512


def in_a_file(tensor: torch.Tensor) -> bool:
    """Whether the first byte of a tensor lies in a mapping of one of our files."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_ = line.split(maxsplit=1)
        start, stop = (int(each, 16) for each in span.split("-"))
        if start <= address < stop:
            return "(deleted)" in line and "memfd" not in line
    raise AssertionError(f"no mapping has {address:x}")


@HEAPS
@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_memory_has_the_size_that_was_asked_for(tmp_path: Path, on_disk: bool, nbytes: int) -> None:
    heap = made(tmp_path, on_disk)
    for memory in (heap.empty(nbytes), heap.zeros(nbytes)):
        assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
    assert not heap.zeros(nbytes).any()


@HEAPS
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6000.0).reshape(60, 100),
        torch.arange(6000.0).reshape(60, 100).t(),
        torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
        torch.arange(6000, dtype=torch.int64),
        torch.randn(6000).to(torch.bfloat16),
        torch.randn(60, 100)[:, ::2],
        torch.randn(1).expand(60, 100),
        torch.tensor(3.0),
        torch.zeros(0, 7),
    ],
    ids=["rows", "columns", "channels last", "whole", "bf16", "gaps", "expanded", "number", "none"],
)
def test_a_copy_has_values_and_strides_as_pytorch_would_lay_them(
    tmp_path: Path, on_disk: bool, tensor: torch.Tensor
) -> None:
    heap = made(tmp_path, on_disk)
    copy, expected = heap.copy(tensor), torch.empty_like(tensor)
    assert (copy.shape, copy.stride(), copy.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert torch.equal(copy, tensor)
    wide = heap.like(tensor, torch.float64)
    assert (wide.dtype, wide.shape, wide.stride()) == (
        torch.float64,
        expected.shape,
        expected.stride(),
    )


def test_what_is_like_a_parameter_has_no_gradient(heap: DiskHeap) -> None:
    for each in (heap, ORDINARY):
        assert not each.like(torch.nn.Parameter(torch.ones(9000))).requires_grad


def test_large_tensors_lie_in_the_file_and_small_ones_do_not(heap: DiskHeap) -> None:
    assert in_a_file(heap.empty(PAGE))
    assert in_a_file(heap.like(torch.empty(PAGE // 4)))
    assert not in_a_file(heap.empty(PAGE - 1))
    assert not in_a_file(heap.like(torch.empty(PAGE // 4 - 1)))
    assert heap.on_disk
    assert not ORDINARY.on_disk


def test_a_tensor_is_copied_only_if_it_lies_elsewhere(heap: DiskHeap) -> None:
    outside, small = torch.randn(5000), torch.randn(3)
    inside = heap.kept(outside)
    assert inside is not outside
    assert torch.equal(inside, outside)
    assert in_a_file(inside)
    assert heap.kept(inside) is inside
    view = inside[8:].detach()
    assert heap.kept(view) is view
    assert heap.kept(small) is small
    assert ORDINARY.kept(outside) is outside


def test_a_place_is_used_again_once_no_tensor_refers_to_it(heap: DiskHeap) -> None:
    one = heap.empty(5 * PAGE)
    view = one.view(torch.float32)[7:]
    del one
    gc.collect()
    other = heap.empty(5 * PAGE)
    assert other.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    taken, before = view.untyped_storage().data_ptr(), used(heap)
    del view
    gc.collect()
    assert heap.empty(5 * PAGE - 1).untyped_storage().data_ptr() == taken
    assert used(heap) == before


def test_values_stay_what_they_are_while_others_come_and_go(heap: DiskHeap) -> None:
    kept = {}
    for number in range(200):
        tensor = heap.empty((1 + number % 3) * PAGE).fill_(number)
        if number % 7 == 0:
            kept[number] = tensor[100:200]
    del tensor
    assert used(heap) < 100 * PAGE
    for number, view in kept.items():
        assert view.tolist() == [number] * 100


def test_a_place_that_was_used_is_not_taken_for_zeros(heap: DiskHeap) -> None:
    heap.empty(2 * PAGE).fill_(9)
    gc.collect()
    assert not heap.zeros(2 * PAGE).any()


def test_a_tensor_outlives_its_heap(tmp_path: Path) -> None:
    heap = DiskHeap(tmp_path)
    tensor = heap.copy(torch.arange(4000.0))
    descriptor = heap._descriptor
    del heap
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert torch.equal(tensor, torch.arange(4000.0))


def test_no_name_is_left_in_the_folder(tmp_path: Path) -> None:
    heap = DiskHeap(tmp_path)
    heap.zeros(PAGE).fill_(1)
    assert not list(tmp_path.iterdir())


def test_it_is_where_temporary_files_are_if_no_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert DiskHeap.at("").folder == tmp_path
    assert DiskHeap.at(str(tmp_path / "..")).folder == tmp_path / ".."


@for_each("kind", ["absent", "a file"])
def test_a_folder_in_which_nothing_can_be_made_is_named(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "there"
    if kind == "a file":
        folder.write_text("")
    with pytest.raises(OSError, match=r"expected a folder in which files can be made.*--home"):
        DiskHeap(folder)


def test_a_disk_that_is_full_is_named_and_nothing_is_lost(
    heap: DiskHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = heap.copy(torch.arange(4000.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"8,192 more bytes of the model in .*: No space") as caught:
        heap.empty(2 * PAGE)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        new_disk_file(heap.folder, PAGE)
    monkeypatch.undo()
    assert torch.equal(kept, torch.arange(4000.0))
    assert heap.empty(2 * PAGE).numel() == 2 * PAGE


def test_room_is_there_before_it_is_mapped(tmp_path: Path) -> None:
    """A page without room on the disk would end the process when it is written."""
    descriptor = new_disk_file(tmp_path, 3 * PAGE)
    try:
        assert os.fstat(descriptor).st_size == 3 * PAGE
        assert os.fstat(descriptor).st_blocks * 512 >= 3 * PAGE
    finally:
        os.close(descriptor)


def test_a_folder_that_is_no_disk_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = f"1 0 {os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)} / {{}}\n"
    read_text = Path.read_text

    for line, said in (
        ("/ rw shared:1 - tmpfs tmpfs rw", True),
        ("/ rw - ext4 /dev/it rw", False),
    ):
        caplog.clear()

        def read(path: Path, line: str = line) -> str:
            is_list = str(path) == "/proc/self/mountinfo"
            return listed.format(line) if is_list else read_text(path)

        monkeypatch.setattr(Path, "read_text", read)
        DiskHeap.at(str(tmp_path))
        assert ("which is itself in memory (tmpfs)" in caplog.text) == said


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_memory_of_the_system_is_known(caplog: pytest.LogCaptureFixture) -> None:
    DiskHeap.at("/dev/shm")
    assert "in /dev/shm, which is itself in memory (tmpfs)" in caplog.text


def test_many_tensors_take_few_descriptors_and_mappings(heap: DiskHeap) -> None:
    """A process may have 1,024 open files by default, and 65,530 mappings."""

    def counted() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), len(maps)

    before = counted()
    kept = [heap.empty(PAGE).fill_(number % 251) for number in range(3000)]
    kept += [heap.empty((1 << 20) + number) for number in range(200)]
    after = counted()
    assert after[0] - before[0] <= 8
    assert after[1] - before[1] <= 16
    assert all(int(tensor[0]) == number % 251 for number, tensor in enumerate(kept[:3000]))


def test_only_what_is_used_takes_room_on_the_disk(heap: DiskHeap) -> None:
    kept = [heap.zeros(PAGE), heap.zeros(3 * PAGE)]
    blocks = os.fstat(heap._descriptor).st_blocks * 512
    assert sum(each.nbytes for each in kept) <= blocks < 1 << 20


def test_memory_that_was_freed_is_given_back(heap: DiskHeap) -> None:
    ORDINARY.trim()
    heap.trim()
    assert heap.copy(torch.ones(PAGE)).sum() == PAGE
