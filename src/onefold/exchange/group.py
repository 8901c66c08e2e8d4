"""Joins torch.distributed for each Trainer of this process, and leaves it in order.

Note: no default group
----------------------
PyTorch's default group belongs to the script, or to a launcher. `torch.distributed` does not know
onefold's group: ``is_initialized()`` and ``get_world_size()`` must not depend on the exchange, or a
line left over from DistributedDataParallel would change the result.

Note: the keys of the store
---------------------------
Before there is a group, processes know each other only through the store of the run: each sets a
key under its own rank and waits for the keys of the others. Each key has one writer and is never
removed, so there is no race for it; keys that every Trainer needs again contain its number.

Note: the store of another launcher
-----------------------------------
Processes of another launcher find each other through a store at the lead's address. If its name
does not resolve, or its port refuses connections, the lead's machine may just not be up yet. So
neither ends the wait, but both are logged meanwhile.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property, partial
from ipaddress import ip_address
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from onefold.core.late import load
from onefold.core.options import LaunchContext
from onefold.errors import DisagreementError, LaunchError, PeerTimeout
from onefold.exchange.connections import (
    Connections,
    LateWatch,
    PeerWatch,
    SealedStore,
    close_watches,
    host_identity,
    noted_connections,
    prove,
    refuse_sealed,
)
from onefold.exchange.progress import Waiting, progress_of
from onefold.system.accelerator import collective_backend
from onefold.system.compat import Groups

__all__ = [
    "JoinedGroup",
    "Rendezvous",
    "agree_on_devices",
    "agree_on_name",
    "all_gather_objects",
    "break_off",
    "join_group",
    "tell_end",
]


_log = logging.getLogger("onefold")
_FAREWELL = timedelta(seconds=5)
_SEEN_KEY = "onefold/seen"
_POLL_S = 0.005
_ATTEMPTS = 4
_CONNECTED_S = 2.5
_JOINED, _REFUSED = "joined", "refused"
_MOST_OF_PROOF = 1 << 20
"""Maximum bytes of a message until all have authenticated: an intruder must not fill the memory."""
_GOODBYE_S = 2.0

_stores: dict[tuple[LaunchContext, int], Store] = {}
_sealed: list[Store] = []
"""Stores that PyTorch calls. They are kept here, because PyTorch keeps only their C++ part."""


class Rendezvous:
    """The store through which the processes of a run find each other.

    Args:
        context: how this process was started.
        size: the number of devices that take part; others may have started and left.
        timeout_s: the longest wait for the others.
    """

    def __init__(self, context: LaunchContext, size: int, timeout_s: float) -> None:
        self.context, self.size, self.timeout_s = context, size, timeout_s

    @cached_property
    def store(self) -> Store:
        """The store, created once per process."""
        context, key = self.context, (self.context, self.size)
        if key not in _stores:
            base: Store = (
                # A file without a name, which the kernel opens for this user only: there is no open
                # port, and nothing that could be removed or left behind.
                reach_store(context, self.timeout_s)
                if context.address
                else FileStore(f"/proc/self/fd/{context.store_descriptor}", self.size)
            )
            attempt = ""
            if context.agent_store and not context.one_host:
                agree = load("exchange.attempts").agree_on_attempt
                attempt = agree(base, context, self.size, self.timeout_s)
                base = PrefixStore(attempt, base)
            if context.secret:
                # Include the attempt, so that a value of an earlier one is not valid again.
                base = SealedStore(base, context.secret.encode(), context.run_id + attempt)
                _sealed.append(base)
            _stores[key] = PrefixStore(f"onefold/{context.run_id}", base)
        return _stores[key]

    def apart(self, prefix: str) -> Store:
        """Return the store with its own connection, for a thread that may be blocked there.

        Args:
            prefix: prefix of the keys.
        """
        twin: Store = self.store.underlying_store.clone()  # type: ignore[attr-defined]  # likewise
        if isinstance(twin, SealedStore):
            _sealed.append(twin)
        return PrefixStore(f"onefold/{self.context.run_id}/{prefix}", twin)

    def has_ended(self, rank: int) -> bool:
        """Whether the script of a device ended."""
        progress = progress_of(self.context)
        if progress is not None and self.context.one_host:
            return progress.has_ended(rank)
        return bool(self.store.check([f"ended/{rank}"]))

    def publish(self, topic: str, text: str) -> None:
        """Write a text of this process for all others."""
        self.store.set(f"{topic}/{self.context.rank}", text)

    def all_gather(self, topic: str, text: str) -> list[str]:
        """Write a text of this process, and wait for the texts of all, in rank order."""
        # Write before waiting, or all would wait for each other.
        self.publish(topic, text)
        return self.read({rank: f"{topic}/{rank}" for rank in range(self.size)})

    def read(self, keys: Mapping[int, str]) -> list[str]:
        """Wait for one key of each given rank, and return their values.

        Raises:
            PeerLost: a script ended without writing its key.
            PeerTimeout: a process did not write in time.
        """
        store, context = self.store, self.context

        def is_missing(rank: int) -> bool:
            return not store.check([keys[rank]])

        def missing() -> str:
            ranks = ", ".join(str(rank) for rank in keys if is_missing(rank))
            where = f" (they meet at {context.address})" if context.address else ""
            return f"still missing, of {context.size} devices: {ranks}{where}"

        waiting = Waiting(
            context.rank,
            self.timeout_s,
            # Check the key again after the end: the process may have set it just before.
            ended=lambda rank: self.has_ended(rank) and is_missing(rank),
            host_has_others=context.local_rank > 0,
        )
        for rank in keys:
            while is_missing(rank):
                waiting.check_peers([rank], missing)
                time.sleep(_POLL_S)
        return [refuse_sealed(key, store.get(key)).decode() for key in keys.values()]


def agree_on_devices(meeting: Rendezvous, kind: str, card: str = "") -> None:
    """Compare the devices of all processes, before they connect.

    Processes with two types of device would wait for each other in different exchanges or backends,
    and NCCL rejects two processes on one card without naming either.

    Args:
        meeting: connects all processes.
        kind: type of this process's device: ``cpu``, ``cuda``, or another accelerator.
        card: the card, with the same name in all processes that see it; empty if unknown.

    Raises:
        DisagreementError: a process computes on another type of device, or two on one card.
        PeerTimeout: a process did not join in time.
    """
    texts = meeting.all_gather("kind", f"{kind} {card}")
    kinds, cards = zip(*(text.split(" ", 1) for text in texts), strict=True)
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise DisagreementError(
                f"device {rank} computes on {other}, but device 0 on {kinds[0]}: all devices of a "
                f"run must be of one type. Check that every process sees its GPUs "
                f"(CUDA_VISIBLE_DEVICES), or hide them from all"
            )
        if cards[rank] and (first := cards.index(cards[rank])) < rank:
            raise DisagreementError(
                f"devices {first} and {rank} are the same card, or parts of it ({cards[rank]}), "
                f"but each process needs its own card. Start fewer processes; one process can "
                f"drive several devices of a card with Trainer(devices=[...])"
            )


def agree_on_name(meeting: Rendezvous, trainer: int) -> str:
    """Agree on a name for one Trainer, which the lead draws and no other process can guess.

    Args:
        meeting: connects all processes.
        trainer: number of the Trainer in the script, from 0.

    Raises:
        PeerTimeout: the lead did not join in time.
    """
    key = f"name/{trainer}"
    if meeting.context.rank == 0:
        meeting.store.set(key, secrets.token_hex(16))
    (name,) = meeting.read({0: key})
    return name


class JoinedGroup(NamedTuple):
    """A group that this process joined."""

    group: dist.ProcessGroup
    store: Store
    """The store behind the group, in which failures are reported."""
    connections: Connections
    """The group's TCP connections, which can be cut."""
    watch: PeerWatch
    """Watches the peers on this host."""
    lateness: LateWatch
    """Finds the device that the others wait for."""
    left: Callable[[], list[int]]
    """Lists the devices whose program ended."""


def join_group(meeting: Rendezvous, kind: str, trainer: int) -> JoinedGroup:
    """Join a group of all devices of the run for one Trainer, and prove that all belong to it.

    A group that the script made is left alone; onefold makes its own. A later Trainer gets another
    group, because a failed Trainer's group may be waiting for messages forever.

    Args:
        meeting: connects all processes; its timeout applies to all waits in the group.
        kind: type of the devices.
        trainer: number of the Trainer in the script, from 0.

    Raises:
        DisagreementError: a process does not know the secret of the run.
        PeerError: another process did not join.
        RuntimeError: the connections broke in every attempt.
    """
    context = meeting.context
    if context.network:
        simulated: JoinedGroup = context.network.group(trainer)
        return simulated
    if not context.one_host and not context.secret and context.rank == 0 and trainer == 0:
        _log.warning(
            "this run uses several hosts without a secret, so anyone who reaches them can join it. "
            "Set ONEFOLD_SECRET to the same long random text for every process"
        )
    group, store, connections = _connect(meeting, kind, trainer)
    if not dist.is_initialized():
        # The script has no group of its own, so no other code tears this one down at exit.
        _note_membership(group, meeting)
    # `break_off` unregistered `_leave` if the script survived a failure. Never register it twice.
    if _memberships:
        atexit.unregister(_leave)
        atexit.register(_leave)
    rank = group.rank()
    here = host_identity()
    texts = all_gather_objects(group, json.dumps([here, os.getpid()]).encode())
    # A process id is meaningful only on its own host and in its own namespace.
    found = enumerate(map(json.loads, texts))
    pids = {r: int(pid) for r, (host, pid) in found if host == here and r != rank}
    lateness = LateWatch(store, rank, group.size())
    watch = PeerWatch(pids, connections, lateness)
    return JoinedGroup(group, store, connections, watch, lateness, who_left)


def _connect(
    meeting: Rendezvous, kind: str, trainer: int
) -> tuple[dist.ProcessGroup, Store, Connections]:
    """Connect all processes, and let each prove that it belongs to the run.

    gloo accepts as a peer any process that sends it the peer's number first. An intruder who
    reaches its port while it listens can break the connections in this way; all processes then
    make them again.
    """
    context, timeout_s = meeting.context, meeting.timeout_s
    for attempt in range(1, _ATTEMPTS + 1):
        name = f"{trainer}/{attempt}"
        # Wait for all processes, or the first one would listen for a long time.
        hosts = meeting.all_gather(f"begins/{name}", _address_toward(context.address))
        limit_s = min(timeout_s, _CONNECTED_S * 2**attempt) if attempt < _ATTEMPTS else timeout_s
        group = None
        connections, problem = Connections(), None
        try:
            with noted_connections(connections), gloo_interface(context, hosts):
                group, store = _make_group(meeting, kind, limit_s, trainer, attempt)
            # Prove before every other message, so that nothing from an intruder is used.
            trade = partial(all_gather_objects, group, most=_MOST_OF_PROOF)
            prove(context.proof, group.rank(), trade, connections.ends())
        except RuntimeError as error:
            problem = error
            # Cut what was connected, or the others would wait for this process.
            connections.cut()
        except DisagreementError:
            # Tell the others before raising: they wait for this outcome, and must not try again.
            meeting.publish(f"ends/{name}", _REFUSED)
            raise
        outcomes = meeting.all_gather(f"ends/{name}", str(problem or _JOINED))
        if group is not None and all(outcome == _JOINED for outcome in outcomes):
            # The group was made with the short limit of an attempt. Set the run's limit.
            Groups.set_limit(group, timedelta(seconds=timeout_s))
            return group, store, connections
        connections.cut()
        if group is not None:
            dist.destroy_process_group(group) if dist.is_initialized() else Groups.end(group)
        if _REFUSED in outcomes:
            raise DisagreementError(
                f"device {outcomes.index(_REFUSED)} rejected a process that did not authenticate. "
                f"Set the same ONEFOLD_SECRET for every process of the run, or for none"
            )
        # An intruder may disturb the first attempt, so this alone is no reason to warn.
        level = logging.INFO if attempt == 1 else logging.WARNING
        advice = "check for a firewall, or set GLOO_SOCKET_IFNAME to the right interface"
        _log.log(
            level, "attempt %d to connect all devices failed (%s): %s", attempt, advice, outcomes
        )
    raise problem or RuntimeError(f"the devices could not be connected: {outcomes}")


def _make_group(
    meeting: Rendezvous, kind: str, timeout_s: float, trainer: int, attempt: int
) -> tuple[dist.ProcessGroup, Store]:
    context = meeting.context
    backend = collective_backend(kind)
    limit = timedelta(seconds=timeout_s)
    # Bind the group to this process's GPU. Otherwise NCCL may guess one, and create a context on
    # it.
    index = None if kind == "cpu" else torch.accelerator.current_device_index()
    device = None if index is None else torch.device(kind, index)
    if dist.is_initialized():
        store = Groups.default_store()
        group = dist.new_group(backend=backend, timeout=limit, device_id=device)
        return group, PrefixStore(f"onefold/{context.run_id}/{trainer}", store)
    store = meeting.store
    own = Groups.beside_default(
        backend,
        PrefixStore(f"group/{trainer}/{attempt}", store),
        rank=context.rank,
        size=meeting.size,
        limit=limit,
        device=device,
    )
    return own, PrefixStore(f"trainer/{trainer}", store)


def all_gather_objects(
    group: dist.ProcessGroup, text: bytes, most: int | None = None
) -> list[bytes]:
    """Gather a text of at most ``most`` bytes from every process of a group, in rank order.

    Raises:
        RuntimeError: a process announces a longer text.
    """
    size = group.size()
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    counts = [int(length) for length in lengths]
    # Check the lengths before allocating memory: they come from processes that may be intruders.
    if most is not None and not all(0 <= count <= most for count in counts):
        raise RuntimeError(f"a process announces {counts} bytes, over {most}")
    # all_gather needs one length from all, and frombuffer rejects an empty or a read-only buffer.
    padded = bytearray(text.ljust(max(1, *counts), b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return [part[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]


def tell_end(context: LaunchContext) -> None:
    """Announce that this script ended, because others may wait for a Trainer that it never makes.

    Workers of onefold's launcher on one host note it in `Progress` instead.
    """
    if context.size == 1 or _memberships:
        return
    try:
        Rendezvous(context, context.size, _GOODBYE_S).publish("ended", "1")
    # The launcher is gone, and with it every process that might wait.
    except (RuntimeError, PeerTimeout) as error:
        _log.info("device %d could not report its end: %s", context.rank, error)


def break_off() -> None:
    """Leave without waiting for the others, after a failure or in a forked child."""
    atexit.unregister(_leave)


def who_left() -> list[int]:
    """List the devices whose program ended."""
    return [
        rank
        for meeting, _ in _memberships
        for rank in range(meeting.size)
        if meeting.store.check([_left_key(rank)])
    ]


_memberships: list[tuple[Rendezvous, list[dist.ProcessGroup]]] = []
"""Empty, or one entry: the rendezvous of the run, and a group for each Trainer so far."""


def _note_membership(group: dist.ProcessGroup, meeting: Rendezvous) -> None:
    """Register a process group, to be destroyed with this process's other groups at exit."""
    if not _memberships:
        _memberships.append((meeting, []))
        # A forked child is not the device, so it must not leave in its name.
        os.register_at_fork(after_in_child=break_off)
    _memberships[0][1].append(group)


def _leave() -> None:
    """Leave together, because destroying a group can hang while a peer still uses it.

    After `_FAREWELL`, a process leaves without the others. If they wait for it, its connections
    close, which ends their wait.
    """
    for meeting, groups in _memberships:
        store, rank, size = meeting.store, meeting.context.rank, meeting.size
        try:
            store.set(_left_key(rank), "1")
            store.wait([_left_key(other) for other in range(size)], _FAREWELL)
            # Under PyTorch's launcher the lead may serve the store. It stays until every process
            # has read all keys, or their last read would fail.
            store.add(_SEEN_KEY, 1)
            limit = time.monotonic() + _FAREWELL.total_seconds()
            while rank == 0 and store.add(_SEEN_KEY, 0) < size and time.monotonic() < limit:
                time.sleep(0.002)
        except RuntimeError as error:
            _log.info("the other devices did not end normally: %s", error)
            return
        # Drop every reference to the store while Python still runs. Its threads would otherwise run
        # while the interpreter shuts down.
        close_watches()
        _stores.clear()
        while groups:
            Groups.end(groups.pop())
        _sealed.clear()


def _left_key(rank: int) -> str:
    return f"onefold/left/{rank}"


_TRY_S, _STORE_S = 5.0, 30.0
_PAUSE_S = 0.1


def reach_store(context: LaunchContext, timeout_s: float) -> Store:
    """Serve the store if this is the lead and its launcher does not serve it; else connect to it.

    Raises:
        LaunchError: the port is taken, or the host name is invalid.
        PeerTimeout: no process serves the store at its address.
    """
    host, _, port = context.address.rpartition(":")
    place = (host.strip("[]"), int(port))
    if context.rank == 0 and not context.agent_store:
        return _serve(context, place, timeout_s)
    waiting = Waiting(context.rank, timeout_s, host_has_others=context.local_rank > 0)
    while isinstance(found := _connected(place, timeout_s), str):
        if waiting.is_over:
            raise PeerTimeout(
                f"device {context.rank} did not reach device 0 at {context.address} within "
                f"{timeout_s:g} s: {found}. Set MASTER_ADDR to the machine of device 0, by a name "
                f"or address that every machine knows, and open MASTER_PORT there",
                device=0,
                step=0,
            )
        waiting.say(partial("device 0 cannot be reached at {}: {}".format, context.address, found))
        time.sleep(_PAUSE_S)
    return found


def _connected(place: tuple[str, int], timeout_s: float) -> Store | str:
    """Return the store that is served at an address, or why it is not available."""
    try:
        # PyTorch reports nothing before its own limit, so Python tries first.
        with socket.create_connection(place, timeout=_TRY_S):
            pass
    except UnicodeError:
        raise LaunchError(
            f"MASTER_ADDR must be the name of a machine, but got {place[0]}"
        ) from None
    except socket.gaierror as error:
        return f"the name {place[0]} does not resolve on {socket.gethostname()} ({error.strerror})"
    except ConnectionRefusedError:
        return "no process listens at this port yet"
    except OSError as error:
        return f"no answer ({error.strerror or error}; is there a firewall?)"
    made: list[Store] = []

    def make() -> None:
        limit = timedelta(seconds=timeout_s)
        with suppress(RuntimeError):
            made.append(TCPStore(*place, timeout=limit, wait_for_workers=False))

    # Use a thread: if another program listens at the port and does not answer, PyTorch waits
    # without a limit.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(min(_STORE_S, timeout_s))
    return made[0] if made else "the program that listens there is not a store of PyTorch"


def _serve(context: LaunchContext, place: tuple[str, int], timeout_s: float) -> Store:
    host, port = place
    try:
        with socket.create_server((host, 0)):
            pass
    except OSError:
        # The address may not belong to this machine, but to a service in front of it.
        host = "127.0.0.1"
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            # This constructor would wait without naming a missing process; the keys name it.
            wait_for_workers=False,
            # The script may have created its own store at this port.
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"device 0 cannot open the store of the run at {context.address}: {error}. Set "
            f"MASTER_PORT to a port that is free on its machine"
        ) from None


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_interface(context: LaunchContext, hosts: Sequence[str]) -> Iterator[None]:
    """Bind gloo to the interface through which the other processes reach it.

    On one host this is loopback. On several hosts it is the address of the host's own name, unless
    that is a loopback address, as on Debian. Then it is the interface toward the others, which is
    found for IPv4 only. The user's choice in the environment takes precedence.

    Args:
        context: how this process was started.
        hosts: an address of each process; empty for processes that know none.
    """
    name = "lo" if context.one_host else _interface_toward([context.address, *hosts])
    if not name or _GLOO_INTERFACE in os.environ:
        yield
        return
    # gloo reads the variable while a group is made; init_process_group has no argument for it.
    # Remove it afterwards, because programs that the script starts may make their own groups.
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def _interface_toward(hosts: Sequence[str]) -> str:
    """Return the interface to the first host that is another one; empty if gloo needs none."""
    # If no interface is set, gloo does the same, and falls back to loopback.
    with suppress(OSError), socket.socket() as probe:
        probe.bind((socket.gethostname(), 0))
        if not ip_address(probe.getsockname()[0]).is_loopback:
            return ""
    own = next(filter(None, map(_address_toward, hosts)), "0.0.0.0")
    with socket.socket() as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                # SIOCGIFADDR, the kernel's request for an interface's IPv4 address. It raises if
                # the interface has none.
                found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))
                if found[20:24] == socket.inet_aton(own):
                    return name
    if own != "0.0.0.0":
        _log.info(
            "no interface has %s as its first address: gloo may need %s", own, _GLOO_INTERFACE
        )
    return ""


def _address_toward(place: str) -> str:
    """Return this host's IPv4 address toward a host; empty if none, or if it is loopback."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe, suppress(OSError):
        # Connecting a datagram socket sends nothing; it only chooses a route.
        probe.connect(((place.rpartition(":")[0] or place).strip("[]"), 9))
        own: str = probe.getsockname()[0]
        return "" if ip_address(own).is_loopback else own
    return ""
