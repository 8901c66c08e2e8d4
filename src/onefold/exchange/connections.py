"""Guards a process group: who belongs to it, whose connections are cut, whom all others wait for.

`SealedStore` is a store whose values only processes with the secret of the run can write. Whoever
reaches the store's port may set any key, ahead of its owner or after it: the address at which a
device listens, say. So each value carries a digest of its key and of itself, keyed with the secret
(HMAC-SHA256), and one without it ends the run. Counters and the mere presence of keys carry none: a
stranger can hold a run up with those, or end it, and nothing else.

`prove` proves that every process of a group belongs to the run, before anything it sends is used.
Each process draws a challenge, and each answers the challenges of all with a keyed digest of them
and of its own number (HMAC-SHA256, RFC 2104). Nobody can answer without the secret of the run, and
an answer is of no use in another group, whose challenges differ. The secret itself is never sent.

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

Note: a stranger in the middle
------------------------------
One who stands between two devices can pass on what each says, the answers included. But each device
then has a connection to him and none to the other. So an answer covers the addresses and ports of
all connections of its process, as they are seen there, and two devices must see one connection
alike. Where an address is translated on the way (NAT), they do not.
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

from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported

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


_MARK = b"onefold-sealed:"
_DIGITS = 64


class SealedStore(Store):
    """Seals what is set in a store, and checks what is read from it.

    gloo reads and writes through it as well, so it must live as long as the group. It has what gloo
    and onefold use of a store, and no more.

    Args:
        store: what keeps the values.
        secret: of the run.
        run_id: tells apart the runs that have the same secret.
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
            raise NotImplementedError(f"{key}: only what was not there before can be set")
        return self._opened(key, self._store.compare_set(key, "", self._sealed(key, desired)))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def clone(self) -> SealedStore:
        """Make one with a connection of its own, for another thread."""
        twin: Store = self._store.clone()  # type: ignore[attr-defined]  # its stubs lag behind
        return SealedStore(twin, self._secret, self._run_id.decode())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def _sealed(self, key: str, value: str | bytes) -> str:
        text = value if isinstance(value, bytes) else value.encode()
        # As text, since a store takes values from Python as such.
        return (_MARK + self._seal(key, text) + text.hex().encode()).decode()

    def _opened(self, key: str, text: bytes) -> bytes:
        """The value that was sealed; raises where it was not sealed with this secret."""
        seal, value = text[len(_MARK) :][:_DIGITS], text[len(_MARK) + _DIGITS :]
        try:
            found = bytes.fromhex(value.decode())
        except ValueError:
            found = b""
        if not (text.startswith(_MARK) and hmac.compare_digest(seal, self._seal(key, found))):
            raise DisagreementError(
                f"the store of the run has a value under {key} that was written without the secret "
                f"of this run: start every process with the same ONEFOLD_SECRET, or none with any. "
                f"If they have it, a stranger writes to the store: look who can reach its host"
            )
        return found

    def _seal(self, key: str, value: bytes) -> bytes:
        parts = [self._run_id, key.encode(), value]
        # Each with its length, so that no two lists of parts give one text.
        text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self._secret, b"onefold store" + text, "sha256").hex().encode()


def refuse_sealed(key: str, text: bytes) -> bytes:
    """Refuse a value that a process with a secret has written, where this one has none.

    Raises:
        DisagreementError: it is one.
    """
    if text.startswith(_MARK):
        raise DisagreementError(
            f"a process of the run has ONEFOLD_SECRET and this one has not ({key}): start every "
            f"process with the same one, or none with any"
        )
    return text


_BYTES = hashlib.sha256().digest_size


Ends = tuple[str, str]
"""A connection as a process sees it: its own address and port, and those of the other end."""


def prove(
    secret: bytes,
    rank: int,
    trade: Callable[[bytes], Sequence[bytes]],
    connections: Sequence[Ends] | None = None,
) -> None:
    """Prove to all processes that this one knows the secret, and check that they know it.

    Args:
        secret: the secret of the run; empty if it has none, and then nothing is proved.
        rank: number of this process.
        trade: sends some bytes to all processes, and returns those of all in the order of their
            ranks.
        connections: those of this process; None where others cannot stand in between.

    Raises:
        DisagreementError: a process does not know the secret, or another stands in between.
    """
    challenges = trade(os.urandom(_BYTES))
    seen = "\n".join(" ".join(ends) for ends in connections or ()).encode()
    answers = trade(_answer(secret, rank, challenges, seen) + seen)
    # In constant time, so that how long a refusal takes gives nothing away.
    for other, answer in enumerate(answers):
        said, theirs = answer[:_BYTES], answer[_BYTES:]
        if not hmac.compare_digest(said, _answer(secret, other, challenges, theirs)):
            raise DisagreementError(
                f"device {other} has not shown that it belongs to this run, as device {rank} "
                f"expects: start every process with the same ONEFOLD_SECRET, or none with any. If "
                f"they have it, a stranger has joined: look who can reach these hosts"
            )
        if secret and connections is not None and other != rank:
            _check_joined(connections, rank, theirs.decode().splitlines(), other)


def _check_joined(ours: Sequence[Ends], rank: int, theirs: Sequence[str], other: int) -> None:
    """Refuse a device that does not have the other end of a connection of this one."""
    if not {f"{peer} {own}" for own, peer in ours} & set(theirs):
        listed = ", ".join(map(" ".join, ours)) or "none"
        raise DisagreementError(
            f"device {rank} and device {other} know the secret of the run, but are not connected "
            f"with each other: device {rank} has connections {listed}, device {other} has "
            f"{', '.join(theirs) or 'none'} (own end first). Somebody stands in between and passes "
            f"messages on, or addresses are translated on the way (NAT), which onefold cannot tell "
            f"apart: have the hosts reach each other by their own addresses (GLOO_SOCKET_IFNAME)"
        )


def _answer(secret: bytes, rank: int, challenges: Sequence[bytes], seen: bytes) -> bytes:
    # With the rank in it, nobody can send back another process's answer as its own. All parts but
    # the last are of a fixed length.
    text = b"onefold" + rank.to_bytes(8, "little") + b"".join(challenges) + seen
    return hmac.digest(secret, text, "sha256")
