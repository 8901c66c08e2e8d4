"""Proves that every process of a group belongs to the run, before anything it sends is used.

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

from onefold.errors import DisagreementError

__all__ = ["prove"]

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
        raise DisagreementError(
            f"device {rank} and device {other} know the secret of the run, but are not connected "
            f"with each other: device {rank} has connections {_listed(ours)}, device {other} has "
            f"{', '.join(theirs) or 'none'} (own end first). Somebody stands in between and passes "
            f"messages on, or addresses are translated on the way (NAT), which onefold cannot tell "
            f"apart: have the hosts reach each other by their own addresses (GLOO_SOCKET_IFNAME)"
        )


def _listed(ends: Sequence[Ends]) -> str:
    return ", ".join(" ".join(each) for each in ends) or "none"


def _answer(secret: bytes, rank: int, challenges: Sequence[bytes], seen: bytes) -> bytes:
    # With the rank in it, nobody can send back another process's answer as its own. All parts but
    # the last are of a fixed length.
    text = b"onefold" + rank.to_bytes(8, "little") + b"".join(challenges) + seen
    return hmac.digest(secret, text, "sha256")
