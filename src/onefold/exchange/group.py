"""This process's part in torch.distributed, joined once and left in order."""

from __future__ import annotations

import atexit
import logging
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from onefold.errors import DisagreementError, PeerTimeout
from onefold.world import World

__all__ = ["agree_on_kind", "break_off", "gather_bytes", "join_group", "who_left"]

_log = logging.getLogger("onefold")
_FAREWELL = timedelta(seconds=5)
_SEEN_KEY = "onefold/seen"


def agree_on_kind(world: World, kind: str, size: int, timeout_s: float) -> None:
    """Compare the kinds of device of all processes, before anything else joins them.

    Processes of another kind would wait for each other through another exchange or backend.

    Args:
        world: of this process.
        kind: ``cpu`` or ``cuda``, of this process's device.
        size: how many devices take part.
        timeout_s: the longest wait for the others.

    Raises:
        DisagreementError: a process computes on another kind of device.
        PeerTimeout: a process did not come.
    """
    store = _store(world, size, timeout_s)
    store.set(_kind_key(world.rank), kind)
    for rank in range(size):
        try:
            store.wait([_kind_key(rank)], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerTimeout(
                f"device {rank} did not join within {timeout_s:g} s: every device must run the "
                f"same script and make its Trainer ({str(error).splitlines()[0]})",
                device=rank,
                step=0,
            ) from error
    kinds = [store.get(_kind_key(rank)).decode() for rank in range(size)]
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise DisagreementError(
                f"device {rank} computes on {other} and device 0 on {kinds[0]}: the devices of a "
                f"run must be of one kind. Check that every process sees its GPUs "
                f"(CUDA_VISIBLE_DEVICES), or hide them from all"
            )


def join_group(
    world: World, kind: str, size: int, *, timeout_s: float, trainer: int
) -> tuple[dist.ProcessGroup, Store]:
    """A group of all devices of the run for one Trainer, and the store behind it.

    A group that the script has made itself is left alone; ours is then made beside it. A later
    Trainer gets another one: that of a Trainer that failed may be waiting for messages for ever.

    Args:
        world: of this process.
        kind: ``cpu`` or ``cuda``.
        size: how many devices take part; others may have been started and have left.
        timeout_s: the longest that anything waits in the group.
        trainer: counts the trainers of a script, from 0.
    """
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        if _memberships:
            atexit.unregister(_leave)
            atexit.register(_leave)  # a failure that was survived has taken it back
        group = dist.new_group(backend=backend, timeout=limit)
        return group, PrefixStore(f"onefold/{world.run_id}/{trainer}", store)
    store = _store(world, size, timeout_s)
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
    own = dist.group.WORLD
    if own is None:
        raise RuntimeError("torch.distributed made no process group")
    return own, PrefixStore(f"trainer/{trainer}", store)


def gather_bytes(group: dist.ProcessGroup, text: bytes) -> list[bytes]:
    """What every process of a group has to say, of any length, in the order of their ranks."""
    size = group.size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(length) for length in lengths)
    own = torch.frombuffer(bytearray(text.ljust(longest, b"\0")), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    pairs = zip(parts, lengths, strict=True)
    return [bytes(part[: int(length)].numpy()) for part, length in pairs]


_stores: dict[tuple[World, int], Store] = {}


def _store(world: World, size: int, timeout_s: float) -> Store:
    """The store of the run, made once in a process."""
    if (world, size) not in _stores:
        limit = timedelta(seconds=timeout_s)
        base = _rendezvous(world, size, limit)
        _stores[world, size] = PrefixStore(f"onefold/{world.run_id}", base)
    return _stores[world, size]


def _kind_key(rank: int) -> str:
    return f"kind/{rank}"


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
    port = directory.read_port(limit.total_seconds())
    return TCPStore("127.0.0.1", port, size, False, limit)


def break_off() -> None:
    """Do not wait for the others at the end of the program: this process has failed."""
    atexit.unregister(_leave)


def who_left() -> list[int]:
    """Devices whose program has come to its end."""
    return [
        rank
        for store, _, size in _memberships
        for rank in range(size)
        if store.check([_left_key(rank)])
    ]


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
        _stores.clear()  # or its threads would go on while Python is taken apart
        dist.destroy_process_group()


def _left_key(rank: int) -> str:
    return f"onefold/left/{rank}"
