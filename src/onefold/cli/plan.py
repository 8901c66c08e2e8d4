"""Shows a model's stages and the memory it needs, and lists the devices of this machine.

`plan_script` prints the plan of a model, `show_devices` the table of ``onefold devices``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from onefold import RunOptions, list_devices, select_devices, supervise
from onefold.cli import Screen, print_json, tell_failure
from onefold.system.safe_files import PrivateFolder
from onefold.system.words import counted

__all__ = ["plan_script", "read_counts", "show_devices"]

_FILE = ":file"
"""Suffix of the names of sizes that belong to files instead of devices."""


def plan_script(command: Sequence[str], devices: str, *, options: RunOptions, as_json: bool) -> int:
    """Run a script up to its first Trainer, and print the memory that its model needs.

    Args:
        command: the script and its arguments.
        devices: device counts, such as ``1,2,4``.
        options: options of the run.
        as_json: print one JSON object, with sizes in bytes, instead of tables.

    Returns:
        0, or 2 if the script failed or created no Trainer.
    """
    counts = read_counts(devices)
    with PrivateFolder("onefold-plan-") as private:
        path = private.path / "plan.json"
        settled = replace(
            options,
            tools={"plan": {"path": str(path), "devices": counts}},
            logs=str(private.path),
            quiet=True,
        )
        outcome = supervise(command, select_devices(1), settled)
        if outcome.exit_code or not path.exists():
            tell_failure(outcome.message or "the script created no Trainer", outcome.traceback)
            return 2
        found = json.loads(path.read_text())
    *gpus, processor = list_devices()
    together = found["together"]
    # CPU devices share the host's free memory; each GPU device has the memory of its card.
    memory = processor.free_bytes if together else min((gpu.total_bytes for gpu in gpus), default=0)
    found["available_bytes"] = memory
    names = [name for name in found["rows"][0] if name != "devices"]
    found["placements"] = [name for name in names if not name.endswith(_FILE)]
    for row in found["rows"]:
        share = memory // (row["devices"] if together else 1)
        sizes = {name: row[name] for name in found["placements"] if row[name] is not None}
        row["fits"] = [name for name, size in sizes.items() if size <= share]
    if as_json:
        print_json(found)
    else:
        _print(Screen(), found, names)
    return 0


def read_counts(devices: str) -> tuple[int, ...]:
    """Parse device counts.

    Raises:
        ValueError: a count is not a number, or is below 1.
    """
    parts = [part.strip() for part in devices.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--devices must be device counts, such as 1,2,4, but got {devices}")
    return tuple(map(int, parts))


def _print(console: Screen, found: dict[str, Any], names: Sequence[str]) -> None:
    console.print(
        f"{found['model']}: {found['parameters']:,} trained parameters, "
        f"{_mebibytes(found['parameter_bytes'])} MiB; {found['optimizer']}; "
        f"{counted(found['shards'], 'shard')}"
    )
    console.print(_stages(found["stages"]))
    console.print(_rows(found["rows"], names))
    console.print(
        "In addition, a device needs PyTorch itself, its batch, and the activations of one shard."
    )
    if found["gradient_bytes_of_graphs"]:
        console.print(
            f"graphs=True keeps these activations, and on a GPU "
            f"{_mebibytes(found['gradient_bytes_of_graphs'])} MiB of gradients for each size of a "
            f"shard."
        )
    owner = "The smallest GPU of this machine has"
    if found["together"]:
        console.print("CPU devices of one host share the parameters; each counts its part.")
        owner = "The CPU devices of this machine can together use"
    if not found["state_is_known"]:
        console.print("This optimizer's state is unknown; two numbers per parameter are assumed.")
    fits = []
    for row in found["rows"]:
        some = "all" if row["fits"] == found["placements"] else ", ".join(row["fits"])
        fits.append(f"with {counted(row['devices'], 'device')} {some or 'nothing'}")
    alone = "counting only parameters, gradients and optimizer state"
    gibibytes = f"{found['available_bytes'] / 2**30:.1f} GiB"
    console.print(f"{owner} {gibibytes}. What fits, {alone}: {'; '.join(fits)}.")
    largest = max(found["stages"], key=lambda stage: int(stage["bytes"]))
    first = found["rows"][0]
    # If the model is in a file, a device needs only one stage at a time.
    by_stage = [first[name.removesuffix(_FILE)] for name in names if name.endswith(_FILE)]
    least = min(filter(None, by_stage), default=None)
    if least and not first["fits"]:
        console.headed(
            "bold red",
            "Too large",
            f" for a device: {largest['name']} needs "
            f"{_mebibytes(least)} MiB at a time. Split it with Trainer(stages=[...]), or "
            f"split its largest layer into several modules: "
            f"https://onefold.example/do/split-a-layer.html.",
        )


def _stages(stages: Sequence[dict[str, Any]]) -> Table:
    """Build the table of stages; consecutive stages of the same size share a row."""
    table = _table("Stages", "-stage", "parameters", "MiB of gradients")
    used = [stage for stage in stages if stage["parameters"]]
    for _, group in groupby(used, key=lambda stage: (stage["parameters"], stage["bytes"])):
        alike = list(group)
        name = alike[0]["name"]
        if len(alike) > 1:
            name += f" to {alike[-1]['name']}, each of {len(alike)}"
        table.add_row(name, f"{alike[0]['parameters']:,}", _mebibytes(alike[0]["bytes"]))
    return table


def _rows(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    title = "Memory per device, MiB, by --placement"
    # Headings of two lines, so that the table fits 80 columns.
    table = _table(title, "devices", *(name.replace(":", ":\n") for name in names))
    for row in rows:
        table.add_row(str(row["devices"]), *(_mebibytes(row[name]) for name in names))
    return table


def _mebibytes(number: int | None) -> str:
    return "-" if number is None else f"{number / 2**20:,.1f}"


def show_devices(*, as_json: bool) -> None:
    """Print a row per device: index, kind, name, total and free memory.

    Args:
        as_json: print one JSON object, with sizes in bytes, instead of the table.
    """
    devices = list_devices()
    if as_json:
        print_json({"devices": [asdict(device) for device in devices]})
        return
    headings = ("index", "-kind", "-name", "memory total", "memory free")
    table = _table("Devices of this machine", *headings)
    for device in devices:
        name = f"{device.name} ({device.count} cores)" if device.kind == "cpu" else device.name
        sizes = (f"{each / 2**30:.1f} GiB" for each in (device.total_bytes, device.free_bytes))
        table.add_row(str(device.index), device.kind, name, *sizes)
    Screen().print(table)


def _table(title: str, *headings: str) -> Table:
    """Build a table of numbers, and of text in columns whose heading starts with a dash."""
    columns = [
        # Text instead of str, because some headings have two lines.
        Column(Text(each.removeprefix("-")), justify="left" if each.startswith("-") else "right")
        for each in headings
    ]
    return Table(*columns, title=title)
