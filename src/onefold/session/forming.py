"""Chooses the devices of a run and of this process, and configures the process for them.

`settle_memory` makes the C library keep freed memory, so that every step finds it ready, or return
it immediately, for a model that is larger than memory.

Note: why memory is kept
------------------------
By default, the C library requests every large block from the operating system and returns it when
it is freed. A training step frees and allocates the same activations and gradients over and over,
and the system clears every page first: on a CPU this costs up to a quarter of a step. With the
first two settings of `_KEEPS`, freed blocks stay in the process and are reused, as PyTorch's own
allocator does on a GPU. The peak grows little or not at all, but memory is no longer returned at
the end of a step.

With the third setting, threads share one arena. Shards that take turns (`onefold.gather`) compute
in separate threads. Otherwise each thread would have an arena that keeps the memory freed by its
shard, where the next shard cannot use it. The setting applies to arenas that do not exist yet, so
to all threads except the first few.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import sys
from collections.abc import Iterable, Sequence

import torch

from onefold.checks.model import check_device
from onefold.core.assignment import Devices
from onefold.core.late import load
from onefold.core.options import LaunchContext
from onefold.core.settings import Settings
from onefold.core.shard import Shares
from onefold.errors import LaunchError
from onefold.launcher.environment import allocator_chosen, have_cublas_repeat, visible_gpus
from onefold.launcher.membership import hush_and_report
from onefold.system import accelerator
from onefold.system.process import cores
from onefold.system.words import counted, in_shell, program

__all__ = ["check_devices", "choose_devices", "settle_process", "shares_of"]

_log = logging.getLogger("onefold")


_LARGE_BYTES = 1 << 16
"""Size in bytes above which freed blocks are returned to the system if memory is short. Only the
segments of small models are smaller."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # of mallopt(3)
# No blocks by mmap, because each is returned when freed; and never trim the top of the heap.
_KEEPS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
# glibc's default threshold is dynamic: it starts to keep blocks of a size when one is freed.
_RETURNS = ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _LARGE_BYTES))


@functools.cache
def settle_memory(*, keeps: bool) -> None:
    """Make the C library keep freed memory permanently, or return it immediately.

    Nothing changes if the user chose an allocator or its settings (see
    `onefold.launcher.environment.allocator_chosen`), or if the C library is not glibc.
    """
    mallopt = None if allocator_chosen() else getattr(ctypes.CDLL(None), "mallopt", None)
    done = [mallopt(*setting) for setting in (_KEEPS if keeps else _RETURNS)] if mallopt else [1]
    if keeps and not all(done):
        _log.info("the C library does not let this process keep freed memory; steps take longer")


_trainers = itertools.count()


def choose_devices(
    context: LaunchContext,
    chosen: Sequence[str | torch.device] | None,
    *,
    shards: int,
    module: torch.nn.Module,
) -> Devices:
    """Choose the devices of a run.

    Args:
        context: launch context of this process.
        chosen: devices that the script assigns to this process.
        shards: number of shards per batch, the maximum number of devices.
        module: the model; its parameters' device is used if no other is named.

    Raises:
        ValueError: there are more devices than shards, devices of different types, or devices
            chosen by both the script and a launcher.
        LaunchError: a device does not exist, or the launcher started processes that this one cannot
            join.
    """
    if context.refusal:
        raise LaunchError(context.refusal)
    if context.size > 1 or (context.launched and not chosen):
        if chosen:
            raise ValueError(
                f"Trainer(devices=...) drives several devices from one process, but this process "
                f"is one of {context.size} that a launcher started. Use only one of the two"
            )
        devices, own = _launched(context, shards), range(context.rank, context.rank + 1)
    else:
        devices = tuple(map(_checked, _listed(chosen) or [_default(module)]))
        own = range(len(devices))
    _check_together(devices, shards, context.options.pipeline_of(len(devices)))
    if context.launcher == "torch":
        _settle_output(context)
    # Otherwise libraries that allocate on the current GPU would all open a context on GPU 0.
    if devices[own[0]].type != "cpu":
        accelerator.make_current(devices[own[0]])
    trainer = next(context.network.trainers if context.network else _trainers)
    return Devices(all=devices, own=tuple(own), context=context, trainer=trainer)


@functools.cache
def _settle_output(context: LaunchContext) -> None:
    """Redirect output, once per process: this replaces descriptors 1 and 2."""
    if context.size > 1:
        hush_and_report(context)
    if context.others and context.rank == 0:
        _log.warning(
            "%s: each trains its own model, because this run is a single process", context.others
        )


def settle_process(devices: Devices, settings: Settings) -> None:
    """Set the number of threads per device: the bits depend on it, so it is part of the run.

    For a CPU device, this also makes the process keep its memory, unless the placement returns it;
    see `settle_memory`. For deterministic GPUs, it configures cuBLAS.
    """
    shards, threads = settings.shards, settings.threads
    available, on_host = cores(), devices.all[devices.own[0]].type == "cpu"
    # Divide by shards: the threads per device must not depend on the number of devices.
    settled = max(1, available // shards) if threads is None else threads
    torch.set_num_threads(settled)
    if on_host:
        settle_memory(keeps=not devices.context.options.placement_kind.returns_memory)
    elif settings.deterministic:
        have_cublas_repeat()
    first = not devices.context.launched and devices.trainer == 0
    if on_host and available > settled and first:
        run = [f"onefold run --devices auto {in_shell(file)}" for file in program()[:1]]
        _log.warning(
            "using %d of %d cores: a CPU device has %s with %d shards. To use all cores: %s",
            *(settled, available, counted(settled, "thread"), shards),
            *(run or ["onefold.launch(main)"]),
        )


def _launched(context: LaunchContext, shards: int) -> tuple[torch.device, ...]:
    if context.launcher == "onefold":
        names = context.devices[:shards] if context.may_leave else context.devices
        if context.rank >= len(names):
            print(f"device {context.rank} is not needed: the batch has {shards} shards")
            sys.exit(0)
        # Each of several hosts has checked its own; those of others are not visible here.
        return tuple(map(torch.device if context.address else _checked, names))
    seen, kind = accelerator.count(), accelerator.kind()
    if seen == 0:
        return (torch.device("cpu"),) * context.size
    if seen >= context.local_size:
        # GPUs of other hosts are not visible here, but the ranks of a host are consecutive, so each
        # rank's GPU follows from the rank.
        first = context.rank - context.local_rank
        indices = ((rank - first) % context.local_size for rank in range(context.size))
        return tuple(torch.device(kind, index) for index in indices)
    # The launcher or the script may show each process only its own GPU. One process cannot tell
    # whether two share a GPU; NCCL raises in that case.
    named = [name for name in (visible_gpus() or "").split(",") if name.strip()]
    if seen == 1 and len(named) == 1:
        return (torch.device(kind, 0),) * context.size
    raise LaunchError(
        f"the launcher started {context.local_size} processes on this host, which need a GPU each, "
        f"but process {context.rank} sees {seen}. Start as many processes as GPUs (torchrun "
        f"--nproc-per-node {seen}), let every process see all GPUs or only its own "
        f"(CUDA_VISIBLE_DEVICES), or hide all GPUs to use the CPU (CUDA_VISIBLE_DEVICES=)"
    )


def _listed(chosen: object) -> list[object]:
    if chosen is None or isinstance(chosen, list | tuple):
        return list(chosen or ())
    raise TypeError(
        f'devices must be a list of devices such as ["cuda:0", "cuda:1"], but got {chosen!r}'
    )


def _default(module: torch.nn.Module) -> torch.device:
    """Return the model's device if the user moved it, else the emptiest GPU, else the CPU."""
    placed = next((p.device for p in module.parameters()), torch.device("cpu"))
    if placed.type != "cpu" or not (seen := accelerator.count()):
        return placed
    return torch.device(
        accelerator.kind(), load("launcher.devices").emptiest_gpu() if seen > 1 else 0
    )


def _checked(named: object) -> torch.device:
    try:
        device = torch.device(named)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise ValueError(f"devices must be cpu or {_usual()} devices, but got {named!r}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != _usual():
        raise ValueError(f"devices must be cpu or {_usual()} devices, but got {device}")
    index = device.index if device.index is not None else 0
    if index >= (seen := accelerator.count()):
        raise LaunchError(
            f"{device.type}:{index} does not exist: PyTorch sees {seen} GPUs on this machine (see: "
            f"onefold devices)"
        )
    return torch.device(device.type, index)


def _usual() -> str:
    """Return this machine's accelerator type, or "cuda" if there is none."""
    return "cuda" if accelerator.kind() == "cpu" else accelerator.kind()


def _check_together(devices: Sequence[torch.device], shards: int, pipeline: int) -> None:
    if len({device.type for device in devices}) > 1:
        listed = ", ".join(map(str, devices))
        raise ValueError(f"the devices of a run must have the same type, but got {listed}")
    if pipeline == 1 and len(devices) > shards:
        raise ValueError(
            f"{counted(len(devices), 'device')} cannot share {counted(shards, 'shard')}: a shard "
            f"is never divided. Use at most {counted(shards, 'device')}, or pass more shards to "
            f"Trainer (this changes the result)"
        )


def check_devices(devices: Iterable[torch.device], settings: Settings) -> None:
    """Raise if a device does not support the settings."""
    for device in devices:
        check_device(settings.precision, device)
        if settings.compile:
            load("shard.compiling").check_compiler(device)


def shares_of(devices: Devices, shards: int, counts: Sequence[int] | None) -> Shares:
    """Return the shares with these numbers of shards per device; None for even shares.

    Raises:
        TypeError, ValueError: the counts are not valid shares of this run.
    """
    size, options = len(devices.all), devices.context.options
    options.check_combination(shares=counts)
    if options.placement_kind.has_pipelines:
        return Shares.in_pipelines(shards=shards, devices=size, pipeline=options.pipeline_of(size))
    if counts is None:
        return Shares.even(shards=shards, devices=size)
    if not isinstance(counts, Sequence) or not all(isinstance(c, int) for c in counts):
        raise TypeError(f"shares must be a list of integers, but got {counts!r}")
    return Shares.given(counts, shards=shards, devices=size)
