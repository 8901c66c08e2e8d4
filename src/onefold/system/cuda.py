"""Features of CUDA only: versions, precisions, and NVIDIA's list of GPUs (NVML).

A script queries NVML, in a process that can be killed; see `onefold.launcher.devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ASK_NVML", "DEVICE_NODE", "DRIVER", "SIGNS", "described", "has_bfloat16", "visible"]

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists if the driver is loaded, even in containers without a GPU."""
DEVICE_NODE = Path("/dev/nvidiactl")
"""Exists if this machine or container has GPUs."""
_WINDOWS_NODE = Path("/dev/dxg")
"""Exists instead under Windows Subsystem for Linux, which passes its GPUs through."""
SIGNS = (DRIVER, DEVICE_NODE, _WINDOWS_NODE)
"""If there are NVIDIA GPUs, one of these exists."""

ASK_NVML = """
import json
from pynvml import *
def ask(question, gpu, otherwise):
    try:
        return question(gpu)
    except NVMLError:  # not every GPU has an answer
        return otherwise
def row(index):
    try:
        gpu = nvmlDeviceGetHandleByIndex(index)
    except NVMLError_NoPermission:  # of another job or container
        return []
    bus = nvmlDeviceGetPciInfo(gpu)
    memory = ask(nvmlDeviceGetMemoryInfo, gpu, None)
    split = ask(nvmlDeviceGetMigMode, gpu, [0])[0] == NVML_DEVICE_MIG_ENABLE
    return [[bus.domain, bus.bus, bus.device], nvmlDeviceGetUUID(gpu), split,
            nvmlDeviceGetName(gpu), memory.total if memory else 0, memory.free if memory else 0]
nvmlInit()
rows = filter(None, map(row, range(nvmlDeviceGetCount())))
print(json.dumps({"gpus": [gpu[1:] for gpu in sorted(rows)]}))
"""
"""Prints a row per GPU: UUID, whether it is split into parts, name, total bytes, free bytes. Rows
are in PCI bus order, which is the workers' numbering."""


def visible(rows: Sequence[Sequence[Any]], allowed: str | None) -> list[Sequence[Any]]:
    """Select the GPUs in CUDA_VISIBLE_DEVICES, in its order, as CUDA does.

    Args:
        rows: output of `ASK_NVML`.
        allowed: value of the variable; None if it is not set.
    """
    if allowed is None:
        return list(rows)
    seen = []
    for item in (part.strip() for part in allowed.split(",")):
        match = [row for i, row in enumerate(rows) if str(i) == item or row[0].startswith(item)]
        if not item or not match:
            break  # CUDA also stops at the first unknown item
        seen.append(match[0])
    return seen


def has_bfloat16(device: torch.device) -> bool:
    """Whether a CUDA device has bfloat16 kernels, by its compute capability."""
    import torch  # not at the top: the launcher does not load PyTorch

    return torch.cuda.get_device_capability(device) >= (8, 0)


def described() -> dict[str, str]:
    """Describe the versions and settings of CUDA and its libraries that affect the bits."""
    import torch

    # Query them one by one: PyTorch's combined query raises if a script has set only one of them.
    cudnn: Any = torch.backends.cudnn
    return {
        "the version of CUDA": str(torch.version.cuda),
        "the version of cuDNN": str(cudnn.version()),
        "the precision of convolutions": str(cudnn.conv.fp32_precision),
        "the precision of recurrent layers": str(cudnn.rnn.fp32_precision),
    }
