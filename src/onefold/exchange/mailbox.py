"""Connects all processes of a host: for short messages, and for prompt notice of a dead one.

Every process holds a socket to every other one. The kernel closes the sockets of a process that
ends, whatever ended it; where a child still holds a copy, a pidfd reports the end all the same. So
whoever waits notices a dead peer at once.

`connected` connects every process of one host with every other one. The sockets have abstract
names: there is no port and no file, and nothing to clean up. Anyone on the host can list such
names, and connect to them. So a name is derived from an address that only the processes of the run
know, both ends look at the other's user, and who connects gives its number first.

Note: a peer's last words
-------------------------
A process that fails sends why and hangs up at once. If it leaves messages unread, the kernel
reports a reset connection before it delivers what the process sent. It also reports the end too
early to who finds no message just before the process sends its last and hangs up. So neither is
final until a second read has found nothing: the reason comes last (see `_read`, `_explain_unsent`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from onefold.errors import DisagreementError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange.transport import has_left
from onefold.exchange.waiting import Waiting
from onefold.system.process import LOOK_S, Stillness
from onefold.system.words import message_of, words_of_failure

__all__ = ["Mailbox", "Peer", "connected"]


_ARRIVED, _NOTE, _MORE, _FAILED, _LEAVING = b"A", b"N", b"M", b"F", b"L"
_SPIN_S = 60e-6
_CHUNK_BYTES = 32 * 1024
_FRAME_BYTES = 64 * 1024


@dataclass(slots=True)
class Peer:
    """The connection to another process."""

    number: int
    socket: socket.socket
    pid: int
    pidfd: int | None
    stillness: Stillness
    has_left: bool = False
    """Whether it has said that it comes to its end in order."""
    frames: deque[bytes] = field(default_factory=deque)


class Mailbox:
    """Reaches all other processes of the run on this host.

    Args:
        peers: connections to them, by their numbers; closed with the mailbox.
        rank: number of this process.
        timeout_s: the longest that any call here waits.
    """

    def __init__(self, peers: Mapping[int, Peer], *, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self.timeout_s = timeout_s
        self.step = 1
        """The step that the run is at, for error messages; set by the owner of the mailbox."""
        # Spinning saves a wake-up, but with more processes than cores it starves the peer.
        self._spin_s = _SPIN_S if self.size <= len(os.sched_getaffinity(0)) else 0.0
        self._peers = dict(peers)
        self._closed = False
        self._failure = ""
        _let_go_in_children(self)

    def meet(self, word: bytes = b"", among: Collection[int] | None = None) -> list[bytes]:
        """Wait for every process to call this, and return the words of all, by rank.

        Args:
            word: a short message from this process.
            among: the ranks of those that meet, in ascending order; all if absent.

        Raises:
            PeerLost, PeerFailed, PeerTimeout: a process has ended, failed, or did not call in time.
            OnefoldError: this mailbox is closed.
        """
        if self._closed:
            raise has_left(self._failure)
        frame = _ARRIVED + word
        # Send to all before waiting for any, or two processes would wait for each other's word.
        ranks = range(self.size) if among is None else among
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            self._send(self._peers[rank], frame)
        frames = self._await(others, _ARRIVED)
        frames[self.rank] = frame
        return [frames[rank][1:] for rank in ranks]

    def send_note(self, rank: int, note: bytes) -> None:
        """Send bytes of any length to one process; it must be receiving."""
        peer = self._peer(rank)
        chunks = [note[i : i + _CHUNK_BYTES] for i in range(0, len(note), _CHUNK_BYTES)] or [b""]
        for chunk in chunks[:-1]:
            self._send(peer, _MORE + chunk)
        self._send(peer, _NOTE + chunks[-1])

    def receive_note(self, rank: int) -> bytes:
        """Wait for one note from a process."""
        parts = []
        while True:
            frame = self._await([rank], _NOTE, _MORE)[rank]
            parts.append(frame[1:])
            if frame[:1] == _NOTE:
                return b"".join(parts)

    def send_file(self, rank: int, descriptor: int) -> None:
        """Send an open file to a process."""
        peer = self._peer(rank)
        try:
            socket.send_fds(peer.socket, [b"file"], [descriptor])
        except OSError as error:
            self._explain_unsent(error, peer)

    def receive_file(self, rank: int) -> int:
        """Receive an open file, which must be in the very next message of a process."""
        peer = self._peer(rank)
        limit = time.monotonic() + self.timeout_s
        while not self._wait_for_news([peer], limit):
            continue
        descriptors: list[int] = []

        def receive() -> bytes:  # not by `_drain`: a plain recv would throw the descriptors away
            message, found, _, _ = socket.recv_fds(peer.socket, _FRAME_BYTES, 1)
            descriptors.extend(found)
            return message

        message = _read(receive)
        if descriptors:
            return descriptors[0]
        if message.startswith(_FAILED):
            self._raise_failed(peer, message)
        peer.has_left |= message == _LEAVING
        if not message or peer.has_left:
            self._raise_ended(peer)
        raise self._elsewhere(peer)

    def tell_failure(self, failure: BaseException) -> None:
        """Tell every peer that this process has failed, and why."""
        self._failure = self._failure or words_of_failure(failure, self.step)
        text = json.dumps(
            {
                "step": self.step,
                "words": words_of_failure(failure, self.step),
                "disagreement": message_of(failure)
                if isinstance(failure, DisagreementError)
                else None,
            }
        )
        self._tell(_FAILED + text.encode())

    def tell_end(self) -> None:
        """Tell every peer that this process leaves in order, and has not been killed."""
        self._tell(_LEAVING)

    def _tell(self, frame: bytes) -> None:
        for peer in self._peers.values():
            # Never block here: a peer that is gone or has a full queue must not delay the others.
            with contextlib.suppress(OSError):
                peer.socket.send(frame, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close every connection. May be called again."""
        self._closed = True
        for peer in self._peers.values():
            peer.socket.close()
            if peer.pidfd is not None:
                os.close(peer.pidfd)
        self._peers = {}

    # Waiting

    def _peer(self, rank: int) -> Peer:
        if self._closed:
            raise has_left(self._failure)
        return self._peers[rank]

    def _await(self, ranks: Iterable[int], *kinds: bytes) -> dict[int, bytes]:
        """Wait for one frame of one of ``kinds`` from each of ``ranks``."""
        pending = {rank: self._peer(rank) for rank in ranks}
        found: dict[int, bytes] = {}
        spin_until = time.monotonic() + self._spin_s
        limit = time.monotonic() + self.timeout_s
        while True:
            for rank, peer in list(pending.items()):
                self._drain(peer)
                if peer.frames:
                    found[rank] = self._expected(peer, kinds)
                    del pending[rank]
            if not pending:
                return found
            if time.monotonic() > spin_until:
                self._wait_for_news(pending.values(), limit)
            else:
                os.sched_yield()  # the peer may be waiting for this very core

    def _expected(self, peer: Peer, kinds: tuple[bytes, ...]) -> bytes:
        frame = peer.frames.popleft()
        # Each sender's messages stay in order, so another kind is another call, not a late one.
        if frame[:1] not in kinds:
            raise self._elsewhere(peer)
        return frame

    def _elsewhere(self, peer: Peer) -> DisagreementError:
        return DisagreementError(
            f"device {peer.number} is at another point of the program than device {self.rank} "
            f"(step {self.step}): all devices must make the same calls of the trainer in the same "
            f"order"
        )

    def _drain(self, peer: Peer) -> bool:
        """Queue the next frame from a peer without waiting; return whether there was one."""
        try:
            frame = _read(peer.socket.recv, _FRAME_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if frame.startswith(_FAILED):
            self._raise_failed(peer, frame)
        if frame == _LEAVING:
            peer.has_left = True
            return self._drain(peer)
        # End of stream. Frames already queued are still valid, so raise only once they are used.
        if not frame:
            if not peer.frames:
                self._raise_ended(peer)
            return False
        peer.frames.append(frame)
        return True

    def _wait_for_news(self, pending: Iterable[Peer], limit: float) -> bool:
        """Wait for `LOOK_S` at most; return whether a peer has sent something or ended."""
        waiting = list(pending)
        if self._wait_readable(waiting, LOOK_S):
            return True
        # A stopped peer neither sends nor ends: nothing but a look at its state shows it.
        for peer in waiting:
            self._look_at(peer)
        if time.monotonic() > limit:
            raise self._late(waiting)
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
        """Return whether a peer has sent something or ended."""
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
            # Ended, yet its socket is open in a child. It may have sent between poll's look at the
            # socket and its look at the pidfd, so read once more before calling it lost.
            if peer.socket.fileno() not in ready:
                self._drain(peer)
                if not peer.frames:
                    self._raise_ended(peer)
        return bool(events)

    def _look_at(self, peer: Peer) -> None:
        if peer.stillness.look():
            raise PeerLost.stopped(peer.number, peer.pid, waiting=self.rank, step=self.step)

    def _raise_ended(self, peer: Peer) -> NoReturn:
        how = (
            "ended: its script came to an end before the others', or closed its Trainer"
            if peer.has_left
            else "ended without saying why: it was killed (by somebody, or by the system for lack "
            "of memory), has ended itself by os._exit, or dropped its Trainer"
        )
        raise PeerLost(
            f"device {peer.number} (process {peer.pid}) {how}; device {self.rank} waits for it in "
            f"step {self.step}",
            device=peer.number,
            step=self.step,
        )

    def _raise_failed(self, peer: Peer, frame: bytes) -> NoReturn:
        word = json.loads(frame[1:])
        if word["disagreement"] is not None:
            raise DisagreementError(word["disagreement"])
        raise PeerFailed(
            f"device {peer.number} {word['words']}", device=peer.number, step=word["step"]
        )

    def _send(self, peer: Peer, frame: bytes) -> None:
        try:
            peer.socket.send(frame)
        except OSError as error:
            self._explain_unsent(error, peer)

    def _explain_unsent(self, error: OSError, peer: Peer) -> NoReturn:
        """Turn an error of the socket into one that says what happened to the peer."""
        if isinstance(error, BlockingIOError):
            raise self._late([peer]) from None
        if not isinstance(error, ConnectionError):
            raise error
        while self._drain(peer):  # the reason comes last; see the note at the head
            continue
        self._raise_ended(peer)


def _read(receive: Callable[..., bytes], *arguments: int) -> bytes:
    """The next message, or nothing once the peer has hung up: see the note at the head."""
    for _ in range(2):
        try:
            if message := receive(*arguments):
                return message
        except ConnectionError:
            continue
    return b""


_open_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _let_go_in_children(mailbox: Mailbox) -> None:
    """Close the sockets in forked children, so that the peers notice when the parent ends."""
    if not _open_mailboxes:
        os.register_at_fork(after_in_child=_close_all)
    _open_mailboxes.add(mailbox)


def _close_all() -> None:
    for mailbox in list(_open_mailboxes):
        mailbox.close()


def _peer(number: int, connection: socket.socket, timeout_s: float) -> Peer:
    # The kernel's own limit, as Python's would make the socket non-blocking for good.
    connection.setblocking(True)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    pid, _ = credentials(connection)
    return Peer(number, connection, pid, _open_pidfd(pid), Stillness(pid))


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a peer in another namespace: the socket alone must do
        return None


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
        address: known to this run's processes alone: whoever can guess it could claim it first.
        rank: number of this process.
        size: how many processes there are.
        timeout_s: the longest wait for another process, here and in later calls.
        ended: whether the script of a process has ended, so that it will never connect.

    Returns:
        the connection to each other process, in the order of their numbers.

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
    # They connect in any order.
    return {n: _peer(n, each, timeout_s) for n, each in sorted(dialing.connections.items())}


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
