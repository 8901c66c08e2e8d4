"""The connections of a process group, so that they can be cut, and peers that no longer respond.

Note: why connections are cut
-----------------------------
A process that waits in gloo hears of another one in two ways: its message comes, or the connection
ends. A peer that is stopped, or that has failed and lives on (a notebook), does neither. gloo
offers no way to end a wait from outside: aborting a group leaves the waits that are under way. So
the sockets that came to be while the group was made are remembered. Who fails shuts its own down,
and who sees that a peer has been stopped likewise: then every wait ends with an error, at once.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from onefold.exchange.lateness import Lateness
from onefold.system.process import LOOK_S, Stillness

__all__ = ["Connections", "PeerWatch", "close_watches", "host_identity", "noted_connections"]


class Connections:
    """Sockets of this process, by descriptor and inode."""

    def __init__(self) -> None:
        self.sockets: dict[int, str] = {}

    def cut(self) -> None:
        """End them, in both directions: whoever waits for a message on them gets an error."""
        for descriptor, inode in self.sockets.items():
            with _copy_of(descriptor, inode) as copy:
                try:
                    if copy is not None:
                        copy.shutdown(socket.SHUT_RDWR)
                except OSError:  # its other end has gone before
                    continue
        self.sockets = {}


@contextmanager
def noted_connections(connections: Connections) -> Iterator[None]:
    """Add the TCP connections that come to be inside the block."""
    before = _connected()
    yield
    after = _connected()
    new = {fd: inode for fd, inode in after.items() if before.get(fd) != inode}
    connections.sockets.update(new)


class PeerWatch:
    """Looks, from a thread, whether a process of this host has been stopped, and ends the waits.

    The same thread answers others that ask who waits.

    Args:
        pids: process id of each peer on this host, by its rank.
        connections: what to cut.
        lateness: what answers.
    """

    def __init__(
        self, pids: Mapping[int, int], connections: Connections, lateness: Lateness
    ) -> None:
        self.stopped: int | None = None
        """Rank of a peer that was found stopped."""
        self.pids = dict(pids)
        self._connections = connections
        self._lateness: Lateness | None = lateness
        self._end = threading.Event()
        self._peers = {rank: Stillness(pid) for rank, pid in pids.items()}
        _watches.add(self)
        threading.Thread(target=self._watch, name="onefold peers", daemon=True).start()

    def close(self) -> None:
        """End the thread, and let go of the store."""
        self._end.set()
        self._lateness = None

    def _watch(self) -> None:
        while not self._end.wait(LOOK_S):
            for rank, peer in self._peers.items():
                if peer.look():
                    self.stopped = rank
                    self._connections.cut()
                    return
            if not any(peer.is_still for peer in self._peers.values()):  # it may hold the store
                self._answer()

    def _answer(self) -> None:
        lateness = self._lateness
        try:
            if lateness is not None:
                lateness.look()
        except RuntimeError:  # the store has gone: nobody asks in it any more
            self._lateness = None


_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


def close_watches() -> None:
    """Close those of Trainers that nobody has closed."""
    for watch in list(_watches):
        watch.close()


def host_identity() -> str:
    """The same for two processes that see each other under their process ids, and for no others."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _connected() -> dict[int, str]:
    """Descriptors of this process's connected TCP sockets, and their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        inode = _inode_of(descriptor)
        if inode.startswith("socket:") and _is_connected(descriptor, inode):
            found[descriptor] = inode
    return found


def _inode_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # it was closed in between
        return ""


@contextmanager
def _copy_of(descriptor: int, inode: str) -> Iterator[socket.socket | None]:
    """The socket under a descriptor of its own; None if the number is no longer that socket's.

    A backend closes its sockets from threads of its own, at any time: so the copy is made first,
    which nobody else closes, and looked at afterwards.
    """
    try:
        own = os.dup(descriptor)
    except OSError:  # it was closed in between
        yield None
        return
    if _inode_of(own) != inode:
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as copy:
        yield copy


def _is_connected(descriptor: int, inode: str) -> bool:
    with _copy_of(descriptor, inode) as copy:
        try:
            if copy is None:
                return False
            copy.getpeername()
        except OSError:
            return False
        return copy.family in (socket.AF_INET, socket.AF_INET6)
