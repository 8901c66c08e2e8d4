"""Writes the timeline: what every device did when, in a file for Perfetto and Chrome.

Every process of a run appends to a part of its own, in the private folder of the run; the launcher
joins the parts into one file in the folder that the user named. The format is the trace event
format of Chrome, whose times are in microseconds. This module does not load PyTorch, because the
launcher does not either, and starts sooner for it.
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
"""How every timeline of ours begins: with the name of a group of rows, see `name_row`."""
# The format's letter for an event with a start and a length.
_WORK = "X"


def name_row(*, group: int, row: int, name: str) -> list[Event]:
    """Make the events that name a row, and the group of rows that it belongs to."""
    place = {"ph": "M", "pid": group, "tid": row}
    return [
        {**place, "name": "process_name", "args": {"name": f"trainer {group}"}},
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": row}},
    ]


def slice_of(
    name: str, category: str, start_s: float, stop_s: float, *, group: int, row: int, step: int
) -> Event:
    """Make the event for work that took a while."""
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
    """Writes what one process adds to the timeline.

    Args:
        folder: folder of the parts.
        name: name of this part, different from that of every other part.
    """

    def __init__(self, folder: Path, name: str) -> None:
        # Kept open: a cleaner of temporary files may remove the folder while the run goes on, and
        # writing to a file without a name is no error.
        self._descriptor = create_file(folder / f"{name}.part", append=True)

    def append(self, events: Sequence[Event]) -> None:
        """Append events; they are in the file when this returns, even if the process is killed."""
        lines = "".join(json.dumps(event) + "\n" for event in events)
        write_all(self._descriptor, lines.encode())


def check_timeline(folder: Path) -> None:
    """Refuse a folder in which the timeline would replace a file that is not ours.

    Raises:
        OSError: the folder's ``timeline.json`` is a link, or no file.
        ValueError: it is not a timeline that onefold wrote.
    """
    path = folder / _NAME
    try:
        file = open_plain(path)
    except FileNotFoundError:
        return
    with file:
        if not _BEGIN.match(file.read(1000)):
            raise ValueError(
                f"{path} is there, and is not a timeline that onefold wrote: move it away, or name "
                f"another folder"
            )


def join_timeline(parts: Path, folder: Path) -> Path | None:
    """Join all parts into ``timeline.json``; return its path, or None if no work was recorded.

    Args:
        parts: folder of the parts.
        folder: folder in which the timeline is written.

    Raises:
        OSError: the timeline cannot be written, or there is a link in its place.
        ValueError: the folder has a ``timeline.json`` that onefold did not write.
    """
    texts = [part.read_text() for part in sorted(parts.glob("*.part"))]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    # The last line of a part may be cut off: its process may have been killed as it wrote.
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    if not any(event["ph"] == _WORK for event in events):
        return None
    # Checked again: much may have happened in the folder since the run began.
    check_timeline(folder)
    replace_file(folder / _NAME, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return folder / _NAME
