"""Files that are not what they seem: pipes, devices, links, and more than anybody asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onefold.data.files import open_regular, read_json, read_whole, require_ours
from onefold.system.ownfiles import aside_of, write_whole
from tests.tables import for_each


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a FIFO or a device"):
        open_regular(tmp_path / "pipe")


@for_each(("path", "words"), [("/dev/zero", "a device"), ("/", "a folder")])
def test_what_is_no_regular_file_is_not_opened(path: str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        open_regular(Path(path))


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_whole(path, 5) == b"12345"
    with pytest.raises(ValueError, match="expected a file of at most 4 bytes, got more"):
        read_whole(path, 4)


@for_each("content", ["[" * 100_000, "{", "9" * 5000, "\xff"])
def test_what_is_no_json_is_one_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"a\.json: expected JSON"):
        read_json(path, 1 << 20)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"theirs")
    (tmp_path / "a").symlink_to(foreign)
    write_whole(tmp_path / "a", b"ours")
    assert (foreign.read_bytes(), (tmp_path / "a").read_bytes()) == (b"theirs", b"ours")
    assert not (tmp_path / "a").is_symlink()


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")

    def write_half() -> None:
        with aside_of(tmp_path / "a") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"


@for_each("kind", ["another file", "a link", "a folder", "a pipe"])
def test_what_is_not_ours_is_not_written_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "another file":
        path.write_bytes(b"theirs")
    elif kind == "a link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "a folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=r"expected nothing there, .* is .*: remove it"):
        require_ours(path, lambda head: head.startswith(b"ours"), "expected nothing there")


@for_each("content", [None, b"", b"ours too"])
def test_what_is_ours_may_be_written_over(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    require_ours(tmp_path / "a", lambda head: head.startswith(b"ours"), "expected nothing there")
