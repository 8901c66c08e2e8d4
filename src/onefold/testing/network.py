"""Connects simulated devices: replaces sockets and process groups.

`Mailbox` and `CollectiveTransport`, and everything built on them, run here as between processes: on
sockets of the same kind, and on `_Group` instead of a process group with a real backend.

Note: worst cases of a backend
------------------------------
A sent tensor is read as late as possible, when one end waits for it. Until then, the buffer of the
receiver is filled with bytes of 255, which are NaN in all floating-point dtypes. Reading or
overwriting a buffer too early therefore changes the bits. A message is transferred once both ends
have started; an end that waits before the other has started lets other devices run.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onefold.errors import PeerLost, PeerTimeout
from onefold.exchange.group import JoinedGroup
from onefold.exchange.mailbox import Mailbox, Peer
from onefold.system.compat import Groups
from onefold.system.process import StoppedProcess
from onefold.testing.scheduler import Scheduler

__all__ = ["Connection", "Network"]


class Network:
    """Connects the devices of a simulated run.

    Args:
        devices: number of devices.
        scheduler: runs the devices one at a time.
        limit_s: timeout of waits in seconds, only used in messages: see `Scheduler`.
    """

    def __init__(self, devices: int, scheduler: Scheduler, limit_s: float) -> None:
        self.size, self.scheduler, self.limit_s = devices, scheduler, limit_s
        self.stores: dict[int, dict[str, bytes]] = {}
        self._seen: dict[int, dict[int, Any]] = {}
        self._sockets: dict[tuple[int, int], list[socket.socket]] = {}
        self._broken: set[int] = set()
        self.broken_in: set[tuple[int, int]] = set()
        """Pairs of a Trainer and a device whose connections are broken for that Trainer only."""
        self.groups: list[_Group] = []
        self.left: list[int] = []
        """Devices whose script has ended normally."""
        self.asked: set[int] = set()
        """Trainers in which a device has reported a hang, over a process group."""
        # Each Trainer needs two sockets per pair of devices: more than the usual limit of a
        # process.
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1],) * 2)

    def cut(self, number: int) -> None:
        """Break all connections of a device."""
        self._broken.add(number)
        for ends, made in self._sockets.items():
            for each in made if number in ends else ():
                with suppress(OSError):  # its Trainer has already closed it
                    each.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Close the sockets that devices did not close themselves, such as a stopped one's."""
        for made in self._sockets.values():
            for each in made:
                each.close()
        for group in self.groups:
            Groups.forget(group)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def is_broken(self, trainer: int, number: int) -> bool:
        """Whether a device's connections over a process group are broken."""
        return number in self._broken or (trainer, number) in self.broken_in

    def meet(self, trainer: int, number: int, given: Any) -> dict[int, Any]:
        """Wait until all devices create a Trainer; return each device's object."""
        seen = self._seen.setdefault(trainer, {})
        seen[number] = given

        def missing() -> list[int]:
            return [n for n in range(self.size) if n not in seen]

        def ended() -> list[int]:
            return [n for n in missing() if self.scheduler.states[n].is_over]

        self.scheduler.begin_call(number)
        came = self.scheduler.wait(number, lambda: not missing() or bool(ended()))
        if ended():
            raise PeerLost.before_start(ended()[0])
        if not came:
            raise PeerTimeout(
                f"device {', '.join(map(str, missing()))} did not join: every device must run the "
                f"same script and create its Trainer",
                device=missing()[0],
                step=0,
            )
        return seen

    def socket(self, trainer: int, one: int, other: int) -> socket.socket:
        """Return a device's end of its connection to another one, separate for each Trainer."""
        own = self._sockets.setdefault((one, other), [])
        theirs = self._sockets.setdefault((other, one), [])
        while len(own) <= trainer:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end, ends in ((here, own), (there, theirs)):
                end.setblocking(False)
                ends.append(end)
            if self._broken & {one, other}:
                here.shutdown(socket.SHUT_RDWR)
        return own[trainer]


@dataclass(frozen=True)
class Connection:
    """One device's part of the network."""

    network: Network
    number: int
    trainers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of the device's Trainers."""

    def mailbox(self, trainer: int) -> Mailbox:
        """Connect the device with all others, like processes of one host."""
        self.network.meet(trainer, self.number, None)
        return _Mailbox(self.network, trainer, self.number)

    def group(self, trainer: int) -> JoinedGroup:
        """Join a process group of all devices."""
        network = self.network
        groups = network.meet(trainer, self.number, _Group(network, trainer, self.number))
        group: _Group = groups[self.number]
        group.peers = groups
        beside: Any = _NetworkStore(network, trainer, self.number)
        return JoinedGroup(group, beside, beside, beside, beside, left=lambda: network.left)


class _Stopped(StoppedProcess):
    """Whether a device is suspended forever."""

    def __init__(self, network: Network, number: int) -> None:
        self._seat = network.scheduler.states[number]

    def sample_state(self) -> bool:
        return self._seat.is_stopped


class _Mailbox(Mailbox):
    """A mailbox that lets other devices run while it waits."""

    def __init__(self, network: Network, trainer: int, rank: int) -> None:
        self._network = network
        peers = {
            n: Peer(n, network.socket(trainer, rank, n), os.getpid(), None, _Stopped(network, n))
            for n in range(network.size)
            if n != rank
        }
        super().__init__(peers, rank=rank, timeout_s=network.limit_s)

    def _send(self, peer: Peer, frame: bytes) -> None:
        self._network.scheduler.begin_call(self.rank)
        super()._send(peer, frame)

    def send_file(self, rank: int, descriptor: int) -> None:
        self._network.scheduler.begin_call(self.rank)
        super().send_file(rank, descriptor)

    def _wait_for_news(self, peers: list[Peer], limit: float) -> bool:
        if self._network.scheduler.wait(self.rank, lambda: self._wait_readable(peers, 0)):
            return True
        for peer in peers:
            self._look_at(peer)
        raise self._late(peers)


class _Sent:
    """A tensor in transit between two devices."""

    def __init__(self, network: Network, trainer: int, source: int, target: int) -> None:
        self._network, self._trainer, self._ends = network, trainer, (source, target)
        self.source: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self.is_done = False

    @property
    def _is_lost(self) -> bool:
        states, is_broken = self._network.scheduler.states, self._network.is_broken
        return any(is_broken(self._trainer, n) or states[n].is_over for n in self._ends)

    def finish(self, number: int) -> None:
        """Wait, as one of the two ends, until the tensor is transferred."""
        scheduler = self._network.scheduler
        scheduler.begin_call(number)
        came = scheduler.wait(number, lambda: self.is_done or self._has_both or self._is_lost)
        if self.is_done:
            return
        if self.source is None or self.target is None:
            why = "Connection closed by peer" if came else "Timed out waiting for a peer"
            raise RuntimeError(why)
        self.target.copy_(self.source)
        self.is_done = True
        self.source = self.target = None

    @property
    def _has_both(self) -> bool:
        return self.source is not None and self.target is not None


class _Work(NamedTuple):
    """The handle that a process group returns for a message."""

    message: _Sent
    number: int

    def wait(self, limit: timedelta | None = None) -> bool:
        self.message.finish(self.number)
        return True

    def is_completed(self) -> bool:
        return self.message.is_done


class _Group(dist.ProcessGroup):
    """The process group of one device, with the methods that onefold calls."""

    def __init__(self, network: Network, trainer: int, rank: int) -> None:
        super().__init__(rank, network.size)  # type: ignore[call-arg]
        self._network, self._trainer, self._number = network, trainer, rank
        self._others = [n for n in range(network.size) if n != rank]
        self.peers: Mapping[int, _Group] = {}
        self._with: dict[int, list[_Sent]] = {n: [] for n in range(network.size)}
        """Messages from this device to each other one, in order."""
        self._begun: Counter[tuple[bool, int]] = Counter()
        Groups.adopt(self, network.size)
        network.groups.append(self)

    def _next(self, source: int, target: int) -> _Sent:
        """Return the next message that this device starts, as one of its ends."""
        if any(self._network.is_broken(self._trainer, n) for n in (source, target)):
            return _Sent(self._network, self._trainer, source, target)  # it has no other end
        sends = source == self._number
        end = sends, target if sends else source
        place = self._begun[end]
        self._begun[end] += 1
        messages = self.peers[source]._with[target]
        while len(messages) <= place:
            messages.append(_Sent(self._network, self._trainer, source, target))
        return messages[place]

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> _Work:  # type: ignore[override]
        message = self._next(self._number, target)
        (message.source,) = tensors
        return _Work(message, self._number)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> _Work:  # type: ignore[override]
        message = self._next(source, self._number)
        (message.target,) = tensors
        message.target.view(torch.uint8).fill_(255)
        return _Work(message, self._number)

    def allgather(self, rooms: Any, tensors: list[torch.Tensor], options: Any = None) -> None:  # type: ignore[override]
        (parts,), (own,) = rooms, tensors
        parts[self._number].copy_(own)
        works = [self.send([own], n) for n in self._others]
        works += [self.recv([parts[n]], n) for n in self._others]
        for work in works:
            work.wait()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:  # type: ignore[override]
        lead = options.rootRank
        if self._number != lead:
            self.recv(tensors, lead).wait()
            return
        for work in [self.send(tensors, n) for n in self._others]:
            work.wait()


@dataclass(frozen=True)
class _NetworkStore:
    """The store of a process group, and its watchdogs.

    Replaces `Store`, `Connections`, `PeerWatch` and `LateWatch`. All devices share the store,
    except those with broken connections.
    """

    network: Network
    trainer: int
    number: int

    @property
    def _values(self) -> dict[str, bytes]:
        return self.network.stores.setdefault(self.trainer, {})

    def set(self, key: str, value: str) -> None:
        if self.network.scheduler.states[self.number].is_killed:
            return
        if self.network.is_broken(self.trainer, self.number):
            raise RuntimeError("Connection to the store is broken")
        self._values[key] = value.encode()

    def compare_set(self, key: str, expected: str, value: str) -> None:
        if self._values.get(key, b"") == expected.encode():
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        if not all(key in self._values for key in keys):
            raise RuntimeError("a key is not set")

    def cut(self) -> None:
        self.network.broken_in.add((self.trainer, self.number))

    @property
    def pids(self) -> dict[int, int]:
        return dict.fromkeys(range(self.network.size), os.getpid())

    @property
    def stopped(self) -> int | None:
        states = enumerate(self.network.scheduler.states)
        return next((n for n, state in states if state.is_stopped), None)

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def say_waiting(self, *, in_vain: bool = False) -> None:
        if in_vain:
            self.network.asked.add(self.trainer)

    def late(self) -> list[int]:
        if self.trainer not in self.network.asked:
            return []
        return [n for n in self.network.scheduler.late() if n != self.number]
