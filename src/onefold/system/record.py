"""Lines of JSON in a file, one a step."""

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
"""Of a line, which has about a hundred."""


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Add one line to a file; follows no link.

    Raises:
        OSError: it cannot be written.
        ValueError: it is a link, or no file.
    """
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def check_trace(path: Path) -> None:
    """Refuse a file that is no trace: it would be emptied.

    Raises:
        ValueError: there is something else of that name.
    """
    _read_trace(path)


def keep_steps(path: Path, last: int) -> None:
    """Drop the lines of steps after ``last``, and one that is not whole; make an empty file if
    there is none.

    Raises:
        OSError: it cannot be written.
        ValueError: there is something else of that name.
    """
    kept = []
    for line in _read_trace(path):
        with suppress(json.JSONDecodeError):  # cut off as the process that wrote it was killed
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    replace_file(path, "".join(kept))


def _read_trace(path: Path) -> list[str]:
    """The lines of a trace, of which the last may be cut off; none if there is no file."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return []
    lines = []
    with os.fdopen(descriptor, "rb") as file:
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
    if not line.endswith("\n"):
        return line.startswith(_BEGIN) or _BEGIN.startswith(line)
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("step"), int) and "loss" in found


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl``; none if there is no such file."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
