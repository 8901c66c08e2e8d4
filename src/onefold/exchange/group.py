"""Joins torch.distributed for each Trainer of this process, and leaves it in order.

Note: no default group
----------------------
PyTorch's default group is the script's, or a launcher's. Ours is none that `torch.distributed`
would find: whether ``is_initialized()``, and what ``get_world_size()`` returns, must not depend on
the exchange, or a line left over from DistributedDataParallel would change the result.

Note: the keys of the store
---------------------------
Until there is a group, processes know each other only through the store of the run: each sets a key
under its own rank and waits for those of the others. Each of these keys has one writer and is never
removed, so there is no race for it; what every Trainer needs anew has its number in the key.

Note: the store of another launcher
-----------------------------------
Its processes find each other there. A name may not resolve, or a port refuse, only because the
lead's machine is not up yet. So neither ends the wait, but both are named while it lasts.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are exported

from onefold.core.world import World
from onefold.errors import DisagreementError, LaunchError, PeerLost, PeerTimeout
from onefold.exchange.connections import (
    Connections,
    Lateness,
    PeerWatch,
    close_watches,
    host_identity,
    noted_connections,
)
from onefold.exchange.progress import progress_of
from onefold.exchange.sealing import SealedStore, prove, refuse_sealed
from onefold.exchange.waiting import FIRST_S, Waiting
from onefold.system.compat import Groups
from onefold.system.process import LOOK_S

__all__ = [
    "Joined",
    "agree_on_kind",
    "agree_on_name",
    "break_off",
    "gather_bytes",
    "join_group",
    "watch_for_end",
    "who_left",
]


_log = logging.getLogger("onefold")
_FAREWELL = timedelta(seconds=5)
_SEEN_KEY = "onefold/seen"
_POLL_S = 0.005
_ATTEMPTS = 4
_CONNECTED_S = 2.5
_JOINED, _REFUSED = "joined", "refused"
_MOST_OF_PROOF = 1 << 20
"""In bytes: a process that has not proved anything yet must not choose how much memory is used."""
_GOODBYE = timedelta(seconds=2)


def agree_on_kind(world: World, kind: str, size: int, timeout_s: float) -> None:
    """Compare the kinds of device of all processes, before anything else joins them.

    Otherwise processes of two kinds would wait for each other in different exchanges or backends.

    Args:
        world: how this process was started.
        kind: ``cpu`` or ``cuda``, of this process's device.
        size: how many devices take part.
        timeout_s: the longest wait for the others.

    Raises:
        DisagreementError: a process computes on another kind of device.
        PeerTimeout: a process did not join in time.
    """
    kinds = _trade(world, size, timeout_s, "kind", kind)
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise DisagreementError(
                f"device {rank} computes on {other} and device 0 on {kinds[0]}: the devices of a "
                f"run must be of one kind. Check that every process sees its GPUs "
                f"(CUDA_VISIBLE_DEVICES), or hide them from all"
            )


def agree_on_name(world: World, size: int, timeout_s: float, trainer: int) -> str:
    """Agree on a name for one Trainer, which the lead draws and nobody can guess.

    Args:
        world: how this process was started.
        size: how many devices take part.
        timeout_s: the longest wait for the lead.
        trainer: number of the Trainer among those of the script, from 0.

    Raises:
        PeerTimeout: the lead did not join in time.
    """
    store, key = _store(world, size, timeout_s), f"name/{trainer}"
    if world.rank == 0:
        store.set(key, secrets.token_hex(16))
    limit, ended = time.monotonic() + timeout_s, watch_for_end(world, size, timeout_s)
    _await(store, key, 0, limit, timeout_s, ended, _saying(world, store, [key]))
    return refuse_sealed(key, store.get(key)).decode()


class Joined(NamedTuple):
    """A group that this process has joined."""

    group: dist.ProcessGroup
    store: Store
    """The store behind the group; failures are reported in it."""
    connections: Connections
    """The group's TCP connections, so that they can be cut."""
    watch: PeerWatch
    """Watches the peers on this host."""
    lateness: Lateness
    """Finds out which device the others wait for."""
    left: Callable[[], list[int]]
    """Lists the devices whose program has ended."""


def join_group(world: World, kind: str, size: int, *, timeout_s: float, trainer: int) -> Joined:
    """Join a group of all devices of the run for one Trainer, and prove that all belong to it.

    A group that the script has made itself is left alone; ours is then made beside it. A later
    Trainer gets another one: that of a Trainer that failed may be waiting for messages for ever.

    Args:
        world: how this process was started.
        kind: ``cpu`` or ``cuda``.
        size: how many devices take part; others may have been started and have left.
        timeout_s: the longest that anything waits in the group.
        trainer: number of the Trainer among those of the script, from 0.

    Raises:
        DisagreementError: a process does not know the secret of the run.
        PeerError: another process did not join.
        RuntimeError: the connections broke in every attempt.
    """
    if world.network:
        simulated: Joined = world.network.group(trainer)
        return simulated
    if not world.one_host and not world.secret and world.rank == 0 and trainer == 0:
        _log.warning(
            "this run goes over several hosts without a secret: whoever reaches them may take "
            "part in it. Set ONEFOLD_SECRET to the same long random text for every process"
        )
    group, store, connections = _meet(world, kind, size, timeout_s, trainer)
    if not dist.is_initialized():
        _note_membership(group, world, size, timeout_s)
    # `break_off` has unregistered it if the script survived a failure. Never registered twice.
    if _memberships:
        atexit.unregister(_leave)
        atexit.register(_leave)
    rank = group.rank()
    here = host_identity()
    found = [json.loads(t) for t in gather_bytes(group, json.dumps([here, os.getpid()]).encode())]
    # A process id means something on its own host and in its own namespace only.
    pids = {r: int(pid) for r, (host, pid) in enumerate(found) if host == here and r != rank}
    lateness = Lateness(store, rank, group.size())
    watch = PeerWatch(pids, connections, lateness)
    return Joined(group, store, connections, watch, lateness, who_left)


def _meet(
    world: World, kind: str, size: int, timeout_s: float, trainer: int
) -> tuple[dist.ProcessGroup, Store, Connections]:
    """Connect all processes, and have each prove that it belongs to the run.

    gloo takes whoever first sends it the number of a peer for that peer. A stranger who reaches its
    port while it listens breaks the connections with that, so then all processes make them anew.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        name = f"{trainer}/{attempt}"
        _trade(world, size, timeout_s, f"begins/{name}", "")  # or the first would listen for long
        limit_s = min(timeout_s, _CONNECTED_S * 2**attempt) if attempt < _ATTEMPTS else timeout_s
        group = None
        connections, problem = Connections(), None
        try:
            with noted_connections(connections), gloo_on_loopback(world):
                group, store = _make_group(world, kind, size, limit_s, trainer, attempt)
            # Ahead of every other message: nothing that a stranger sends is used before its proof.
            trade = partial(gather_bytes, group, most=_MOST_OF_PROOF)
            prove(world.proof, group.rank(), trade, connections.ends())
        except RuntimeError as error:
            problem = error
            connections.cut()  # or the others wait for this process
        except DisagreementError:
            _tell(world, size, timeout_s, f"ends/{name}", _REFUSED)
            raise
        outcomes = _trade(world, size, timeout_s, f"ends/{name}", str(problem or _JOINED))
        if group is not None and all(outcome == _JOINED for outcome in outcomes):
            Groups.set_limit(group, timedelta(seconds=timeout_s))
            return group, store, connections
        connections.cut()
        if group is not None:
            dist.destroy_process_group(group) if dist.is_initialized() else Groups.end(group)
        _refuse(outcomes)
        # The first may fail by a stranger who has come between.
        level = logging.INFO if attempt == 1 else logging.WARNING
        advice = "is there a firewall, or does the name of a machine not resolve there?"
        _log.log(
            level, "attempt %d to connect all devices failed (%s): %s", attempt, advice, outcomes
        )
    raise problem or RuntimeError(f"the devices could not be connected: {outcomes}")


def _refuse(outcomes: Sequence[str]) -> None:
    """Raise if a process has found one that does not belong to the run."""
    if _REFUSED in outcomes:
        raise DisagreementError(
            f"device {outcomes.index(_REFUSED)} has refused a device that has not shown that it "
            f"belongs to this run: start every process with the same ONEFOLD_SECRET, or none with "
            f"any"
        )


def _make_group(
    world: World, kind: str, size: int, timeout_s: float, trainer: int, attempt: int
) -> tuple[dist.ProcessGroup, Store]:
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        store = Groups.default_store()
        group = dist.new_group(backend=backend, timeout=limit)
        return group, PrefixStore(f"onefold/{world.run_id}/{trainer}", store)
    store = _store(world, size, timeout_s)
    # Bound to its GPU, or NCCL may guess one, and open a context on it.
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
    own = Groups.beside_default(
        backend,
        PrefixStore(f"group/{trainer}/{attempt}", store),
        rank=world.rank,
        size=size,
        limit=limit,
        device=device,
    )
    return own, PrefixStore(f"trainer/{trainer}", store)


def _note_membership(group: dist.ProcessGroup, world: World, size: int, timeout_s: float) -> None:
    """Have a group of ours ended together with all others, when this process ends."""
    if not _memberships:
        store = _store(world, size, timeout_s)
        _memberships.append(_Membership(store, world.rank, size, []))
        os.register_at_fork(after_in_child=break_off)  # a child is not the device
    _memberships[0].groups.append(group)


def gather_bytes(group: dist.ProcessGroup, text: bytes, most: int | None = None) -> list[bytes]:
    """Gather a text from every process of a group, of ``most`` bytes, in the order of their ranks.

    Raises:
        RuntimeError: a process announces a longer one.
    """
    size = group.size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    if most is not None and not all(0 <= int(length) <= most for length in lengths):
        raise RuntimeError(f"a process announces {[int(n) for n in lengths]} bytes, over {most}")
    # all_gather takes one length from all, and frombuffer refuses an empty one.
    longest = max(1, *(int(length) for length in lengths))
    parts = _gather_alike(group, text.ljust(longest, b"\0"))
    return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]


def _gather_alike(group: dist.ProcessGroup, text: bytes) -> list[bytes]:
    """Gather one text from every process of a group, all of the same length."""
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # of a copy: bytes are read-only
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.numpy()) for part in parts]


_stores: dict[tuple[World, int], Store] = {}
_sealed: list[Store] = []
"""What PyTorch calls in Python must be kept there; it would only keep its own part of it."""


def _store(world: World, size: int, timeout_s: float) -> Store:
    """The store of the run, made once per process."""
    if (world, size) not in _stores:
        limit = timedelta(seconds=timeout_s)
        base = _rendezvous(world, size, limit)
        if world.secret:
            base = SealedStore(base, world.secret.encode(), world.run_id)
            _sealed.append(base)
        _stores[world, size] = PrefixStore(f"onefold/{world.run_id}", base)
    return _stores[world, size]


def _tell(world: World, size: int, timeout_s: float, topic: str, word: str) -> None:
    _store(world, size, timeout_s).set(f"{topic}/{world.rank}", word)


def _trade(world: World, size: int, timeout_s: float, topic: str, word: str) -> list[str]:
    """Tell all processes a word, and wait for theirs, in the order of their ranks."""
    # Told before waiting for anyone, or all would wait for each other.
    _tell(world, size, timeout_s, topic, word)
    store, ended = _store(world, size, timeout_s), watch_for_end(world, size, timeout_s)
    limit = time.monotonic() + timeout_s
    keys = [f"{topic}/{rank}" for rank in range(size)]
    say = _saying(world, store, keys)
    for rank, key in enumerate(keys):
        _await(store, key, rank, limit, timeout_s, ended, say)
    return [refuse_sealed(key, store.get(key)).decode() for key in keys]


def _saying(world: World, store: Store, keys: Sequence[str]) -> Callable[[], None]:
    """Return a function that says who is waited for, once that takes long: see `Waiting`."""
    waiting = Waiting(world.rank, host_has_others=world.local_rank > 0)

    def missing() -> str:
        ranks = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        where = f" (they meet at {world.address})" if world.address else ""
        return f"not yet there, of {world.size} devices: {ranks}{where}"

    return partial(waiting.look, missing)


def _rendezvous(world: World, size: int, limit: timedelta) -> Store:
    """Make the store through which the processes find each other.

    Under onefold's launcher it is a file without a name, which the kernel opens for this user only:
    there is no open port, and nothing that could be removed or left behind.
    """
    if world.store_descriptor >= 0:
        return FileStore(f"/proc/self/fd/{world.store_descriptor}", size)
    return reach_store(world, limit.total_seconds())


def _await(
    store: Store,
    key: str,
    rank: int,
    limit: float,
    timeout_s: float,
    ended: Callable[[int], bool],
    say: Callable[[], None],
) -> None:
    """Wait for a key that another process sets in the store."""
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
            say()
            # Asked again after its end: the process may have set the key just before it.
            if ended(rank) and not store.check([key]):
                raise PeerLost.before_start(rank)
        time.sleep(_POLL_S)


def watch_for_end(world: World, size: int, timeout_s: float) -> Callable[[int], bool]:
    """Return a function that tells, for a rank, whether that device's script has ended."""
    progress = progress_of(world)
    if progress is not None:
        return progress.has_ended
    store = _store(world, size, timeout_s)
    return lambda rank: bool(store.check([_ended_key(rank)]))


def tell_end(world: World) -> None:
    """Announce that this script has ended: others may wait for a Trainer that it never makes.

    For processes of PyTorch's launcher; workers of onefold's note it in `Progress`.
    """
    if world.size == 1 or _memberships:
        return
    try:
        store = _store(world, world.size, _GOODBYE.total_seconds())
        store.set(_ended_key(world.rank), "1")
    # The launcher is gone, and with it whoever might wait.
    except (RuntimeError, PeerTimeout) as error:
        _log.info("device %d could not say that it ends: %s", world.rank, error)


def _ended_key(rank: int) -> str:
    return f"ended/{rank}"


def break_off() -> None:
    """Leave without waiting for the others, as this process has failed, or is a forked child."""
    atexit.unregister(_leave)


def who_left() -> list[int]:
    """List the devices whose program has ended."""
    return [
        rank
        for store, _, size, _ in _memberships
        for rank in range(size)
        if store.check([_left_key(rank)])
    ]


class _Membership(NamedTuple):
    store: Store
    rank: int
    size: int
    groups: list[dist.ProcessGroup]
    """One for each Trainer so far."""


_memberships: list[_Membership] = []


def _leave() -> None:
    """Leave together: tearing down a group can hang while a peer still uses it.

    A process that has waited long enough leaves without the others. If they wait for this device,
    its closing connections end their wait.
    """
    for store, rank, size, groups in _memberships:
        try:
            store.set(_left_key(rank), "1")
            store.wait([_left_key(other) for other in range(size)], _FAREWELL)
            # Under PyTorch's launcher the lead may serve the store, so it stays until everybody has
            # read that all are here, or their last read would fail.
            store.add(_SEEN_KEY, 1)
            limit = time.monotonic() + _FAREWELL.total_seconds()
            while rank == 0 and store.add(_SEEN_KEY, 0) < size and time.monotonic() < limit:
                time.sleep(0.002)
        except RuntimeError as error:
            _log.info("the other devices did not end in order: %s", error)
            return
        # Drop every reference to the store while Python still runs: its threads would otherwise
        # go on while the interpreter is taken apart.
        close_watches()
        _stores.clear()
        while groups:
            Groups.end(groups.pop())
        _sealed.clear()


def _left_key(rank: int) -> str:
    return f"onefold/left/{rank}"


_TRY_S, _STORE_S = 5.0, 30.0
_PAUSE_S = 0.1


def reach_store(world: World, timeout_s: float, *, first_s: float = FIRST_S) -> Store:
    """Serve the store, if this is the lead and its launcher does not, or connect to it.

    Raises:
        LaunchError: the port is taken, or the host has an impossible name.
        PeerTimeout: nobody serves the store at its address.
    """
    host, _, port = world.address.rpartition(":")
    place = (host.strip("[]"), int(port))
    if world.rank == 0 and not world.agent_store:
        return _serve(world, place, timeout_s)
    waiting = Waiting(world.rank, first_s=first_s, host_has_others=world.local_rank > 0)
    limit = time.monotonic() + timeout_s
    while isinstance(found := _connected(place, timeout_s), str):
        if time.monotonic() > limit:
            raise PeerTimeout(
                f"device {world.rank} did not reach device 0 at {world.address} within "
                f"{timeout_s:g} s: {found}. Expected MASTER_ADDR to be the machine of device 0, by "
                f"a name or address that every machine knows, and MASTER_PORT to be open there",
                device=0,
                step=0,
            )
        words = f"device 0 cannot be reached at {world.address}, as {found}"
        waiting.look(lambda words=words: words)  # type: ignore[misc]
        time.sleep(_PAUSE_S)
    return found


def _connected(place: tuple[str, int], timeout_s: float) -> Store | str:
    """The store that is served at an address, or why it cannot be had."""
    try:
        # PyTorch says nothing until its own limit, so Python tries first.
        with socket.create_connection(place, timeout=_TRY_S):
            pass
    except UnicodeError:
        raise LaunchError(
            f"expected the name of a machine in MASTER_ADDR, got {place[0]}"
        ) from None
    except socket.gaierror as error:
        return f"the name {place[0]} does not resolve on {socket.gethostname()} ({error.strerror})"
    except ConnectionRefusedError:
        return "nobody listens at this port yet"
    except OSError as error:
        return f"nobody answers ({error.strerror or error}; is there a firewall?)"
    made: list[Store] = []

    def make() -> None:
        limit = timedelta(seconds=timeout_s)
        with suppress(RuntimeError):
            made.append(TCPStore(*place, timeout=limit, wait_for_workers=False))

    # A thread, as PyTorch waits without a limit for the answer of a stranger at the port.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(min(_STORE_S, timeout_s))
    return made[0] if made else "what listens there is no store of PyTorch"


def _serve(world: World, place: tuple[str, int], timeout_s: float) -> Store:
    host, port = place
    try:
        with socket.create_server((host, 0)):
            pass
    except OSError:
        host = "127.0.0.1"  # the others' address is none of this machine, but a service's, say
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # who is missing is seen by what they write
            multi_tenant=True,  # the script may have made a store there
        )
    except RuntimeError as error:
        raise LaunchError(
            f"device 0 cannot let the others join at {world.address}: {error}. Expected "
            f"MASTER_PORT to be a port that is free on its machine"
        ) from None


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_on_loopback(world: World) -> Iterator[None]:
    """Keep gloo from opening ports that other hosts can reach, if all processes are on one host.

    A choice that the user has made in the environment takes precedence.
    """
    if not world.one_host or _GLOO_INTERFACE in os.environ:
        yield
        return
    # gloo reads the variable while a group is made, and init_process_group has no argument for it.
    # It is removed again, as programs that the script starts may make groups of their own.
    os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]
