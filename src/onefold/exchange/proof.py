"""Proves that every process of a group belongs to the run, before anything it sends is used.

Each process draws a challenge, and each answers the challenges of all with a keyed digest of them
and of its own number (HMAC-SHA256, RFC 2104). Nobody can answer without the secret of the run, and
an answer is of no use in another group, whose challenges differ. The secret itself is never sent.
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
    """Prove to all processes that this one knows the secret, and check that they know it.

    Args:
        secret: the secret of the run; empty if it has none, and then nothing is proved.
        rank: number of this process.
        trade: sends 32 bytes to all processes, and returns those of all in the order of their
            ranks.

    Raises:
        DisagreementError: a process does not know the secret.
    """
    challenges = trade(os.urandom(_BYTES))
    answers = trade(_answer(secret, rank, challenges))
    # In constant time, so that how long a refusal takes gives nothing away.
    for other, answer in enumerate(answers):
        if not hmac.compare_digest(answer, _answer(secret, other, challenges)):
            raise DisagreementError(
                f"device {other} has not shown that it belongs to this run, as device {rank} "
                f"expects: start every process with the same ONEFOLD_SECRET, or none with any. If "
                f"they have it, a stranger has joined: look who can reach these hosts"
            )


def _answer(secret: bytes, rank: int, challenges: Sequence[bytes]) -> bytes:
    # With the rank in it, nobody can send back another process's answer as its own.
    text = b"onefold" + rank.to_bytes(8, "little") + b"".join(challenges)
    return hmac.digest(secret, text, "sha256")
