"""What tests of checkpoints look at, and a disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
