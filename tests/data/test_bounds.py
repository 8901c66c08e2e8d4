"""What small files may cost: no program, no memory without end, no walk without end."""

from __future__ import annotations

import gzip
import itertools
import os
import resource
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from onefold.data.arrays import read_idx
from onefold.data.bad import BadFile
from onefold.data.decoding import MOST_PIXELS, in_hand, load_picture, open_picture
from onefold.data.pictures import look_at, look_through, picture_paths
from onefold.data.scan import scan_pictures
from onefold.data.tsv import read_splits, read_tsv
from onefold.errors import DataError
from tests.data.pictures import noise

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
MEBIBYTE = 1 << 20


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a program called gs would leave behind."""
    trace = tmp_path / "gs was started"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 10.0\ntouch '{trace}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None, raising=False)
    return trace


def test_no_picture_starts_a_program(tmp_path: Path, ghostscript: Path) -> None:
    for name in ("a.png", "a.jpg", "a.eps"):
        (tmp_path / name).write_bytes(EPS)
        for read in (open_picture, load_picture, look_at):
            with pytest.raises(DataError, match=r"no known format that begins with b'%!PS-.* PNG"):
                read(tmp_path / name)
    assert not ghostscript.exists()


def zeros_png(path: Path, width: int, height: int) -> Path:
    """A small file of a large black picture in colours."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    row = bytes(1 + 3 * width)
    packer = zlib.compressobj(1)
    content = b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()])
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\2\0\0\0")
    path.write_bytes(head + chunk(b"IDAT", content) + chunk(b"IEND", b""))
    return path


def test_a_picture_of_too_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zeros_png(tmp_path / "a.png", 12_000, 12_000)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    words = r"a\.png: .*: it has 12000x12000 pixels, more than the 134,217,728 .*: make it smaller"
    with pytest.raises(DataError, match=words) as caught:
        open_picture(path)
    (bad,) = scan_pictures([path]).bad
    assert str(bad) == str(caught.value)


LOOK_AT_ALL = """
import resource, sys
from pathlib import Path
from onefold.data.scan import scan_pictures
paths = [Path(name) for name in sys.argv[1:]]
small, *large = paths
scan_pictures([small])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
many = [path for each in large for path in [each, *[small] * 15]]  # a large one for each thread
assert len(scan_pictures(many).sound) == 64
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_large_pictures_are_decoded_one_after_the_other(tmp_path: Path) -> None:
    noise((4, 4)).save(tmp_path / "small.png")
    large = [zeros_png(tmp_path / f"{n}.png", 6_000 + n, 6_000) for n in range(4)]
    done = subprocess.run(
        [sys.executable, "-c", LOOK_AT_ALL, tmp_path / "small.png", *large],
        capture_output=True,
        text=True,
        check=True,
    )
    one = 4 * 6_000 * 6_000 / 1024  # KiB
    assert int(done.stdout) < 3.5 * one  # threads keep some of what they had


def test_threads_wait_where_theirs_together_would_be_too_much() -> None:
    lock, held, most = threading.Lock(), [0], [0]
    tenth = MOST_PIXELS // 2 // 10  # of what threads decode together

    def look(pixels: int) -> int:
        in_hand.take(pixels)
        with lock:
            held[0] += pixels
            most[0] = max(most[0], held[0])
        with lock:
            held[0] -= pixels
        return pixels

    sizes = [tenth * size for size in (4, 50, 6, 1)] * 40
    assert look_through(look, sizes) == sizes
    assert most[0] <= 50 * tenth


def test_a_link_to_a_device_is_no_picture(tmp_path: Path) -> None:
    words = "expected a file, got a FIFO or a device"
    (tmp_path / "a.png").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "b.png")
    (path,) = picture_paths(tmp_path, [])
    (found,) = scan_pictures([path]).bad
    assert str(found).endswith(f"a.png: expected a picture that can be read: {words}")
    with pytest.raises(DataError, match=words):
        open_picture(tmp_path / "b.png")


def test_two_links_a_level_are_gone_through_once(tmp_path: Path) -> None:
    levels = [tmp_path / f"level {number}" for number in range(40)]
    for level in levels:
        level.mkdir()
    for above, beneath in itertools.pairwise(levels):
        (above / "a").symlink_to(beneath)
        (above / "b").symlink_to(beneath)
    noise((4, 4)).save(levels[-1] / "x.png")
    bad: list[BadFile] = []
    assert picture_paths(levels[0], bad) == [levels[0].joinpath(*["a"] * 39, "x.png")]
    assert bad == []


def test_folders_that_lie_too_deep_are_bad(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*["d"] * 66)
    deepest.mkdir(parents=True)
    noise((4, 4)).save(deepest / "x.png")
    bad: list[BadFile] = []
    assert picture_paths(tmp_path, bad) == []
    assert [each.reason for each in bad] == ["expected folders at most 64 deep"]


def limited_to(bytes_more: int) -> tuple[int, int]:
    """Let this process have no more memory than it has and this; what was allowed before."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + bytes_more, before[1]))
    return before


def test_a_gzip_file_gives_no_more_than_its_header_promises(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    header = b"\0\0\x08\1" + MEBIBYTE.to_bytes(4, "big")
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header)
        for _ in range(160):
            file.write(bytes(MEBIBYTE))
    before = limited_to(64 * MEBIBYTE)
    try:
        with pytest.raises(ValueError, match=r"expected 1048584 bytes .*, got more"):
            read_idx(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_header_may_not_promise_more_than_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    header = b"\0\0\x08\1" + (2**31).to_bytes(4, "big")
    path.write_bytes(gzip.compress(header) + bytes(4 * MEBIBYTE))
    with pytest.raises(ValueError, match="that are taken out of a gzip file: unpack it with gunz"):
        read_idx(path)


def test_a_label_of_many_digits_is_a_bad_line(tmp_path: Path) -> None:
    content = f"a\t1\nb\t2\nc\t{'7' * 5000}\n"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text(content)
    splits = read_splits(tmp_path / "train.tsv", tmp_path / "dev.tsv")
    assert splits.classes == ["1", "2"]
    assert [bad.line for bad in splits.left_out] == [3, 3]
    assert "expected a label of at most 200 characters, got 5,000" in splits.left_out[0].reason


def test_a_line_without_end_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    with path.open("wb") as file:
        file.write(b"fine\t1\n")
        for _ in range(160):
            file.write(b"x" * MEBIBYTE)
        file.write(b"\t1\nfine as well\t2")
    before = limited_to(64 * MEBIBYTE)
    try:
        lines, bad = read_tsv(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert [(line.line_number, line.label) for line in lines] == [(1, "1"), (3, "2")]
    assert [str(each) for each in bad] == [
        f"{path}, line 2: expected a line of at most 1,048,576 bytes, got more"
    ]
