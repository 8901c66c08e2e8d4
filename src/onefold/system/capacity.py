"""How much memory a device has at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["capacity_bytes"]


def capacity_bytes(device: torch.device) -> int:
    """All memory of a device: of the host, what this process may take of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits()])


def _limits() -> list[int]:
    """The limits of the control groups that this process is in; none where they are not used."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    # Of version 2 alone, whose line has no number and no names: 0::/path
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folders = [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]
    found = []
    for folder in folders:
        try:
            text = (folder / "memory.max").read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return found
