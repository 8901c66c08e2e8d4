"""Connects every process of one host with every other one.

The sockets have abstract names: there is no port and no file, and nothing to clean up. Anyone on
the host can list such names, and connect to them. So a name is derived from an address that only
the processes of the run know, both ends look at the other's user, and who connects gives its
number first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

from onefold.errors import PeerLost, PeerTimeout
from onefold.exchange.waiting import Waiting
from onefold.system.process import LOOK_S

__all__ = ["connected", "credentials"]

_HELLO = struct.Struct("<q")
_HELLO_S = 5.0


def connected(
    address: str, rank: int, size: int, timeout_s: float, ended: Callable[[int], bool]
) -> dict[int, socket.socket]:
    """Connect this process with all others; see `Mailbox` for the arguments.

    Returns:
        a socket for messages to each other process, in the order of their numbers.

    Raises:
        PeerTimeout: a process did not connect in time.
        PeerLost: a process ended before it connected.
    """
    dialing = _Dialing(address, rank, timeout_s, ended)
    try:
        dialing.reach_all(size)
    except BaseException:
        for connection in dialing.connections.values():
            connection.close()
        raise
    return dict(sorted(dialing.connections.items()))  # they connect in any order


class _Dialing:
    """What one process does to reach the others."""

    def __init__(
        self, address: str, rank: int, timeout_s: float, ended: Callable[[int], bool]
    ) -> None:
        self.connections: dict[int, socket.socket] = {}
        self._address, self._rank, self._ended = address, rank, ended
        self._timeout_s = timeout_s
        self._limit = time.monotonic() + timeout_s
        self._waiting = Waiting(rank)

    def reach_all(self, size: int) -> None:
        # Everybody listens before connecting to the ranks below, with room for all in the queue: a
        # connect succeeds before its accept, so no circle of processes can wait for each other.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(_socket_name(self._address, self._rank))
            listener.listen(size)
            for rank in range(self._rank):
                self.connections[rank] = self._reach(_socket_name(self._address, rank), rank)
            while missing := sorted(set(range(self._rank + 1, size)) - self.connections.keys()):
                listener.settimeout(min(LOOK_S, max(0.01, self._limit - time.monotonic())))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._check_coming(missing)
                    continue
                who = _hello(connection)
                if who in missing:
                    self.connections[who] = connection
                else:
                    connection.close()

    def _reach(self, name: str, rank: int) -> socket.socket:
        """Connect to a process that listens under a name, once one of this user does."""
        look = time.monotonic() + LOOK_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)  # a full queue would block connect without a limit
            try:
                connection.connect(name)
                if credentials(connection)[1] == os.getuid():
                    connection.send(_HELLO.pack(self._rank))
                    return connection
            except OSError as error:
                if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN, errno.ENOENT):
                    connection.close()
                    raise
            connection.close()
            if time.monotonic() > look:
                look += LOOK_S
                self._check_coming([rank])
            time.sleep(0.005)

    def _check_coming(self, missing: Sequence[int]) -> None:
        self._waiting.look(lambda: f"not yet there: device {', '.join(map(str, missing))}")
        for rank in missing:
            if self._ended(rank):
                raise PeerLost.before_start(rank)
        if time.monotonic() > self._limit:
            raise PeerTimeout(
                f"device {', '.join(map(str, missing))} did not join within {self._timeout_s:g} s. "
                f"Every device must run the same script and make its Trainer",
                device=missing[0],
                step=0,
            )


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _socket_name(address: str, rank: int) -> str:
    """The abstract name under which a device listens; it reveals no other device's name.

    Anyone who lists the names could claim that of a device that has yet to start if it could be
    derived from one that is listed.
    """
    return "\0onefold-" + hashlib.sha256(f"{address}.{rank}".encode()).hexdigest()[:32]


def _hello(connection: socket.socket) -> int | None:
    """The rank of a process that has connected; None for a stranger or a silent one."""
    if credentials(connection)[1] != os.getuid():
        return None
    connection.settimeout(_HELLO_S)
    try:
        (rank,) = _HELLO.unpack(connection.recv(_HELLO.size))
    except (OSError, struct.error):
        return None
    return int(rank)
