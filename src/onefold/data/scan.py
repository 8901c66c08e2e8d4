"""Looks at every file of a data set once, and remembers what it saw.

What was seen of a file holds for as long as its content stays the same. A file that nobody has
touched is known by its stamp; one that was moved or copied, by a digest of its content, which takes
far less time than decoding it. A look at anything else reads the picture.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from onefold.data.bad import BadFile, readable
from onefold.data.files import open_regular, read_whole
from onefold.data.masks import MaskLook
from onefold.data.pictures import Look, Watch, look_at, look_through, white_of
from onefold.errors import DataError

__all__ = [
    "PictureFacts",
    "Scanning",
    "Seen",
    "by_one_white",
    "deep_note",
    "pack_scan",
    "read_scan",
    "scan_files",
    "scan_pictures",
    "unpack_scan",
]

_FORMAT = 1
_MOST_BYTES = 1 << 29
"""Of what was kept: more than a million files."""
_SETTLED_NS = 2_000_000_000
"""A file that changed more recently may change again without another stamp."""
_KINDS: Mapping[str, type[Look] | type[MaskLook]] = {"picture": Look, "mask": MaskLook}


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one file."""

    kind: str
    """``picture``, or ``mask:`` and how masks are read."""
    content: str
    """Digest of its bytes."""
    stamp: tuple[int, ...] | None
    """Size, times of change and number of the file; None if it had only just been written."""
    look: Any
    """A `Look` or a `MaskLook`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanning:
    """How to look through files."""

    known: Mapping[str, Seen] = field(default_factory=dict)
    """What was seen before, by the path from the root of the data."""
    watch: Watch | None = None
    """Called after every file."""


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What a look through pictures has found."""

    sound: list[int]
    """Numbers of those that can be read."""
    bad: list[BadFile]
    seen: list[Seen]
    """What is kept of each sound one."""

    @property
    def looks(self) -> list[Look]:
        """Of each sound one."""
        return [each.look for each in self.seen]

    @property
    def grey(self) -> bool:
        """All sound ones are grey."""
        return bool(self.seen) and all(look.grey for look in self.looks)

    @property
    def white(self) -> int | None:
        """Of all that have more than 8 bits a pixel."""
        return white_of(self.looks)


def scan_pictures(
    paths: Sequence[Path], root: Path = Path(), scanning: Scanning | None = None
) -> PictureFacts:
    """Read every picture once: which are sound, how large they are, and the sums of their pixels.

    Args:
        paths: of the files.
        root: of the data.
        scanning: how.
    """
    found = scan_files([(path, "picture", look_at) for path in paths], root, scanning)
    sound = [number for number, each in enumerate(found) if isinstance(each, Seen)]
    seen = [each for each in found if isinstance(each, Seen)]
    bad = [each for each in found if isinstance(each, BadFile)]
    return PictureFacts(sound, bad, by_one_white([paths[number] for number in sound], seen))


def by_one_white(paths: Sequence[Path], seen: Sequence[Seen]) -> list[Seen]:
    """The same pictures, with the sums of all of them by the white that they have together."""
    white = white_of(each.look for each in seen)
    others = [n for n, each in enumerate(seen) if each.look.white not in (None, white)]
    again = look_through(partial(look_at, white=white), [paths[number] for number in others])
    aligned = list(seen)
    for number, look in zip(others, again, strict=True):
        aligned[number] = replace(seen[number], look=look)
    return aligned


def deep_note(looks: Sequence[Look]) -> list[str]:
    """What to mention of pictures of more than 8 bits a pixel, if there are any."""
    deep = [look for look in looks if look.largest is not None]
    if not deep:
        return []
    largest = max(look.largest or 0.0 for look in deep)
    note = (
        f"{len(deep):,} of {len(looks):,} pictures have more than 8 bits a pixel and values up to "
        f"{largest:g}: {white_of(deep)} is used as white for all of these"
    )
    return [note]


def scan_files(
    files: Sequence[tuple[Path, str, Callable[[Path], Any]]],
    root: Path,
    scanning: Scanning | None = None,
) -> list[Seen | BadFile]:
    """Look at every file that is not known already.

    Args:
        files: the path of each, its kind, and what looks at it and raises DataError.
        root: of the data.
        scanning: how.
    """
    scanning = scanning or Scanning()
    contents = {(seen.kind, seen.content): seen for seen in scanning.known.values()}

    def see(file: tuple[Path, str, Callable[[Path], Any]]) -> Seen | BadFile:
        path, kind, look = file
        stamp = _stamp(path)
        before = scanning.known.get(_name(path, root))
        if before is not None and before.kind == kind and before.stamp == stamp is not None:
            return before
        try:
            content = _content(path)
            known = contents.get((kind, content)) if content else None
            return Seen(kind, content, stamp, known.look if known else look(path))
        except DataError as error:
            return BadFile(path, str(error).removeprefix(f"{readable(path)}: "))

    return look_through(see, files, scanning.watch)


def read_scan(path: Path) -> Mapping[str, Seen]:
    """What was seen before; nothing if the file is not there, or not whole."""
    try:
        return unpack_scan(read_whole(path, _MOST_BYTES).decode())
    except (OSError, ValueError):
        return {}  # then the files are read again


def pack_scan(paths: Sequence[Path], seen: Sequence[Seen], root: Path) -> str:
    """As text, which `read_scan` reads from a file.

    Args:
        paths: of the files.
        seen: of each.
        root: of the data.
    """
    pairs = zip(paths, seen, strict=True)
    files = {
        _name(path, root): [each.kind, each.content, each.stamp, each.look.packed()]
        for path, each in pairs
    }
    return json.dumps({"format": _FORMAT, "files": files})


def unpack_scan(content: str) -> Mapping[str, Seen]:
    """What `pack_scan` wrote.

    Raises:
        ValueError: it is something else.
    """
    said = None
    try:
        said = json.loads(content)
        if said["format"] == _FORMAT:
            return {name: _unpacked(*values) for name, values in said["files"].items()}
        raise ValueError(f"expected format {_FORMAT}, got {said['format']}")
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected what was seen of files, got {said!r:.40}") from error


def _unpacked(kind: str, content: str, stamp: list[int] | None, look: list[Any]) -> Seen:
    return Seen(
        kind,
        content,
        tuple(stamp) if stamp else None,
        _KINDS[kind.partition(":")[0]].unpacked(look),
    )


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None  # whoever reads the file says what is wrong with it
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _content(path: Path) -> str:
    """Empty if the file cannot be read: whoever looks at it says why."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, _hash).hexdigest()
    except OSError:
        return ""


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)
