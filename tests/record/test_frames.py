"""A record survives a kill at any byte, and damage is refused by name."""

import fcntl
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from onefold.errors import LaunchError, RecordError
from onefold.record.entries import HEAD, FrameWriter, append_beside, read_frames

BODIES = [b"one", b"two" * 100, b"\0\0\0\0", b"four"]


def written(path: Path) -> bytes:
    writer = FrameWriter(path)
    for body in BODIES:
        writer.append(body)
    writer.close()
    return path.read_bytes()


def bodies_in(path: Path) -> list[bytes]:
    return [frame.body for frame in read_frames(path)[0]]


def test_what_was_appended_is_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.record"
    written(path)
    writer = FrameWriter(path)
    assert writer.entries == len(BODIES)
    writer.append(b"five")
    assert bodies_in(path) == [*BODIES, b"five"]
    with pytest.raises(LaunchError, match=r"is using this folder \(this process itself\)"):
        FrameWriter(path)
    writer.close()
    FrameWriter(path).close()


def test_a_reader_neither_keeps_a_record_from_being_written_nor_frees_it(tmp_path: Path) -> None:
    """Whoever may read the file may lock it, and a script may open its own record."""
    path = tmp_path / "run.record"
    written(path)
    with path.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_SH)
        fcntl.lockf(stranger, fcntl.LOCK_SH)
        writer = FrameWriter(path)
    path.read_bytes()
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    child = subprocess.run(
        [sys.executable, "-c", _WRITES, str(path)], capture_output=True, text=True, check=False
    )
    assert "another process is using this folder" in child.stderr
    writer.close()
    assert list(tmp_path.iterdir()) == [path]


_WRITES = """
import sys
import tracemalloc
from pathlib import Path
from onefold.record.entries import FrameWriter
FrameWriter(Path(sys.argv[1]))
"""


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A loader's worker may outlive the run."""
    path = tmp_path / "run.record"
    writer, (reading, writing) = FrameWriter(path), os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    writer.close()
    FrameWriter(path).close()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_file_cut_at_any_byte_has_its_whole_frames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.record"
    data = written(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        frames, torn = read_frames(path)
        bodies = [frame.body for frame in frames]
        assert bodies == BODIES[: len(bodies)]
        end = frames[-1].end if frames else len(HEAD) * (length >= len(HEAD))
        assert end + torn == length
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            writer = FrameWriter(path)
        assert (f"truncated {torn} bytes of a partial frame" in caplog.text) == bool(torn)
        writer.append(b"next")
        writer.close()
        assert bodies_in(path) == [*bodies, b"next"]
        assert path.read_bytes().startswith(HEAD)


def test_damage_before_the_end_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "run.record"
    data = bytearray(written(path))
    for byte in range(len(HEAD), len(data) - len(BODIES[-1]) - 24):
        broken = data.copy()
        broken[byte] ^= 1
        path.write_bytes(broken)
        with pytest.raises(
            RecordError, match=r"the digest of the frame at byte \d+ does not match"
        ):
            read_frames(path)
        with pytest.raises(RecordError, match="does not match its content and position"):
            FrameWriter(path)
        assert path.read_bytes() == broken


@pytest.mark.parametrize("content", [b"{}", b"onefold\1", b"\0" * 100])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.record"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="expected it to begin with"):
        FrameWriter(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("keeps", [0, 5, 24, 26])
def test_zeros_of_a_power_failure_are_a_torn_tail(tmp_path: Path, keeps: int) -> None:
    """The length of a file may reach the disk before its content does."""
    path = tmp_path / "run.record"
    data = written(path)
    whole = read_frames(path)[0][-2].end
    path.write_bytes(data[: whole + keeps].ljust(whole + 9000, b"\0"))
    frames, torn = read_frames(path)
    assert ([frame.body for frame in frames], torn) == (BODIES[:-1], 9000)
    FrameWriter(path).close()
    assert path.stat().st_size == whole


def test_a_file_larger_than_memory_is_read_frame_by_frame(tmp_path: Path) -> None:
    path = tmp_path / "run.record"
    written(path)
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    frames, torn = read_frames(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(frames), torn) == (4, (1 << 30) - frames[-1].end)
    assert most < 8 << 20


def test_a_frame_beside_the_chain_changes_nothing_in_it(tmp_path: Path) -> None:
    path = tmp_path / "run.record"
    writer = FrameWriter(path)
    writer.append(b"one")
    append_beside(path, b"told by the launcher")
    writer.append(b"two")
    writer.close()
    heads = [frame.head for frame in read_frames(path)[0]]
    assert [bool(head) for head in heads] == [True, False, True]
    assert (writer.entries, writer.head) == (2, heads[-1])


def test_frames_that_are_moved_are_refused(tmp_path: Path) -> None:
    """Removed, repeated, exchanged, or from another record: each frame stands for all before."""
    path, other = tmp_path / "run.record", tmp_path / "other.record"
    data = written(path)
    written(other)
    ends = [len(HEAD), *(frame.end for frame in read_frames(path)[0])]
    frames = [data[a:b] for a, b in itertools.pairwise(ends)]
    append_beside(other, b"foreign")
    foreign = other.read_bytes()[len(data) :]
    for order in itertools.product(range(4), repeat=4):
        if order == (0, 1, 2, 3):
            continue
        path.write_bytes(HEAD + b"".join(frames[n] for n in order) + frames[3])
        with pytest.raises(RecordError, match="does not match its content and position"):
            read_frames(path)
    path.write_bytes(data[: ends[2]] + foreign + data[ends[2] :])
    assert [frame.body for frame in read_frames(path)[0] if frame.head] == BODIES
