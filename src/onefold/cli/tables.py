"""The table that ``onefold devices`` prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from onefold import DeviceInfo

__all__ = ["device_table"]


def device_table(devices: Iterable[DeviceInfo]) -> Table:
    """Make a table with a row for each device: index, kind, name, total and free memory."""
    table = Table(title="Devices of this machine")
    for heading in ("index", "kind", "name", "memory total", "memory free"):
        table.add_column(
            heading, justify="right" if heading.startswith(("index", "mem")) else "left"
        )
    for device in devices:
        name = f"{device.name} ({device.count} cores)" if device.kind == "cpu" else device.name
        row = (escape(name), _gibibytes(device.total_bytes), _gibibytes(device.free_bytes))
        table.add_row(str(device.index), device.kind, *row)
    return table


def _gibibytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
