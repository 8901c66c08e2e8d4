"""Files that anybody may have put there are read within limits; only what is ours is replaced."""

import errno
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from onefold.system.safe_files import (
    RECORD_BYTES,
    PrivateFolder,
    append_line,
    create_file,
    nested_too_deeply,
    open_plain,
    parse_json,
    read_plain,
    read_record,
)
from onefold.system.whole_files import aside_of, open_folder, replace_file, write_whole
from tests.tables import for_each

DEEPEST = 200


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of these tests, which close what they open."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")
    yield tmp_path
    assert os.listdir("/proc/self/fd") == before


def test_a_file_is_read_whole_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"text", bytes(range(256)) * 1000):
        path.write_bytes(content)
        assert read_plain(path) == content
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("file")
        with open_plain(tmp_path / "link", follow=True) as file:  # which the user has named
            assert file.read() == content
    assert len(read_plain(path, 256_000)) == 256_000
    with pytest.raises(OSError, match="expected at most 255,999 bytes, got 256,000") as caught:
        read_plain(path, 255_999)
    assert caught.value.errno == errno.EFBIG
    # A file of the kernel claims to be empty.
    with pytest.raises(OSError, match="expected at most 10 bytes, got more: '/proc/"):
        read_plain(Path("/proc/self/maps"), 10)
    os.truncate(path, RECORD_BYTES + 1)
    with pytest.raises(OSError, match="expected at most 67,108,864 bytes, got 67,108,865"):
        read_plain(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    for name, make, words in (
        ("link", lambda path: path.symlink_to("nothing"), "expected a file, got a link"),
        ("folder", Path.mkdir, "expected a file, got a folder"),
        ("fifo", os.mkfifo, "expected a file, got a FIFO or a device"),
        ("socket", make_socket, "expected a file, got a FIFO or a socket"),
        ("nothing", lambda path: None, "No such file or directory"),
    ):
        make(tmp_path / name)
        for follow in (False, True):
            if not (follow and name == "link"):
                with pytest.raises(OSError, match=f"{words}.*{tmp_path / name}"):
                    open_plain(tmp_path / name, follow=follow)
    with pytest.raises(OSError, match="expected a file, got a FIFO or a device"):
        read_plain(Path("/dev/zero"))


def test_json_that_nobody_wrote_is_a_value_error() -> None:
    deep = DEEPEST + 1
    for text in (
        *("", "{a: 1}", '{"a": [1', b"\xff\xfe\xfa", "1" * 10_000),
        *("[" * 100_000, "[" * 100_000 + "]" * 100_000, "[" * deep + "]" * deep),
        '{"a":' * deep + "0" + "}" * deep,
    ):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)
    for sound in ('{"a": [1, 2.5, null, "é"]}', "[" * DEEPEST + "]" * DEEPEST, "0"):
        assert not nested_too_deeply(parse_json(sound))
        assert parse_json(sound) == parse_json(sound.encode())


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_written_whole_and_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    path, calls = tmp_path / "file", list[str]()
    for name in ("fsync", "replace"):
        own = getattr(os, name)

        def noted(*given: Any, own: Any = own, name: str = name, **named: Any) -> Any:
            calls.append(name)
            return own(*given, **named)

        monkeypatch.setattr(os, name, noted)
    for content in (b"older, and longer than what comes now", b"new"):
        write_whole(path, content, sync=sync)
        assert path.read_bytes() == content
    assert calls == (["fsync", "replace"] if sync else ["replace"]) * 2
    assert os.listdir(tmp_path) == ["file"]


def there(path: Path, kind: str, elsewhere: Path) -> None:
    """Put something under a name that no writer of ours has put there."""
    make: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to(elsewhere / "file"),
        "dangling": lambda: path.symlink_to(elsewhere / "gone"),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[kind]()


@for_each("kind", ["link", "dangling", "fifo", "folder"])
@for_each("new", [True, False])
def test_nothing_but_a_file_is_replaced(tmp_path: Path, kind: str, new: bool) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    (elsewhere / "file").write_text("theirs")
    there(folder / "name", kind, elsewhere)
    words = "expected a (free name|file), got (a link|no file): remove it"
    with pytest.raises(FileExistsError, match=words):
        write_whole(folder / "name", b"ours", new=new)
    # Or if it comes while the file is written.
    with pytest.raises(FileExistsError, match=words), aside_of(folder / "late", new=new):
        there(folder / "late", kind, elsewhere)
    assert sorted(os.listdir(folder)) == ["late", "name"]
    assert os.listdir(elsewhere) == ["file"]
    assert (elsewhere / "file").read_text() == "theirs"


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"first", new=True)
    with pytest.raises(FileExistsError, match="expected a free name, got a file: remove it"):
        write_whole(tmp_path / "file", b"second", new=True)
    late = aside_of(tmp_path / "late", new=True)
    late.__enter__()
    write_whole(tmp_path / "late", b"first")
    with pytest.raises(FileExistsError, match="expected a free name, got a file: remove it"):
        late.__exit__(None, None, None)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "late").read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["file", "late"]


def test_no_link_below_the_folder_that_was_named_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    named, elsewhere = tmp_path / "named", tmp_path / "elsewhere"
    named.symlink_to("real")  # the user's own
    elsewhere.mkdir()
    write_whole(named / "a" / "b" / "file", b"1", below=named)
    assert (tmp_path / "real/a/b/file").read_bytes() == b"1"
    (named / "link").symlink_to(elsewhere)
    (named / "a" / "link").symlink_to(elsewhere)
    for inner in ("link", "a/link", "a/link/b", "a/../../elsewhere"):
        words = r"links and \.\. are not followed below a folder, but got (link|\.\.)"
        with pytest.raises(OSError, match=words), open_folder(named / inner, below=named):
            pass
        with pytest.raises(OSError, match=words):
            write_whole(named / inner / "file", b"1", below=named)
    # Of the folder, not of its name: whoever exchanges it meanwhile changes nothing.
    with aside_of(named / "a" / "b" / "late", below=named) as file:
        file.write(b"2")
        (named / "a").rename(named / "moved")
        (named / "a").symlink_to(elsewhere)
    assert (named / "moved/b/late").read_bytes() == b"2"
    assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_what_was_there_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "file"
    replace_file(path, "older")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "two \udcff")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, fails, mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(path, b"new")
    assert path.read_text() == "older"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_only_the_owner_can_look_into_a_private_folder(temporary: Path) -> None:
    with PrivateFolder() as folder, PrivateFolder() as gone:
        assert folder.path.parent == temporary
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "file").touch()
        shutil.rmtree(gone.path)  # by a cleaner
        assert not gone.is_there()
    assert os.listdir(temporary) == []


LIVES = """
import sys
from onefold.system.safe_files import PrivateFolder
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


def marked(path: Path, mark: bytes, mode: int = 0o700) -> Path:
    path.mkdir(mode)
    path.chmod(mode)
    (path / ".onefold-boot").write_bytes(mark)
    return path


def test_what_is_not_surely_ours_and_dead_stays(tmp_path: Path) -> None:
    with PrivateFolder() as folder:
        mark = (folder.path / ".onefold-boot").read_bytes()
    owner = marked(tmp_path / "elsewhere", mark) / ".onefold-boot"
    for number, make in enumerate(
        (
            lambda path: path.mkdir(0o700),
            lambda path: marked(path, b"another"),  # of a host, or from before a restart
            lambda path: marked(path, b""),
            lambda path: marked(path, mark, 0o755),
            lambda path: path.symlink_to(owner.parent),
            lambda path: (path.mkdir(0o700), (path / owner.name).symlink_to(owner)),
            lambda path: path.touch(),
            lambda path: os.mkfifo(path),
        )
    ):
        make(tmp_path / f"onefold-1234567{number}")
    before = sorted(tmp_path.rglob("*"))
    marked(tmp_path / "onefold-abcdefgh", mark)  # this goes
    PrivateFolder().remove()
    assert sorted(tmp_path.rglob("*")) == before


# Files of JSON lines


def test_lines_are_added_one_by_one(tmp_path: Path) -> None:
    assert read_record(tmp_path, "run") == []
    numbers = [0.1, 1e-320, 1 / 3, -0.0, math.inf]
    lines: list[dict[str, object]] = [
        {"step": 1, "loss": numbers},
        {"step": 2, "loss": None, "text": "zwei\nZeilen é"},
    ]
    for line in lines:
        append_line(tmp_path / "run.jsonl", line)
    first, second = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(first), json.loads(second)] == read_record(tmp_path, "run") == lines
    found = read_record(tmp_path, "run")[0]["loss"]
    assert [number.hex() for number in found] == [number.hex() for number in numbers]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        append_line(tmp_path / "nowhere" / "run.jsonl", {})


@for_each("kind", ["link", "pipe", "folder"])
def test_a_line_is_written_through_no_link_or_pipe(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "lines", tmp_path / "target"
    append_line(target, {"step": 1})
    make = {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path)}
    make.get(kind, path.mkdir)()
    before = target.read_text()
    with pytest.raises(OSError, match=r"expected a file|Is a directory"):
        append_line(path, {"step": 2})
    assert target.read_text() == before
