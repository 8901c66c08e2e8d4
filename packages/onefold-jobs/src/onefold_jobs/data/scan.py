"""Looks at every file of a data set once, and remembers what it saw.

Note: when a file need not be read again
----------------------------------------
What was seen of a file holds for as long as its content stays the same. A file that nobody has
touched is recognized by its stamp: size, times and number. One that was moved or copied has another
stamp, and is recognized by a digest of its content, which takes far less time than decoding it.
The stamp is taken before the content is read: if the file changes in between, the stamp is the old
one, and the file is read again next time. Taken afterwards, it would vouch for content that nobody
has seen. The clock of a file system may be coarse, so a file that has just changed gets no stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from onefold.cli import counted
from onefold.errors import DataError
from onefold.files import open_plain, parse_json
from onefold_jobs.data.files import BadFile, name_below, read_whole, readable
from onefold_jobs.data.masks import MaskLook
from onefold_jobs.data.pictures import Look, look_at, look_through, white_of

__all__ = [
    "Scanning",
    "Seen",
    "by_one_white",
    "notes_of",
    "pack_scan",
    "read_scan",
    "scan_files",
    "scan_pictures",
]

MOST_SCAN_BYTES = 1 << 29
"""Of a scan that is read back: enough for more than a million files."""
_SETTLED_NS = 2_000_000_000
"""A file that changed more recently may change again and keep the same times."""
_AnyLook = TypeVar("_AnyLook", bound=Look | MaskLook)


class Seen(msgspec.Struct, Generic[_AnyLook], frozen=True, array_like=True):
    """What was seen of one file."""

    kind: str
    """``picture``, or ``mask:`` and how masks are read."""
    content: str
    """Digest of the file's bytes."""
    stamp: tuple[int, ...] | None
    """Size, both times of change and inode number; None if it had only just been written."""
    look: _AnyLook

    def __post_init__(self) -> None:
        # Anybody may have written a scan in a run's folder.
        if isinstance(self.look, MaskLook):
            fits = self.kind.startswith("mask:")
        else:
            channels = 1 if self.look.gray else 3
            counted = [len(self.look.sums.totals), len(self.look.sums.squares)]
            fits = self.kind == "picture" and counted == [channels, channels]
        if not fits:
            raise ValueError(f"expected what was seen of a {self.kind:.40}, got {self.look!r:.80}")


_Item = TypeVar("_Item", bound=Any)


class _Scan(msgspec.Struct):
    """The file that `pack_scan` writes."""

    files: dict[str, Seen[Look | MaskLook]]
    format: Literal[4]
    """Raised whenever what is kept changes its form or meaning; older scans are then ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanning:
    """What is known of files before they are looked through, and who watches."""

    known: Mapping[str, Seen[Any]] = field(default_factory=dict)
    """What was seen before, by the path below the root of the data."""
    watch: Callable[[int, int], None] | None = None
    """Called after every file with how many have been looked at, and how many there are."""
    white: int | None = None
    """White of the pictures, as `look_at` takes it."""


def scan_pictures(
    paths: Sequence[Path], root: Path = Path(), scanning: Scanning | None = None
) -> list[Seen[Look] | BadFile]:
    """Read every picture once for its size and the sums of its pixels, if it can be read.

    Args:
        paths: paths of the files.
        root: root of the data, which names are relative to.
        scanning: what is known of the files already, and who watches; None for neither.

    Returns:
        What was seen of each picture, or why it cannot be used, in the order of the paths.
    """
    scanning = scanning or Scanning()
    look = partial(look_at, white=scanning.white)
    return scan_files([(path, "picture", look) for path in paths], root, scanning)


def by_one_white(items: Sequence[_Item], white: int | None, bad: list[BadFile]) -> list[_Item]:
    """Make the sums of pictures hold for the white of their data set; None is the usual one.

    Each look took the white of its picture alone, as the common one is only known after the last.
    Pictures of 8 bits have none; of the others, those with another white are read again. Those that
    are too dark for it are added to bad.

    Args:
        items: named tuples with the ``path`` of each picture, and what was ``seen`` of it.
        white: what `white_of` found.
        bad: list to which the pictures that cannot be used are added.
    """
    others = [each for each in items if each.seen.look.white not in (None, white or 0)]
    scanning = Scanning(white=white or 0)
    again = scan_pictures([each.path for each in others], scanning=scanning)
    renewed = {each.path: seen for each, seen in zip(others, again, strict=True)}
    bad += [seen for seen in again if isinstance(seen, BadFile)]
    found = [each._replace(seen=renewed.get(each.path, each.seen)) for each in items]
    return [each for each in found if isinstance(each.seen, Seen)]


def notes_of(looks: Sequence[Look], trained: int = 0) -> list[str]:
    """Mention the white of training pictures, the first of all, and pages that are left unread."""
    notes, train = [], looks[:trained]
    if deep := [look.bright for look in train if look.bright is not None]:
        notes.append(
            f"pictures of more than 8 bits a pixel, {len(deep):,} of {len(train):,} to train with, "
            f"share one white, {white_of(train)}: 99.9% of each one's values are at most "
            f"{max(deep):g}, and brighter values than white become white"
        )
    if several := sum(look.several for look in looks):
        words = f"{counted(several, 'picture')} with several pages or frames"
        notes.append(f"{words}: only the first is used")
    return notes


def scan_files(
    files: Sequence[tuple[Path, str, Callable[[Path], Any]]],
    root: Path,
    scanning: Scanning | None = None,
) -> list[Seen[Any] | BadFile]:
    """Look at every file that is not known already.

    Args:
        files: for each file its path, its kind, and the function that looks at it, which raises
            DataError if it cannot be used.
        root: root of the data, which names are relative to.
        scanning: what is known of the files already, and who watches; None for neither.

    Returns:
        What was seen of each file, or why it cannot be used, in the order of the files.
    """
    scanning = scanning or Scanning()
    contents = {(seen.kind, seen.content): seen for seen in scanning.known.values()}

    def unchanged(path: Path, kind: str) -> Seen[Any] | None:
        before = scanning.known.get(name_below(path, root))
        if before is None or before.kind != kind or before.stamp is None:
            return None
        return before if before.stamp == _stamp(path) else None

    def see(file: tuple[Path, str, Callable[[Path], Any]]) -> Seen[Any] | BadFile:
        path, kind, look = file
        # Before anything is read: see the note on when a file need not be read again.
        stamp = _stamp(path)
        try:
            # By kind as well: one file may be both a picture and a mask.
            content = _content(path)
            known = contents.get((kind, content)) if content else None
            return Seen(kind, content, stamp, known.look if known else look(path))
        except DataError as error:
            return BadFile(path, str(error).removeprefix(f"{readable(path)}: "))

    found: list[Any] = [unchanged(path, kind) for path, kind, _ in files]
    left = [number for number, before in enumerate(found) if before is None]
    seen = look_through(see, [files[number] for number in left], scanning.watch)
    for number, each in zip(left, seen, strict=True):
        found[number] = each
    return found


def read_scan(path: Path) -> Mapping[str, Seen[Any]]:
    """Read what was seen before; nothing if the file is not there, or damaged."""
    try:
        return msgspec.convert(parse_json(read_whole(path, MOST_SCAN_BYTES)), _Scan).files
    # A scan only saves time: without it the pictures are read again.
    except (OSError, ValueError):
        return {}


def pack_scan(files: Iterable[tuple[Path, Seen[Any]]], root: Path) -> str:
    """Write what was seen as text, for a file that `read_scan` reads.

    Args:
        files: the path of each file, and what was seen of it.
        root: root of the data, which names are relative to.
    """
    named = {name_below(path, root): seen for path, seen in files}
    # Not by msgspec alone, which refuses names that are not UTF-8.
    return json.dumps(msgspec.to_builtins(_Scan(named, 4)))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Take what changes with a file's content; None if that may not be relied on."""
    try:
        found = os.stat(path)
    # Whoever reads the file reports what is wrong with it.
    except OSError:
        return None
    # The time of the inode's change as well: cp -p and touch can set the other back.
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _content(path: Path) -> str:
    """Digest a file; empty if it cannot be read, which whoever looks at it will report."""
    try:
        with open_plain(path, follow=True) as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError:
        return ""
