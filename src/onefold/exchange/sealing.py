"""Proves by the run's secret who wrote a value of the store, and that processes belong to the run.

`SealedStore` is a store whose values only processes with the secret of the run can write. Whoever
reaches the store's port may set any key, ahead of its owner or after it: the address at which a
device listens, say. So each value carries a digest of its key and of itself, keyed with the secret
(HMAC-SHA256), and one without it ends the run. Counters and the mere presence of keys carry none: a
stranger can hold a run up with those, or end it, and nothing else.

`prove` proves that every process of a group belongs to the run, before anything it sends is used.
Each process draws a challenge, and each answers the challenges of all with a keyed digest of them
and of its own number (HMAC-SHA256, RFC 2104). Nobody can answer without the secret of the run, and
an answer is of no use in another group, whose challenges differ. The secret itself is never sent.

Note: a stranger in the middle
------------------------------
One who stands between two devices can pass on what each says, the answers included. But each device
then has a connection to him and none to the other. So an answer covers the addresses and ports of
all connections of its process, as they are seen there, and two devices must see one connection
alike. Where an address is translated on the way (NAT), they do not.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # it is exported

from onefold.errors import DisagreementError

__all__ = ["SealedStore", "prove", "refuse_sealed"]


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
