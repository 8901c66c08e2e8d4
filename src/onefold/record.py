"""Lines of JSON in a file, one a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_line", "read_record"]


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Add one line to a file."""
    with path.open("a") as file:
        file.write(json.dumps(dict(record)) + "\n")


def read_record(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of ``NAME.jsonl``; none if there is no such file."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
