"""Nothing is removed or written over that was not made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold.system.ownfiles import PrivateFolder, _boot, create_file, replace_file


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of these tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_the_owner_can_look_into_a_private_folder(temporary: Path) -> None:
    with PrivateFolder() as folder:
        assert folder.path.parent == temporary
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "file").touch()
    assert os.listdir(temporary) == []


def test_a_private_folder_that_a_cleaner_has_removed_is_no_error(temporary: Path) -> None:
    with PrivateFolder() as folder:
        shutil.rmtree(folder.path)
        assert not folder.is_there()
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_somebody_put_in_its_place_is_not_removed(temporary: Path, kind: str) -> None:
    other = temporary / "other"
    other.mkdir()
    (other / "file").touch()
    with PrivateFolder() as folder:
        shutil.rmtree(folder.path)
        if kind == "folder":
            shutil.copytree(other, folder.path)
        else:
            folder.path.symlink_to(other)
    assert (folder.path / "file").exists()
    assert (other / "file").exists()


def test_a_file_is_replaced_whole_or_not_at_all(temporary: Path) -> None:
    path = temporary / "file"
    replace_file(path, "one")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "two \udcff")
    assert path.read_text() == "one"
    assert os.listdir(temporary) == ["file"]


def test_a_file_is_not_made_where_there_is_a_link(temporary: Path) -> None:
    (temporary / "link").symlink_to(temporary / "target")
    with pytest.raises(FileExistsError):
        create_file(temporary / "link")
    assert not (temporary / "target").exists()


LIVES = """
import sys
from onefold.system.ownfiles import PrivateFolder
folder = PrivateFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_folders_of_killed_processes_are_removed_by_the_next(temporary: Path) -> None:
    """And no others: those of living ones, and those that were left to the user."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LIVES],
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [Path(process.stdout.readline().strip()) for process in started]  # type: ignore[union-attr]
    kept = PrivateFolder()
    (kept.path / "device-1.log").touch()
    kept.keep()
    try:
        started[0].kill()
        started[0].wait()
        with PrivateFolder() as folder:
            assert set(temporary.iterdir()) == {folders[1], kept.path, folder.path}
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert os.listdir(kept.path) == ["device-1.log"]
    PrivateFolder().remove()
    assert set(temporary.iterdir()) == {kept.path}


def strange(mark: bytes | None, mode: int = 0o700) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)
        if mark is not None:
            (path / ".onefold-owner").write_bytes(mark)

    return make


def link_to_a_dead_one(path: Path) -> None:
    strange(_boot())(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def dead_by_a_link(path: Path) -> None:
    strange(None)(path)
    path.with_name("owner").write_bytes(_boot())
    (path / ".onefold-owner").symlink_to(path.with_name("owner"))


STRANGE: dict[str, Callable[[Path], None]] = {
    "no mark": strange(None),
    "of another host, or from before a restart": strange(b"another"),
    "an empty mark": strange(b""),
    "open to others": strange(_boot(), 0o755),
    "a link to a folder": link_to_a_dead_one,
    "a mark that is a link": dead_by_a_link,
    "a file": lambda path: path.touch(),
    "a FIFO": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_not_surely_ours_and_dead_stays(kind: str, temporary: Path) -> None:
    STRANGE[kind](temporary / "onefold-12345678")
    before = sorted(temporary.rglob("*"))
    PrivateFolder().remove()
    assert sorted(temporary.rglob("*")) == before
    # What is both goes.
    strange(_boot())(temporary / "onefold-abcdefgh")
    PrivateFolder().remove()
    assert sorted(temporary.rglob("*")) == before
