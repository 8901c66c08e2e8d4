from __future__ import annotations

import io

from rich.console import Console

from onefold.cli.plan import device_table
from onefold.run.devices import DeviceInfo

GPU = DeviceInfo(
    index=1, kind="cuda", name="NVIDIA A100", total_bytes=80 * 2**30, free_bytes=3 * 2**29
)
PROCESSOR = DeviceInfo(index=0, kind="cpu", name="Xeon", total_bytes=2**34, free_bytes=0, count=64)


def shown(*devices: DeviceInfo) -> list[list[str]]:
    """The cells of every row, headings first."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(device_table(devices))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def test_one_row_a_device() -> None:
    assert shown(GPU, PROCESSOR) == [
        ["index", "kind", "name", "memory total", "memory free"],
        ["1", "cuda", "NVIDIA A100", "80.0 GiB", "1.5 GiB"],
        ["0", "cpu", "Xeon (64 cores)", "16.0 GiB", "0.0 GiB"],
    ]


def test_names_are_shown_as_they_are() -> None:
    odd = DeviceInfo(index=0, kind="cuda", name="Card [bold]", total_bytes=0, free_bytes=0)
    assert shown(odd)[1][2] == "Card [bold]"
