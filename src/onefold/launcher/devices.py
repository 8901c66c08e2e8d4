"""Lists the devices of this machine, and reads which of them the user chose.

NVIDIA GPUs are found through the management library (NVML, via pynvml) instead of PyTorch, so that
the launcher starts at once. onefold queries PyTorch if NVML fails although a driver is loaded, if
programs see other devices than NVML lists (MIG slices), and for other kinds of accelerators. It is
an error if the GPUs cannot be listed: otherwise the run would silently use the CPU.

Each query runs in a separate process. A driver call that hangs cannot be interrupted from Python,
but a process can be killed; and neither the libraries nor a GPU context stay in the launcher.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from onefold.errors import LaunchError
from onefold.launcher.environment import is_by_bus, visible_gpus
from onefold.system import cuda
from onefold.system.process import cores

__all__ = [
    "DeviceInfo",
    "Selection",
    "emptiest_gpu",
    "list_devices",
    "select_devices",
]

_log = logging.getLogger("onefold")
_NUMBERS = re.compile(r"(^|,)\s*[0-9]")
_DRIVER_LIMIT_S = 20
_TORCH_LIMIT_S = 120
_OTHERS = re.compile("[+]xpu|[+]rocm")
"""Matches the version of a PyTorch build for these accelerators."""
_ASK_TORCH = """
import json, os
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
import torch
kind = torch.accelerator.current_accelerator(check_available=True)
some = kind is not None and kind.type != "mps"
def row(index):
    device = torch.get_device_module(kind)
    try:
        free = device.mem_get_info(index)[0]
    except RuntimeError:  # another program has it for itself
        free = 0
    about = device.get_device_properties(index)
    return [about.name, about.total_memory, free]
gpus = [row(index) for index in range(torch.accelerator.device_count() if some else 0)]
print(json.dumps({"cuda": torch.version.cuda, "kind": kind.type if some else "", "gpus": gpus}))
"""
"""Lists GPUs in the workers' numbering; see `onefold.launcher.launch.worker_environment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One GPU, or all CPU cores; see `list_devices`."""

    index: int
    kind: str
    """``cpu``, ``cuda``, or PyTorch's name of another accelerator type."""
    name: str
    total_bytes: int
    free_bytes: int
    count: int = 1
    """Number of CPU cores; 1 for a GPU."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Devices chosen for a run; see `select_devices`."""

    devices: tuple[str, ...]
    may_leave: bool = False
    """Whether devices may be left out, because the user did not request a number."""
    choice: str = field(default="auto", compare=False)
    """Text of the choice, which each host of a run over several hosts reads by itself."""


def list_devices() -> list[DeviceInfo]:
    """List the GPUs in PCI bus order, followed by the CPU.

    Raises:
        LaunchError: a GPU driver is loaded, but the GPUs cannot be listed.

    >>> processor = list_devices()[-1]
    >>> processor.kind, processor.count >= 1, processor.free_bytes <= processor.total_bytes
    ('cpu', True, True)
    """
    return [*_gpus(), _processor()]


def select_devices(choice: int | str | Sequence[str]) -> Selection:
    """Parse a value of ``--devices``.

    Args:
        choice: a number N (the N GPUs with the most free memory, or N CPU processes if there are
            no GPUs), ``auto`` (all), ``cpu:N``, or a list such as ``cuda:1,cuda:3``.

    Raises:
        LaunchError: a device does not exist on this machine, or the GPUs cannot be listed.
        ValueError: the choice has none of these forms.

    >>> select_devices("cpu:3").devices
    ('cpu', 'cpu', 'cpu')
    """
    listed = not isinstance(choice, int | str)
    text = str(choice) if isinstance(choice, int | str) else ",".join(map(str, choice))
    text = text.strip()
    if text == "auto":
        everything = _names(_gpus()) or ["cpu"] * cores()
        return Selection(tuple(everything), may_leave=True)
    kind, _, number = text.rpartition(":")
    if number.isdecimal() and (kind == "cpu" or (number == text and not listed)):
        if int(number) < 1:
            raise ValueError(f"devices must be at least 1, but got {text}")
        return Selection(("cpu",) * int(number) if kind else _emptiest(int(number)), choice=text)
    names = tuple(_read(part.strip(), text) for part in text.split(","))
    chosen = [name for name in names if name != "cpu"]
    there = _names(_gpus()) if chosen else []
    for name in chosen:
        if name not in there:
            raise LaunchError(
                f"{name} does not exist: this machine has {', '.join(there) or 'no GPU'}. Run "
                f"onefold devices to list them"
            )
        if chosen.count(name) > 1:
            raise ValueError(f"devices {text}: {name} is listed twice; use each GPU once")
    return Selection(names, choice=text)


def emptiest_gpu() -> int:
    """Return the index of the GPU with the most free memory, without a context on the others.

    If the GPUs are of several types, return 0: the first is the fastest.
    """
    try:
        gpus = _gpus()
    except LaunchError:  # using the GPU raises the reason
        return 0
    if len({gpu.name for gpu in gpus}) != 1:
        return 0
    return max(gpus, key=lambda gpu: gpu.free_bytes).index


def _emptiest(number: int) -> tuple[str, ...]:
    gpus = _gpus()
    if not gpus:
        return ("cpu",) * number
    if number > len(gpus):
        raise LaunchError(
            f"requested {number} devices, but the number of GPUs here is {len(gpus)}. Request "
            f"at most {len(gpus)}, or cpu:{number} for CPU processes"
        )
    # Choose by free memory, but keep the order of indices, so that ranks follow the PCI bus.
    emptiest = sorted(gpus, key=lambda gpu: (-gpu.free_bytes, gpu.index))[:number]
    return tuple(_names(sorted(emptiest, key=lambda gpu: gpu.index)))


def _names(gpus: Iterable[DeviceInfo]) -> list[str]:
    return [f"{gpu.kind}:{gpu.index}" for gpu in gpus]


def _read(part: str, text: str) -> str:
    if part == "cpu":
        return part
    kind, _, index = part.partition(":")
    if not kind.isidentifier() or kind == "cpu" or not index.isdecimal():
        raise ValueError(
            f"devices {text!r}: {part!r} is not a device. Pass a number, 'auto', 'cpu:N', or a "
            f"list such as 'cuda:1,cuda:3'"
        )
    return f"{kind}:{int(index)}"


def _gpus() -> list[DeviceInfo]:
    """List the GPUs that programs see, in PyTorch's order.

    Raises:
        LaunchError: the GPUs cannot be listed.
    """
    allowed = visible_gpus()
    if allowed is not None and allowed.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return []
    if allowed is not None and "MIG-" in allowed:
        return _gpus_of_torch(f"CUDA_VISIBLE_DEVICES={allowed} names parts of GPUs", some=True)
    if not any(sign.exists() for sign in cuda.SIGNS):
        # Without a sign of GPUs, do not start a process to query them.
        return _gpus_of_torch("PyTorch was built for them", some=False) if _has_others() else []
    try:
        rows = _ask("NVML", cuda.ASK_NVML, _DRIVER_LIMIT_S)[0]["gpus"]
    except LaunchError as failure:
        # A loaded driver does not prove that there are GPUs: containers without any see it too.
        some = cuda.DEVICE_NODE.exists()
        if not (some or cuda.DRIVER.exists()):
            return []
        return _gpus_of_torch(f"NVIDIA's driver is loaded and {failure}", some=some)
    if any(split for _, split, *_ in rows):
        return _gpus_of_torch("a GPU is split into parts (MIG)", some=True)
    several = len({name for _, _, name, *_ in rows}) > 1
    if allowed is not None and several and _NUMBERS.search(allowed) and not is_by_bus():
        _log.warning(
            "CUDA_VISIBLE_DEVICES=%s: onefold numbers the GPUs by PCI bus, but a script started "
            "without onefold numbers them by speed. Name them by UUID (nvidia-smi -L), or set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID",
            allowed,
        )
    return _described([about for _, _, *about in cuda.visible(rows, allowed)])


def _gpus_of_torch(why: str, *, some: bool) -> list[DeviceInfo]:
    """List the GPUs that PyTorch sees, if the driver's list cannot be used.

    Args:
        why: reason why the driver's list cannot be used, for errors.
        some: whether there must be GPUs, so that an empty list is an error.

    Raises:
        LaunchError: PyTorch does not answer, or sees no GPU although there must be some.
    """
    try:
        answer, hint = _ask("PyTorch", _ASK_TORCH, _TORCH_LIMIT_S)
        if not answer["gpus"] and some:
            hint = (hint or "no reason given") if answer["cuda"] else "it was built without CUDA"
            raise LaunchError(f"PyTorch sees no GPU ({hint})")
    except LaunchError as failure:
        raise LaunchError(
            f"{why}, and {failure}. Repair the driver (check with nvidia-smi and "
            f"torch.cuda.is_available()), use the CPU with --devices cpu:N, or hide the GPUs with "
            f"CUDA_VISIBLE_DEVICES="
        ) from None
    return _described(answer["gpus"], answer["kind"])


def _has_others() -> bool:
    """Whether PyTorch was built for, or has a plugin for, accelerators other than NVIDIA's."""
    return _OTHERS.search(version("torch")) is not None or bool(
        entry_points(group="torch.backends")
    )


def _ask(whom: str, script: str, limit_s: float) -> tuple[dict[str, Any], str]:
    """Run a script in a separate process; return its answer and its last line of errors.

    Raises:
        LaunchError: the script fails, times out, or does not print the expected JSON.
    """
    # -P: the current folder may contain a file named like a library.
    command = [sys.executable, "-P", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{whom} did not answer within {limit_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"the query of {whom} failed: {_last_line(error.stderr)}") from None
    except OSError as error:
        raise LaunchError(f"the query of {whom} failed: {error}") from None
    came = _last_line(done.stdout)
    with suppress(ValueError):
        answer = json.loads(came)
        if isinstance(answer, dict) and "gpus" in answer:
            return answer, _last_line(done.stderr)
    raise LaunchError(f"{whom} must answer in JSON, but got {came!r}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _described(rows: Iterable[Sequence[Any]], kind: str = "cuda") -> list[DeviceInfo]:
    return [
        DeviceInfo(index=index, kind=kind, name=name, total_bytes=total, free_bytes=free)
        for index, (name, total, free) in enumerate(rows)
    ]


def _processor() -> DeviceInfo:
    memory, about = _of_proc("meminfo"), _of_proc("cpuinfo")
    total, free = (int(memory[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    name = about.get("model name") or about.get("Model") or "processor"
    return DeviceInfo(
        index=0, kind="cpu", name=name, total_bytes=total, free_bytes=free, count=cores()
    )


def _of_proc(file: str) -> dict[str, str]:
    """Read a file of ``/proc`` that has a name and a value per line."""
    pairs = (line.partition(":") for line in Path("/proc", file).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
