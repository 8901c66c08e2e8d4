"""How much memory a device has."""

import os
from pathlib import Path

import pytest
import torch

from onefold.system.accelerator import capacity_bytes
from tests.tables import for_each

CPU = torch.device("cpu")
GROUP, MEMORY = "/proc/self/cgroup", "/sys/fs/cgroup"
NESTED = {
    GROUP: "12:cpu:/x\n0::/a/b\n",
    f"{MEMORY}/a/b/memory.max": "7000\n",
    f"{MEMORY}/memory.max": "9000\n",
}


@for_each(
    ("files", "expected"),
    [
        ({}, None),
        ({GROUP: "4:pids:/x\n", f"{MEMORY}/memory.max": "6000\n"}, None),
        ({GROUP: "0::/a/b\n", f"{MEMORY}/a/memory.max": "5000\n"}, 5000),
        ({**NESTED, f"{MEMORY}/a/memory.max": "max\n"}, 7000),
        (
            {
                GROUP: "4:cpu,memory:/x/y\n3:pids:/\n",
                f"{MEMORY}/memory/x/memory.limit_in_bytes": "6000\n",
                f"{MEMORY}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            6000,
        ),
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
    assert found == (expected or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
