"""Reads and writes files of JSON lines, one line per step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from onefold.system.ownfiles import open_regular, read_lines, replace_file

__all__ = ["append_line", "check_trace", "keep_steps", "read_record"]

_BEGIN = '{"step": '
"""How every line of a trace begins."""
_LONGEST_BYTES = 1 << 16
"""The longest line that is read; one of ours has about a hundred bytes."""


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a file, without following links.

    Raises:
        OSError: the file cannot be written, or is a link or no regular file.
    """
    # Opened for each line, so that a file that is moved away during the run is simply begun again.
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def check_trace(path: Path) -> None:
    """Refuse a file that is not a trace, because it would be overwritten.

    Raises:
        OSError: the path is a link, or no regular file.
        ValueError: the file is something other than a trace that onefold wrote.
    """
    _read_trace(path)


def keep_steps(path: Path, last: int) -> None:
    """Keep the lines of steps up to ``last`` in a trace; create an empty one if there is none.

    A line that was cut off is dropped as well.

    Raises:
        OSError: the file cannot be written, or is a link or no regular file.
        ValueError: the file is something other than a trace that onefold wrote.
    """
    lines = _read_trace(path)
    replace_file(path, "".join([f"{line}\n" for line, step in lines if step <= last]))


def _read_trace(path: Path) -> list[tuple[str, int]]:
    """The whole lines of a trace with their steps; none if the file does not exist."""
    lines = []
    for number, line in enumerate(read_lines(path, _LONGEST_BYTES), 1):
        text = line.decode("utf-8", "replace")
        try:
            step = msgspec.convert(json.loads(text), _Line).step
        except (ValueError, RecursionError):
            # The process that wrote the last line may have been killed in the middle of it,
            # perhaps within the first few characters: all that is there must fit.
            if not text.endswith("\n") and _BEGIN.startswith(text[: len(_BEGIN)]):
                continue
            raise ValueError(
                f"{path} is there, and is not a trace that onefold wrote (line {number}): it "
                f"would be written over; name another file"
            ) from None
        lines.append((text.removesuffix("\n"), step))
    return lines


class _Line(msgspec.Struct):
    step: int
    loss: Any


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl`` in a folder; none if the file does not exist."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
