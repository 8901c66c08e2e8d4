"""Agrees on a name for the current attempt of a run on several hosts that torchrun restarts.

torchrun's store survives an attempt, and the next one must not read its keys. torchrun numbers the
attempts of each host separately, and does not count a restart because of another host, so that
these numbers differ between hosts.

Note: why all processes return the same name
--------------------------------------------
Each process writes a new random text under its rank. A name is the digest of the texts of all
ranks, and each process writes, under its rank, the name that it finds. A process returns once all
ranks have written the name that it found itself. That name depends on its own text, which no
earlier attempt had, so all ranks wrote it in this attempt. It also depends on the texts of all
others, so none of them finds another name, unless a process starts again: then the attempt is over.
"""

from __future__ import annotations

import secrets
import time
from hashlib import sha256
from typing import Any

from onefold.core.options import LaunchContext
from onefold.exchange.progress import Waiting

__all__ = ["agree_on_attempt"]

_POLL_S = 0.02


def agree_on_attempt(store: Any, context: LaunchContext, size: int, timeout_s: float) -> str:
    """Return a name that all processes of this attempt share, and no earlier attempt had.

    Args:
        store: store of the launcher; an intruder can at most prevent the agreement.
        context: how this process was started.
        size: number of processes.
        timeout_s: the longest wait for the others.

    Raises:
        PeerTimeout: a process did not start in time.
    """
    texts, names = ([f"{kind}/{rank}" for rank in range(size)] for kind in ("started", "attempt"))

    def value(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    waiting = Waiting(context.rank, timeout_s, host_has_others=context.local_rank > 0)
    store.set(texts[context.rank], secrets.token_hex(16))
    name, written = "", None
    while missing := [rank for rank, key in enumerate(names) if value(key) != name or not name]:
        name = sha256("/".join(map(value, texts)).encode()).hexdigest()
        if name != written:
            written = name
            store.set(names[context.rank], name)
        waiting.check_peers(missing)
        time.sleep(_POLL_S)
    return name
