"""Reads the user's files within bounds, reports those that cannot be used, and overwrites none."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onefold.cli import counted, visible
from onefold.errors import DataError
from onefold.files import open_plain, parse_json

__all__ = [
    "BadFile",
    "ReadData",
    "counted_bad",
    "digest_of",
    "left_out_notes",
    "name_below",
    "read_json",
    "read_whole",
    "readable",
    "refuse",
    "require_ours",
]

_TOLD = 5
"""How many bad files or lines an error names; a file has all of them."""


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file, or a line of one, that cannot be used.

    >>> str(BadFile(Path("train.tsv"), "there is no tab", line=3))
    'train.tsv, line 3: there is no tab'
    """

    path: Path
    """Path of the file."""
    reason: str
    """What was expected, and what was found instead."""
    line: int | None = None
    """Number of the line, from 1; None for the file as a whole."""

    def __str__(self) -> str:
        place = readable(self.path)
        if self.line is not None:
            place = f"{place}, line {self.line}"
        return f"{place}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadData:
    """What all data sets have, whatever their samples are."""

    left_out: list[BadFile]
    """Files and lines that cannot be used."""
    notes: list[str] = field(default_factory=list)
    """What to mention before training."""
    own_test: bool = False
    """Whether there was a test set, so that no share was held out for it."""
    columns: tuple[str, str | None, tuple[str, ...]] | None = None
    """The `onefold_jobs.data.tables.Columns` of its tables, if it has been read from some."""
    scan: str = ""
    """What was seen of the files, as `onefold_jobs.data.scan.read_scan` reads it."""
    digest: str
    """The same for the same samples under the same names, in the same classes and sets."""


def readable(path: Path) -> str:
    """Spell a path so that it can be printed, even if it is not UTF-8 or has control characters.

    >>> print(readable(Path("a\\x1b[2J.png")))
    a\\x1b[2J.png
    """
    return visible(str(path))


def name_below(path: Path, root: Path) -> str:
    """Name a file by its path below a folder, or by its whole path if it lies elsewhere.

    >>> name_below(Path("data/a.png"), Path("data")), name_below(Path("/a.png"), Path("data"))
    ('a.png', '/a.png')
    """
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def refuse(bad: Sequence[BadFile], others: Sized) -> None:
    """Raise one error that names the first bad files and lines, if there are any.

    If there are more, all of them are written to a file, which the error names.

    Args:
        bad: what cannot be used.
        others: what can be; if there is nothing, leaving out the bad ones is no way out.

    Raises:
        DataError: ``bad`` is not empty.
    """
    if not bad:
        return
    named = "\n".join(f"  {each}" for each in _shortly(bad))
    more = f"\n  and {len(bad) - _TOLD:,} more{_written(bad)}" if len(bad) > _TOLD else ""
    advice = "mend or remove them, or leave them out with --skip-bad"
    advice = advice if others else "nothing else can be used"
    raise DataError(f"{counted_bad(bad)} cannot be used:\n{named}{more}\n{advice}")


def _shortly(bad: Sequence[BadFile]) -> list[str]:
    """Describe the first bad files and lines; what was expected, and what to do, only once."""
    lines: list[str] = []
    before = ""
    for each in bad[:_TOLD]:
        expected, got, came = each.reason.partition(", got ")
        # Behind the colon is what to do.
        again = replace(each, reason=f"likewise{got}{came.partition(': ')[0]}")
        lines.append(str(again if expected == before else each))
        before = expected
    return lines


def counted_bad(bad: Sequence[BadFile]) -> str:
    """Count lines and files apart.

    >>> counted_bad([BadFile(Path("a.tsv"), "why", 3), BadFile(Path("b.png"), "why")])
    '1 line of 1 file, and 1 file'
    """
    files = [each for each in bad if each.line is None]
    lines = [each for each in bad if each.line is not None]
    within = counted(len({each.path for each in lines}), "file")
    told = [f"{counted(len(lines), 'line')} of {within}"] if lines else []
    return ", and ".join([*told, *([counted(len(files), "file")] if files or not bad else [])])


def _written(bad: Sequence[BadFile]) -> str:
    """Write bad files and lines to a file; return words that name it, or nothing if it failed."""
    content = "".join(f"{each}\n" for each in bad).encode()
    try:
        descriptor, path = tempfile.mkstemp(prefix="onefold-bad-", suffix=".txt")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    # The error itself is what counts, and it has the first of them.
    except OSError:
        return ""
    return f"; all of them are listed in {path}"


def left_out_notes(bad: Sequence[BadFile]) -> list[str]:
    """Name the first files and lines that are left out of a run, and count all."""
    notes = [f"left out: {each}" for each in _shortly(bad)]
    if len(bad) > _TOLD:
        notes.append(f"left out in all: {counted_bad(bad)}, which run.json lists")
    return notes


_HEAD_BYTES = 512
"""How much of a file is read to recognize it as one of ours."""


def read_whole(path: Path, most_bytes: int) -> bytes:
    """Read all of a file that must not be large.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than ``most_bytes``.
    """
    with open_plain(path, follow=True) as file:
        # One byte more than allowed, instead of asking for the size: a file in /proc reports 0, and
        # any file may grow after it was asked.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path}: expected a file of at most {most_bytes:,} bytes, got more")
    return content


def read_json(path: Path, most_bytes: int) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than ``most_bytes``, nested too deeply, or not JSON; the
            message names it.
    """
    content = read_whole(path, most_bytes)
    try:
        return parse_json(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error


def require_ours(path: Path, ours: Callable[[bytes], bool], told: str) -> None:
    """Refuse to write over anything that onefold did not make.

    Args:
        path: path of the file that is to be written.
        ours: takes the first bytes of a file and returns whether the file may be replaced.
        told: beginning of the error: the option that names the path, and what it takes.

    Raises:
        ValueError: the path is a link, a folder, a pipe or a device, or a file that is not ours.
        OSError: the file cannot be read.
    """
    try:
        # Not through a link: writing replaces the link, and the user put it there on purpose.
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        with open_plain(path, follow=True) as file:
            head = file.read(_HEAD_BYTES)
        # Nothing is lost with an empty file, such as mktemp leaves to reserve a name.
        if not head or ours(head):
            return
        came = "a file with something else in it"
    else:
        came = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
    raise ValueError(f"{told}, {path} is {came}: remove it, or give another name")


def digest_of(*parts: Any, size_bytes: int = 8) -> str:
    """Digest texts, numbers, and lists of these; 8 bytes give 16 hexadecimal digits.

    >>> digest_of(["a.png", "b.png"], [0, 1])
    '0ef90b3a28133b26'
    """
    # As JSON, whose brackets and quotes mark where each text ends: joined texts ["ab", "c"] and
    # ["a", "bc"] would digest alike. Its default escapes also take names that are not UTF-8.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=size_bytes).hexdigest()
