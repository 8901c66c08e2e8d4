"""This process's part in torch.distributed, joined once and left in order."""

from __future__ import annotations

import atexit
import functools
import logging
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from onefold.world import World

__all__ = ["break_off", "join_group", "who_left"]

_log = logging.getLogger("onefold")
_FAREWELL = timedelta(seconds=5)
_SEEN_KEY = "onefold/seen"


@functools.cache
def join_group(world: World, kind: str, size: int) -> tuple[dist.ProcessGroup, Store]:
    """The group of all devices of the run, and the store behind it.

    A group that the script has made itself is left alone; ours is then made beside it.

    Args:
        world: of this process.
        kind: ``cpu`` or ``cuda``.
        size: how many devices take part; others may have been started and have left.
    """
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=world.timeout_s)
    if dist.is_initialized():
        group = dist.new_group(backend=backend, timeout=limit)
        store = dist.distributed_c10d._get_default_store()
        return group, PrefixStore(f"onefold/{world.run_id}", store)
    store = PrefixStore(f"onefold/{world.run_id}", _rendezvous(world, size, limit))
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=size,
        timeout=limit,
        device_id=device,
    )
    _memberships.append(_Membership(store, world.rank, size))
    atexit.register(_leave)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed made no process group")
    return group, store


def _rendezvous(world: World, size: int, limit: timedelta) -> Store:
    directory = world.run_directory
    if directory is None:  # PyTorch's launcher has said where in the environment
        store: Store
        store, _, _ = next(rendezvous("env://", world.rank, size, timeout=limit))
        return store
    if world.rank == 0:
        lead = TCPStore("127.0.0.1", 0, size, True, limit, wait_for_workers=False)
        directory.write_port(lead.port)
        return lead
    port = directory.read_port(world.timeout_s)
    return TCPStore("127.0.0.1", port, size, False, limit)


def break_off() -> None:
    """Do not wait for the others at the end of the program: this process has failed."""
    atexit.unregister(_leave)


def who_left(store: Store, size: int) -> list[int]:
    """Devices whose program has come to its end."""
    return [rank for rank in range(size) if store.check([_left_key(rank)])]


class _Membership(NamedTuple):
    store: Store
    rank: int
    size: int


_memberships: list[_Membership] = []


def _leave() -> None:
    """Leave together: a group that is torn down while a peer still talks to it can hang.

    Who has waited in vain for a while goes without the others; if they wait for this device, they
    are told by the closing of its connections.
    """
    for store, rank, size in _memberships:
        try:
            store.set(_left_key(rank), "1")
            store.wait([_left_key(other) for other in range(size)], _FAREWELL)
            # The lead's process holds the store: it stays until all have seen that all are here.
            store.add(_SEEN_KEY, 1)
            limit = time.monotonic() + _FAREWELL.total_seconds()
            while rank == 0 and store.add(_SEEN_KEY, 0) < size and time.monotonic() < limit:
                time.sleep(0.002)
        except RuntimeError as error:
            _log.info("the other devices did not end in order: %s", error)
            return
        join_group.cache_clear()  # or its threads would go on while Python is taken apart
        dist.destroy_process_group()


def _left_key(rank: int) -> str:
    return f"onefold/left/{rank}"
