"""The accelerators of this machine, of any type: CUDA, ROCm, XPU, NPU and others.

Uses `torch.accelerator` and PyTorch's module for each device type. `onefold.system.cuda` has what
is specific to CUDA. A device of type ``cpu`` is not an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from onefold.system.process import host_bytes

__all__ = [
    "DTYPES",
    "HostCopy",
    "as_current",
    "capacity_bytes",
    "card_of",
    "collective_backend",
    "count",
    "generator_of",
    "kind",
    "make_current",
    "name_of",
    "on_stream",
    "record_event",
    "release_cached_memory",
    "same_stream",
    "traits_of",
]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Dtypes that safetensors can store, with their names there."""

_WITHOUT = ("mps",)
"""Types that lack required features: several devices, or 64-bit numbers."""
_NOTHING = nullcontext()


def kind() -> str:
    """Return the type of accelerator that PyTorch sees on this machine; ``cpu`` if there is none.

    >>> kind() == "cpu" or count() > 0
    True
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None or found.type in _WITHOUT else found.type


def count() -> int:
    """Return the number of accelerators that PyTorch sees."""
    return 0 if kind() == "cpu" else torch.accelerator.device_count()


def name_of(device: torch.device) -> str:
    """Return the product name of an accelerator."""
    return str(_module_of(device).get_device_name(device))


def capacity_bytes(device: torch.device) -> int:
    """Return the total memory of a device, or the host memory that this process may use."""
    if device.type == "cpu":
        return host_bytes()
    return int(_module_of(device).get_device_properties(device).total_memory)


def card_of(device: torch.device) -> str:
    """Identify the card that an accelerator is, or is a part of; empty if unknown."""
    if device.type == "cpu":
        return ""
    about = _module_of(device).get_device_properties(device)
    fields = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if all(hasattr(about, name) for name in fields):
        return ":".join(f"{getattr(about, name):x}" for name in fields)
    return str(getattr(about, "uuid", ""))


def traits_of(device: torch.device) -> dict[str, str]:
    """Return the properties of an accelerator that its kernels may depend on, in words."""
    about = _module_of(device).get_device_properties(device)
    found = {"type": name_of(device)}
    for name in _TRAITS:
        if (value := getattr(about, name, None)) is not None:
            found[name.replace("_", " ")] = str(value)
    return found


_TRAITS = ("multi_processor_count", "major", "minor", "gcnArchName", "driver_version")
"""Fields of PyTorch's device properties; a device type may lack some of them."""


def make_current(device: torch.device) -> None:
    """Make an accelerator the default one, on which libraries allocate."""
    torch.accelerator.set_device_index(device.index)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which ``device="cuda"`` and the like mean this accelerator."""
    return _NOTHING if device.type == "cpu" else torch.accelerator.device_index(device.index)


def same_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a block for another thread that uses this thread's stream of a device."""
    if device.type == "cpu":
        return _NOTHING
    return on_stream(device, torch.accelerator.current_stream(device))


@contextmanager
def on_stream(device: torch.device, stream: torch.Stream) -> Iterator[None]:
    """Launch on another stream of a device inside the block."""
    with as_current(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def record_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Record an event that fires when all work queued so far on a device's stream is done."""
    event = torch.Event(device, enable_timing=timing)
    event.record(torch.accelerator.current_stream(device))
    return event


def generator_of(device: torch.device) -> torch.Generator:
    """Return PyTorch's random number generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    found: torch.Generator = _module_of(device).default_generators[device.index]
    return found


def release_cached_memory(device: torch.device) -> None:
    """Release device memory that PyTorch's allocator caches without using it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def collective_backend(kind: str) -> str:
    """Return the `torch.distributed` backends for devices of a type, and for host memory."""
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"


class HostCopy:
    """A copy of a device's values to the host that blocks only when it is read.

    Args:
        values: on any device; they may be overwritten afterwards.

    >>> HostCopy(torch.ones(2)).read()
    tensor([1., 1.])
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._there: torch.Event | None = None
        if values.device.type == "cpu":
            self._values = values.clone()
            return
        # Pin the memory: otherwise the host would wait. PyTorch reuses this memory only after the
        # copy.
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = record_event(values.device)

    def read(self) -> torch.Tensor:
        """Return the values on the host, waiting for them if necessary."""
        if self._there is not None and not self._there.query():
            # Wait only for the copy, not for work that was queued after it.
            self._there.synchronize()
        return self._values


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
