"""The look through all files: what it takes from large ones, what it remembers, how it stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onefold.data import scan
from onefold.data.bad import BadFile
from onefold.data.classes import read_folders
from onefold.data.decoding import open_picture
from onefold.data.masks import MaskRule
from onefold.data.pairs import MaskedPictures, read_pairs
from onefold.data.pictures import Look, Sums, look_at, look_through
from onefold.data.scan import Scanning, Seen, read_scan, scan_files, scan_pictures
from onefold.data.splits import PictureClasses
from onefold.errors import DataError
from tests.data.pictures import noise, write_class_folders
from tests.masked import save_pairs
from tests.tables import for_each

PETS = ("cat", "dog")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(scan, "_SETTLED_NS", -1)


@pytest.fixture
def read_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pictures that were decoded."""
    paths: list[Path] = []

    def look(path: Path, white: int | None = None) -> Look:
        paths.append(path)
        return look_at(path, white)

    monkeypatch.setattr(scan, "look_at", look)
    return paths


def read(root: Path, known: Path | None = None) -> PictureClasses:
    scanning = Scanning(known=read_scan(known)) if known else None
    return read_folders(root, holdout=0.3, seed=0, skip_bad=False, scanning=scanning)


def kept(folder: Path, data: PictureClasses | MaskedPictures) -> Path:
    """A file of what was seen."""
    path = folder / "scan.json"
    path.write_text(data.scan)
    return path


# What is remembered.


@pytest.mark.usefixtures("settled")
def test_what_nobody_has_touched_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(write_class_folders(tmp_path / "pets", PETS))
    known = scan.unpack_scan(first.scan)
    monkeypatch.setattr(scan, "open_regular", lambda *_: pytest.fail("a file was opened"))
    monkeypatch.setattr(scan, "look_at", lambda *_: pytest.fail("a picture was read"))
    again = read_folders(
        tmp_path / "pets",
        holdout=0.3,
        seed=0,
        skip_bad=False,
        scanning=Scanning(known=known),
    )
    assert (again.digest, again.sizes, again.sums) == (first.digest, first.sizes, first.sums)


@pytest.mark.parametrize("settle", [False, True])
def test_what_was_copied_is_known_by_its_content(
    tmp_path: Path, read_paths: list[Path], settle: bool, request: pytest.FixtureRequest
) -> None:
    if settle:
        request.getfixturevalue("settled")
    first = read(write_class_folders(tmp_path / "pets", PETS))
    known = kept(tmp_path, first)
    assert len(read_paths) == 18
    read_paths.clear()
    shutil.copytree(tmp_path / "pets", tmp_path / "moved")
    again = read(tmp_path / "moved", known)
    assert read_paths == []
    assert again.digest == first.digest


@pytest.mark.parametrize("settle", [False, True])
def test_what_was_changed_is_read_again(
    tmp_path: Path, read_paths: list[Path], settle: bool, request: pytest.FixtureRequest
) -> None:
    if settle:
        request.getfixturevalue("settled")
    root = write_class_folders(tmp_path / "pets", PETS)
    first = read(root)
    known = kept(tmp_path, first)
    read_paths.clear()
    changed = root / "train/cat/0.png"
    times = os.stat(changed)
    noise((12, 10), seed=99).save(changed)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = read(root, known)
    assert read_paths == [changed]
    assert again.digest != first.digest


def test_a_file_that_was_only_just_written_has_no_stamp(tmp_path: Path) -> None:
    noise((4, 4)).save(tmp_path / "a.png")
    (seen,) = scan_pictures([tmp_path / "a.png"]).seen
    assert seen.stamp is None
    old = os.stat(tmp_path / "a.png").st_mtime_ns - 10**12
    os.utime(tmp_path / "a.png", ns=(old, old))
    assert scan_pictures([tmp_path / "a.png"]).seen[0].stamp is None  # its change is new


def test_masks_are_remembered_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pairs(tmp_path / "data", [(4, 4)] * 8)
    choices: dict[str, Any] = {"holdout": 0.25, "seed": 0, "skip_bad": False}
    first = read_pairs(tmp_path / "data", **choices)
    known = read_scan(kept(tmp_path, first))
    assert len(known) == 16
    monkeypatch.setattr("onefold.data.pairs.look_at", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(
        "onefold.data.pairs.look_at_mask", lambda *_, rule: pytest.fail(f"read by {rule}")
    )
    again = read_pairs(tmp_path / "data", **choices, scanning=Scanning(known=known))
    assert again.digest == first.digest
    assert (again.foreground, again.pixels) == (first.foreground, first.pixels)


def test_a_picture_that_is_its_own_mask_is_seen_as_both(tmp_path: Path) -> None:
    save_pairs(tmp_path, [(4, 4)] * 4)
    for number in range(4):
        shutil.copy(tmp_path / f"masks/{number}.png", tmp_path / f"images/{number}.png")
    data = read_pairs(tmp_path, holdout=0.25, seed=0, skip_bad=False)
    known = scan.unpack_scan(data.scan)
    again = read_pairs(
        tmp_path, holdout=0.25, seed=0, skip_bad=False, scanning=Scanning(known=known)
    )
    assert again.digest == data.digest
    assert {seen.kind for seen in known.values()} == {"picture", "mask:/"}


def test_what_was_seen_by_another_white_is_brought_to_the_new_one(
    tmp_path: Path, read_paths: list[Path]
) -> None:
    for number in range(8):
        values = np.random.default_rng(number).integers(0, 900, (6, 5)).astype(np.uint16)
        path = tmp_path / "data" / PETS[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(path)
    known = kept(tmp_path, read(tmp_path / "data"))
    values[0, 0] = 4000
    Image.fromarray(values).save(path)
    read_paths.clear()
    again = read(tmp_path / "data", known)
    assert again.white == 4095
    assert again.sums == read(tmp_path / "data").sums


@for_each(
    "content",
    ["", "{", "[]", '{"format": 0, "files": {}}', '{"format": 1, "files": {"a": [1]}}', "\xff"],
)
def test_a_damaged_memory_is_none(tmp_path: Path, content: str) -> None:
    assert read_scan(tmp_path / "none.json") == {}
    (tmp_path / "scan.json").write_text(content, encoding="latin-1")
    assert read_scan(tmp_path / "scan.json") == {}


def test_names_that_are_not_utf_8_are_remembered(tmp_path: Path, read_paths: list[Path]) -> None:
    root = write_class_folders(tmp_path / "pets", ["dog", os.fsdecode(b"caf\xe9")])
    known = kept(tmp_path, read(root))
    read_paths.clear()
    read(root, known)
    assert read_paths == []


# Large JPEGs.


def photograph(path: Path, size: tuple[int, int], **how: Any) -> Path:
    """A picture with large and small shapes, as JPEG."""
    coarse = noise((size[0] // 40, size[1] // 40)).resize(size, Image.Resampling.BICUBIC)
    Image.blend(coarse, noise(size), 0.1).save(path, format="JPEG", quality=90, **how)
    return path


def full_sums(path: Path) -> Sums:
    sums = Sums()
    sums.add(np.asarray(open_picture(path)))
    return sums


@for_each("size", [(1000, 1600), (511, 3000), (40, 30)])
def test_a_picture_that_is_not_large_is_looked_at_in_full(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    path = photograph(tmp_path / "a.jpg", size) if min(size) > 40 else tmp_path / "a.jpg"
    if min(size) <= 40:
        noise(size).save(path)
    assert look_at(path) == Look(size, False, full_sums(path))


@for_each("orientation", [1, 6])
def test_a_large_jpeg_is_looked_at_in_less_detail(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = photograph(tmp_path / "a.jpg", (2400, 1200), exif=exif)
    look, full = look_at(path), full_sums(path)
    assert look.size == open_picture(path).size
    assert look.sums.count == full.count
    assert look.sums != full
    (mean, std), (full_mean, full_std) = look.sums.mean_and_std(), full.mean_and_std()
    assert mean == pytest.approx(full_mean, abs=0.002)
    assert std == pytest.approx(full_std, rel=0.1)


def test_a_large_jpeg_that_ends_too_early_is_bad(tmp_path: Path) -> None:
    path = photograph(tmp_path / "a.jpg", (1200, 1200))
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataError, match="image file is truncated"):
        look_at(path)


def test_training_reads_every_pixel_of_a_large_jpeg(tmp_path: Path) -> None:
    path = photograph(tmp_path / "a.jpg", (1200, 1100))
    with Image.open(path) as whole:
        assert open_picture(path).tobytes() == whole.convert("RGB").tobytes()


@for_each("mode", ["L", "RGB"])
def test_sums_of_a_picture_are_those_of_its_pixels(tmp_path: Path, mode: str) -> None:
    noise((31, 17), mode).save(tmp_path / "a.png")
    pixels = np.asarray(open_picture(tmp_path / "a.png")).reshape(17, 31, -1)
    expected = Sums()
    expected.add(pixels)
    assert look_at(tmp_path / "a.png").sums == expected


# How far it is, and how it stops.


def test_every_file_is_counted(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(40)]
    for path in paths[:39]:
        noise((4, 4)).save(path)
    told: list[tuple[int, int]] = []

    def watch(done: int, total: int) -> None:
        told.append((done, total))

    found = scan_files(
        [(path, "picture", look_at) for path in paths], tmp_path, Scanning(watch=watch)
    )
    assert told == [(number, 40) for number in range(1, 41)]
    assert isinstance(found[0], Seen)
    assert isinstance(found[39], BadFile)


def interrupt() -> None:
    """What Ctrl-C does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def fail() -> None:
    raise MemoryError


@for_each(("how", "raised"), [(interrupt, KeyboardInterrupt), (fail, MemoryError)])
def test_a_look_through_stops_after_the_pictures_in_hand(
    how: Callable[[], None], raised: type[BaseException]
) -> None:
    looked: list[int] = []
    stopping = threading.Event()

    def look(number: int) -> int:
        looked.append(number)
        if number == 40:
            how()
        elif stopping.wait(0.02):
            pytest.fail("nobody sets this")
        return number

    with pytest.raises(raised):
        look_through(look, range(4000))
    assert len(looked) < 1000
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_a_rule_is_part_of_what_is_seen(tmp_path: Path) -> None:
    save_pairs(tmp_path, [(4, 4)] * 4)
    choices: dict[str, Any] = {"holdout": 0.25, "seed": 0, "skip_bad": False}
    first = read_pairs(tmp_path, **choices)
    other = read_pairs(
        tmp_path,
        **choices,
        rule=MaskRule(("0",)),
        scanning=Scanning(known=scan.unpack_scan(first.scan)),
    )
    assert other.foreground == other.pixels - first.foreground


PICTURE = [[4, 4], True, [16, [9], [9]], None, False, None]
MASK = [[4, 4], 3, 0, 1, ["0", "1"], []]


@for_each(
    ("kind", "look"),
    [
        *(("picture", [*PICTURE[:at], "x", *PICTURE[at + 1 :]]) for at in range(6)),
        *(("mask:", [*MASK[:at], {}, *MASK[at + 1 :]]) for at in range(6)),
        ("picture", PICTURE[:3]),
        ("picture", [[4, 4], True, [16, ["a"], [9]], None, False, None]),
        ("picture", None),
    ],
)
def test_a_memory_of_another_shape_is_none(tmp_path: Path, kind: str, look: object) -> None:
    path = tmp_path / "scan.json"
    good: object = PICTURE if kind == "picture" else MASK
    for value, known in ((good, {"a.png"}), (look, set())):
        files = {"a.png": [kind, "digest", None, value]}
        path.write_text(json.dumps({"format": 1, "files": files}))
        assert set(read_scan(path)) == known
