"""How folders are looked through, and what is said of those that may not be."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from onefold.data.bad import BadFile
from onefold.data.pictures import picture_paths, visible_folders
from onefold.errors import DataError


@pytest.fixture
def unsearchable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may be read, and not searched: its names can be seen, and nothing else."""
    folder = tmp_path / "closed"
    (folder / "a").mkdir(parents=True)
    (folder / "b.png").touch()
    (folder / ".hidden").touch()
    real = Path.stat

    # The tests may be run by root, whom no file system keeps out.
    def refuse(path: Path, **options: Any) -> Any:
        if path.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    return folder


def test_what_may_not_be_looked_at_is_bad(unsearchable: Path) -> None:
    (unsearchable.parent / "c.png").touch()
    bad: list[BadFile] = []
    assert picture_paths(unsearchable.parent, bad) == [unsearchable.parent / "c.png"]
    reason = "expected a file or folder, got Permission denied"
    assert bad == [BadFile(unsearchable / name, reason) for name in ("a", "b.png")]


def test_folders_that_may_not_be_looked_at_are_named(unsearchable: Path) -> None:
    words = "closed/[ab].*: expected a folder that can be looked through, got Permission denied"
    with pytest.raises(DataError, match=words):
        visible_folders(unsearchable)


def test_links_that_lead_nowhere_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "to folder").symlink_to("folder")
    (tmp_path / "to nothing").symlink_to("nothing")
    (tmp_path / "to itself").symlink_to("to itself")
    (tmp_path / "into a file").symlink_to("file/within")
    (tmp_path / "file").touch()
    assert visible_folders(tmp_path) == [tmp_path / "folder", tmp_path / "to folder"]
