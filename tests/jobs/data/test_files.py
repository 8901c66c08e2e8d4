"""Files that are not what they seem: pipes, devices, links, and more than anybody asked for."""

import os
from pathlib import Path

import pytest

from onefold_jobs.data.files import require_ours


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
