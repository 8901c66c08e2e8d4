"""What pictures may cost: no program, no memory without end, no walk without end."""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from pathlib import Path

import pytest

from onefold.data.bad import BadFile
from onefold.data.decoding import MOST_PIXELS, in_hand, load_picture, open_picture
from onefold.data.pictures import look_at, look_through, picture_paths
from onefold.data.scan import scan_pictures
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
