"""Proof that every process of a group belongs to the run, before anything it says is used.

Each process draws a challenge, and each answers the challenges of all with a keyed digest of them
and of its own number (HMAC-SHA256, RFC 2104). Nobody can answer without the secret of the run, and
what was answered once is of no use later. The secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence

from onefold.errors import DisagreementError

__all__ = ["prove"]

_BYTES = hashlib.sha256().digest_size


def prove(secret: bytes, rank: int, trade: Callable[[bytes], Sequence[bytes]]) -> None:
    """Show to all processes that this one knows the secret, and have them show it.

    Args:
        secret: of the run; empty where there is none, and nothing is proved.
        rank: of this process.
        trade: gives 32 bytes to all processes, and returns those of all in the order of their
            ranks.

    Raises:
        DisagreementError: a process does not know the secret.
    """
    challenges = trade(os.urandom(_BYTES))
    answers = trade(_answer(secret, rank, challenges))
    for other, said in enumerate(answers):
        if not hmac.compare_digest(said, _answer(secret, other, challenges)):
            raise DisagreementError(
                f"device {other} has not shown that it belongs to this run, as device {rank} "
                f"expects: start every process with the same ONEFOLD_SECRET, or none with any. If "
                f"they have it, a stranger has joined: look who can reach these hosts"
            )


def _answer(secret: bytes, rank: int, challenges: Sequence[bytes]) -> bytes:
    text = b"onefold" + rank.to_bytes(8, "little") + b"".join(challenges)
    return hmac.digest(secret, text, "sha256")
