"""What only CUDA has: its versions and precisions, and NVIDIA's list of GPUs (NVML).

NVML is asked by a script, in a process that can be killed; see `onefold.launcher.devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ASK_NVML", "DEVICE_NODE", "DRIVER", "SIGNS", "described", "has_bfloat16", "visible"]

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists where the driver is loaded, even in containers that have no GPU."""
DEVICE_NODE = Path("/dev/nvidiactl")
"""Exists where this machine or container is given GPUs."""
_WINDOWS_NODE = Path("/dev/dxg")
"""Exists instead under Windows Subsystem for Linux, which passes its GPUs through."""
SIGNS = (DRIVER, DEVICE_NODE, _WINDOWS_NODE)
"""One of these exists where there are GPUs of NVIDIA's."""

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
"""Prints a row for each GPU: UUID, whether it is split into parts, name, bytes in all, free bytes.
They have the order of the PCI bus, as workers number them."""


def visible(rows: Sequence[Sequence[Any]], allowed: str | None) -> list[Sequence[Any]]:
    """Pick the GPUs that CUDA_VISIBLE_DEVICES names, in its order, as CUDA does.

    Args:
        rows: of `ASK_NVML`.
        allowed: the variable's value; None where it is unset.
    """
    if allowed is None:
        return list(rows)
    seen = []
    for item in (part.strip() for part in allowed.split(",")):
        match = [row for i, row in enumerate(rows) if str(i) == item or row[0].startswith(item)]
        if not item or not match:
            break  # CUDA, too, stops at the first that it does not know
        seen.append(match[0])
    return seen


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device of CUDA's has kernels in bfloat16, by its compute capability."""
    import torch  # not at the top: the launcher does without it

    return torch.cuda.get_device_capability(device) >= (8, 0)


def described() -> dict[str, str]:
    """What the bits depend on of CUDA and its libraries, in words."""
    import torch

    # One by one: asked for both at once, PyTorch raises where a script has set one of them.
    cudnn: Any = torch.backends.cudnn
    return {
        "the version of CUDA": str(torch.version.cuda),
        "the version of cuDNN": str(cudnn.version()),
        "the precision of convolutions": str(cudnn.conv.fp32_precision),
        "the precision of recurrent layers": str(cudnn.rnn.fp32_precision),
    }
