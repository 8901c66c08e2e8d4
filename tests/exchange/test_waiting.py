"""A device that waits for the others says for whom, where, and why that may be."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from onefold.core.world import World
from onefold.errors import LaunchError, PeerTimeout
from onefold.exchange import group, mailbox, waiting
from onefold.exchange.group import reach_store
from onefold.exchange.mailbox import connected
from onefold.exchange.waiting import Waiting
from tests.tables import for_each

SHORT_S = 0.3
WORLD = World(rank=1, size=3, run_id="run", launcher="torch", local_rank=0, local_size=1)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Somebody who listens at a port and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def test_what_is_waited_for_is_said_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    mine = Waiting(1)
    for second in range(100):
        now = 100.0 + second
        mine.look(lambda: "nobody came")
    assert [record.getMessage() for record in caplog.records] == [
        f"device 1 has waited for {second} s: nobody came" for second in (10, 30, 90)
    ]


@for_each(
    ("rank", "alone_on_host", "says"),
    [(0, False, True), (1, False, True), (2, False, False), (2, True, True)],
)
def test_not_every_device_of_a_host_says_it(
    rank: int, alone_on_host: bool, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Waiting(rank, first_s=0, host_has_others=not alone_on_host).look(lambda: "words")
    assert bool(caplog.text) is says


@for_each(
    ("host", "words"),
    [
        ("no-such-machine.invalid", "the name no-such-machine.invalid does not resolve on "),
        ("127.0.0.1", "nobody listens at this port yet"),
    ],
)
def test_who_cannot_be_reached_is_named_with_the_reason(
    host: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = replace(WORLD, address=f"{host}:{free_port()}")
    with pytest.raises(PeerTimeout, match=f"did not reach device 0 at {world.address} within 0.3"):
        reach_store(world, SHORT_S, first_s=0)
    said = caplog.records[0].getMessage()
    assert f"device 0 cannot be reached at {world.address}, as {words}" in said


def test_a_stranger_at_the_port_and_a_port_that_does_not_answer_are_told_apart(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = listening.getsockname()
    assert group._connected(place, SHORT_S) == "what listens there is no store of PyTorch"

    def silent(*_: object, **__: object) -> None:
        raise TimeoutError("timed out")

    listening.close()  # which lets go of the thread
    monkeypatch.setattr(group.socket, "create_connection", silent)
    assert group._connected(place, SHORT_S) == ("nobody answers (timed out; is there a firewall?)")


def test_an_impossible_name_is_refused_at_once() -> None:
    world = replace(WORLD, address=f"{'a' * 70}:29500")
    with pytest.raises(LaunchError, match="expected the name of a machine in MASTER_ADDR, got aaa"):
        reach_store(world, 60)


def test_a_port_that_is_taken_is_refused_at_once(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    world = replace(WORLD, rank=0, address=f"127.0.0.1:{port}")
    with pytest.raises(LaunchError, match=r"EADDRINUSE.*Expected MASTER_PORT to be a port that is"):
        reach_store(world, 60)


@for_each("host", ["127.0.0.1", "no-such-machine.invalid", "192.0.2.1"])
def test_the_lead_need_not_know_the_name_by_which_others_reach_it(host: str) -> None:
    port = free_port()
    served = reach_store(replace(WORLD, rank=0, address=f"{host}:{port}"), 60)
    found = reach_store(replace(WORLD, address=f"127.0.0.1:{port}"), 60)
    served.set("key", "value")
    assert found.get("key") == b"value"


def test_all_reach_the_store_of_a_launcher() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    found = [
        reach_store(replace(WORLD, rank=rank, address=address, agent_store=True), 60)
        for rank in range(2)
    ]
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"
    assert found[1].timeout == timedelta(seconds=60)


def test_who_did_not_join_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, store = replace(WORLD, rank=0, size=4, address="node1:29500"), HashStore()
    monkeypatch.setattr(group, "_stores", {(world, 4): store})
    monkeypatch.setattr(group, "LOOK_S", 0.02)
    monkeypatch.setattr(group, "Waiting", lambda rank, **_: Waiting(rank, first_s=0.1))
    store.set("kind/2", "cpu")
    with pytest.raises(PeerTimeout, match="device 1 did not join within 0"):
        group.agree_on_kind(world, "cpu", 4, SHORT_S)
    said = [r.getMessage() for r in caplog.records if r.name == "onefold.waiting"]
    assert said == [
        "device 0 has waited for 0 s: not yet there, of 4 devices: 1, 3 (they meet at node1:29500)"
    ]


def test_who_did_not_join_on_this_host_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox, "LOOK_S", 0.02)
    monkeypatch.setattr(mailbox, "Waiting", lambda rank: Waiting(rank, first_s=0.1))
    with pytest.raises(PeerTimeout):
        connected("test-waiting", 0, 3, SHORT_S, lambda _: False)
    assert "device 0 has waited for 0 s: not yet there: device 1, 2" in caplog.text


@pytest.mark.processes
def test_it_reaches_the_screen_from_a_device_whose_output_is_a_log(tmp_path: Path) -> None:
    """As that of every device but the lead is, under another launcher."""
    import subprocess
    import sys

    code = (
        "from onefold.core.world import World\n"
        "from onefold.exchange.waiting import Waiting\n"
        "from onefold.run.membership import hush_and_report\n"
        "import sys\n"
        "hush_and_report(World(rank=1, size=2, launcher='torch'))\n"
        "print('to the log', file=sys.stderr)\n"
        "Waiting(1, first_s=0).look(lambda: 'the lead')\n"
        "print('torch' in sys.modules, file=sys.__stderr__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stderr == "device 1 has waited for 0 s: the lead\n"
    assert logging.getLogger("onefold.waiting").handlers == []
