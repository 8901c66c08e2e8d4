"""Files that are not what they seem: pipes, devices, links, and more than anybody asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onefold.data.files import open_regular, read_json, read_whole, require_ours
from tests.tables import for_each


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
    for content in (b"", b"ours too"):
        (tmp_path / "b").write_bytes(content)
        require_ours(tmp_path / "b", lambda head: head.startswith(b"ours"), "nothing there")
    require_ours(tmp_path / "c", lambda head: False, "expected nothing there")
