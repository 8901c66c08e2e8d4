"""This process's part in torch.distributed, joined once and left in order."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # they are exported
    FileStore,
    PrefixStore,
    Store,
)
from torch.distributed.rendezvous import rendezvous

from onefold.core.world import World
from onefold.errors import DisagreementError, PeerLost, PeerTimeout
from onefold.exchange.connections import (
    Connections,
    PeerWatch,
    close_watches,
    host_identity,
    noted_connections,
)
from onefold.exchange.lateness import Lateness
from onefold.exchange.loopback import gloo_on_loopback
from onefold.exchange.progress import progress_of
from onefold.exchange.proof import prove
from onefold.system.compat import default_store
from onefold.system.process import LOOK_S

__all__ = [
    "Joined",
    "agree_on_kind",
    "agree_on_name",
    "break_off",
    "gather_bytes",
    "join_group",
    "tell_end",
    "watch_for_end",
    "who_left",
]

_log = logging.getLogger("onefold")
_FAREWELL = timedelta(seconds=5)
_SEEN_KEY = "onefold/seen"
_POLL_S = 0.005
_GOODBYE = timedelta(seconds=2)


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
    limit = time.monotonic() + timeout_s
    ended = watch_for_end(world, size, timeout_s)
    for rank in range(size):
        _await(store, _kind_key(rank), rank, limit, timeout_s, ended)
    kinds = [store.get(_kind_key(rank)).decode() for rank in range(size)]
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise DisagreementError(
                f"device {rank} computes on {other} and device 0 on {kinds[0]}: the devices of a "
                f"run must be of one kind. Check that every process sees its GPUs "
                f"(CUDA_VISIBLE_DEVICES), or hide them from all"
            )


def agree_on_name(world: World, size: int, timeout_s: float, trainer: int) -> str:
    """A name that the lead has drawn for one Trainer, and that nobody can guess.

    Args:
        world: of this process.
        size: how many devices take part.
        timeout_s: the longest wait for the lead.
        trainer: counts the trainers of a script, from 0.

    Raises:
        PeerTimeout: the lead did not come.
    """
    store, key = _store(world, size, timeout_s), f"name/{trainer}"
    if world.rank == 0:
        store.set(key, secrets.token_hex(16))
    limit, ended = time.monotonic() + timeout_s, watch_for_end(world, size, timeout_s)
    _await(store, key, 0, limit, timeout_s, ended)
    return str(store.get(key).decode())


class Joined(NamedTuple):
    """A group that this process has joined."""

    group: dist.ProcessGroup
    store: Store
    """Behind the group; carries word of failures."""
    connections: Connections
    """Of the group, on the host."""
    watch: PeerWatch
    """Of the peers on this host."""
    lateness: Lateness


def join_group(world: World, kind: str, size: int, *, timeout_s: float, trainer: int) -> Joined:
    """A group of all devices of the run for one Trainer, in which all know the run's secret.

    A group that the script has made itself is left alone; ours is then made beside it. A later
    Trainer gets another one: that of a Trainer that failed may be waiting for messages for ever.

    Args:
        world: of this process.
        kind: ``cpu`` or ``cuda``.
        size: how many devices take part; others may have been started and have left.
        timeout_s: the longest that anything waits in the group.
        trainer: counts the trainers of a script, from 0.

    Raises:
        DisagreementError: a process does not know the secret of the run.
    """
    if not world.one_host and not world.secret and world.rank == 0 and trainer == 0:
        _log.warning(
            "this run goes over several hosts without a secret: whoever reaches them may take "
            "part in it. Set ONEFOLD_SECRET to the same long random text for every process"
        )
    connections = Connections()
    with noted_connections(connections), gloo_on_loopback(world):
        group, store = _make_group(world, kind, size, timeout_s, trainer)
    rank = group.rank()
    prove(world.proof, rank, lambda word: _gather_alike(group, word))
    here = host_identity()
    said = [json.loads(t) for t in gather_bytes(group, json.dumps([here, os.getpid()]).encode())]
    pids = {r: int(pid) for r, (host, pid) in enumerate(said) if host == here and r != rank}
    lateness = Lateness(store, rank, group.size())
    return Joined(group, store, connections, PeerWatch(pids, connections, lateness), lateness)


def _make_group(
    world: World, kind: str, size: int, timeout_s: float, trainer: int
) -> tuple[dist.ProcessGroup, Store]:
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        store = default_store()
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
    os.register_at_fork(after_in_child=break_off)  # a child is not the device
    own = dist.group.WORLD
    if own is None:
        raise RuntimeError("torch.distributed made no process group")
    return own, PrefixStore(f"trainer/{trainer}", store)


def gather_bytes(group: dist.ProcessGroup, text: bytes) -> list[bytes]:
    """What every process of a group has to say, of any length, in the order of their ranks."""
    size = group.size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(1, *(int(length) for length in lengths))  # no message is of nothing
    parts = _gather_alike(group, text.ljust(longest, b"\0"))
    return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


def _gather_alike(group: dist.ProcessGroup, text: bytes) -> list[bytes]:
    """The same, where all have as many bytes to say."""
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.numpy()) for part in parts]


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
    """The store through which the processes find each other.

    On one host it is a file without a name, which the kernel lets nobody open but this user: no
    port is open, and there is nothing that could be removed or left behind.
    """
    if world.store_descriptor >= 0:
        return FileStore(f"/proc/self/fd/{world.store_descriptor}", size)
    store: Store  # PyTorch's launcher has said where in the environment
    store, _, _ = next(rendezvous("env://", world.rank, size, timeout=limit))
    return store


def _await(
    store: Store,
    key: str,
    rank: int,
    limit: float,
    timeout_s: float,
    ended: Callable[[int], bool],
) -> None:
    """Wait for what a process is to write into the store."""
    look = time.monotonic() + LOOK_S
    while not store.check([key]):
        now = time.monotonic()
        if now > limit:
            raise PeerTimeout(
                f"device {rank} did not join within {timeout_s:g} s: every device must run the "
                f"same script and make its Trainer",
                device=rank,
                step=0,
            )
        if now > look:
            look = now + LOOK_S
            if ended(rank) and not store.check([key]):
                raise PeerLost.before_start(rank)
        time.sleep(_POLL_S)


def watch_for_end(world: World, size: int, timeout_s: float) -> Callable[[int], bool]:
    """Tells of a device by its number whether its script has come to its end."""
    progress = progress_of(world)
    if progress is not None:
        return progress.has_ended
    store = _store(world, size, timeout_s)
    return lambda rank: bool(store.check([_ended_key(rank)]))


def tell_end(world: World) -> None:
    """Under PyTorch's launcher: others may wait for a Trainer that this process never makes."""
    if world.size == 1 or _memberships:
        return
    try:
        store = _store(world, world.size, _GOODBYE.total_seconds())
        store.set(_ended_key(world.rank), "1")
    except RuntimeError as error:  # the launcher has gone, and whoever might have waited
        _log.info("device %d could not say that it ends: %s", world.rank, error)


def _ended_key(rank: int) -> str:
    return f"ended/{rank}"


def break_off() -> None:
    """Do not wait for the others at the end of the program, as where this process has failed."""
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
        close_watches()  # they have the store as well
        _stores.clear()  # or its threads would go on while Python is taken apart
        dist.destroy_process_group()


def _left_key(rank: int) -> str:
    return f"onefold/left/{rank}"
