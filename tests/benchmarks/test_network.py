"""Two hosts on one machine, and the exchange between them; needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import network
import scaling

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.skipif(network.why_not() is not None, reason=f"a network {network.why_not()}"),
]
COMMAND = [sys.executable, scaling.__file__, "--network"]


def hosts_of(pid: int) -> set[str]:
    """Names of the network namespaces that a process has made."""
    folder = Path("/run/netns")
    there = os.listdir(folder) if folder.is_dir() else []
    return {name for name in there if name in (f"of{pid}a", f"of{pid}b")}


def wait_until(there: Callable[[], bool], limit_s: float = 30.0) -> None:
    limit = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < limit, "it did not come about in time"
        time.sleep(0.02)


def test_a_cable_joins_two_hosts_and_nothing_is_left() -> None:
    with network.two_hosts(network.Cable(mbit_per_s=100)) as (one, other):
        assert {one.name, other.name} == hosts_of(os.getpid())
        route = one.command(["ip", "route", "get", other.address])
        shown = subprocess.run(route, capture_output=True, text=True, check=True).stdout
        assert f"dev {one.name}" in shown
        sleeper = subprocess.Popen(one.command(["sleep", "600"]))
        wait_until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n")
    assert sleeper.wait(timeout=300) == -signal.SIGKILL
    with (
        pytest.raises(network.NetworkError, match=r"tc .* 0mbit"),
        network.two_hosts(network.Cable(mbit_per_s=0)),
    ):
        pass
    assert not hosts_of(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_no_hosts(number: signal.Signals) -> None:
    running = subprocess.Popen(
        [*COMMAND, "--parameters", "2000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Or a test run that was started in the background hands on that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: len(hosts_of(running.pid)) == 2)
    running.send_signal(number)
    assert running.wait(timeout=600) != 0
    assert not hosts_of(running.pid)


def test_the_exchange_between_hosts_is_timed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ["--mbit", "100", "--parameters", "1000000", "--steps", "2", "--output", str(record)]
    subprocess.run([*COMMAND, *options], capture_output=True, check=True, timeout=600)
    (one,) = json.loads(record.read_text(encoding="utf-8"))["results"]
    # Its bytes must pass the cable. The device that is late finds a part of them there already.
    assert one["measured_s"]["low"] > 0.5 * one["parameter_bytes"] / (100e6 / 8)
