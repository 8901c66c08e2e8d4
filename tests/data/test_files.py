"""Files that are not what they seem: pipes, devices, links, and more than anybody asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onefold.data.files import open_regular, read_json, read_whole, require_ours


def test_only_regular_files_are_read_and_no_more_than_was_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "pipe", "a FIFO"),
        (Path("/dev/zero"), "a device"),
        (Path("/"), "a folder"),
    ):
        with pytest.raises(OSError, match=words):
            open_regular(path)
    path = tmp_path / "a.json"
    path.write_bytes(b"12345")
    assert read_whole(path, 5) == b"12345"
    with pytest.raises(ValueError, match="expected a file of at most 4 bytes, got more"):
        read_whole(path, 4)
    for content in ("[" * 100_000, "{", "9" * 5000, "\xff"):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=r"a\.json: expected JSON"):
            read_json(path, 1 << 20)


def test_what_is_not_ours_is_not_written_over(tmp_path: Path) -> None:
    for name, make in (
        ("another file", lambda path: path.write_bytes(b"theirs")),
        ("a link", lambda path: path.symlink_to(tmp_path / "elsewhere")),
        ("a folder", Path.mkdir),
        ("a pipe", os.mkfifo),
    ):
        make(tmp_path / name)
        with pytest.raises(ValueError, match=r"expected nothing there, .* is .*: remove it"):
            require_ours(tmp_path / name, is_ours, "expected nothing there")
    for content in (b"", b"ours too"):
        (tmp_path / "b").write_bytes(content)
        require_ours(tmp_path / "b", is_ours, "nothing there")
    require_ours(tmp_path / "c", is_ours, "expected nothing there")


def is_ours(head: bytes) -> bool:
    return head.startswith(b"ours")
