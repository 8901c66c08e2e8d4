"""The file of a timeline: what every device did when, as Perfetto and Chrome read it.

Every process of a run appends to a part of its own; the launcher makes one file of them. The format
is the trace event format of Chrome, whose times are in microseconds. This module does not load
PyTorch, for the launcher does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Event", "TimelinePart", "join_timeline", "name_row", "remove_parts", "slice_of"]

Event = Mapping[str, Any]

_WORK = "X"  # the format's letter for an event with a start and a length


def name_row(*, group: int, row: int, name: str) -> list[Event]:
    """Events that name a row, and the group of rows that it belongs to."""
    place = {"ph": "M", "pid": group, "tid": row}
    return [
        {**place, "name": "process_name", "args": {"name": f"trainer {group}"}},
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": row}},
    ]


def slice_of(
    name: str, category: str, start_s: float, stop_s: float, *, group: int, row: int, step: int
) -> Event:
    """An event for work that took a while."""
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
    """What one process adds to the timeline.

    Args:
        folder: of the timeline.
        name: different for each part.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.part"
        self._path.write_text("")

    def append(self, events: Sequence[Event]) -> None:
        """Add events; they are in the file when this returns."""
        with self._path.open("a") as file:
            file.write("".join(json.dumps(event) + "\n" for event in events))


def remove_parts(folder: Path) -> None:
    """Remove what an earlier run that was killed has left."""
    for part in folder.glob("*.part"):
        part.unlink()


def join_timeline(folder: Path) -> Path | None:
    """Make ``timeline.json`` of all parts and remove them; None if no work was noted."""
    parts = sorted(folder.glob("*.part"))
    lines = [line for part in parts for line in part.read_text().splitlines(keepends=True)]
    events = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be cut off
    if not any(event["ph"] == _WORK for event in events):
        remove_parts(folder)
        return None
    path = folder / "timeline.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    os.replace(aside, path)
    remove_parts(folder)
    return path
