"""Scans every file of a dataset once, and stores the results.

Note: when a file is not read again
-----------------------------------
A scan result is valid as long as the file's content stays the same. An unchanged file is recognized
by its stamp: size, times and inode number. A file that was moved or copied has another stamp, and
is recognized by a digest of its content, which takes much less time than decoding. The stamp is
taken before the content is read: if the file changes in between, the stamp is the old one, and the
file is read again next time. Taken afterwards, it would vouch for content that was never read. The
clock of a file system may be coarse, so a file that has just changed gets no stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
    "content_of",
    "notes_of",
    "pack_scan",
    "read_scan",
    "scan_files",
    "scan_pictures",
    "unpack_scan",
]

MOST_SCAN_BYTES = 1 << 29
"""Maximum size of a scan file, in bytes: enough for more than a million files."""
_SETTLED_NS = 2_000_000_000
"""A file that changed more recently may change again and keep the same times."""
_AnyLook = TypeVar("_AnyLook", bound=Look | MaskLook)


class Seen(msgspec.Struct, Generic[_AnyLook], frozen=True, array_like=True):
    """Scan result of a file."""

    kind: str
    """``picture``, or ``mask:`` and the mask rule."""
    content: str
    """Digest of the file's content."""
    stamp: tuple[int, ...] | None
    """Size, both times of change, and inode number; None if it was just written."""
    look: _AnyLook

    def __post_init__(self) -> None:
        # The scan in a run's folder may come from another user.
        if isinstance(self.look, MaskLook):
            fits = self.kind.startswith("mask:")
        else:
            channels = 1 if self.look.gray else 3
            counted = [len(self.look.sums.totals), len(self.look.sums.squares)]
            fits = self.kind == "picture" and counted == [channels, channels]
        if not fits:
            raise ValueError(f"expected the scan of a {self.kind:.40}, got {self.look!r:.80}")


_Item = TypeVar("_Item", bound=Any)


class _Scan(msgspec.Struct):
    """Content of the file that `pack_scan` writes."""

    files: dict[str, Seen[Look | MaskLook]]
    format: Literal[5]
    """Increased whenever the format or its meaning changes; older scans are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanning:
    """Known scan results, and a progress callback."""

    known: Mapping[str, Seen[Any]] = field(default_factory=dict)
    """Known results, by path relative to the root of the data."""
    watch: Callable[[int, int], None] | None = None
    """Called after every file with the number of completed files and of all files."""
    white: int | None = None
    """White of the images, as in `look_at`."""


def scan_pictures(
    paths: Sequence[Path], root: Path = Path(), scanning: Scanning | None = None
) -> list[Seen[Look] | BadFile]:
    """Read every image once for its size and the sums of its pixels.

    Args:
        paths: paths of the files.
        root: root of the data, which names are relative to.
        scanning: known files and a progress callback; None for neither.

    Returns:
        Result for each image, or why it is unusable, in the order of the paths.
    """
    scanning = scanning or Scanning()
    look = partial(look_at, white=scanning.white)
    return scan_files([(path, "picture", look) for path in paths], root, scanning)


def by_one_white(items: Sequence[_Item], white: int | None, bad: list[BadFile]) -> list[_Item]:
    """Recompute the sums of images for the white of their dataset; None is the usual one.

    Each image was scanned with its own white, because the common white is only known at the end.
    8-bit images have none; other images with a different white are read again. Images that are too
    dark for it are added to ``bad``.

    Args:
        items: named tuples with the ``path`` of each image, and its scan result ``seen``.
        white: result of `white_of`.
        bad: list that receives unusable images.
    """
    others = [each for each in items if each.seen.look.white not in (None, white or 0)]
    scanning = Scanning(white=white or 0)
    again = scan_pictures([each.path for each in others], scanning=scanning)
    renewed = {each.path: seen for each, seen in zip(others, again, strict=True)}
    bad += [seen for seen in again if isinstance(seen, BadFile)]
    found = [each._replace(seen=renewed.get(each.path, each.seen)) for each in items]
    return [each for each in found if isinstance(each.seen, Seen)]


def notes_of(looks: Sequence[Look], trained: int = 0) -> list[str]:
    """Report the white of the training images, which come first, and pages that are ignored."""
    notes, train = [], looks[:trained]
    if deep := [look.bright for look in train if look.bright is not None]:
        notes.append(
            f"{len(deep):,} of {len(train):,} training images have more than 8 bits per pixel; all "
            f"use the white {white_of(train)}: 99.9% of each one's values are at most "
            f"{max(deep):g}, and brighter values than white become white"
        )
    if several := sum(look.several for look in looks):
        words = f"{counted(several, 'image')} with several pages or frames"
        notes.append(f"{words}: only the first is used")
    return notes


def scan_files(
    files: Sequence[tuple[Path, str, Callable[[Path], Any]]],
    root: Path,
    scanning: Scanning | None = None,
) -> list[Seen[Any] | BadFile]:
    """Scan every file that is not known yet.

    Args:
        files: for each file its path, its kind, and the function that scans it, which raises
            DataError if the file is unusable.
        root: root of the data, which names are relative to.
        scanning: known files and a progress callback; None for neither.

    Returns:
        Result for each file, or why it is unusable, in the order of the files.
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
        # Take the stamp before anything is read: see the note at the head of the file.
        stamp = _stamp(path)
        try:
            # Keyed by kind as well, because a file may be both an image and a mask.
            content = content_of(path)
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
    """Read a stored scan; empty if the file is missing or damaged."""
    # A scan only saves time: without it, the images are read again.
    with suppress(OSError, ValueError):
        return unpack_scan(read_whole(path, MOST_SCAN_BYTES))
    return {}


def unpack_scan(scan: str | bytes) -> Mapping[str, Seen[Any]]:
    """Parse a scan, whose files are in the order in which `pack_scan` received them.

    Raises:
        ValueError: the scan is damaged.
    """
    return msgspec.convert(parse_json(scan), _Scan).files


def pack_scan(files: Iterable[tuple[Path, Seen[Any]]], root: Path) -> str:
    """Serialize a scan for a file that `read_scan` reads.

    Args:
        files: path and scan result of each file.
        root: root of the data, which names are relative to.
    """
    named = {name_below(path, root): seen for path, seen in files}
    # msgspec alone would reject names that are not UTF-8.
    return json.dumps(msgspec.to_builtins(_Scan(named, 5)))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return values that change along with a file's content; None if they are not reliable."""
    try:
        found = os.stat(path)
    # The code that reads the file reports this error.
    except OSError:
        return None
    # Include the inode's time of change, because cp -p and touch can reset the other time.
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def content_of(path: Path) -> str:
    """Return a file's digest; empty if it cannot be read, which its scan will report."""
    try:
        with open_plain(path, follow=True) as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError:
        return ""
