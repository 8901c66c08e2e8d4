"""Nothing is removed or written over that was not made here."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from onefold.system.ownfiles import PrivateFolder, create_file, replace_file


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
