"""The accelerators of this machine, whatever their kind: CUDA, ROCm, XPU, NPU and others.

All of it goes by `torch.accelerator`, and by the module that PyTorch has for each kind of device.
What only CUDA has is in `onefold.system.cuda`. A device of type ``cpu`` is no accelerator.
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
"""The dtypes that safetensors can store, and their names there."""

_WITHOUT = ("mps",)
"""Kinds that lack what is needed here: several devices, or numbers of 64 bits."""
_NOTHING = nullcontext()


def kind() -> str:
    """The kind of accelerator that PyTorch sees on this machine; ``cpu`` where there is none.

    >>> kind() == "cpu" or count() > 0
    True
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None or found.type in _WITHOUT else found.type


def count() -> int:
    """How many accelerators PyTorch sees."""
    return 0 if kind() == "cpu" else torch.accelerator.device_count()


def name_of(device: torch.device) -> str:
    """What an accelerator is called."""
    return str(_module_of(device).get_device_name(device))


def capacity_bytes(device: torch.device) -> int:
    """All memory of a device; of the host, what this process may take of it."""
    if device.type == "cpu":
        return host_bytes()
    return int(_module_of(device).get_device_properties(device).total_memory)


def card_of(device: torch.device) -> str:
    """Which card of this machine an accelerator is, or is a part of; empty where nobody knows."""
    if device.type == "cpu":
        return ""
    about = _module_of(device).get_device_properties(device)
    fields = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if all(hasattr(about, name) for name in fields):
        return ":".join(f"{getattr(about, name):x}" for name in fields)
    return str(getattr(about, "uuid", ""))


def traits_of(device: torch.device) -> dict[str, str]:
    """What the kernels that an accelerator runs may depend on, in words."""
    about = _module_of(device).get_device_properties(device)
    found = {"type": name_of(device)}
    for name in _TRAITS:
        if (value := getattr(about, name, None)) is not None:
            found[name.replace("_", " ")] = str(value)
    return found


_TRAITS = ("multi_processor_count", "major", "minor", "gcnArchName", "driver_version")
"""Fields of PyTorch's device properties, as far as a kind of device has them."""


def make_current(device: torch.device) -> None:
    """Make an accelerator the one on which libraries allocate that are not told where."""
    torch.accelerator.set_device_index(device.index)


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """A block in which an accelerator is the one that ``device="cuda"`` and its like refer to."""
    return _NOTHING if device.type == "cpu" else torch.accelerator.device_index(device.index)


def same_stream(device: torch.device) -> AbstractContextManager[object]:
    """A block, entered in another thread, that queues on a device's stream of this thread."""
    if device.type == "cpu":
        return _NOTHING
    return _on_stream(device, torch.accelerator.current_stream(device))


@contextmanager
def _on_stream(device: torch.device, stream: torch.Stream) -> Iterator[None]:
    with as_current(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def record_event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """An event that comes once all work is done that was queued on a device's stream until now."""
    event = torch.Event(device, enable_timing=timing)
    event.record(torch.accelerator.current_stream(device))
    return event


def generator_of(device: torch.device) -> torch.Generator:
    """PyTorch's generator of random numbers of a device."""
    if device.type == "cpu":
        return torch.default_generator
    found: torch.Generator = _module_of(device).default_generators[device.index]
    return found


def release_cached_memory(device: torch.device) -> None:
    """Give back what PyTorch's allocator holds of a device's memory without using it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def collective_backend(kind: str) -> str:
    """What `torch.distributed` is to use between devices of a kind, and between hosts' memories."""
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"


class HostCopy:
    """A device's values on their way to the host, where nobody waits until they are read.

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
        # Pinned, or the host would wait; PyTorch uses this memory again only after the copy.
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = record_event(values.device)

    def read(self) -> torch.Tensor:
        """Return the values on the host, once they are there."""
        if self._there is not None and not self._there.query():
            # For the copy alone, and not for what was queued behind it.
            self._there.synchronize()
        return self._values


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
