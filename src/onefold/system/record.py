"""Reads and writes files of JSON lines, one line per step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onefold.system.ownfiles import open_regular, replace_file

__all__ = ["append_line", "check_trace", "keep_steps", "read_record"]

_BEGIN = '{"step": '
"""How every line of a trace begins."""
_LONGEST_BYTES = 1 << 16
"""The longest line that is read; one of ours has about a hundred bytes."""


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a file, without following links.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path is a link, or not a regular file.
    """
    # Opened for each line, so that a file that is moved away during the run is simply begun again.
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def check_trace(path: Path) -> None:
    """Refuse a file that is not a trace, because it would be overwritten.

    Raises:
        ValueError: the path is something other than a trace that onefold wrote.
    """
    _read_trace(path)


def keep_steps(path: Path, last: int) -> None:
    """Keep the lines of steps up to ``last`` in a trace; create an empty one if there is none.

    A line that was cut off is dropped as well.

    Raises:
        OSError: the file cannot be written.
        ValueError: the path is something other than a trace that onefold wrote.
    """
    kept = []
    for line in _read_trace(path):
        # The process that wrote the last line may have been killed in the middle of it.
        with suppress(json.JSONDecodeError):
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    replace_file(path, "".join(kept))


def _read_trace(path: Path) -> list[str]:
    """The lines of a trace, of which the last may be cut off; none if the file does not exist."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return []
    lines = []
    with os.fdopen(descriptor, "rb") as file:
        # Lines of limited length: a large file without any would otherwise be read into memory
        # whole before it could be refused.
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_BYTES), b""), 1):
            text = line.decode("utf-8", "replace")
            if not _is_of_a_trace(text):
                raise ValueError(
                    f"{path} is there, and is not a trace that onefold wrote (line {number}): it "
                    f"would be written over; name another file"
                )
            lines.append(text.removesuffix("\n"))
    return lines


def _is_of_a_trace(line: str) -> bool:
    # Cut off, perhaps within the first few characters: all that is there must fit.
    if not line.endswith("\n"):
        return line.startswith(_BEGIN) or _BEGIN.startswith(line)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("step"), int) and "loss" in found


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl`` in a folder; none if the file does not exist."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
