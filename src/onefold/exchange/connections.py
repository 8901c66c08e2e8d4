"""Cuts the connections of a failed process group, and finds the device that all others wait for.

`Connections` can be cut when this process fails or a peer stops responding, which `PeerWatch`
notices. `LateWatch` finds out which device all others wait for.

Note: why connections are cut
-----------------------------
A wait in gloo ends in one of two ways: the message comes, or the connection ends. A peer that is
stopped, or that has failed and lives on (a notebook), causes neither. gloo offers no way to end a
wait from outside: aborting a group leaves the waits that are under way. So the sockets that were
opened while the group was made are remembered. A process that fails shuts its own down, and so does
one that finds a peer stopped: then every wait ends with an error, at once.

Note: a descriptor is only a number
-----------------------------------
The backend closes its sockets when it likes, from threads of its own, and the kernel gives the
number to the next file that is opened. So every socket is known by its inode as well, and nothing
is done through the number itself: it is duplicated first, as nobody else closes the copy, and the
copy is used only if its inode is the right one (see `_copy_of`).

Note: who is late
-----------------
A backend that times out does not say for whom it waited: in a collective call all wait for all. So
the device that gives up asks in the store, and every device that waits as well answers, from a
thread. A device that computes, or hangs in the script, does not wait and does not answer: it is
late. One that only had to send may rightly have gone on computing, and is named beside the late
one.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported

from onefold.system.process import LOOK_S, StoppedProcess

__all__ = [
    "Connections",
    "LateWatch",
    "PeerWatch",
    "close_watches",
    "host_identity",
    "noted_connections",
]


_ASKED_KEY = "onefold/who-waits"
_CLOSE_S = 2.0
ANSWERS_S = LOOK_S
"""How long to wait for answers; whoever asks has already waited for a failure to be reported."""


class LateWatch:
    """Asks which device is late, and answers for this one.

    Args:
        store: the store behind the group.
        rank: number of this device.
        size: how many devices there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        # Written by the main thread and read by the watch's: a bool needs no lock for that.
        self._waits = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this device waits for others inside the block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def answer_peers(self) -> None:
        """Answer if some device has asked; called every `LOOK_S`, from a thread.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._waits and self.is_asked():
            self.say_waiting()

    def is_asked(self) -> bool:
        """Whether a device has timed out and asked who waits."""
        return bool(self._store.check([_ASKED_KEY]))

    def say_waiting(self, *, in_vain: bool = False) -> None:
        """Answer that this device waits, or did until now; if in vain, ask who else does.

        Raises:
            RuntimeError: the store is gone.
        """
        if in_vain:
            self._store.set(_ASKED_KEY, "1")
        self._store.set(_waits_key(self._rank), "1")

    def late(self) -> list[int]:
        """List the devices that do not answer within `ANSWERS_S`, if any device has asked.

        Raises:
            RuntimeError: the store is gone.
        """
        if not self.is_asked():
            return []
        until = time.monotonic() + ANSWERS_S
        keys = {rank: _waits_key(rank) for rank in range(self._size)}
        while True:
            # Taken before the look, so that the last look comes after the end of the time.
            at_an_end = time.monotonic() > until
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if at_an_end or not missing:
                return missing
            time.sleep(0.05)


def _waits_key(rank: int) -> str:
    return f"onefold/waits/{rank}"


class Connections:
    """Sockets of this process that can be cut, by descriptor and inode."""

    def __init__(self) -> None:
        self.sockets: dict[int, str] = {}

    def ends(self) -> list[tuple[str, str]]:
        """Address and port of both ends of each that is still connected, its own first."""
        found = []
        for descriptor, inode in self.sockets.items():
            with _copy_of(descriptor, inode) as copy, suppress(OSError):
                if copy is not None:
                    found.append((_place(copy.getsockname()), _place(copy.getpeername())))
        return found

    def cut(self) -> None:
        """Shut them down in both directions: whoever waits for a message on them gets an error."""
        for descriptor, inode in self.sockets.items():
            # An error if the other end was gone already.
            with _copy_of(descriptor, inode) as copy, suppress(OSError):
                if copy is not None:
                    copy.shutdown(socket.SHUT_RDWR)
        self.sockets = {}


@contextmanager
def noted_connections(connections: Connections) -> Iterator[None]:
    """Add the TCP connections that are opened inside the block."""
    # By inode, as a number that was free before may be another socket's afterwards.
    before = _connected()
    yield
    connections.sockets.update(_connected().items() - before.items())


class PeerWatch:
    """Watches from a thread for a stopped process on this host, and ends all waits for it.

    The same thread answers peers that ask who is waiting; see `LateWatch`.

    Args:
        pids: process id of each peer on this host, by its rank.
        connections: the connections to cut.
        lateness: answers the peers.
    """

    def __init__(
        self, pids: Mapping[int, int], connections: Connections, lateness: LateWatch
    ) -> None:
        # Set by the thread before it cuts, read by the main thread after its wait has ended.
        self.stopped: int | None = None
        """Rank of the peer that was found stopped, if any."""
        self.pids = dict(pids)
        self._connections = connections
        self._lateness: LateWatch | None = lateness
        self._end = threading.Event()
        self._peers = {rank: StoppedProcess(pid) for rank, pid in pids.items()}
        # A daemon, so that a script that never closes its Trainer can end.
        self._thread = threading.Thread(target=self._watch, name="onefold peers", daemon=True)
        _watches.add(self)
        self._thread.start()

    def close(self) -> None:
        """Have the thread end, and drop the store."""
        self._end.set()
        self._lateness = None

    def join(self, limit_s: float) -> None:
        """Wait for the end of the thread, which a stopped store may keep waiting."""
        self._thread.join(limit_s)

    def _watch(self) -> None:
        while not self._end.wait(LOOK_S):
            for rank, peer in self._peers.items():
                if peer.sample_state():
                    # Before the cut: whoever it wakes reads this to explain the error.
                    self.stopped = rank
                    self._connections.cut()
                    return
            # A peer found stopped may serve the store, and asking it would hang this thread.
            if not any(peer.is_still for peer in self._peers.values()):
                self._answer()

    def _answer(self) -> None:
        lateness = self._lateness  # `close` may drop it meanwhile, from the main thread
        try:
            if lateness is not None:
                lateness.answer_peers()
        except RuntimeError:  # the store is gone: nobody can ask there any more
            self._lateness = None


_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@atexit.register
def close_watches() -> None:
    """Close the watches of all Trainers, and wait for their threads.

    A thread that comes back from PyTorch while Python ends would abort the process.
    """
    watches = list(_watches)  # a thread that runs holds its watch
    for watch in watches:
        watch.close()
    limit = time.monotonic() + _CLOSE_S
    for watch in watches:
        watch.join(max(0.0, limit - time.monotonic()))


def host_identity() -> str:
    """A text that two processes share exactly if they see each other's process ids."""
    # The boot names the machine; a container on it may have process ids of its own.
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _connected() -> dict[int, str]:
    """Descriptors of this process's connected TCP sockets, and their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        inode = _inode_of(descriptor)
        if not inode.startswith("socket:"):
            continue
        # The name of the other end is an error where there is none.
        with _copy_of(descriptor, inode) as copy, suppress(OSError):
            if copy is not None and copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.getpeername()
                found[descriptor] = inode
    return found


def _place(address: tuple[object, ...]) -> str:
    """Host and port, alike at both ends: an address of IPv4 may be written as one of IPv6."""
    host = str(address[0]).partition("%")[0].removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _inode_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # it was closed in between
        return ""


@contextmanager
def _copy_of(descriptor: int, inode: str) -> Iterator[socket.socket | None]:
    """Yield the socket under a descriptor of our own; None if the number is not its any more."""
    try:
        own = os.dup(descriptor)
    except OSError:  # it was closed in between
        yield None
        return
    # Compared on the copy: between a look at the original and `dup` the number could change hands.
    if _inode_of(own) != inode:
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as copy:
        yield copy
