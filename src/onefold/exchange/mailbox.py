"""Short messages between the processes of one host, and word of who is gone.

Every process holds a socket to every other one. A socket of a process that ends is closed by the
kernel, whatever ended it, and a pidfd tells the same even where a child still holds a copy of the
socket; so a dead peer is noticed while waiting, at once. The sockets have abstract names: there is
no port and no file, and nothing to clean up.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from onefold.errors import DisagreementError, OnefoldError, PeerFailed, PeerLost, PeerTimeout
from onefold.exchange.transport import LEFT
from onefold.system.process import LOOK_S, Stillness

__all__ = ["Mailbox"]

_ARRIVED, _NOTE, _MORE, _FAILED = b"A", b"N", b"M", b"F"
_SPIN_S = 60e-6
_HELLO = struct.Struct("<q")
_HELLO_S = 5.0
_CHUNK_BYTES = 32 * 1024
_FRAME_BYTES = 64 * 1024


@dataclass(slots=True)
class _Peer:
    number: int
    socket: socket.socket
    pid: int
    pidfd: int | None
    stillness: Stillness
    frames: deque[bytes] = field(default_factory=deque)


class Mailbox:
    """Connects this process with all others of the run on this host.

    Args:
        address: common to all processes of this run, and to no other run of the machine; nobody
            else should be able to guess it, or he could take it first.
        rank: of this process.
        size: how many processes there are.
        timeout_s: the longest that anything here waits.
        ended: whether the script of a process has come to its end, so that it will not come.

    Raises:
        PeerTimeout: not everybody came in time.
        PeerLost: somebody will not come.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        ended: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.step = 1
        """What the run is at, for errors; its user sets it."""
        self._spin_s = _SPIN_S if size <= len(os.sched_getaffinity(0)) else 0.0
        self._peers: dict[int, _Peer] = {}
        self._closed = False
        try:
            self._connect(address, time.monotonic() + timeout_s, ended)
        except BaseException:
            self.close()
            raise
        _let_go_in_children(self)

    def meet(self, word: bytes = b"") -> list[bytes]:
        """Return when every process has called it, with the words of all in their order.

        Args:
            word: of this process; short.

        Raises:
            PeerLost, PeerFailed, PeerTimeout: somebody will not come.
            OnefoldError: this process has hung up.
        """
        if self._closed:
            raise OnefoldError(LEFT)
        frame = _ARRIVED + word
        for peer in self._peers.values():
            self._send(peer, frame)
        frames = self._await(self._peers.keys(), _ARRIVED)
        frames[self.rank] = frame
        return [frames[rank][1:] for rank in range(self.size)]

    def send_note(self, rank: int, note: bytes) -> None:
        """Send bytes of any length to one process; it must be receiving."""
        peer = self._peer(rank)
        chunks = [note[i : i + _CHUNK_BYTES] for i in range(0, len(note), _CHUNK_BYTES)] or [b""]
        for chunk in chunks[:-1]:
            self._send(peer, _MORE + chunk)
        self._send(peer, _NOTE + chunks[-1])

    def receive_note(self, rank: int) -> bytes:
        """Wait for one note of a process."""
        parts = []
        while True:
            frame = self._await([rank], _NOTE, _MORE)[rank]
            parts.append(frame[1:])
            if frame[:1] == _NOTE:
                return b"".join(parts)

    def send_file(self, rank: int, descriptor: int) -> None:
        """Give a process an open file."""
        peer = self._peer(rank)
        with self._sending(peer):
            socket.send_fds(peer.socket, [b"file"], [descriptor])

    def receive_file(self, rank: int) -> int:
        """Take an open file, from the very next message of a process."""
        peer = self._peer(rank)
        limit = time.monotonic() + self.timeout_s
        while not self._wait_for_news([peer], limit):
            continue
        try:
            message, descriptors, _, _ = socket.recv_fds(peer.socket, _FRAME_BYTES, 1)
        except ConnectionError:
            message, descriptors = _last_words(peer), []
        if descriptors:
            return descriptors[0]
        if message.startswith(_FAILED):
            self._raise_failed(peer, message)
        if not message:
            self._raise_ended(peer)
        raise self._elsewhere(peer)

    def tell_failure(self, failure: BaseException) -> None:
        """Tell everybody that this process fails, and why."""
        text = json.dumps(
            {
                "step": self.step,
                "kind": type(failure).__name__,
                "text": str(failure)[:4000],
                "disagreement": isinstance(failure, DisagreementError),
            }
        )
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # a peer that is gone need not be told
                peer.socket.send(_FAILED + text.encode(), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        for peer in self._peers.values():
            peer.socket.close()
            if peer.pidfd is not None:
                os.close(peer.pidfd)
        self._peers = {}

    # Waiting

    def _peer(self, rank: int) -> _Peer:
        if self._closed:
            raise OnefoldError(LEFT)
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

    def _expected(self, peer: _Peer, kinds: tuple[bytes, ...]) -> bytes:
        frame = peer.frames.popleft()
        if frame[:1] not in kinds:
            raise self._elsewhere(peer)
        return frame

    def _elsewhere(self, peer: _Peer) -> DisagreementError:
        return DisagreementError(
            f"device {peer.number} is at another point of the program than device {self.rank} "
            f"(step {self.step}): all devices must make the same calls of the trainer in the same "
            f"order"
        )

    def _drain(self, peer: _Peer) -> bool:
        """Take in the next frame from a peer, without waiting; whether there was one."""
        try:
            frame = peer.socket.recv(_FRAME_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            frame = _last_words(peer)
        if frame.startswith(_FAILED):
            self._raise_failed(peer, frame)
        if not frame:
            if not peer.frames:
                self._raise_ended(peer)
            return False
        peer.frames.append(frame)
        return True

    def _wait_for_news(self, pending: Iterable[_Peer], limit: float) -> bool:
        """Wait for a while; whether a peer has sent something or ended."""
        waiting = list(pending)
        if self._wait_readable(waiting, LOOK_S):
            return True
        for peer in waiting:
            self._look_at(peer)
        if time.monotonic() > limit:
            raise self._late(waiting)
        return False

    def _late(self, peers: list[_Peer]) -> PeerTimeout:
        names = ", ".join(f"{peer.number} (process {peer.pid})" for peer in peers)
        return PeerTimeout.in_step(
            f"device {names}",
            device=peers[0].number,
            timeout_s=self.timeout_s,
            waiting=self.rank,
            step=self.step,
        )

    def _wait_readable(self, peers: list[_Peer], within_s: float) -> bool:
        """Whether a peer has sent something or ended."""
        poller = select.poll()
        ends: dict[int, _Peer] = {}
        for peer in peers:
            poller.register(peer.socket, select.POLLIN)
            if peer.pidfd is not None:
                ends[peer.pidfd] = peer
                poller.register(peer.pidfd, select.POLLIN)
        events = poller.poll(1000 * within_s)
        ready = {descriptor for descriptor, _ in events}
        for descriptor in ready & ends.keys():
            peer = ends[descriptor]
            if peer.socket.fileno() not in ready:
                self._drain(peer)  # its last words may have come in between
                if not peer.frames:
                    self._raise_ended(peer)
        return bool(events)

    def _look_at(self, peer: _Peer) -> None:
        if peer.stillness.look():
            raise PeerLost.stopped(peer.number, peer.pid, waiting=self.rank, step=self.step)

    def _raise_ended(self, peer: _Peer) -> NoReturn:
        raise PeerLost(
            f"device {peer.number} (process {peer.pid}) ended without saying why: it was killed "
            f"(by somebody, or by the system for lack of memory), or its script came to an end "
            f"before the others'; device {self.rank} waits for it in step {self.step}",
            device=peer.number,
            step=self.step,
        )

    def _raise_failed(self, peer: _Peer, frame: bytes) -> NoReturn:
        told = json.loads(frame[1:])
        if told["disagreement"]:
            raise DisagreementError(told["text"])
        raise PeerFailed(
            f"device {peer.number} failed in step {told['step']}: {told['kind']}: {told['text']}",
            device=peer.number,
            step=told["step"],
        )

    def _send(self, peer: _Peer, frame: bytes) -> None:
        with self._sending(peer):
            peer.socket.send(frame)

    @contextlib.contextmanager
    def _sending(self, peer: _Peer) -> Iterator[None]:
        """Turn an error of the socket into one that says what has become of the peer."""
        try:
            yield
        except BlockingIOError:
            raise self._late([peer]) from None
        except ConnectionError:
            while self._drain(peer):  # why it left comes last, behind what was not read before
                continue
            self._raise_ended(peer)

    # Connecting

    def _connect(self, address: str, limit: float, ended: Callable[[int], bool]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(_socket_name(address, self.rank))
            listener.listen(self.size)
            for rank in range(self.rank):
                self._admit(self._reach(_socket_name(address, rank), rank, limit, ended), rank)
            while missing := sorted(set(range(self.rank + 1, self.size)) - self._peers.keys()):
                listener.settimeout(min(LOOK_S, max(0.01, limit - time.monotonic())))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._check_coming(missing, limit, ended)
                    continue
                who = _hello(connection)
                if who in missing:
                    self._admit(connection, who)
                else:
                    connection.close()

    def _reach(
        self, name: str, rank: int, limit: float, ended: Callable[[int], bool]
    ) -> socket.socket:
        """Connect to a process of this user that listens under a name, once it does."""
        look = time.monotonic() + LOOK_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)  # a peer that does not accept would hold this process
            try:
                connection.connect(name)
                if _credentials(connection)[1] == os.getuid():
                    connection.send(_HELLO.pack(self.rank))
                    return connection
            except OSError as error:
                if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN, errno.ENOENT):
                    connection.close()
                    raise
            connection.close()
            if time.monotonic() > look:
                look += LOOK_S
                self._check_coming([rank], limit, ended)
            time.sleep(0.005)

    def _check_coming(
        self, missing: Sequence[int], limit: float, ended: Callable[[int], bool]
    ) -> None:
        for rank in missing:
            if ended(rank):
                raise PeerLost.before_start(rank)
        if time.monotonic() > limit:
            raise self._nobody(missing)

    def _admit(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(True)
        limit = struct.pack("ll", int(self.timeout_s), int(self.timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        pid, _ = _credentials(connection)
        self._peers[rank] = _Peer(rank, connection, pid, _open_pidfd(pid), Stillness(pid))

    def _nobody(self, missing: Sequence[int]) -> PeerTimeout:
        return PeerTimeout(
            f"device {', '.join(map(str, missing))} did not join within {self.timeout_s:g} s. "
            f"Every device must run the same script and make its Trainer",
            device=missing[0],
            step=0,
        )


def _last_words(peer: _Peer) -> bytes:
    """What a peer said before it hung up; that it did so is told first where frames are unread."""
    try:
        return peer.socket.recv(_FRAME_BYTES, socket.MSG_DONTWAIT)
    except OSError:
        return b""


_open_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _let_go_in_children(mailbox: Mailbox) -> None:
    """A forked child closes its copies of the sockets, so that the peers see its parent's end."""
    if not _open_mailboxes:
        os.register_at_fork(after_in_child=_close_all)
    _open_mailboxes.add(mailbox)


def _close_all() -> None:
    for mailbox in list(_open_mailboxes):
        mailbox.close()


def _socket_name(address: str, rank: int) -> str:
    """Where a device listens: a name without a file, which shows nothing of the others' names.

    Everybody on the host can list such names, and could take that of a device that is still to
    come if it followed from one that is there.
    """
    return "\0onefold-" + hashlib.sha256(f"{address}.{rank}".encode()).hexdigest()[:32]


def _hello(connection: socket.socket) -> int | None:
    """The rank of a process that has connected; None for a stranger, or one who does not say."""
    if _credentials(connection)[1] != os.getuid():
        return None
    connection.settimeout(_HELLO_S)
    try:
        (rank,) = _HELLO.unpack(connection.recv(_HELLO.size))
    except (OSError, struct.error):
        return None
    return int(rank)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or a peer in another namespace: the socket alone must tell
        return None
