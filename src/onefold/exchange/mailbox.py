"""Connects all processes of a host, for short messages and for prompt notice of a dead process.

Every process has a socket to every other one. The kernel closes the sockets of a process when it
ends, for whatever reason; if a child still holds a copy, a pidfd reports the end anyway. So a
process that waits detects a dead peer at once.

`connected` connects every process of one host with every other one. The sockets have abstract
names: there is no port and no file, and nothing to clean up. Any user of the host can list such
names, and connect to them. So a name is derived from an address that only the processes of the run
know, both ends check the other's user, and the connecting process sends its number first.

Note: the last message of a peer
--------------------------------
A process that fails sends the reason and hangs up at once. If it leaves messages unread, the kernel
reports a reset connection before it delivers what the process sent. The kernel also reports an end
of stream too early if a reader finds no message just before the process sends its last one and
hangs up. So neither is final until a second read finds nothing (see `_read`, `_explain_unsent`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import struct
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import msgspec

from onefold.errors import DisagreementError, PeerLost, PeerTimeout
from onefold.exchange.progress import NoteWait, Waiting
from onefold.exchange.transport import Failure, Ranks, has_left
from onefold.system.process import LOOK_S, StoppedProcess

__all__ = ["Mailbox", "Peer", "connected", "socket_name"]


_ARRIVED, _FILE, _FAILED, _LEAVING = b"A", b"file", b"F", b"L"
_SPIN_S = 60e-6
_FRAME_BYTES = 64 * 1024


@dataclass(slots=True)
class Peer:
    """The connection to another process."""

    number: int
    socket: socket.socket
    pid: int
    pidfd: int | None
    stillness: StoppedProcess
    has_left: bool = False
    """Whether the peer announced a normal end."""
    frames: deque[bytes] = field(default_factory=deque)
    files: deque[int] = field(default_factory=deque)
    """Descriptors that arrived with frames."""


class Mailbox:
    """Connects this process to all other processes of the run on this host.

    Args:
        peers: connections to the others, by their numbers; closed with the mailbox.
        rank: number of this process.
        timeout_s: the longest wait of any call.
    """

    def __init__(self, peers: Mapping[int, Peer], *, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self.timeout_s = timeout_s
        self._is_late = False
        self.note_wait: NoteWait = lambda peer: None
        """Called with the device for which this one waits, and with None when the wait ends."""
        self.step = 1
        """Step of the run, for error messages; set by the owner of the mailbox."""
        # Spinning saves a wake-up, but starves the peer if there are more processes than cores.
        self._spin_s = _SPIN_S if self.size <= len(os.sched_getaffinity(0)) else 0.0
        self._peers = dict(peers)
        self._closed = False
        self._failure = ""
        _let_go_in_children(self)

    def all_gather_bytes(self, message: bytes = b"", among: Ranks = None) -> list[bytes]:
        """Wait until every process makes this call; return the messages of all, in rank order.

        Args:
            message: a short message of this process.
            among: ranks of the processes that take part, in ascending order; all by default.

        Raises:
            PeerLost, PeerFailed, PeerTimeout: a process ended, failed, or did not make the call in
                time.
            OnefoldError: this mailbox is closed.
        """
        self._check_open()
        frame = _ARRIVED + message
        # Send to all before waiting for any, or two processes would wait for each other's message.
        ranks = range(self.size) if among is None else among
        others = [self._peers[rank] for rank in ranks if rank != self.rank]
        for peer in others:
            self._send(peer, frame)
        frames = self._receive_each(others, _ARRIVED)
        frames[self.rank] = frame
        return [frames[rank][1:] for rank in ranks]

    def _receive_each(self, peers: Iterable[Peer], kind: bytes) -> dict[int, bytes]:
        """Wait for one frame of a kind from each of the given peers."""
        try:
            return self._received(peers, kind)
        finally:
            if self._is_late:
                self._is_late = False
                self.note_wait(None)

    def _received(self, peers: Iterable[Peer], kind: bytes) -> dict[int, bytes]:
        pending, found = list(peers), dict[int, bytes]()
        spin_until = time.monotonic() + self._spin_s
        limit = time.monotonic() + self.timeout_s
        while True:
            for peer in list(pending):
                self._drain(peer)
                if peer.frames:
                    frame = found[peer.number] = peer.frames.popleft()
                    # Messages of one sender stay in order, so a frame of another kind belongs to
                    # another call; it is not a late frame of this one.
                    if not frame.startswith(kind):
                        raise DisagreementError(
                            f"device {peer.number} and device {self.rank} made different trainer "
                            f"calls (step {self.step}): all devices must make the same calls in "
                            f"the same order"
                        )
                    pending.remove(peer)
            if not pending:
                return found
            if time.monotonic() > spin_until:
                if not self._wait_for_news(pending, limit):
                    self._is_late = True
                    self.note_wait(pending[0].number)
            else:
                # Yield, because the peer may be waiting for this core.
                os.sched_yield()

    def send_file(self, rank: int, descriptor: int) -> None:
        """Send an open file to a process."""
        self._check_open()
        peer = self._peers[rank]
        try:
            socket.send_fds(peer.socket, [_FILE], [descriptor])
        except OSError as error:
            self._explain_unsent(error, peer)

    def receive_file(self, rank: int) -> int:
        """Receive an open file, which must be the next frame from the process."""
        self._check_open()
        peer = self._peers[rank]
        self._receive_each([peer], _FILE)
        return peer.files.popleft()

    def tell_failure(self, failure: BaseException) -> None:
        """Report to every peer that this process failed, and why."""
        report = Failure.of(failure, device=self.rank, step=self.step)
        # Keep the first failure, because later ones usually follow from it.
        self._failure = self._failure or report.words
        self._tell(_FAILED + msgspec.json.encode(report))

    def tell_end(self) -> None:
        """Report to every peer that this process ends normally, and was not killed."""
        self._tell(_LEAVING)

    def _tell(self, frame: bytes) -> None:
        for peer in self._peers.values():
            # Never block here: a dead peer, or one with a full queue, must not delay the others.
            with contextlib.suppress(OSError):
                peer.socket.send(frame, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close every connection. May be called again."""
        self._closed = True
        for peer in self._peers.values():
            peer.socket.close()
            for descriptor in (*peer.files, *([] if peer.pidfd is None else [peer.pidfd])):
                os.close(descriptor)
        self._peers = {}

    def _check_open(self) -> None:
        if self._closed:
            raise has_left(self._failure)

    def _drain(self, peer: Peer) -> bool:
        """Queue the next frame from a peer without waiting; return whether there was one."""
        try:
            frame, files = _read(peer.socket)
        except BlockingIOError:
            return False
        if frame.startswith(_FAILED):
            raise msgspec.json.decode(frame[1:], type=Failure).error()
        if frame == _LEAVING:
            peer.has_left = True
            # No caller expects this frame, so look for the next one.
            return self._drain(peer)
        # End of stream. Queued frames are still valid, so raise only after they are used.
        if not frame:
            if not peer.frames:
                self._raise_ended(peer)
            return False
        peer.frames.append(frame)
        peer.files += files
        return True

    def _wait_for_news(self, peers: list[Peer], limit: float) -> bool:
        """Wait at most `LOOK_S`; return whether a peer sent something or ended."""
        if self._wait_readable(peers, LOOK_S):
            return True
        # A stopped peer neither sends nor ends, so only its process state shows it.
        for peer in peers:
            self._look_at(peer)
        if time.monotonic() > limit:
            raise self._late(peers)
        return False

    def _late(self, peers: list[Peer]) -> PeerTimeout:
        names = ", ".join(f"{peer.number} (process {peer.pid})" for peer in peers)
        return PeerTimeout.in_step(
            f"device {names}",
            device=peers[0].number,
            timeout_s=self.timeout_s,
            waiting=self.rank,
            step=self.step,
        )

    def _wait_readable(self, peers: list[Peer], within_s: float) -> bool:
        """Return whether a peer sent something or ended."""
        poller = select.poll()
        ends: dict[int, Peer] = {}
        for peer in peers:
            poller.register(peer.socket, select.POLLIN)
            if peer.pidfd is not None:
                ends[peer.pidfd] = peer
                poller.register(peer.pidfd, select.POLLIN)
        events = poller.poll(1000 * within_s)
        ready = {descriptor for descriptor, _ in events}
        for descriptor in ready & ends.keys():
            peer = ends[descriptor]
            # The process ended, but its socket is open in a child. It may have sent between poll's
            # checks of the socket and of the pidfd, so read once more before calling it lost.
            if peer.socket.fileno() not in ready:
                self._drain(peer)
                if not peer.frames:
                    self._raise_ended(peer)
        return bool(events)

    def _look_at(self, peer: Peer) -> None:
        if peer.stillness.sample_state():
            raise PeerLost.stopped(peer.number, peer.pid, waiting=self.rank, step=self.step)

    def _raise_ended(self, peer: Peer) -> NoReturn:
        how = (
            "ended: its script finished before the others', or closed its Trainer"
            if peer.has_left
            else "ended without a reason: it was killed (by a user, or by the system for lack of "
            "memory), called os._exit, or dropped its Trainer"
        )
        what = f"(process {peer.pid}) {how}"
        raise PeerLost.in_step(peer.number, what, waiting=self.rank, step=self.step)

    def _send(self, peer: Peer, frame: bytes) -> None:
        try:
            peer.socket.send(frame)
        except OSError as error:
            self._explain_unsent(error, peer)

    def _explain_unsent(self, error: OSError, peer: Peer) -> NoReturn:
        """Replace an error of the socket by one that reports the state of the peer."""
        # SO_SNDTIMEO expired: the peer's queue was full for the whole limit.
        if isinstance(error, BlockingIOError):
            raise self._late([peer]) from None
        if not isinstance(error, ConnectionError):
            raise error
        # Read everything before raising: the reason comes last (see the note at the head).
        while self._drain(peer):
            continue
        self._raise_ended(peer)


def _read(connection: socket.socket) -> tuple[bytes, array[int]]:
    """Return the next message and its descriptors; empty after the peer has hung up.

    See the note at the head.
    """
    files = array("i")
    # Read twice, because a first reset or end of stream may hide a message that is still queued.
    for _ in range(2):
        try:
            beside = socket.CMSG_LEN(files.itemsize)
            found = connection.recvmsg(_FRAME_BYTES, beside, socket.MSG_DONTWAIT)
            for _, _, numbers in found[1]:
                files.frombytes(numbers)
            if found[0]:
                return found[0], files
        except ConnectionError:
            continue
    return b"", files


_open_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _let_go_in_children(mailbox: Mailbox) -> None:
    """Close the sockets in forked children, so that peers notice when the parent ends."""
    if not _open_mailboxes:
        os.register_at_fork(after_in_child=_close_all)
    _open_mailboxes.add(mailbox)


def _close_all() -> None:
    for mailbox in list(_open_mailboxes):
        mailbox.close()


def _peer(number: int, connection: socket.socket, timeout_s: float) -> Peer:
    # Use the kernel's timeout: Python's would make the socket non-blocking permanently.
    connection.setblocking(True)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    pid, _ = credentials(connection)
    peer = Peer(number, connection, pid, None, StoppedProcess(pid))
    # Old kernels have no pidfd, and the process id of a peer in another namespace is not visible.
    # Then only the socket shows that the peer ended.
    with contextlib.suppress(OSError):
        peer.pidfd = os.pidfd_open(pid)
    return peer


_HELLO = struct.Struct("<q")
_HELLO_S = 5.0


def connected(
    address: str,
    rank: int,
    size: int,
    timeout_s: float,
    ended: Callable[[int], bool] = lambda rank: False,
) -> dict[int, Peer]:
    """Connect this process with all others.

    Args:
        address: known only to the processes of this run: a process that guesses it could claim it.
        rank: number of this process.
        size: number of processes.
        timeout_s: the longest wait for another process, here and in later calls.
        ended: whether the script of a process ended, so that it will never connect.

    Returns:
        The connection to each other process, in the order of their numbers.

    Raises:
        PeerTimeout: a process did not connect in time.
        PeerLost: a process ended before it connected.
    """
    connections: dict[int, socket.socket] = {}
    waiting = Waiting(rank, timeout_s, ended=ended)
    try:
        # Every process listens before it connects to lower ranks, with a queue for all. A connect
        # succeeds before its accept, so processes cannot wait for each other in a circle.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(socket_name(address, rank))
            listener.listen(size)
            for other in range(rank):
                check_run = partial(waiting.check_peers, [other])
                connections[other] = _reach(socket_name(address, other), rank, check_run)
            while missing := sorted(set(range(rank + 1, size)) - connections.keys()):
                listener.settimeout(LOOK_S)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    waiting.check_peers(missing)
                    continue
                who = _hello(connection)
                # Also refuse a second connection that claims the same rank: the first one stays.
                if who in missing:
                    connections[who] = connection
                else:
                    connection.close()
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    # Processes connect in any order, so sort them.
    return {n: _peer(n, each, timeout_s) for n, each in sorted(connections.items())}


def _reach(name: str, rank: int, check_run: Callable[[], None]) -> socket.socket:
    """Connect to a process that listens under a name, once a process of this user does.

    Args:
        name: name of the socket.
        rank: number of this process, which it sends first.
        check_run: called repeatedly; raises if waiting is pointless.
    """
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Do not block: a full queue would block connect without a limit.
        connection.setblocking(False)
        try:
            connection.connect(name)
            # Check the user before sending: another user could listen under this name.
            if credentials(connection)[1] == os.getuid():
                connection.send(_HELLO.pack(rank))
                return connection
        except OSError as error:
            # These errors mean that the process does not listen yet, or that its queue is full: try
            # again.
            if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN, errno.ENOENT):
                connection.close()
                raise
        connection.close()
        check_run()
        time.sleep(0.005)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and user id of the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def socket_name(address: str, rank: int) -> str:
    """Return the abstract name under which a device listens.

    The name is a hash, so that it does not reveal the other devices' names: otherwise a user who
    lists the names could claim the name of a device that has not started yet.
    """
    return "\0onefold-" + hashlib.sha256(f"{address}.{rank}".encode()).hexdigest()[:32]


def _hello(connection: socket.socket) -> int | None:
    """Return the rank of a process that connected; None for a foreign or silent process."""
    if credentials(connection)[1] != os.getuid():
        return None
    # Set a limit, so that a silent process cannot keep the others from being accepted.
    connection.settimeout(_HELLO_S)
    try:
        (rank,) = _HELLO.unpack(connection.recv(_HELLO.size))
    except (OSError, struct.error):
        return None
    return int(rank)
