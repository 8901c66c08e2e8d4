"""What tests of checkpoints look at, and a disk that is full."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def names_in(folder: Path) -> set[str]:
    """What lies in a folder."""
    return {path.name for path in folder.iterdir()}


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory, which holds nothing else."""
    return sorted(int(name.removeprefix("step-")) for name in names_in(directory))


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file may grow beyond the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def seal(folder: Path, text: str) -> None:
    """Write a ``run.json`` whose digest is right; its text has zeros in the digest's place."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "run.json").write_text(text.replace("0" * 64, digest, 1))


def reseal(folder: Path, **changes: Any) -> None:
    """Have a checkpoint say something else, with digests that are right for its files as they are.

    Args:
        folder: of the checkpoint.
        changes: of what ``run.json`` says, by name.
    """
    record = json.loads((folder / "run.json").read_text())
    record["files"] = {name: sealed(folder / name) for name in record["files"]}
    seal(folder, json.dumps({**record, **changes, "sha256": "0" * 64}, indent=2) + "\n")


def sealed(path: Path) -> dict[str, Any]:
    """Size and digest of a file."""
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
