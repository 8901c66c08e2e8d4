"""A record survives a kill at any byte, and damage is refused by name."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.errors import RecordError
from onefold.record.entries import HEAD, FrameWriter, read_frames

BODIES = [b"one", b"two" * 100, b"\0\0\0\0", b"four"]


def written(path: Path) -> bytes:
    writer = FrameWriter(path)
    for body in BODIES:
        writer.append(body)
    writer.close()
    return path.read_bytes()


def test_what_was_appended_is_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.record"
    written(path)
    writer = FrameWriter(path)
    assert writer.before == BODIES
    writer.append(b"five")
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=False
    )
    assert b"BlockingIOError" in other.stderr
    assert read_frames(path)[0] == [*BODIES, b"five"]
    writer.close()


def test_a_file_cut_at_any_byte_has_its_whole_frames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.record"
    data = written(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        bodies, end, torn = read_frames(path)
        assert bodies == BODIES[: len(bodies)]
        assert end + torn == length
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            writer = FrameWriter(path)
        assert (f"{torn} bytes of a torn frame" in caplog.text) == bool(torn)
        writer.append(b"next")
        writer.close()
        assert read_frames(path)[0] == [*bodies, b"next"]
        assert path.read_bytes().startswith(HEAD)


def test_damage_before_the_end_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "run.record"
    data = bytearray(written(path))
    for byte in range(len(HEAD), len(data) - len(BODIES[-1]) - 12):
        broken = data.copy()
        broken[byte] ^= 1
        path.write_bytes(broken)
        with pytest.raises(RecordError, match=r"frame at byte \d+ does not check"):
            read_frames(path)
        with pytest.raises(RecordError, match="does not check"):
            FrameWriter(path)
        assert path.read_bytes() == broken


@pytest.mark.parametrize("content", [b"{}", b"onefold\2", b"\0" * 100])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.record"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="expected it to begin with"):
        FrameWriter(path)
    assert path.read_bytes() == content
