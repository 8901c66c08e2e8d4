"""How this process was started. The only module that reads the environment, once, at the start.

A process is alone, or was started by ``onefold run`` or `onefold.launch` (which leave a record in
ONEFOLD_WORLD), or by any launcher that speaks PyTorch's protocol (RANK, WORLD_SIZE, MASTER_ADDR).

Note: one process is the device
-------------------------------
A program that the script starts inherits the environment, and a process that it forks all of the
memory: each would take itself for the device. So the record is taken out of the environment when it
is read (RANK and WORLD_SIZE stay, for libraries that print or download on rank 0 alone), and the
world is that of the process that has read it; in a child of that, asking for it is an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, MutableMapping

from onefold.core.world import World
from onefold.errors import LaunchError

__all__ = [
    "allocator_chosen",
    "current_world",
    "is_launched",
    "read_world",
    "take_world",
    "visible_gpus",
    "worker_environment",
]

WORLD_VARIABLE = "ONEFOLD_WORLD"
SECRET_VARIABLE = "ONEFOLD_SECRET"
_SECRET_LENGTH = 16


def read_world(environment: Mapping[str, str]) -> World:
    """Make out from the environment how this process was started."""
    if WORLD_VARIABLE in environment:
        return World.from_json(environment[WORLD_VARIABLE])
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return _read_torch(environment)
    return World()


def _read_torch(environment: Mapping[str, str]) -> World:
    size = int(environment["WORLD_SIZE"])
    local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return World(
        rank=int(environment["RANK"]),
        size=size,
        run_id="-".join(environment.get(name, "") for name in parts),
        one_host=local_size == size,
        launcher="torch",
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_size=local_size,
        secret=_checked_secret(environment.get(SECRET_VARIABLE, "")),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _checked_secret(secret: str) -> str:
    if secret and len(secret) < _SECRET_LENGTH:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(secret)} characters: expected {_SECRET_LENGTH} or more "
            f"that nobody can guess, the same for every process of the run"
        )
    return secret


def take_world(environment: MutableMapping[str, str]) -> World:
    """Make out how this process was started, and leave no record of it to those it starts."""
    world = read_world(environment)
    environment.pop(WORLD_VARIABLE, None)
    return world


@functools.cache
def _own_world() -> tuple[World, int]:
    """This process's world, and the process that it belongs to."""
    return take_world(os.environ), os.getpid()


def current_world() -> World:
    """This process's world; the environment is read at the first call.

    Raises:
        LaunchError: this is a forked child of a process that is part of a run.
    """
    world, process = _own_world()
    if world.launched and os.getpid() != process:
        raise LaunchError(
            f"process {os.getpid()} was forked from process {process}, which is device "
            f"{world.rank} of a run: only that one is part of the run. Make and use the Trainer "
            f"there; in a child, compute without it, or start the child by the spawn method"
        )
    return world


def is_launched() -> bool:
    """Whether a launcher has started this process as a device of a run.

    >>> is_launched()
    False
    """
    return current_world().launched


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES: what the user lets programs see, or None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def allocator_chosen() -> bool:
    """Whether the user has said how memory is to be allocated, by glibc's own variables or by
    loading another allocator before it."""
    return any(
        name.startswith("MALLOC_")
        or (name == "GLIBC_TUNABLES" and "glibc.malloc" in value)
        or (name == "LD_PRELOAD" and "malloc" in value)
        for name, value in os.environ.items()
    )


def worker_environment(world: World) -> dict[str, str]:
    """The environment of a worker that onefold launches."""
    environment = dict(os.environ)
    environment[WORLD_VARIABLE] = world.to_json()
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that numbers mean the same to everybody
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its bits
    environment.setdefault("PYTHONHASHSEED", "0")  # sets have the same order everywhere
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the first failure is told by us
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no need for its name to resolve
    # Libraries that print, log or download on rank 0 alone look for these.
    environment["RANK"] = environment["LOCAL_RANK"] = str(world.rank)
    environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = str(world.size)
    return environment
