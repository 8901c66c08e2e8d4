"""How much memory a device has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from onefold.engine.assembly import capacity_bytes
from tests.tables import for_each

CPU = torch.device("cpu")


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@for_each(
    ("files", "expected"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/memory.max": "5000\n"}, 5000),
        (
            {
                "/proc/self/cgroup": "12:cpu:/x\n0::/a/b\n",
                "/sys/fs/cgroup/a/memory.max": "max\n",
                "/sys/fs/cgroup/a/b/memory.max": "7000\n",
                "/sys/fs/cgroup/memory.max": "9000\n",
            },
            7000,
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu,memory:/x/y\n3:pids:/\n",
                "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "6000\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            6000,
        ),
        ({"/proc/self/cgroup": "4:pids:/x\n", "/sys/fs/cgroup/memory.max": "6000\n"}, None),
    ],
)
def test_limits_of_control_groups_count(
    files: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> str:
        if str(path) in files:
            return files[str(path)]
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read)
        found = capacity_bytes(CPU)
    assert found == (expected or host_bytes())
