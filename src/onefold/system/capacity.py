"""How much memory a device has, of which this process may take a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from onefold.system.accelerator import total_bytes

__all__ = ["capacity_bytes"]


_ROOT = Path("/sys/fs/cgroup")


def capacity_bytes(device: torch.device) -> int:
    """All memory of a device: of the host, what this process may take of it."""
    if device.type != "cpu":
        return total_bytes(device)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits()])


def _limits() -> Iterator[int]:
    """The limits of the control groups that this process is in; none where they are not used."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            # Number, what is controlled, path; of version 2 the number is 0, the second is empty.
            _, controlled, path = line.split(":", 2)
            if not controlled:
                yield from _read_limits(_ROOT, path, "memory.max")
            elif "memory" in controlled.split(","):
                yield from _read_limits(_ROOT / "memory", path, "memory.limit_in_bytes")


def _read_limits(root: Path, path: str, name: str) -> Iterator[int]:
    """The limits of a group and of all that it is in."""
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # it is "max" where there is none
            yield int((folder / name).read_text())
