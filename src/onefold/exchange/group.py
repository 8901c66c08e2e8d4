"""This process's part in torch.distributed, joined once and left in order."""

from __future__ import annotations

import atexit
import functools
import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from onefold.world import World

__all__ = ["break_off", "join_group"]

_log = logging.getLogger("onefold")


@functools.cache
def join_group(world: World, kind: str) -> tuple[dist.ProcessGroup, Store]:
    """The group of all devices of the run, and the store behind it.

    A group that the script has made itself is left alone; ours is then made beside it.

    Args:
        world: of this process.
        kind: ``cpu`` or ``cuda``.
    """
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=world.timeout_s)
    if dist.is_initialized():
        group = dist.new_group(backend=backend, timeout=limit)
        store = dist.distributed_c10d._get_default_store()
        return group, PrefixStore(f"onefold/{world.run_id}", store)
    store = PrefixStore(f"onefold/{world.run_id}", _rendezvous(world, limit))
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=limit,
        device_id=device,
    )
    atexit.register(_leave)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed made no process group")
    return group, store


def _rendezvous(world: World, limit: timedelta) -> Store:
    directory = world.run_directory
    if directory is None:  # PyTorch's launcher has said where in the environment
        store: Store
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=limit))
        return store
    if world.rank == 0:
        lead = TCPStore("127.0.0.1", 0, world.size, True, limit, wait_for_workers=False)
        directory.write_port(lead.port)
        return lead
    port = directory.read_port(world.timeout_s)
    return TCPStore("127.0.0.1", port, world.size, False, limit)


def break_off() -> None:
    """Do not wait for the others at the end of the program: this process has failed."""
    atexit.unregister(_leave)


def _leave() -> None:
    """Leave together: a group that is torn down while a peer still talks to it can hang."""
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        _log.warning("the other devices did not end in order: %s", str(error).splitlines()[0])
    dist.destroy_process_group()
