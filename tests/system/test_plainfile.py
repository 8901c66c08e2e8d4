"""Files that anybody may have put there are read within limits, and written whole."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold.system import ownfiles
from onefold.system.ownfiles import (
    nested_too_deeply,
    open_plain,
    parse_json,
    read_plain,
    write_whole,
)

DEEPEST = 200


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> object:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


# Reading


@pytest.mark.parametrize("content", [b"", b"text", bytes(range(256)) * 1000], ids=len)
def test_a_file_is_read_whole(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_plain(tmp_path / "file") == content
    with open_plain(tmp_path / "file") as file:
        assert file.read() == content


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link": (lambda path: path.symlink_to("file"), "expected a file, got a link"),
    "a link to nowhere": (lambda path: path.symlink_to("nothing"), "expected a file, got a link"),
    "a folder": (Path.mkdir, "expected a file, got a folder"),
    "a FIFO": (os.mkfifo, "expected a file, got a FIFO or a device"),
    "a socket": (make_socket, "No such device or address"),
}


@pytest.mark.parametrize(
    ("kind", "follow"),
    [
        (kind, follow)
        for kind in OTHERS
        for follow in (False, True)
        if not (follow and "link" in kind)
    ],
)
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    follow: bool,
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    (tmp_path / "file").write_text("text")
    path = tmp_path / "other"
    make, words = OTHERS[kind]
    make(path)
    with pytest.raises(OSError, match=words) as caught:
        open_plain(path, follow=follow)
    assert str(path) in str(caught.value)


def test_a_device_is_refused() -> None:
    for path in ("/dev/zero", "/dev/null"):
        with pytest.raises(OSError, match="expected a file, got a FIFO or a device"):
            read_plain(Path(path))


def test_a_link_that_the_user_has_named_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    with open_plain(tmp_path / "link", follow=True) as file:
        assert file.read() == b"text"


@pytest.mark.parametrize("follow", [False, True])
def test_a_file_that_is_not_there_is_told_from_all_others(tmp_path: Path, follow: bool) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        open_plain(tmp_path / "nothing", follow=follow)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(1001))
    assert len(read_plain(tmp_path / "file", 1001)) == 1001
    with pytest.raises(OSError, match="expected 1,000 bytes at most, got 1,001") as caught:
        read_plain(tmp_path / "file", 1000)
    assert caught.value.errno == errno.EFBIG


def test_a_file_that_claims_to_be_empty_is_not_read_without_end() -> None:
    """As the kernel's own files do."""
    path = Path("/proc/self/maps")
    assert os.stat(path).st_size == 0
    with pytest.raises(OSError, match="expected 10 bytes at most, got more: '/proc/"):
        read_plain(path, 10)


def test_the_limit_of_words_is_far_above_what_is_written(tmp_path: Path) -> None:
    assert ownfiles.RECORD_BYTES == 64 << 20
    with (tmp_path / "file").open("wb") as file:
        file.truncate(ownfiles.RECORD_BYTES + 1)
    with pytest.raises(OSError, match="expected 67,108,864 bytes at most, got 67,108,865"):
        read_plain(tmp_path / "file")


# JSON


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, null, "é"]}', "[]", "0"])
def test_json_is_understood_as_text_and_as_bytes(text: str) -> None:
    assert parse_json(text) == parse_json(text.encode())
    assert not nested_too_deeply(parse_json(text))


BAD = {
    "nothing": "",
    "no JSON": "{a: 1}",
    "cut off": '{"a": [1',
    "no text": b"\xff\xfe\xfa",
    "deeper than Python": "[" * 100_000,
    "deep and whole": "[" * 100_000 + "]" * 100_000,
    "a level too deep": "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
    "dicts a level too deep": '{"a":' * (DEEPEST + 1) + "0" + "}" * (DEEPEST + 1),
    "a number of thousands of digits": "1" * 10_000,
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_json_that_nobody_wrote_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":[', "]}")], ids=["lists", "both"])
def test_json_may_be_nested_deeper_than_anything_written_here(opens: str, closes: str) -> None:
    levels = DEEPEST // (len(closes))
    assert not nested_too_deeply(parse_json(opens * levels + closes * levels))
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json(opens * (levels + 1) + closes * (levels + 1))


def test_a_wide_value_is_not_deep() -> None:
    assert not nested_too_deeply([[number] for number in range(10_000)])


# Writing


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("before", [None, b"older, and longer than what comes now"])
def test_a_file_is_written_whole(tmp_path: Path, sync: bool, before: bytes | None) -> None:
    if before is not None:
        (tmp_path / "file").write_bytes(before)
    write_whole(tmp_path / "file", b"new", sync=sync)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("somebody else's")
    (tmp_path / "file").symlink_to("other")
    write_whole(tmp_path / "file", b"new")
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "other").read_text() == "somebody else's"


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_what_was_there_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_text("older")
    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "older"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        own = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *words, own=own, name=name: calls.append(name) or own(*words)
        )
    write_whole(tmp_path / "file", b"new", sync=sync)
    assert calls == (["fsync", "replace"] if sync else ["replace"])
