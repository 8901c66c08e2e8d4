"""What this machine has to compute on, found without PyTorch, and how a choice is written."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from onefold.errors import LaunchError
from onefold.world import visible_gpus

__all__ = ["DeviceInfo", "Selection", "cores", "list_devices", "select_devices"]

_QUERY = "index,pci.bus_id,uuid,name,memory.total,memory.free"
_QUERY_LIMIT_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One GPU, or all cores of the processor."""

    index: int
    kind: str
    """``cuda`` or ``cpu``."""
    name: str
    total_bytes: int
    free_bytes: int
    count: int = 1
    """Cores, of a processor."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Devices chosen for a run."""

    devices: tuple[str, ...]
    may_leave: bool = False
    """Chosen because they are there, not because somebody asked for so many."""


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def list_devices() -> list[DeviceInfo]:
    """GPUs in the order of the PCI bus, then the processor."""
    return [*_gpus(), _processor()]


def select_devices(choice: int | str | Sequence[str]) -> Selection:
    """Read what a user wrote after ``--devices``.

    Args:
        choice: a number N (the N GPUs with the most free memory where there are GPUs, else N CPU
            processes), ``auto`` (all), ``cpu:N``, or a list such as ``cuda:1,cuda:3``.

    Raises:
        LaunchError: there is no such device here.
        ValueError: it cannot be read.
    """
    listed = not isinstance(choice, int | str)
    text = str(choice).strip() if isinstance(choice, int | str) else ",".join(map(str, choice))
    gpus = _gpus()
    if text == "auto":
        everything = [f"cuda:{gpu.index}" for gpu in gpus] or ["cpu"] * cores()
        return Selection(tuple(everything), may_leave=True)
    if text.isdecimal() and not listed:
        return Selection(_count(int(text), gpus))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and parts[0].startswith("cpu:") and parts[0][4:].isdecimal():
        return Selection(("cpu",) * _positive(int(parts[0][4:]), text))
    names = tuple(_named(part, text, gpus) for part in parts)
    for name in names:
        if name != "cpu" and names.count(name) > 1:
            raise ValueError(f"--devices {text}: {name} is named twice; a GPU takes one process")
    return Selection(names)


def _count(number: int, gpus: list[DeviceInfo]) -> tuple[str, ...]:
    _positive(number, str(number))
    if not gpus:
        return ("cpu",) * number
    if number > len(gpus):
        raise LaunchError(
            f"{number} devices were asked for and this machine has {len(gpus)} GPUs. Use "
            f"--devices {len(gpus)}, or --devices cpu:{number} for processes on the processor"
        )
    emptiest = sorted(gpus, key=lambda gpu: (-gpu.free_bytes, gpu.index))[:number]
    return tuple(f"cuda:{gpu.index}" for gpu in sorted(emptiest, key=lambda gpu: gpu.index))


def _named(part: str, text: str, gpus: list[DeviceInfo]) -> str:
    if part == "cpu":
        return part
    kind, _, index = part.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ValueError(
            f"--devices {text!r}: expected a number, 'auto', 'cpu:N', or a list such as "
            f"'cuda:1,cuda:3'; {part!r} is none of these"
        )
    if int(index) not in {gpu.index for gpu in gpus}:
        here = ", ".join(f"cuda:{gpu.index}" for gpu in gpus) or "no GPU"
        raise LaunchError(f"{part} is not there: this machine has {here} (see: onefold devices)")
    return part


def _positive(number: int, text: str) -> int:
    if number < 1:
        raise ValueError(f"--devices {text}: expected at least one device")
    return number


def _gpus() -> list[DeviceInfo]:
    """As NVIDIA's driver lists them; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    rows = _visible(sorted((row for row in rows if len(row) == 6), key=lambda row: row[1]))
    return [
        DeviceInfo(
            index=index,
            kind="cuda",
            name=row[3],
            total_bytes=_mebibytes(row[4]),
            free_bytes=_mebibytes(row[5]),
        )
        for index, row in enumerate(rows)
    ]


def _visible(rows: list[list[str]]) -> list[list[str]]:
    """Those that CUDA_VISIBLE_DEVICES lets a program see, in its order, as CUDA counts them."""
    allowed = visible_gpus()
    if allowed is None:
        return rows
    seen = []
    for item in (part.strip() for part in allowed.split(",")):
        match = [row for i, row in enumerate(rows) if str(i) == item or row[2].startswith(item)]
        if not item or not match:
            break  # CUDA, too, stops at the first that it does not know
        seen.append(match[0])
    return seen


def _mebibytes(text: str) -> int:
    return int(float(text) * 2**20) if text.replace(".", "", 1).isdecimal() else 0


def _processor() -> DeviceInfo:
    memory = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            memory[name] = int(value.split()[0]) * 1024
    return DeviceInfo(
        index=0,
        kind="cpu",
        name=_processor_name(),
        total_bytes=memory["MemTotal"],
        free_bytes=memory["MemAvailable"],
        count=cores(),
    )


def _processor_name() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return "processor"
