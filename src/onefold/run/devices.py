"""What this machine has to compute on, and how a choice is written.

GPUs are found without PyTorch, by ``nvidia-smi``, so that a launcher starts at once. Where that is
missing or fails although there is a driver, or lists other devices than a program would see (parts
of GPUs), PyTorch is asked in a process of its own. A machine whose GPUs cannot be listed is an
error, not a machine without GPUs, or a run would take the processor without a word.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onefold.errors import LaunchError
from onefold.run.world import visible_gpus

__all__ = ["DeviceInfo", "Selection", "cores", "list_devices", "select_devices"]

_QUERY = "index,pci.bus_id,uuid,name,memory.total,memory.free"
_QUERY_LIMIT_S = 20
_TORCH_LIMIT_S = 120
_DRIVER = Path("/proc/driver/nvidia/version")
"""There where the driver is loaded, in containers without any GPU too."""
_DEVICE_NODE = Path("/dev/nvidiactl")
"""There where GPUs are handed to this machine or container."""

_ASK_TORCH = """
import json, os
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
import torch
def row(index):
    about = torch.cuda.get_device_properties(index)
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # another program has it for itself
        free = 0
    return [about.name, about.total_memory, free]
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"cuda": torch.version.cuda, "gpus": [row(index) for index in range(count)]}))
"""
"""In the order in which the workers count, see `onefold.run.world.worker_environment`."""


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
    """GPUs in the order of the PCI bus, then the processor.

    Raises:
        LaunchError: there is a driver for GPUs, and they cannot be listed.
    """
    return [*_gpus(), _processor()]


def select_devices(choice: int | str | Sequence[str]) -> Selection:
    """Read what a user wrote after ``--devices``.

    Args:
        choice: a number N (the N GPUs with the most free memory where there are GPUs, else N CPU
            processes), ``auto`` (all), ``cpu:N``, or a list such as ``cuda:1,cuda:3``.

    Raises:
        LaunchError: there is no such device here, or the GPUs cannot be listed.
        ValueError: it cannot be read.
    """
    listed = not isinstance(choice, int | str)
    text = str(choice).strip() if isinstance(choice, int | str) else ",".join(map(str, choice))
    if text == "auto":
        everything = [f"cuda:{gpu.index}" for gpu in _gpus()] or ["cpu"] * cores()
        return Selection(tuple(everything), may_leave=True)
    if text.isdecimal() and not listed:
        return Selection(_count(_positive(int(text), text)))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and parts[0].startswith("cpu:") and parts[0][4:].isdecimal():
        return Selection(("cpu",) * _positive(int(parts[0][4:]), text))
    names = tuple(_read(part, text) for part in parts)
    _expect_there([name for name in names if name != "cpu"])
    for name in names:
        if name != "cpu" and names.count(name) > 1:
            raise ValueError(f"--devices {text}: {name} is named twice; a GPU takes one process")
    return Selection(names)


def _count(number: int) -> tuple[str, ...]:
    gpus = _gpus()
    if not gpus:
        return ("cpu",) * number
    if number > len(gpus):
        raise LaunchError(
            f"{number} devices were asked for and this machine has {len(gpus)} GPUs. Use "
            f"--devices {len(gpus)}, or --devices cpu:{number} for processes on the processor"
        )
    emptiest = sorted(gpus, key=lambda gpu: (-gpu.free_bytes, gpu.index))[:number]
    return tuple(f"cuda:{gpu.index}" for gpu in sorted(emptiest, key=lambda gpu: gpu.index))


def _read(part: str, text: str) -> str:
    if part == "cpu":
        return part
    kind, _, index = part.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ValueError(
            f"--devices {text!r}: expected a number, 'auto', 'cpu:N', or a list such as "
            f"'cuda:1,cuda:3'; {part!r} is none of these"
        )
    return f"cuda:{int(index)}"


def _expect_there(names: Sequence[str]) -> None:
    there = [f"cuda:{gpu.index}" for gpu in _gpus()] if names else []
    for name in names:
        if name not in there:
            raise LaunchError(
                f"{name} is not there: this machine has {', '.join(there) or 'no GPU'} "
                f"(see: onefold devices)"
            )


def _positive(number: int, text: str) -> int:
    if number < 1:
        raise ValueError(f"--devices {text}: expected at least one device")
    return number


def _gpus() -> list[DeviceInfo]:
    """Those that programs see, in the order in which CUDA counts them.

    Raises:
        LaunchError: they cannot be listed.
    """
    allowed = visible_gpus()
    if allowed is not None and allowed.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return []
    if allowed is not None and "MIG-" in allowed:
        return _gpus_of_torch(f"CUDA_VISIBLE_DEVICES={allowed} names parts of GPUs")
    rows, failure = _ask_driver()
    if rows is None:
        there = _DRIVER.exists() or _DEVICE_NODE.exists()
        return _gpus_of_torch(f"NVIDIA's driver is loaded and {failure}") if there else []
    return [
        DeviceInfo(
            index=index,
            kind="cuda",
            name=row[3],
            total_bytes=_mebibytes(row[4]),
            free_bytes=_mebibytes(row[5]),
        )
        for index, row in enumerate(_visible(rows, allowed))
    ]


def _ask_driver() -> tuple[list[list[str]] | None, str]:
    """Rows of `_QUERY` in the order of the bus, or None and why there are none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, "there is no nvidia-smi"
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"nvidia-smi did not answer within {_QUERY_LIMIT_S} s"
    except OSError as error:
        return None, f"nvidia-smi cannot be run ({error.strerror})"
    if answer.returncode != 0:
        said = _last_line(answer.stdout + answer.stderr)
        return None, f"nvidia-smi ended with exit code {answer.returncode} ({said})"
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return sorted((row for row in rows if len(row) == 6), key=lambda row: row[1]), ""


def _gpus_of_torch(why: str) -> list[DeviceInfo]:
    """The GPUs that PyTorch sees, where the driver's list will not do.

    Raises:
        LaunchError: PyTorch cannot say, or sees none although there should be some.
    """
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _not_listed(why, f"asking PyTorch failed: {error}") from None
    if answer.returncode != 0:
        raise _not_listed(why, f"asking PyTorch failed: {_last_line(answer.stderr)}")
    try:
        said = json.loads(_last_line(answer.stdout))
        built_for, rows = said["cuda"], [(str(n), int(t), int(f)) for n, t, f in said["gpus"]]
    except (ValueError, KeyError, TypeError):
        came = _last_line(answer.stdout)
        raise _not_listed(why, f"expected PyTorch's answer as JSON, got {came!r}") from None
    if not rows and (_DEVICE_NODE.exists() or "MIG-" in (visible_gpus() or "")):
        hint = _last_line(answer.stderr) if built_for else "it was built without CUDA"
        raise _not_listed(why, f"PyTorch sees no GPU ({hint or 'without a reason'})")
    return [
        DeviceInfo(index=index, kind="cuda", name=name, total_bytes=total, free_bytes=free)
        for index, (name, total, free) in enumerate(rows)
    ]


def _not_listed(why: str, what: str) -> LaunchError:
    return LaunchError(
        f"{why}, and {what}. Mend the driver (nvidia-smi and torch.cuda.is_available() show "
        f"whether it works), or compute on the processor: --devices cpu:N, or "
        f"CUDA_VISIBLE_DEVICES= to hide the GPUs"
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _visible(rows: list[list[str]], allowed: str | None) -> list[list[str]]:
    """Those that CUDA_VISIBLE_DEVICES lets a program see, in its order, as CUDA counts them."""
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
