"""What scaling.py reads, compares and shows; its processes; its network, where there can be one."""

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
from measure import write_record
from scaling import arguments, averages, compared, predicted, rollup_bytes, run_of, sent_over

pytestmark = pytest.mark.full

PROGRAM = Path(scaling.__file__)
NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 1 2 0 0 0 0 0 0 30 4 0 0 0 0 0 0
  eth0: 5 6 0 0 0 0 0 0 7 8 0 0 0 0 0 0
"""
ROLLUP = "Rss:    2048 kB\nPss:     1024 kB\nPss_Dirty:  5 kB\n"

needs_network = pytest.mark.skipif(
    network.why_not() is not None, reason=f"a network {network.why_not()}"
)


def test_counters_of_an_interface() -> None:
    wire = sent_over(NET_DEV, "lo")
    assert (wire.sent_bytes, wire.packets) == (30, 4)
    with pytest.raises(ValueError, match="counters of veth0"):
        sent_over(NET_DEV, "veth0")


def test_memory_of_a_rollup() -> None:
    assert rollup_bytes(ROLLUP, "Pss") == 1024 * 1024
    assert rollup_bytes(ROLLUP, "Rss") == 2048 * 1024
    with pytest.raises(ValueError, match="a line Swap"):
        rollup_bytes(ROLLUP, "Swap")


def test_averages_are_of_a_device_in_a_step() -> None:
    found = averages([{"collect": 8, "messages": 4}, {"collect": 4}], steps=2)
    assert found == {"collect": 3.0, "messages": 1.0}


@pytest.mark.parametrize(
    ("found", "wanted", "shown"),
    [(3.0, 2.0, ["3.00", "2.00", "1.500"]), (0.0, 0.0, ["0.00", "0.00", "-"])],
)
def test_measured_beside_predicted(found: float, wanted: float, shown: list[str]) -> None:
    assert compared(found, wanted, 1) == shown


def test_the_network_that_is_trained_has_about_the_parameters_asked_for() -> None:
    run = run_of(1_000_000, devices=2, shards=8, devices_per_host=2)
    assert run.parameter_bytes == pytest.approx(4e6, rel=0.02)
    assert run.buffers == 3


@pytest.mark.parametrize("exchange", scaling.EXCHANGES)
def test_what_was_found_is_shown(exchange: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(200_000, devices=4, shards=8, devices_per_host=4)
    wanted = scaling.predictions(run, exchange)
    one = {
        "exchange": exchange,
        "precision": "fp32",
        "devices": 4,
        "k": run.k,
        "loopback": "the machine's",
        "wire_bytes": 7_770_000.0,
        "measured": {name: 2 * amount for name, amount in wanted.items()},
        "predicted": wanted,
        "memory_before": scaling.Memory(pss=1, rss=2),
        "memory_after": scaling.Memory(pss=44_000_000, rss=55_000_000),
        "others_cores": 0.7,
    }
    scaling.show([one])
    shown = capsys.readouterr().out
    line = f"{exchange}, fp32, 4"
    for text in (line, "7.77", "2.000", "44", "55", "the machine's", "0.70 cores"):
        assert text in shown


def test_predictions_name_all_three_ways() -> None:
    found = predicted(64)
    assert found["hosts"] == 8
    for gbit in scaling.PREDICTED_GBIT:
        assert found["folded_s"][gbit] < found["exchange_s"][gbit]
        assert found["ring_s"][gbit] < found["exchange_s"][gbit]


def test_more_devices_than_shards_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--devices", "9"])
    assert "1 to 8 devices for 8 shards" in capsys.readouterr().err


def test_without_the_tools_a_network_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "TOOLS", ("ip-that-is-not-there",))
    with pytest.raises(SystemExit, match="2"):
        arguments(["--network"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("--network needs ip-that-is-not-there, which this machine lacks")


def test_a_record_is_written_for_people_and_programs(tmp_path: Path) -> None:
    write_record({"wire": network.Cable(mbit_per_s=5)}, tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"wire": {"mbit_per_s": 5, "delay_ms": 0.0}}
    assert text.startswith('{\n  "wire"')
    assert text.endswith("}\n")


@pytest.mark.processes
def test_both_exchanges_send_what_the_model_says(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ["--devices", "2", "3", "--parameters", "200000", "--steps", "2"]
    command = [sys.executable, str(PROGRAM), *options, "--output", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    assert json.loads(done.stdout.splitlines()[-1])["results"] == results
    assert [(one["exchange"], one["devices"]) for one in results] == [
        ("collective", 2),
        ("collective", 3),
        ("shared", 2),
        ("shared", 3),
    ]
    for one in results:
        expected = {name: value for name, value in one["predicted"].items() if name != "memory"}
        found = {name: one["measured"][name] for name in expected}
        assert found == pytest.approx(expected, rel=0.1)  # spans are cut at whole pieces
        assert one["measured"]["messages"] == pytest.approx(one["predicted"]["messages"])
        assert one["memory_after"]["pss"] > one["memory_before"]["pss"]


@needs_network
def test_a_cable_joins_two_hosts_and_nothing_is_left() -> None:
    with network.two_hosts(network.Cable(mbit_per_s=100)) as (one, other):
        assert {one.name, other.name} == hosts_of(os.getpid())
        ping = one.command(["ip", "route", "get", other.address])
        shown = subprocess.run(ping, capture_output=True, text=True, check=True).stdout
        assert f"dev {one.name}" in shown
    assert not hosts_of(os.getpid())


@needs_network
def test_what_runs_on_a_host_ends_with_it() -> None:
    with network.two_hosts(network.Cable(mbit_per_s=100)) as (one, _):
        sleeper = subprocess.Popen(one.command(["sleep", "600"]))
        wait_until(lambda: network._processes(one) == [sleeper.pid])
    assert sleeper.wait(timeout=300) == -signal.SIGKILL


@needs_network
def test_a_cable_that_cannot_be_made_leaves_nothing() -> None:
    with (
        pytest.raises(network.NetworkError, match=r"tc .* 0mbit"),
        network.two_hosts(network.Cable(mbit_per_s=0)),
    ):
        pass
    assert not hosts_of(os.getpid())


@needs_network
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_no_hosts(number: signal.Signals) -> None:
    command = [sys.executable, str(PROGRAM), "--network", "--parameters", "2000"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Or a test run that was started in the background hands on that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: len(hosts_of(running.pid)) == 2)
    running.send_signal(number)
    assert running.wait(timeout=600) != 0
    assert not hosts_of(running.pid)


@needs_network
@pytest.mark.processes
def test_the_exchange_between_hosts_is_timed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ["--network", "--mbit", "100", "--parameters", "1000000", "--steps", "2"]
    command = [sys.executable, str(PROGRAM), *options, "--output", str(record)]
    subprocess.run(command, capture_output=True, check=True, timeout=600)
    (one,) = json.loads(record.read_text(encoding="utf-8"))["results"]
    # Its bytes must pass the cable. The device that is late finds a part of them there already.
    assert one["measured_s"]["low"] > 0.5 * one["parameter_bytes"] / (100e6 / 8)


def hosts_of(pid: int) -> set[str]:
    """Names of the network namespaces that a process has made."""
    folder = Path("/run/netns")
    there = os.listdir(folder) if folder.is_dir() else []
    return {name for name in there if name in (f"of{pid}a", f"of{pid}b")}


def wait_until(there: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Until something is so; fails the test where it does not come about."""
    limit = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < limit, "it did not come about in time"
        time.sleep(0.02)
