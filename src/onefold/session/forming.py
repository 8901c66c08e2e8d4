"""Decides which devices take part and which this process drives, and sets up the process for them.

`settle_memory` has the process keep the memory that it was once given, so that every step finds it
ready, or give it back, for a model that is larger than memory.

Note: why memory is kept
------------------------
By default the C library asks the system anew for every large block and hands it back at once. A
training step frees and allocates the same activations and gradients over and over, and the system
clears every page of them first: on a processor this costs up to a quarter of a step. With the first
two settings of `_KEEPS`, freed blocks stay in the process and are used again, as PyTorch
itself does on a GPU. The peak is what it was, or little more; what is left at the end of a step is
no longer given back.

By the third, threads share one allocator. Shards that take turns (`onefold.gather`) compute in
threads of their own, of which each would otherwise have an allocator that keeps what the shard has
freed, out of reach of the next one. It holds for arenas that do not exist yet, so for all threads
but the first few.
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
from onefold.system.words import counted

__all__ = ["check_devices", "choose_devices", "settle_process", "shares_of"]

_log = logging.getLogger("onefold")


_LARGE_BYTES = 1 << 16
"""What is larger goes back to the system as soon as it is freed, where memory is short: so do the
segments of all but small models."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # of mallopt(3)
# No block by mmap, as these are handed back one by one; and the allocator's top is never trimmed.
_KEEPS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
# By default it begins to keep blocks of a size once it has seen one of them freed.
_RETURNS = ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _LARGE_BYTES))


@functools.cache
def settle_memory(*, keeps: bool) -> None:
    """Have the C library keep freed memory, for good, or else hand it back at once.

    Nothing is changed where the user has chosen an allocator or its settings (see
    `onefold.launcher.environment.allocator_chosen`), and where the C library is not glibc.
    """
    mallopt = None if allocator_chosen() else getattr(ctypes.CDLL(None), "mallopt", None)
    done = [mallopt(*setting) for setting in (_KEEPS if keeps else _RETURNS)] if mallopt else [1]
    if keeps and not all(done):
        _log.info("the C library does not let this process keep its memory; steps take longer")


_trainers = itertools.count()


def choose_devices(
    context: LaunchContext,
    chosen: Sequence[str | torch.device] | None,
    *,
    shards: int,
    module: torch.nn.Module,
) -> Devices:
    """Decide on the devices of a run.

    Args:
        context: how this process was started.
        chosen: devices that the script has this process drive.
        shards: how many shards every batch is cut into: there can be no more devices.
        module: the model; its parameters' device is taken if nothing else names one.

    Raises:
        ValueError: there are more devices than shards, devices of several kinds, or devices chosen
            by both the script and a launcher.
        LaunchError: a device does not exist, or a launcher has started others that this process
            cannot join.
    """
    if context.refusal:
        raise LaunchError(context.refusal)
    if context.size > 1 or (context.launched and not chosen):
        if chosen:
            raise ValueError(
                f"Trainer(devices=...) drives several devices from one process, and this process "
                f"is one of {context.size} that a launcher started. Leave out one of the two"
            )
        devices, own = _launched(context, shards), range(context.rank, context.rank + 1)
    else:
        devices = tuple(map(_checked, _listed(chosen) or [_default(module)]))
        own = range(len(devices))
    _check_together(devices, shards, context.options.pipeline_of(len(devices)))
    if context.launcher == "torch":
        _settle_output(context)
    # Or libraries that allocate on "the current GPU" would all open a context on GPU 0.
    if devices[own[0]].type != "cpu":
        accelerator.make_current(devices[own[0]])
    trainer = next(context.network.trainers if context.network else _trainers)
    return Devices(all=devices, own=tuple(own), context=context, trainer=trainer)


@functools.cache
def _settle_output(context: LaunchContext) -> None:
    """Once per process, not per Trainer: descriptors 1 and 2 are replaced."""
    if context.size > 1:
        hush_and_report(context)
    if context.others and context.rank == 0:
        _log.warning("%s: each trains a model of its own, as this run is of one", context.others)


def settle_process(devices: Devices, settings: Settings) -> None:
    """Fix the number of threads of a device: bits depend on it, so it is part of the run.

    A CPU device also keeps its memory from here on, unless it is to have little of it; see
    `settle_memory`. For GPUs that are to repeat their bits, cuBLAS is told so.
    """
    shards, threads = settings.shards, settings.threads
    available, on_host = cores(), devices.all[devices.own[0]].type == "cpu"
    # By shards, not by devices: so a device has the same threads however many others there are.
    settled = max(1, available // shards) if threads is None else threads
    torch.set_num_threads(settled)
    if on_host:
        settle_memory(keeps=not devices.context.options.placement_kind.returns_memory)
    elif settings.deterministic:
        have_cublas_repeat()
    script = sys.argv[0]
    first = not devices.context.launched and devices.trainer == 0
    if on_host and available > settled and script and first:
        _log.warning(
            "%d of %d cores at work: a CPU device has %s with %d shards. To use all cores: "
            "onefold run --devices auto %s",
            *(settled, available, counted(settled, "thread"), shards, script),
        )


def _launched(context: LaunchContext, shards: int) -> tuple[torch.device, ...]:
    if context.launcher == "onefold":
        names = context.devices[:shards] if context.may_leave else context.devices
        if context.rank >= len(names):
            print(f"device {context.rank} is not needed: the batch has {shards} shards")
            sys.exit(0)
        return tuple(map(_checked, names))
    seen, kind = accelerator.count(), accelerator.kind()
    if seen == 0:
        return (torch.device("cpu"),) * context.size
    if seen >= context.local_size:
        # The GPUs of other hosts cannot be seen from here, but ranks of a host follow one another,
        # so each rank's GPU follows from the rank.
        first = context.rank - context.local_rank
        indices = ((rank - first) % context.local_size for rank in range(context.size))
        return tuple(torch.device(kind, index) for index in indices)
    # The launcher, or the script, may let each process see its own GPU and no other. One process
    # cannot see whether two share a GPU; that is left to NCCL, which refuses it.
    named = [name for name in (visible_gpus() or "").split(",") if name.strip()]
    if seen == 1 and len(named) == 1:
        return (torch.device(kind, 0),) * context.size
    raise LaunchError(
        f"expected a GPU for each of the {context.local_size} processes that the launcher started "
        f"on this host; process {context.rank} sees {seen}. Start as many processes as there are "
        f"GPUs (torchrun --nproc-per-node {seen}), let every process see all GPUs or exactly its "
        f"own (CUDA_VISIBLE_DEVICES), or hide them from all to compute on the processor "
        f"(CUDA_VISIBLE_DEVICES=)"
    )


def _listed(chosen: object) -> list[object]:
    if chosen is None or isinstance(chosen, list | tuple):
        return list(chosen or ())
    raise TypeError(
        f'expected devices to be a list of devices such as ["cuda:0", "cuda:1"], got {chosen!r}'
    )


def _default(module: torch.nn.Module) -> torch.device:
    """Take the model's device if the user moved it; else the emptiest GPU; else the processor."""
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
        raise ValueError(f"expected cpu or {_usual()} devices, got {named!r}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != _usual():
        raise ValueError(f"expected cpu or {_usual()} devices, got {device}")
    index = device.index if device.index is not None else 0
    if index >= (seen := accelerator.count()):
        raise LaunchError(
            f"{device.type}:{index} is not there: PyTorch sees {seen} GPUs on this machine "
            f"(see: onefold devices)"
        )
    return torch.device(device.type, index)


def _usual() -> str:
    """The kind of this machine's accelerators; CUDA, the usual one, where there are none."""
    return "cuda" if accelerator.kind() == "cpu" else accelerator.kind()


def _check_together(devices: Sequence[torch.device], shards: int, pipeline: int) -> None:
    if len({device.type for device in devices}) > 1:
        listed = ", ".join(map(str, devices))
        raise ValueError(f"the devices of a run must be of one kind, got {listed}")
    if pipeline == 1 and len(devices) > shards:
        raise ValueError(
            f"{counted(len(devices), 'device')} cannot share {counted(shards, 'shard')}: a shard "
            f"is never divided. Use at most {counted(shards, 'device')}, or give Trainer more "
            f"shards (that changes the result)"
        )


def check_devices(devices: Iterable[torch.device], settings: Settings) -> None:
    """Refuse devices that cannot compute as the settings ask for."""
    for device in devices:
        check_device(settings.precision, device)
        if settings.compile:
            load("shard.compiling").check_compiler(device)


def shares_of(devices: Devices, shards: int, counts: Sequence[int] | None) -> Shares:
    """Return the shares with these numbers of shards on the devices; None for even shares.

    Raises:
        TypeError, ValueError: the counts are no shares of this run.
    """
    size, options = len(devices.all), devices.context.options
    options.check_combination(shares=counts)
    if options.placement_kind.has_pipelines:
        return Shares.in_pipelines(shards=shards, devices=size, pipeline=options.pipeline_of(size))
    if counts is None:
        return Shares.even(shards=shards, devices=size)
    if not isinstance(counts, Sequence) or not all(isinstance(c, int) for c in counts):
        raise TypeError(f"expected shares to be a list of numbers, got {counts!r}")
    return Shares.given(counts, shards=shards, devices=size)
