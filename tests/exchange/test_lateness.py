"""Who waits in vain finds out for whom."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from torch.distributed import HashStore

from onefold.exchange import connections
from onefold.exchange.connections import Connections, Lateness, PeerWatch

DEVICES = 3
QUICK_S = 0.02


def test_a_store_that_has_gone_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are stopped are noticed all the same."""
    looks: list[int] = []

    class Gone(Lateness):
        def look(self) -> None:
            looks.append(1)
            raise RuntimeError("the store has gone")

    monkeypatch.setattr(connections, "LOOK_S", QUICK_S)
    with subprocess.Popen(["sleep", "60"]) as peer:
        watch = PeerWatch({3: peer.pid}, Connections(), Gone(HashStore(), 0, DEVICES))
        until = time.monotonic() + 20
        while not looks and time.monotonic() < until:
            time.sleep(QUICK_S)
        peer.send_signal(signal.SIGSTOP)
        while watch.stopped is None and time.monotonic() < until:
            time.sleep(QUICK_S)
        peer.kill()
    watch.close()
    assert (watch.stopped, looks) == (3, [1])
