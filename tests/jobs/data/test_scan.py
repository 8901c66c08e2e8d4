"""The look through all files: what it takes from large ones, what it remembers, how it stops."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onefold.errors import DataError
from onefold_jobs.data import scan
from onefold_jobs.data.classes import PictureClasses, read_classes
from onefold_jobs.data.masks import MaskRule
from onefold_jobs.data.pairs import MaskedPictures, read_pairs
from onefold_jobs.data.pictures import Look, Sums, look_at, look_through, open_picture
from onefold_jobs.data.scan import Scanning, read_scan
from tests.jobs.data.pictures import noise, write_class_folders
from tests.masked import save_pairs
from tests.tables import for_each


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    paths: list[Path] = []

    def look(path: Path, white: int | None = None) -> Look:
        paths.append(path)
        return look_at(path, white)

    monkeypatch.setattr(scan, "look_at", look)
    return paths


def read(root: Path, known: Any = None, watch: Any = None) -> PictureClasses:
    scanning = Scanning(known=known, watch=watch) if known else None
    return read_classes(root, holdout=0.3, seed=0, skip_bad=False, scanning=scanning)


def read_masked(root: Path, known: Any = None, **more: Any) -> MaskedPictures:
    scanning = Scanning(known=known) if known else None
    return read_pairs(root, holdout=0.25, seed=0, skip_bad=False, scanning=scanning, **more)


@pytest.mark.parametrize("settled", [False, True])
def test_what_was_changed_is_read_again_and_nothing_else(
    tmp_path: Path, read_paths: list[Path], settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settled:  # files count as written long ago
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 10**12)
    root = write_class_folders(tmp_path / "pets", ["dog", os.fsdecode(b"caf\xe9")])
    first = read(root)
    (tmp_path / "scan.json").write_text(first.scan)
    known = read_scan(tmp_path / "scan.json")
    assert len(read_paths) == 18
    read_paths.clear()
    watched: list[tuple[int, int]] = []
    again = read(root, known, watch=lambda done, total: watched.append((done, total)))
    # Of files that nobody has touched since, none is reported as read.
    assert len(watched) == (0 if settled else 18)
    assert (again.digest, again.sizes, again.sums) == (first.digest, first.sizes, first.sums)
    # What was copied is known by its content.
    shutil.copytree(root, tmp_path / "moved")
    assert read(tmp_path / "moved", known).digest == first.digest
    assert read_paths == []
    changed = root / "train/dog/0.png"
    times = os.stat(changed)
    noise((12, 10), seed=99).save(changed)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read(root, known).digest != first.digest
    assert read_paths == [changed]


def test_masks_are_known_with_their_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pairs(tmp_path, [(4, 4)] * 8)
    first = read_masked(tmp_path)
    (tmp_path / "scan.json").write_text(first.scan)
    known = read_scan(tmp_path / "scan.json")
    assert len(known) == 16
    other = read_masked(tmp_path, known, rule=MaskRule(("0",)))
    assert other.foreground == other.pixels - first.foreground
    for name in ("look_at", "look_at_mask"):
        monkeypatch.setattr(f"onefold_jobs.data.pairs.{name}", lambda *_, **__: pytest.fail("read"))
    again = read_masked(tmp_path, known)
    assert (again.digest, again.foreground) == (first.digest, first.foreground)


def test_a_damaged_memory_is_none(tmp_path: Path) -> None:
    path = tmp_path / "scan.json"
    assert read_scan(path) == {}
    sums = {"count": 16, "totals": [9], "squares": [9]}
    picture = ["picture", [4, 4], True, sums, None, False, None]
    mask = ["mask", [4, 4], 3, 0, 1, ["0", "1"], []]

    def remembered(kind: str, look: list[Any]) -> int:
        files = {"a.png": [kind, "digest", None, look]}
        path.write_text(json.dumps({"format": 4, "files": files}))
        return len(read_scan(path))

    for kind, look, other in (("picture", picture, mask), ("mask:", mask, picture)):
        assert remembered(kind, look) == 1
        damaged = [[*look[:at], odd, *look[at + 1 :]] for at in range(7) for odd in ("x", {})]
        assert [remembered(kind, each) for each in (*damaged, look[:3], [], other)] == [0] * 17
    for content in (b"", b"{", b"[]", b'{"format": 0, "files": {}}', b"\xff"):
        path.write_bytes(content)
        assert read_scan(path) == {}


def photograph(path: Path, size: tuple[int, int], **how: Any) -> Path:
    """A picture with large and small shapes, as JPEG."""
    coarse = noise((size[0] // 40, size[1] // 40)).resize(size, Image.Resampling.BICUBIC)
    Image.blend(coarse, noise(size), 0.1).save(path, format="JPEG", quality=90, **how)
    return path


@for_each("orientation", [1, 6])
def test_a_large_jpeg_is_looked_at_in_less_detail(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = photograph(tmp_path / "a.jpg", (2400, 1200), exif=exif)
    look, full, picture = look_at(path), Sums(), open_picture(path)
    full.add(np.asarray(picture))
    assert (look.size, look.sums.count) == (picture.size, full.count)
    assert look.sums != full
    (mean, std), (full_mean, full_std) = look.sums.mean_and_std(), full.mean_and_std()
    assert mean == pytest.approx(full_mean, abs=0.002)
    assert std == pytest.approx(full_std, rel=0.1)
    with Image.open(path) as whole:
        turned = np.rot90(np.asarray(whole.convert("RGB")), 3 if orientation == 6 else 0)
    np.testing.assert_array_equal(np.asarray(picture), turned)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataError, match="image file is truncated"):
        look_at(path)


@for_each("raised", [KeyboardInterrupt, MemoryError])
def test_a_look_through_stops_after_the_pictures_in_hand(raised: type[BaseException]) -> None:
    looked: list[int] = []
    stopping = threading.Event()

    def look(number: int) -> int:
        looked.append(number)
        if number != 40:
            stopping.wait(0.02)
        elif raised is MemoryError:
            raise MemoryError
        else:  # what Ctrl-C does
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return number

    with pytest.raises(raised):
        look_through(look, range(4000))
    assert len(looked) < 1000
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
