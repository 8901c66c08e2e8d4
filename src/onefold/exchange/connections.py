"""Guards a process group: authenticates processes, cuts connections, finds the late device.

`SealedStore` is a store whose values only processes with the secret of the run can write. Anyone
who reaches the store's port may set any key, before or after its owner does: the address at which a
device listens, for instance. So each value carries a keyed digest of its key and itself
(HMAC-SHA256), and a value without it ends the run. Counters and the mere existence of keys are not
protected: through them an intruder can delay or end a run, but nothing else.

`prove` proves that every process of a group belongs to the run, before anything it sends is used.
Each process draws a challenge, and answers the challenges of all with a keyed digest of them and of
its own number (HMAC-SHA256, RFC 2104). Answering requires the secret of the run, and an answer is
useless in another group, whose challenges differ. The secret itself is never sent.

`Connections` can be cut when this process fails or a peer stops responding, which `PeerWatch`
detects. `LateWatch` finds the device that all others wait for.

Note: why connections are cut
-----------------------------
Before its timeout, a wait in gloo ends in one of two ways: the message arrives, or the connection
ends. A peer that is stopped, or that has failed but lives on (a notebook), causes neither. Aborting
a group does not end its pending waits. So this module remembers the sockets that were opened while
the group was made. A process that fails shuts down its own sockets, and so does a process that
finds a peer stopped: every wait then ends with an error at once.

Note: a descriptor is only a number
-----------------------------------
The backend may close its sockets at any time, from its own threads, and the kernel reuses the
number for the next file. So every socket is identified by its inode as well, and used only through
a duplicate of its descriptor (see `_copy_of`).

Note: which device is late
--------------------------
A backend that times out does not report which device it waited for: in a collective call all wait
for all. So the device that gives up asks in the store, and every device that also waits answers,
from a thread. A device that computes, or hangs in the script, does not wait and does not answer: it
is late. A device that only had to send may have continued computing without a fault, but is named
together with the late one.

Note: a man in the middle
-------------------------
An intruder between two devices can relay what each sends, including answers. But then each device
has a connection to the intruder and none to the other. So an answer covers the addresses and ports
of all connections of its process, as this process sees them, and two devices must see one
connection with the same ends. Address translation (NAT) breaks this.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import Store

from onefold.errors import DisagreementError
from onefold.system.process import LOOK_S, StoppedProcess

__all__ = [
    "Connections",
    "LateWatch",
    "PeerWatch",
    "SealedStore",
    "close_watches",
    "host_identity",
    "noted_connections",
    "prove",
    "refuse_sealed",
]


_ASKED_KEY = "onefold/who-waits"
_CLOSE_S = 2.0
ANSWERS_S = LOOK_S
"""Seconds to wait for answers. The device that asks has already waited for a failure's report."""


class LateWatch:
    """Finds the device that is late, and answers for this one.

    Args:
        store: the store behind the group.
        rank: number of this device.
        size: number of devices.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        # The main thread writes it and the watch's thread reads it: a bool needs no lock.
        self._waits = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that this device waits for others inside the block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def answer_peers(self) -> None:
        """Answer if a device has asked. Called every `LOOK_S`, from a thread.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._waits and self.is_asked():
            self.say_waiting()

    def is_asked(self) -> bool:
        """Whether a device timed out and asked who waits."""
        return bool(self._store.check([_ASKED_KEY]))

    def say_waiting(self, *, in_vain: bool = False) -> None:
        """Answer that this device waits, or did until now; if ``in_vain``, ask who else waits.

        Raises:
            RuntimeError: the store is gone.
        """
        if in_vain:
            # Ask before answering: a peer that sees the answer must also find the question.
            self._store.set(_ASKED_KEY, "1")
        self._store.set(_waits_key(self._rank), "1")

    def late(self) -> list[int]:
        """List the devices that do not answer within `ANSWERS_S`, if any device asked.

        Raises:
            RuntimeError: the store is gone.
        """
        if not self.is_asked():
            return []
        until = time.monotonic() + ANSWERS_S
        keys = {rank: _waits_key(rank) for rank in range(self._size)}
        while True:
            # Read the clock before the store, so that the last check comes after the limit.
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
        """Address and port of both ends of each connected socket, this process's end first."""
        found = []
        for descriptor, inode in self.sockets.items():
            # Use a copy of the descriptor: the backend may close the original at any time.
            with _copy_of(descriptor, inode) as copy, suppress(OSError):
                if copy is not None:
                    found.append((_place(copy.getsockname()), _place(copy.getpeername())))
        return found

    def cut(self) -> None:
        """Shut down all sockets in both directions: every wait on them ends with an error."""
        for descriptor, inode in self.sockets.items():
            # shutdown raises if the other end is already closed.
            with _copy_of(descriptor, inode) as copy, suppress(OSError):
                if copy is not None:
                    copy.shutdown(socket.SHUT_RDWR)
        self.sockets = {}


@contextmanager
def noted_connections(connections: Connections) -> Iterator[None]:
    """Record the TCP connections that are opened inside the block."""
    # Compare inodes too: a number that was free before may be another socket's afterwards.
    before = _connected()
    yield
    connections.sockets.update(_connected().items() - before.items())


class PeerWatch:
    """Detects a stopped process on this host, from a thread, and ends all waits for it.

    The same thread answers peers that ask who waits; see `LateWatch`.

    Args:
        pids: process id of each peer on this host, by its rank.
        connections: the connections to cut.
        lateness: answers the peers.
    """

    def __init__(
        self, pids: Mapping[int, int], connections: Connections, lateness: LateWatch
    ) -> None:
        # The thread sets it before it cuts connections, and the main thread reads it after its wait
        # has ended, so there is no race.
        self.stopped: int | None = None
        """Rank of the peer that was found stopped, if any."""
        self.pids = dict(pids)
        self._connections = connections
        self._lateness: LateWatch | None = lateness
        self._end = threading.Event()
        self._peers = {rank: StoppedProcess(pid) for rank, pid in pids.items()}
        # Use a daemon thread, because a script that never closes its Trainer must be able to end.
        self._thread = threading.Thread(target=self._watch, name="onefold peers", daemon=True)
        _watches.add(self)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and drop the store."""
        self._end.set()
        self._lateness = None

    def join(self, limit_s: float) -> None:
        """Wait for the end of the thread, which a stopped store may delay."""
        self._thread.join(limit_s)

    def _watch(self) -> None:
        while not self._end.wait(LOOK_S):
            for rank, peer in self._peers.items():
                if peer.sample_state():
                    # Set it before the cut, because the wait that the cut ends reads it.
                    self.stopped = rank
                    self._connections.cut()
                    return
            # A stopped peer may serve the store, and asking it would hang this thread.
            if not any(peer.is_still for peer in self._peers.values()):
                self._answer()

    def _answer(self) -> None:
        # Take a local reference: `close` may drop the attribute meanwhile, from the main thread.
        lateness = self._lateness
        try:
            if lateness is not None:
                lateness.answer_peers()
        except RuntimeError:
            # The store is gone, so no device can ask through it any more.
            self._lateness = None


_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@atexit.register
def close_watches() -> None:
    """Close the watches of all Trainers, and wait for their threads.

    A thread that returns from PyTorch while Python shuts down would abort the process.
    """
    # A running thread keeps its watch alive, so the weak set contains every watch that still runs.
    watches = list(_watches)
    for watch in watches:
        watch.close()
    limit = time.monotonic() + _CLOSE_S
    for watch in watches:
        watch.join(max(0.0, limit - time.monotonic()))


def host_identity() -> str:
    """Return a text that two processes share if and only if they see each other's process ids."""
    # The boot id names the machine; a container on it may have its own process ids.
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
        # getpeername raises if the socket is not connected.
        with _copy_of(descriptor, inode) as copy, suppress(OSError):
            if copy is not None and copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.getpeername()
                found[descriptor] = inode
    return found


def _place(address: tuple[object, ...]) -> str:
    """Format host and port the same at both ends: IPv4 addresses may be written as IPv6."""
    host = str(address[0]).partition("%")[0].removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def _inode_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        # The descriptor was closed meanwhile.
        return ""


@contextmanager
def _copy_of(descriptor: int, inode: str) -> Iterator[socket.socket | None]:
    """Yield the socket under a descriptor of our own; None if the number now names another file."""
    try:
        own = os.dup(descriptor)
    except OSError:
        # The descriptor was closed meanwhile.
        yield None
        return
    # Compare the copy: between a look at the original and `dup` the number could be reused. No
    # other thread closes the copy.
    if _inode_of(own) != inode:
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as copy:
        yield copy


_MARK = b"onefold-sealed:"
_DIGITS = 64


class SealedStore(Store):
    """Seals the values that are written to a store, and checks those that are read.

    gloo reads and writes through it as well, so it must live as long as the group. It has only the
    methods that gloo and onefold use.

    Args:
        store: keeps the values.
        secret: the secret of the run.
        run_id: distinguishes runs with the same secret.
    """

    def __init__(self, store: Store, secret: bytes, run_id: str) -> None:
        super().__init__()
        self._store, self._secret, self._run_id = store, secret, run_id.encode()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if expected:
            raise NotImplementedError(f"{key}: compare_set supports only keys that are not set yet")
        return self._opened(key, self._store.compare_set(key, "", self._sealed(key, desired)))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def clone(self) -> SealedStore:
        """Make a store with its own connection, for another thread."""
        twin: Store = self._store.clone()  # type: ignore[attr-defined]  # its stubs lag behind
        return SealedStore(twin, self._secret, self._run_id.decode())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def _sealed(self, key: str, value: str | bytes) -> str:
        text = value if isinstance(value, bytes) else value.encode()
        # Seal as text, because a store takes values from Python as text.
        return (_MARK + self._seal(key, text) + text.hex().encode()).decode()

    def _opened(self, key: str, text: bytes) -> bytes:
        """Return the value; raise if it was not sealed with this secret."""
        seal, value = text[len(_MARK) :][:_DIGITS], text[len(_MARK) + _DIGITS :]
        try:
            found = bytes.fromhex(value.decode())
        except ValueError:
            found = b""
        # Compare in constant time, so that timing does not reveal how much of a forgery is right.
        if not (text.startswith(_MARK) and hmac.compare_digest(seal, self._seal(key, found))):
            raise DisagreementError(
                f"the store of the run has a value under {key} that was written without the secret "
                f"of this run. Set the same ONEFOLD_SECRET for every process of the run, or for "
                f"none. If it is set correctly, an intruder writes to the store: check who can "
                f"reach its host"
            )
        return found

    def _seal(self, key: str, value: bytes) -> bytes:
        parts = [self._run_id, key.encode(), value]
        # Prefix each part with its length, so that no two lists of parts give the same text.
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, b"onefold store" + text, "sha256").hex().encode()


def refuse_sealed(key: str, text: bytes) -> bytes:
    """Refuse a value that a process with a secret wrote, if this process has none.

    Raises:
        DisagreementError: the value is sealed.
    """
    if text.startswith(_MARK):
        raise DisagreementError(
            f"a process of the run has ONEFOLD_SECRET, but this one does not ({key}). Set the same "
            f"ONEFOLD_SECRET for every process of the run, or for none"
        )
    return text


_BYTES = hashlib.sha256().digest_size


Ends = tuple[str, str]
"""A connection as a process sees it: address and port of its own end, and of the other end."""


def prove(
    secret: bytes,
    rank: int,
    trade: Callable[[bytes], Sequence[bytes]],
    connections: Sequence[Ends] | None = None,
) -> None:
    """Prove to all processes that this one knows the secret, and check that they know it.

    Args:
        secret: the secret of the run; if empty, nothing is proved.
        rank: number of this process.
        trade: gathers some bytes from all processes, in the order of their ranks.
        connections: the connections of this process; None if no intruder can be between processes.

    Raises:
        DisagreementError: a process does not know the secret, or an intruder relays messages.
    """
    # Draw fresh challenges, so that answers recorded from another group are useless.
    challenges = trade(os.urandom(_BYTES))
    seen = "\n".join(" ".join(ends) for ends in connections or ()).encode()
    answers = trade(_answer(secret, rank, challenges, seen) + seen)
    # Compare in constant time, so that timing does not reveal how much of an answer is right.
    for other, answer in enumerate(answers):
        said, theirs = answer[:_BYTES], answer[_BYTES:]
        if not hmac.compare_digest(said, _answer(secret, other, challenges, theirs)):
            raise DisagreementError(
                f"device {other} did not authenticate to device {rank}. Set the same "
                f"ONEFOLD_SECRET for every process of the run, or for none. If it is set "
                f"correctly, an intruder has joined: check who can reach these hosts"
            )
        if secret and connections is not None and other != rank:
            _check_joined(connections, rank, theirs.decode().splitlines(), other)


def _check_joined(ours: Sequence[Ends], rank: int, theirs: Sequence[str], other: int) -> None:
    """Refuse a device that does not have the other end of a connection of this device."""
    if not {f"{peer} {own}" for own, peer in ours} & set(theirs):
        listed = ", ".join(map(" ".join, ours)) or "none"
        raise DisagreementError(
            f"device {rank} and device {other} know the secret of the run, but are not connected "
            f"with each other: device {rank} has connections {listed}, device {other} has "
            f"{', '.join(theirs) or 'none'} (own end first). Either an intruder relays the "
            f"messages, or addresses are translated on the way (NAT); onefold cannot tell which. "
            f"Let the hosts reach each other by their own addresses (GLOO_SOCKET_IFNAME)"
        )


def _answer(secret: bytes, rank: int, challenges: Sequence[bytes], seen: bytes) -> bytes:
    # The digest includes the rank, so that no process can return another's answer as its own. All
    # parts but the last have a fixed length.
    text = b"onefold" + rank.to_bytes(8, "little") + b"".join(challenges) + seen
    return hmac.digest(secret, text, "sha256")
