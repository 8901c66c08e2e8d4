"""Reads the user's files with size limits, reports unusable ones, and never overwrites any."""

from __future__ import annotations

import hashlib
import json
import os
import re
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
"""Maximum number of bad files or lines that an error names; all of them are written to a file."""
_VALUE = re.compile(r"""('(\\.|[^'\\])*'|"(\\.|[^"\\])*"|(?!: ).)*""", re.DOTALL)
"""The value in a reason, up to the colon before the advice. A quoted value may have colons."""


@dataclass(frozen=True, slots=True)
class BadFile:
    """An unusable file or line.

    >>> str(BadFile(Path("train.tsv"), "there is no tab", line=3))
    'train.tsv, line 3: there is no tab'
    """

    path: Path
    """Path of the file."""
    reason: str
    """Expected and actual content."""
    line: int | None = None
    """Line number from 1; None for the whole file."""

    def __str__(self) -> str:
        place = readable(self.path)
        if self.line is not None:
            place = f"{place}, line {self.line}"
        return f"{place}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadData:
    """Fields that all datasets have, whatever their samples are."""

    left_out: list[BadFile]
    """Unusable files and lines."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user before training."""
    own_test: bool = False
    """Whether there is a separate test set, so that none was held out."""
    columns: tuple[str, str | None, tuple[str, ...]] | None = None
    """The `onefold_jobs.data.columns.Columns` of its tables, if it was read from tables."""
    scan: str = ""
    """Result of scanning the files, for `onefold_jobs.data.scan.read_scan`."""
    digest: str
    """Digest that is equal for the same samples with the same names, classes and sets."""


def readable(path: Path) -> str:
    """Return a printable path, even if it is not UTF-8 or contains control characters.

    >>> print(readable(Path("a\\x1b[2J.png")))
    a\\x1b[2J.png
    """
    return visible(str(path))


def name_below(path: Path, root: Path) -> str:
    """Return the path of a file relative to a folder, or the whole path if it is outside.

    >>> name_below(Path("data/a.png"), Path("data")), name_below(Path("/a.png"), Path("data"))
    ('a.png', '/a.png')
    """
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def refuse(
    bad: Sequence[BadFile],
    others: Sized,
    samples: int | None = None,
    *,
    skip: str | None = "--skip-bad",
) -> None:
    """Raise an error that names the first bad files and lines, if there are any.

    If there are more, all of them are written to a file that the error names.

    Args:
        bad: unusable files and lines.
        others: all usable samples; if there are none, skipping the bad ones is not a remedy.
        samples: number of all samples; None if each of ``bad`` is one.
        skip: option that skips the bad ones; None without one.

    Raises:
        DataError: ``bad`` is not empty.
    """
    if not bad:
        return
    named = "\n".join(f"  {each}" for each in _shortly(bad))
    more = f"\n  and {len(bad) - _TOLD:,} more{_written(bad)}" if len(bad) > _TOLD else ""
    advice, samples = "nothing else can be used", samples or len(bad) + len(others)
    if others:
        dropped = samples - len(others)
        share = f"{dropped:,} of {counted(samples, 'sample')} ({dropped / samples:.1%})"
        way = (
            f"fix or remove them, or skip them with {skip}" if skip else "fix them, or remove them"
        )
        advice = f"{way}, which drops {share}"
    raise DataError(f"{counted_bad(bad)} cannot be used:\n{named}{more}\n{advice}")


def _shortly(bad: Sequence[BadFile]) -> list[str]:
    """Describe the first bad files and lines, without repeating the expectation and the advice."""
    lines: list[str] = []
    before = ""
    for each in bad[:_TOLD]:
        expected, got, came = each.reason.partition(", got ")
        value = _VALUE.match(came)
        again = replace(each, reason=f"likewise{got}{value.group() if value else came}")
        lines.append(str(again if expected == before else each))
        before = expected
    return lines


def counted_bad(bad: Sequence[BadFile]) -> str:
    """Count lines and files separately.

    >>> counted_bad([BadFile(Path("a.tsv"), "why", 3), BadFile(Path("b.png"), "why")])
    '1 line of 1 file, and 1 file'
    """
    files = [each for each in bad if each.line is None]
    lines = [each for each in bad if each.line is not None]
    within = counted(len({each.path for each in lines}), "file")
    parts = [f"{counted(len(lines), 'line')} of {within}"] if lines else []
    return ", and ".join([*parts, *([counted(len(files), "file")] if files or not bad else [])])


def _written(bad: Sequence[BadFile]) -> str:
    """Write bad files and lines to a file; return words that name it, or nothing on failure."""
    content = "".join(f"{each}\n" for each in bad).encode()
    try:
        descriptor, path = tempfile.mkstemp(prefix="onefold-bad-", suffix=".txt")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    # The error itself matters more, and it names the first of them.
    except OSError:
        return ""
    return f"; all of them are listed in {path}"


def left_out_notes(bad: Sequence[BadFile], listed_in: str | None = "run.json") -> list[str]:
    """Describe the first files and lines that are skipped, and count all.

    Args:
        bad: unusable files and lines.
        listed_in: file that lists all of them; None without one.
    """
    notes = [f"left out: {each}" for each in _shortly(bad)]
    if len(bad) > _TOLD:
        place = f", which {listed_in} lists" if listed_in else ""
        notes.append(f"left out in all: {counted_bad(bad)}{place}")
    return notes


_HEAD_BYTES = 512
"""Number of bytes that identify a file as one of ours."""


def read_whole(path: Path, most_bytes: int) -> bytes:
    """Read a whole file with a size limit.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than ``most_bytes``.
    """
    with open_plain(path, follow=True) as file:
        # Read one byte more than allowed instead of asking for the size: a file in /proc reports 0,
        # and a file may grow afterwards.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path}: expected a file of at most {most_bytes:,} bytes, got more")
    return content


def read_json(path: Path, most_bytes: int) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than ``most_bytes``, nested too deeply, or not JSON. The
            message names the file.
    """
    content = read_whole(path, most_bytes)
    try:
        return parse_json(content.decode())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error


def require_ours(path: Path, ours: Callable[[bytes], bool], expected: str) -> None:
    """Reject overwriting anything that onefold did not write.

    Args:
        path: path of the file to write.
        ours: predicate that receives the first bytes of a file and decides whether it may be
            replaced.
        expected: beginning of the error: the option that names the path, and the expected content.

    Raises:
        ValueError: the path is a link, a folder, a pipe, a device, or an unrelated file.
        OSError: the file cannot be read.
    """
    try:
        # Do not follow links: writing would replace a link that the user created on purpose.
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        with open_plain(path, follow=True) as file:
            head = file.read(_HEAD_BYTES)
        # An empty file, such as one that mktemp reserves, has no content to lose.
        if not head or ours(head):
            return
        came = "an unrelated file"
    else:
        came = "a link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
    raise ValueError(f"{expected}, but {path} is {came}: remove it, or use another name")


def digest_of(*parts: Any, size_bytes: int = 8) -> str:
    """Compute a digest of strings, numbers and lists of these; 8 bytes give 16 hex digits.

    >>> digest_of(["a.png", "b.png"], [0, 1])
    '0ef90b3a28133b26'
    """
    # JSON marks the end of each string: concatenated, ["ab", "c"] and ["a", "bc"] would have the
    # same digest. Its default escapes also support names that are not UTF-8.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=size_bytes).hexdigest()
