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
from tests.masked import black_and_white, save, save_pairs
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
        path.write_text(json.dumps({"format": 5, "files": files}))
        return len(read_scan(path))

    for kind, look, other in (("picture", picture, mask), ("mask:", mask, picture)):
        assert remembered(kind, look) == 1
        odds: tuple[object, ...] = ("x", {})
        damaged = [[*look[:at], odd, *look[at + 1 :]] for at in range(7) for odd in odds]
        assert [remembered(kind, each) for each in (*damaged, look[:3], [], other)] == [0] * 17
    shades = [("1", {}), ("#ff0000", {}), ("2", {"2": "#ff0000"}), ("x", {}), ("2", {"2": "red"})]
    looks = [[*mask, {}, colors, shade] for shade, colors in shades]
    assert [remembered("mask:", look) for look in looks] == [1, 1, 1, 0, 0]
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


LAYOUTS = ("classes", "masks")
HOT = 65535


def plate(number: int, side: int = 40, *, hot: int = 0) -> Any:
    """16 bits a pixel and values to 250, but for the hot ones."""
    pixels = np.random.default_rng(number).integers(0, 251, (side, side)).astype(np.uint16)
    pixels.flat[:hot] = HOT
    return pixels


def write(root: Path, layout: str, train: Any = plate, test: Any = plate) -> list[Path]:
    """Three training and two test pictures of each class, or twice as many with masks."""
    paths = []
    for number in range(10):
        part = "test" if number % 5 > 2 else "train"
        pixels = (test if part == "test" else train)(number)
        if layout == "classes":
            path = root / part / ("few", "many")[number // 5] / f"{number}.tiff"
        else:
            path = root / part / "images" / f"{number}.tiff"
            save(root / part / "masks" / f"{number}.png", black_and_white(*pixels.shape))
        paths.append(save(path, pixels))
    return paths


def read_as(
    root: Path, layout: str, *, known: Any = None, skip_bad: bool = False
) -> PictureClasses | MaskedPictures:
    how: dict[str, Any] = {
        "holdout": 0.2,
        "seed": 0,
        "skip_bad": skip_bad,
        "scanning": Scanning(known=known or {}),
    }
    return read_classes(root, **how) if layout == "classes" else read_pairs(root, **how)


@for_each("layout", LAYOUTS)
def test_hot_pixels_do_not_decide_white(layout: str, tmp_path: Path) -> None:
    write(tmp_path / "plain", layout)
    write(tmp_path / "hot", layout, train=lambda n: plate(n, hot=1), test=lambda n: plate(n, hot=9))
    for path in list((tmp_path / "hot").rglob("*.tiff"))[:2]:
        first = Image.fromarray(np.asarray(Image.open(path)))
        first.save(path, save_all=True, append_images=[first])
    plain, hot = read_as(tmp_path / "plain", layout), read_as(tmp_path / "hot", layout)
    assert plain.white == hot.white == 255
    for one, other in zip(plain.sums.mean_and_std(), hot.sums.mean_and_std(), strict=True):
        assert one == pytest.approx(other, abs=0.002)
    assert (
        "6 of 6 training images have more than 8 bits per pixel; all use the white 255: 99.9% of "
        "each one's values are at most 250, and brighter values than white become white"
    ) in hot.notes
    assert "2 images with several pages or frames: only the first is used" in hot.notes
    # Two in 1,600 are more than one in 1,000, and of 400 pixels none may be left out.
    for number, two in enumerate((lambda n: plate(n, hot=2), lambda n: plate(n, side=20, hot=1))):
        write(tmp_path / f"{number}", layout, train=two, test=two)
        assert read_as(tmp_path / f"{number}", layout).white == HOT


@for_each("layout", LAYOUTS)
def test_what_was_seen_holds_for_the_white_that_was_found(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of other whites than the common one are read a second time, and then never again."""
    write(tmp_path / "data", layout, train=lambda n: plate(n) * (1 + 15 * (n == 0)))
    first = read_as(tmp_path / "data", layout)
    assert first.white == 4095
    (tmp_path / "scan.json").write_text(first.scan)
    known = read_scan(tmp_path / "scan.json")
    for module in ("scan", "pairs"):
        name = f"onefold_jobs.data.{module}.look_at"
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("read"))
    again = read_as(tmp_path / "data", layout, known=known)
    assert (again.white, again.sums, again.scan) == (first.white, first.sums, first.scan)
    # In format 4 a mask had no shade.
    (tmp_path / "scan.json").write_text(first.scan.replace('"format": 5', '"format": 4'))
    assert read_scan(tmp_path / "scan.json") == {}


@for_each("layout", LAYOUTS)
@for_each("part", ["train", "test"])
def test_what_would_be_black_is_refused(layout: str, part: str, tmp_path: Path) -> None:
    def twelve_bits(number: int) -> Any:
        return plate(number) * 16

    def with_dark(number: int) -> Any:
        """One of them has values to 0.9."""
        dark = number == {"train": 5, "test": 3}[part]
        return (plate(number) / 250 * 0.9).astype(np.float32) if dark else twelve_bits(number)

    pixels: Any = {"train": twelve_bits, "test": twelve_bits, part: with_dark}
    write(tmp_path, layout, **pixels)
    words = (
        r"\.tiff: values of 0 to 0\.9 would all become black, because white is 4095: .* of 16\.1 "
    )
    with pytest.raises(DataError, match=words):
        read_as(tmp_path, layout)
    data = read_as(tmp_path, layout, skip_bad=True)
    assert (data.white, len(data.left_out)) == (4095, 1)


def test_pictures_of_one_value_may_be_black(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tiff", np.full((4, 4), 3, dtype=np.uint16))
    assert open_picture(path, white=4095).getextrema() == (0, 0)
    assert look_at(path, 4095).sums.totals == [0]
    save(path, np.array([[3, 4]], dtype=np.uint16))
    # Without a white of their own, those of 16 bits have 65535.
    for white, named in ((4095, "4095"), (None, "65535")):
        with pytest.raises(DataError, match=rf"a\.tiff: values of 3 to 4 .* white is {named}: "):
            open_picture(path, white=white)
