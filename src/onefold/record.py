"""Lines of JSON in a file, one a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["append_line", "keep_steps", "read_record"]


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Add one line to a file."""
    with path.open("a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def keep_steps(path: Path, last: int) -> None:
    """Drop the lines of steps after ``last``, and those that are not whole; make an empty file if
    there is none."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # cut off as the process that wrote it was killed
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    path.write_text("".join(kept))


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl``; none if there is no such file."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
