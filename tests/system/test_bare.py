"""Memory that takes no room until it is provided."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from onefold.system import heap as heaps
from onefold.system.heap import BareMemory
from tests.tables import for_each

MIB = 1 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(each.split()[1]) for each in lines if each.startswith("RssAnon:"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_what_is_read_too_early_is_no_number(dtype: torch.dtype, tmp_path: Path) -> None:
    found = BareMemory(tmp_path).room(9 * MIB).view(dtype)
    assert bool(found.isnan().all())
    assert bool((found.view(torch.int16) == -1).all())


def test_it_takes_no_memory_and_holds_values_once_it_is_provided(tmp_path: Path) -> None:
    heap = BareMemory(tmp_path)
    before, files = resident_bytes(), len(os.listdir("/proc/self/fd"))
    rooms = [heap.room(50 * MIB) for _ in range(3)]
    for each in rooms:
        assert bool((each[:: 1 << 16] == 255).all())
    assert resident_bytes() < before + 10 * MIB
    address = rooms[1].data_ptr()
    heap.provide(rooms[1])
    assert rooms[1].data_ptr() == address
    assert not rooms[1].any()
    rooms[1].fill_(7)
    assert resident_bytes() < before + 10 * MIB, "its pages are a file's"
    assert bool((rooms[0][:: 1 << 16] == 255).all())
    assert len(os.listdir("/proc/self/fd")) == files
    assert not list(tmp_path.iterdir())


def test_nothing_stays_mapped(tmp_path: Path) -> None:
    heap = BareMemory(tmp_path)
    heap.provide(heap.room(9 * MIB))
    gc.collect()
    before = mappings()
    for _ in range(20):
        heap.provide(heap.room(9 * MIB))
    assert mappings() <= before + 2


def test_what_is_written_too_early_is_the_writers_alone(tmp_path: Path) -> None:
    heap = BareMemory(tmp_path)
    one, other = heap.room(100), heap.room(100)
    one.zero_()
    assert bool((other == 255).all())
    assert bool((heap.room(100) == 255).all())


def test_a_disk_without_room_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap = BareMemory(tmp_path)
    room = heap.room(5000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"room for 8,192 more bytes of the model .*--home"):
            heap.provide(room)
    assert bool((room == 255).all())
    heap.provide(room)
    assert not room.any()


def test_a_mapping_that_fails_is_an_error() -> None:
    with pytest.raises(OSError, match="expected 4,096 bytes of a file to be mapped, got: "):
        heaps._map_over(0, 4096, 1, -1)


def test_a_folder_in_memory_is_mentioned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(heaps, "warn_of_memory", seen.append)
    heap = BareMemory(tmp_path)
    rooms = [heap.room(10) for _ in range(2)]
    assert not seen
    for room in rooms:
        heap.provide(room)
    assert seen == [tmp_path]
