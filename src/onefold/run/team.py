"""Decides which devices take part and which this process drives, and sets up the process for them.

`keep_memory` has the process keep the memory that it was once given, so that every step finds it
ready; `return_memory` has it given back, for a model that is larger than memory.

Note: why memory is kept
------------------------
By default the C library asks the system anew for every large block and hands it back at once. A
training step frees and allocates the same activations and gradients over and over, and the system
clears every page of them first: on a processor this costs up to a quarter of a step. With the first
two settings of `keep_memory`, freed blocks stay in the process and are used again, as PyTorch
itself does on a GPU. The peak is what it was, or little more; what is left at the end of a step is
no longer given back.

By the third, threads share one heap. Shards that take turns (`onefold.gather`) compute in threads
of their own, of which each would otherwise have a heap that keeps what the shard has freed, out of
reach of the next one. It holds for heaps that are not there yet, so for all threads but the first
few.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import sys
from collections.abc import Iterable, Sequence

import torch

from onefold.core.roster import Team
from onefold.core.settings import Settings
from onefold.core.shard import Plan
from onefold.core.world import World
from onefold.engine.compiling import check_compiler
from onefold.engine.modelcheck import check_device
from onefold.errors import LaunchError
from onefold.run.devices import cores
from onefold.run.membership import hush_and_report
from onefold.run.world import allocator_chosen, have_cublas_repeat, visible_gpus

__all__ = ["check_devices", "form_team", "plan_of", "settle_process"]

_log = logging.getLogger("onefold")


_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_MAX = -4
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 1 << 16
"""What is larger goes back to the system as soon as it is freed, where memory is short: so do the
pieces of all but small models."""


@functools.cache
def keep_memory() -> bool:
    """Have the C library keep freed memory, for good; return whether it does.

    Nothing is changed where the user has chosen an allocator or its settings (see
    `onefold.run.world.allocator_chosen`), and where the C library is not glibc.
    """
    if allocator_chosen():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block by mmap, as these are handed back one by one; and the heap's top is never trimmed.
    kept = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
    mallopt(_M_ARENA_MAX, 1)
    if not kept:
        _log.info("the C library does not let this process keep its memory; steps take longer")
    return kept


@functools.cache
def return_memory() -> None:
    """Have the C library hand back what is freed, for a model that is larger than memory.

    By default it begins to keep blocks of a size once it has seen one of them freed.
    """
    mallopt = None if allocator_chosen() else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


_trainers = itertools.count()
_hushed: list[World] = []


def form_team(
    world: World,
    chosen: Sequence[str | torch.device] | None,
    *,
    shards: int,
    module: torch.nn.Module,
) -> Team:
    """Decide on the devices of a run.

    Args:
        world: how this process was started.
        chosen: devices that the script has this process drive.
        shards: how many shards every batch is cut into: there can be no more devices.
        module: the model; its parameters' device is taken if nothing else names one.

    Raises:
        ValueError: there are more devices than shards, devices of several kinds, or devices chosen
            by both the script and a launcher.
        LaunchError: a device does not exist, or a launcher has started others that this process
            cannot join.
    """
    own: tuple[int, ...]
    if world.refusal:
        raise LaunchError(world.refusal)
    if world.size > 1 or (world.launched and not chosen):
        if chosen:
            raise ValueError(
                f"Trainer(devices=...) drives several devices from one process, and this process "
                f"is one of {world.size} that a launcher started. Leave out one of the two"
            )
        devices, own = _launched(world, shards), (world.rank,)
    else:
        devices = tuple(_checked(_read(d)) for d in _listed(chosen) or [_default(module)])
        own = tuple(range(len(devices)))
    _check_together(devices, shards, world.options.line_of(len(devices)))
    # Once per process, not per Trainer: descriptors 1 and 2 are replaced.
    if world.launcher == "torch" and world not in _hushed:
        _hushed.append(world)
        if world.size > 1:
            hush_and_report(world)
        if world.others and world.rank == 0:
            _log.warning("%s: each trains a model of its own, as this run is of one", world.others)
    # Or libraries that allocate on "the current GPU" would all open a context on GPU 0.
    for number in own[:1]:
        if devices[number].type == "cuda":
            torch.cuda.set_device(devices[number])
    return Team(
        devices=devices,
        own=own,
        world=world,
        trainer=next(world.network.trainers if world.network else _trainers),
    )


def settle_process(team: Team, settings: Settings) -> None:
    """Fix the number of threads of a CPU device: bits depend on it, so it is part of the run.

    A CPU device also keeps its memory from here on, unless it is to have little of it; see
    `keep_memory`. For GPUs that are to
    repeat their bits, cuBLAS is told so.
    """
    shards, threads = settings.shards, settings.threads
    if team.devices[team.own[0]].type != "cpu":
        if settings.deterministic:
            have_cublas_repeat()
        if threads is not None:
            torch.set_num_threads(threads)
        return
    if team.world.options.keeps == "host":
        return_memory()
    else:
        keep_memory()
    available = cores()
    # By shards, not by devices: so a device has the same threads however many others there are.
    settled = max(1, available // shards) if threads is None else threads
    torch.set_num_threads(settled)
    idle = available - settled
    script = sys.argv[0]
    if idle > 0 and script and not team.world.launched and team.trainer == 0:
        _log.warning(
            "%d of %d cores at work: a CPU device has %d thread%s with %d shards. "
            "To use all cores: onefold run --devices auto %s",
            settled,
            available,
            settled,
            "" if settled == 1 else "s",
            shards,
            script,
        )


def _launched(world: World, shards: int) -> tuple[torch.device, ...]:
    if world.launcher == "onefold":
        names = world.devices[:shards] if world.may_leave else world.devices
        if world.rank >= len(names):
            print(f"device {world.rank} is not needed: the batch has {shards} shards")
            sys.exit(0)
        return tuple(_checked(torch.device(name)) for name in names)
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen == 0:
        return (torch.device("cpu"),) * world.size
    if seen >= world.local_size:
        # The GPUs of other hosts cannot be seen from here, but ranks of a host follow one another,
        # so each rank's GPU follows from the rank.
        first = world.rank - world.local_rank
        indices = ((rank - first) % world.local_size for rank in range(world.size))
        return tuple(torch.device("cuda", index) for index in indices)
    if seen == 1 and _shows_one_gpu(visible_gpus()):
        return (torch.device("cuda", 0),) * world.size
    raise LaunchError(
        f"expected a GPU for each of the {world.local_size} processes that the launcher started on "
        f"this host; process {world.rank} sees {seen}. Start as many processes as there are GPUs "
        f"(torchrun --nproc-per-node {seen}), let every process see all GPUs or exactly its own "
        f"(CUDA_VISIBLE_DEVICES), or hide them from all to compute on the processor "
        f"(CUDA_VISIBLE_DEVICES=)"
    )


def _shows_one_gpu(visible: str | None) -> bool:
    """Whether the launcher, or the script, lets each process see its own GPU and no other.

    One process cannot see whether two share a GPU; that is left to NCCL, which refuses it.
    """
    return visible is not None and len([name for name in visible.split(",") if name.strip()]) == 1


def _listed(chosen: object) -> list[object]:
    if chosen is None or isinstance(chosen, list | tuple):
        return list(chosen or ())
    raise TypeError(
        f'expected devices to be a list of devices such as ["cuda:0", "cuda:1"], got {chosen!r}'
    )


def _read(device: object) -> torch.device:
    try:
        return torch.device(device)  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError):
        raise ValueError(f"expected cpu or cuda devices, got {device!r}") from None


def _default(module: torch.nn.Module) -> torch.device:
    """Take the model's device if the user moved it; else the emptiest GPU; else the processor."""
    placed = next((p.device for p in module.parameters()), torch.device("cpu"))
    if placed.type == "cpu" and torch.cuda.is_available():
        free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
        return torch.device("cuda", free.index(max(free)))
    return placed


def _checked(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"expected cpu or cuda devices, got {device}")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else 0
    if index >= there:
        raise LaunchError(
            f"cuda:{index} is not there: PyTorch sees {there} GPUs on this machine "
            f"(see: onefold devices)"
        )
    return torch.device("cuda", index)


def _check_together(devices: Sequence[torch.device], shards: int, line: int) -> None:
    if len({device.type for device in devices}) > 1:
        listed = ", ".join(map(str, devices))
        raise ValueError(f"the devices of a run must be of one kind, got {listed}")
    if line == 1 and len(devices) > shards:
        raise ValueError(
            f"{len(devices)} devices cannot share {shards} shards: a shard is never divided. Use "
            f"at most {shards} devices, or give Trainer more shards (that changes the result)"
        )


def check_devices(devices: Iterable[torch.device], settings: Settings) -> None:
    """Refuse devices that cannot compute as the settings ask for."""
    for device in devices:
        check_device(settings.precision, device)
        if settings.compile:
            check_compiler(device)


def plan_of(team: Team, shards: int, counts: Sequence[int] | None) -> Plan:
    """Return the plan with these numbers of shards on the devices; None for even shares.

    Raises:
        TypeError, ValueError: the counts are no plan for this run.
    """
    devices, options = len(team.devices), team.world.options
    if options.keeps == "stages":
        if counts is not None:
            raise ValueError(
                f"expected no plan with --keep stages, where every shard goes through all "
                f"devices, got {counts}"
            )
        return Plan.in_lines(shards=shards, devices=devices, line=options.line_of(devices))
    if counts is None:
        return Plan.even(shards=shards, devices=devices)
    if not isinstance(counts, Sequence) or not all(isinstance(c, int) for c in counts):
        raise TypeError(f"expected plan to be a list of numbers, got {counts!r}")
    return Plan.given(counts, shards=shards, devices=devices)
