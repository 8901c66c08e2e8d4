"""Reads and writes files of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onefold.system.safe_files import open_regular

__all__ = ["append_line", "read_record"]


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one line to a file, without following links.

    Raises:
        OSError: the file cannot be written, or is a link or no regular file.
    """
    # Opened for each line, so that a file that is moved away during the run is simply begun again.
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(descriptor, "a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl`` in a folder; none if the file does not exist."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
