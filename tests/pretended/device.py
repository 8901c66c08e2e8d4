"""The pretended accelerator as a device of PyTorch, and what is noticed while it is used.

Every launch is computed at once, by the processor, in memory that belongs to one of the devices;
but nothing may be taken for granted that is not true of a GPU:

- memory is NaN until it is written to, and there is a limit to it;
- a copy to pinned memory is NaN until its stream or an event after it was waited for, and pinned
  memory that is copied from must stay as it is until then;
- memory that is used on two streams at a time, or is freed while another stream uses it, is
  reported, as well as an exchange that meets memory in use;
- a process that is forked from one with devices must leave them, and their memory, alone;
- kernels that are not deterministic on a GPU are refused where only such may run that are;
- every launch, and every wait of the host, is counted by the line that caused it.

Errors of the first kinds need not show in bits, and may come to light where nothing can be raised:
so they are collected, see `reports`.
"""

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.pretended import build

__all__ = [
    "BACKEND",
    "Place",
    "counts",
    "group_sizes",
    "load",
    "nobody_waits",
    "reports",
    "reset_counts",
    "start",
]

KIND = "pretend"
BACKEND = "pretended-nccl"
"""Of `torch.distributed`: it allows what NCCL allows, see ``source/group.cpp``."""
LIMIT = "ONEFOLD_PRETENDED_BYTES"
LOG = "ONEFOLD_PRETENDED_LOG"
"""The environment variable with a file to which all processes add what they report."""
SOURCE = f"{os.sep}src{os.sep}onefold{os.sep}"
OWN = os.path.dirname(__file__)
NOT_SCRIPTS = (os.path.dirname(torch.__file__), OWN + os.sep + "device.py", "<")

Place = tuple[str, str]
"""A line, and the operator that it has launched or what it has waited for."""

_launches: Counter[Place] = Counter()
_waits: Counter[Place] = Counter()
_before: list[int] = [0]
_extension: list[Any] = []


def load() -> None:
    """Called by PyTorch, when it is imported in a process whose environment asks for devices."""
    if os.environ.get(build.NUMBER):
        start()


def start(devices: int | None = None, limit_bytes: int | None = None) -> Any:
    """Have as many devices in this process as the environment says; returns ``torch.pretend``.

    Called again, it changes their number and their memory.
    """
    devices = devices or int(os.environ.get(build.NUMBER) or 1)
    limit_bytes = limit_bytes or int(os.environ.get(LIMIT) or 1 << 40)
    if not _extension:
        sys.path.insert(0, str(build.built()))
        try:
            _extension.append(__import__(build.EXTENSION))
        finally:
            sys.path.pop(0)
        torch.utils.rename_privateuse1_backend(KIND)
        module = _module()
        torch._register_device_module(KIND, module)
        sys.modules[f"torch.{KIND}"] = module
        _mend_dlpack()
        dist.Backend.register_backend(BACKEND, _make_group, devices=[KIND])
        _c().set_watch(_watch)
    _c().set_up(devices, limit_bytes, os.environ.get(LOG, ""))
    return torch.get_device_module(KIND)


def counts() -> dict[str, Any]:
    """What has happened since `reset_counts`, by the line of onefold, or else of the script.

    Returns:
        launches and waits: how often, by line and operator; allocations: number of them.
    """
    number = _c().allocations() - _before[0]
    return {"launches": Counter(_launches), "waits": Counter(_waits), "allocations": number}


def reset_counts(counting: bool = True) -> None:
    """Begin to count, or end it: what is counted takes longer."""
    _launches.clear()
    _waits.clear()
    _before[0] = _c().allocations()
    _c().set_counts(counting)


def reports() -> list[str]:
    """What was done that a GPU might have punished; forgotten with this call.

    With what other processes have reported that write to the same log, if there is one.
    """
    found, log = list(_c().reports()), Path(os.environ.get(LOG, ""))
    if log.is_file():
        found = log.read_text(encoding="utf-8").splitlines()
        log.unlink()
    return found


def group_sizes() -> list[int]:
    """How many operations each group of messages had; forgotten with this call."""
    return list(_c().group_sizes())


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Raise where the host would wait, but where a script asks for it by name."""
    _c().set_waits_raise(True)
    try:
        yield
    finally:
        _c().set_waits_raise(False)


def _make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    own = dist.PrefixStore("pretended", store)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, size, timeout)
    group: dist.Backend = _c().Group(gloo, own, rank, size)
    return group


def _mend_dlpack() -> None:
    """Tensors that come by DLPack are dispatched as others are, see KEYS in ``runtime.h``."""
    core: Any = torch._C
    original = core._from_dlpack
    core._from_dlpack = lambda *given: _c().with_keys(original(*given))


def _c() -> Any:
    if not _extension:
        raise RuntimeError("there is no pretended accelerator in this process: start() it")
    return _extension[0]


def _watch(kind: str, what: str) -> None:
    line = _line()
    if kind == "launch":
        _launches[line, what] += 1
    elif kind == "wait":
        _waits[line, what] += 1
    else:
        _c().note(f"{what}, at {line}")


def _line() -> str:
    """The innermost line of onefold, or else of a script.

    A backward pass runs on threads of PyTorch's own: there it is the line that has begun it.
    """
    frame: Any = sys._getframe(2) if sys._getframe(1).f_back else None
    found = _of_frames(frame)
    if found is None:
        own = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            if thread != own and frame.f_code.co_name == "_engine_run_backward":
                return _of_frames(frame) or "nowhere"
    return found or "nowhere"


def _of_frames(frame: Any) -> str | None:
    script = None
    while frame is not None:
        name = frame.f_code.co_filename
        if SOURCE in name:
            return f"{name.rpartition(SOURCE)[2]}:{frame.f_lineno}"
        if script is None and not name.startswith(NOT_SCRIPTS):
            script = f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return script


class _Properties:
    """What a device says about itself."""

    name = "Pretended accelerator"
    major, minor, multi_processor_count = 9, 0, 132

    def __init__(self, index: int) -> None:
        self.total_memory = torch.accelerator.get_memory_info(index)[1]


class _Here(torch.accelerator.device_index):
    """A device that is the current one for a while."""

    def __init__(self, device: Any) -> None:
        super().__init__(_index(device))


def _index(device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return torch.accelerator.current_device_index() if device is None else device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _module() -> ModuleType:
    """``torch.pretend``, with what PyTorch expects of the module of a device."""
    module: Any = ModuleType(f"torch.{KIND}")
    on = torch.accelerator

    def generators() -> list[torch.Generator]:
        return [_c().generator(index) for index in range(module.device_count())]

    def seed_all(seed: int) -> None:
        for generator in generators():
            generator.manual_seed(seed)

    module.is_available = lambda: module.device_count() > 0
    module.is_initialized = lambda: True
    process = os.getpid()
    module._is_in_bad_fork = lambda: os.getpid() != process
    module._lazy_init = module.init = lambda: None
    module.device_count = lambda: _c().device_count()
    module.current_device = on.current_device_index
    module.set_device = lambda device: on.set_device_index(_index(device))
    module.device = _Here
    module.synchronize = lambda device=None: on.synchronize(_index(device))
    module.current_stream = lambda device=None: on.current_stream(_index(device))
    module.set_stream = on.set_stream
    module.Stream, module.Event = torch.Stream, torch.Event
    module.get_device_name = lambda device=None: _Properties.name
    module.get_device_properties = lambda device=None: _Properties(_index(device))
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    module.set_sync_debug_mode = lambda mode: _c().set_waits_raise(mode in ("error", 2))
    module.default_generators = tuple(_c().generator(index) for index in range(16))
    module.manual_seed_all = seed_all
    module.get_rng_state = lambda device=KIND: _c().generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=KIND: (
        _c().generator(_index(device)).set_state(state)
    )
    module.mem_get_info = on.get_memory_info
    return module
