"""Files that are not what they seem: pipes, devices, links, and more than anybody asked for."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from onefold.errors import DataError
from onefold_jobs.data.files import BadFile, left_out_notes, readable, refuse, require_ours
from onefold_jobs.data.pictures import picture_paths, visible_folders
from onefold_jobs.data.tables import read_tsv


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


def test_any_name_can_be_shown() -> None:
    assert str(BadFile(Path("a/b.tsv"), "why", 7)) == "a/b.tsv, line 7: why"
    assert str(BadFile(Path(os.fsdecode(b"caf\xe9.png")), "why")).encode() == b"caf\\xe9.png: why"
    for name in ("猫/ñandú 1.png", "a b/'c'.png", "."):
        assert readable(Path(name)) == name
    assert str(BadFile(Path("a\rb.png"), "why")) == "a\\rb.png: why"


def test_what_is_expected_of_many_files_is_said_once() -> None:
    words = "expected a mask of 0 and 255, got {} (9.0%): more than two. Name the foreground, such"
    bad = [BadFile(Path(f"{n}.png"), words.format(n)) for n in range(3)]
    bad += [BadFile(Path("a.png"), "there is no mask"), BadFile(Path("b.png"), "there is no mask")]
    bad += [BadFile(Path("c.png"), words.format("c"))] * 2
    mixed = [bad[0], bad[3], bad[1]]
    assert left_out_notes(mixed) == [f"left out: {each}" for each in mixed]
    with pytest.raises(DataError) as caught:
        refuse(bad, ["good.png"])
    assert str(caught.value).endswith(
        "\nfix or remove them, or skip them with --skip-bad, which drops 7 of 8 samples (87.5%)"
    )
    with pytest.raises(DataError, match=r"\nnothing else can be used$"):
        refuse(bad, [])
    assert str(caught.value).splitlines()[:-2] == [
        "7 files cannot be used:",
        f"  {bad[0]}",
        "  1.png: likewise, got 1 (9.0%)",
        "  2.png: likewise, got 2 (9.0%)",
        "  a.png: there is no mask",
        "  b.png: likewise",
    ]
    assert left_out_notes(bad)[1:3] == [
        "left out: 1.png: likewise, got 1 (9.0%)",
        "left out: 2.png: likewise, got 2 (9.0%)",
    ]


def test_what_is_left_of_a_repeated_reason_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"fine\t1\n" + b"caf\xe9\t1\n" * 3)
    _, bad = read_tsv(tmp_path / "a.tsv")
    first, *others = (note.partition(".tsv, ")[2] for note in left_out_notes(bad))
    name = tmp_path / "a.tsv"
    assert first.endswith(f"file with iconv -f WINDOWS-1252 -t UTF-8 {name} > utf8.tsv")
    assert others == [f"line {n}: likewise, got e9 as byte 4" for n in (3, 4)]
    words = "expected a label, got {!r}: name it, such as: a"
    bad = [
        BadFile(Path("a.tsv"), words.format("it's: b")),
        BadFile(Path("b.tsv"), words.format("c: d")),
    ]
    assert left_out_notes(bad)[1] == "left out: b.tsv: likewise, got 'c: d'"
    assert left_out_notes(bad[::-1])[1] == 'left out: a.tsv: likewise, got "it\'s: b"'


def test_what_may_not_be_looked_at_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may be read and not searched: its names can be seen, and nothing else."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "b.png").touch()
    (tmp_path / "to nothing").symlink_to("nothing")
    real = Path.stat

    # The tests may be run by root, whom no file system keeps out.
    def refused(path: Path, **options: Any) -> Any:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    bad: list[BadFile] = []
    assert picture_paths(tmp_path, bad) == []
    reason = "expected a file or folder, got Permission denied"
    assert bad == [BadFile(tmp_path / "closed" / "b.png", reason)]
    assert visible_folders(tmp_path) == [tmp_path / "closed"]
    with pytest.raises(DataError, match=r"closed/b.*: expected a readable folder, got "):
        visible_folders(tmp_path / "closed")
