"""The lock of a run's folder, and files there that no run has written."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold.errors import LaunchError
from onefold.jobs.options import TrainOptions
from onefold.jobs.runfolder import RunFolder, require_room
from onefold.system.folderlock import lock_of_checkpoints
from tests.somebody import NOBODY, needs_root, somebody_else
from tests.tables import for_each

OPTIONS = TrainOptions(data="digits", name="one")
DIGITS = "7" * 5000


def begun(path: Path) -> RunFolder:
    folder = RunFolder(path, is_lead=True)
    folder.create(OPTIONS, "classify", {"words.json": "[1]"})
    return folder


def share(path: Path) -> None:
    """Hold a lock as anybody may who can read a file."""
    fcntl.lockf(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)


@needs_root
def test_a_strangers_lock_does_not_keep_a_run_from_going_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a file of a former version, which others could open."""
    path = tmp_path / ".lock"
    path.touch()
    path.chmod(0o644)
    with somebody_else(share, path), caplog.at_level(logging.WARNING, "onefold"):
        require_room(tmp_path)
        folder = begun(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600
        folder.close()
    assert "was held by process" in caplog.text


def test_ones_own_process_is_named(tmp_path: Path) -> None:
    begun(tmp_path).close()
    child = os.fork()
    if not child:
        os.setuid(os.geteuid())
        folder = RunFolder(tmp_path, is_lead=True)
        folder.go_on(OPTIONS, "classify", steps=0, epochs=0)
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(LaunchError, match=rf"another process is at work .*process {child}\)"):
            require_room(tmp_path)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def a_link(path: Path) -> None:
    (path.parent / "else").touch()
    path.symlink_to(path.parent / "else")


def of_somebody_else(path: Path) -> None:
    path.touch()
    os.chown(path, NOBODY, NOBODY)


LOCKS: list[tuple[Callable[[Path], object], str]] = [
    (a_link, "expected a file of this user's own, got a link"),
    (os.mkfifo, r"\.lock: expected a file, got a FIFO or a device"),
]
if os.geteuid() == 0:
    LOCKS.append((of_somebody_else, f"expected a file of user 0, got one of user {NOBODY}"))


@for_each(("make", "words"), LOCKS)
def test_a_lock_that_is_not_ones_own_file_is_refused(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    make(tmp_path / ".lock")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError, match=words):
        begun(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_root
def test_a_lock_that_cannot_be_kept_from_others_or_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", refuse)
        with pytest.raises(LaunchError, match="kept from other users, got Operation not permitt"):
            begun(tmp_path)
    path.touch()
    path.chmod(0o644)
    words = r"\.lock: process \d+ of another user holds .* \(Operation not permitted\): give this"
    with somebody_else(share, path), monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(LaunchError, match=words):
            begun(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_root
def test_checkpoints_of_a_file_server_may_belong_to_somebody_else(tmp_path: Path) -> None:
    of_somebody_else(tmp_path / ".lock")
    lock = lock_of_checkpoints(tmp_path)
    lock.look()
    lock.take()
    lock.let_go()
    assert not (tmp_path / ".lock").exists()


def is_free(folder: Path) -> bool:
    """Whether another process could take the lock."""
    child = os.fork()
    if not child:
        try:
            lock_of_checkpoints(folder).look()
        except LaunchError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not list its locks")
def test_a_lock_that_was_lost_is_taken_again(tmp_path: Path) -> None:
    """A script that copies the folder reads the file, which gives up the lock."""
    lock = lock_of_checkpoints(tmp_path)
    lock.take()
    (tmp_path / ".lock").read_bytes()
    assert is_free(tmp_path)
    lock.keep()
    assert not is_free(tmp_path)
    lock.let_go()
    lock.keep()  # and nothing is taken that was let go of
    assert not (tmp_path / ".lock").exists()


def test_lines_that_no_run_has_written_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"kind": "steps", "epoch": 0, "step": step} for step in (1, 2)]
    bad = ["[]", "{", '{"kind": "steps"}', '{"kind": "else", "epoch": 0, "step": 1}', "[" * 9000]
    bad += [f'{{"kind": "steps", "epoch": 0, "step": {DIGITS}}}', "\0\0\0", "\xff"]
    lines = [json.dumps(good[0]), *bad, json.dumps(good[1])]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), "latin-1")
    folder = RunFolder(tmp_path, is_lead=True)
    with caplog.at_level(logging.WARNING, "onefold"):
        assert folder.lines() == good
    assert f"metrics.jsonl: {len(bad)} damaged lines were left out" in caplog.text
