"""Writes the timeline of all devices to a file for Perfetto and Chrome.

Every process of a run appends to its own part, in the run's private directory; the launcher joins
the parts into one file in the user's directory. The file has Chrome's trace event format, with
times in microseconds. This module does not import PyTorch, because the launcher uses it and starts
faster without PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onefold.system.safe_files import create_file, open_plain, write_all
from onefold.system.whole_files import replace_file

__all__ = ["TimelinePart", "check_timeline", "join_timeline", "name_row", "slice_of"]

Event = Mapping[str, Any]

_NAME = "timeline.json"
_BEGIN = re.compile(
    rb'\{"traceEvents": \[\{"ph": "M", "pid": \d+, "tid": \d+, "name": "process_name", '
    rb'"args": \{"name": "trainer \d+"\}\}'
)
"""The beginning of every timeline of onefold: the name of a group of rows, see `name_row`."""
# The format's letter for an event with a start and a duration.
_WORK = "X"


def name_row(*, group: int, row: int, name: str) -> list[Event]:
    """Return the events that name a row and its group of rows."""
    place = {"ph": "M", "pid": group, "tid": row}
    return [
        {**place, "name": "process_name", "args": {"name": f"trainer {group}"}},
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": row}},
    ]


def slice_of(
    name: str, category: str, start_s: float, stop_s: float, *, group: int, row: int, step: int
) -> Event:
    """Return the event for a span of work."""
    return {
        "ph": _WORK,
        "name": name,
        "cat": category,
        "ts": round(start_s * 1e6, 3),
        "dur": round((stop_s - start_s) * 1e6, 3),
        "pid": group,
        "tid": row,
        "args": {"step": step},
    }


class TimelinePart:
    """Writes one process's part of the timeline.

    Args:
        folder: directory of the parts.
        name: unique name of this part.
    """

    def __init__(self, folder: Path, name: str) -> None:
        # Keep the file open: a cleaner of temporary files may remove the directory during the run,
        # and writing to an unlinked file still works.
        self._descriptor = create_file(folder / f"{name}.part", append=True)

    def append(self, events: Sequence[Event]) -> None:
        """Append events; they survive if the process is killed after this returns."""
        lines = "".join(json.dumps(event) + "\n" for event in events)
        write_all(self._descriptor, lines.encode())


def check_timeline(folder: Path) -> None:
    """Refuse a directory in which the timeline would replace a file of the user.

    Raises:
        OSError: the directory's ``timeline.json`` is a link, or not a file.
        ValueError: ``timeline.json`` was not written by onefold.
    """
    path = folder / _NAME
    try:
        file = open_plain(path)
    except FileNotFoundError:
        return
    with file:
        if not _BEGIN.match(file.read(1000)):
            raise ValueError(
                f"{path} exists, but was not written by onefold. Move it, or choose another "
                f"directory"
            )


def join_timeline(parts: Path, folder: Path) -> Path | None:
    """Join all parts into ``timeline.json``; return its path, or None if no work was recorded.

    Args:
        parts: directory of the parts.
        folder: directory of the timeline.

    Raises:
        OSError: the timeline cannot be written, or its path is a link.
        ValueError: the directory has a ``timeline.json`` that onefold did not write.
    """
    texts = [part.read_text() for part in sorted(parts.glob("*.part"))]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    # Skip a truncated last line: the process may have been killed while writing it.
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    if not any(event["ph"] == _WORK for event in events):
        return None
    # Check again: the directory may have changed since the start of the run.
    check_timeline(folder)
    replace_file(folder / _NAME, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return folder / _NAME
