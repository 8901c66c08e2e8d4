"""How processes find each other through a store, and how they part; here they are threads."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
import torch.distributed as dist
from benchmarks.network import Cable, two_hosts, why_not
from torch.distributed import TCPStore

import onefold
from onefold.core.options import LaunchContext
from onefold.errors import DisagreementError, LaunchError, PeerLost, PeerTimeout
from onefold.exchange import progress
from onefold.exchange.group import (
    Rendezvous,
    agree_on_devices,
    agree_on_name,
    gloo_interface,
    reach_store,
    tell_end,
)
from tests.exchange.together import LIMIT_S, endings, together, worlds
from tests.small import make_trainer, points
from tests.tables import for_each

SCRIPT = Path(__file__).parents[1] / "scripts" / "connecting.py"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.02)


def meeting(context: LaunchContext, timeout_s: float = LIMIT_S) -> Rendezvous:
    return Rendezvous(context, context.size, timeout_s)


@pytest.fixture
def three() -> Iterator[list[LaunchContext]]:
    with worlds(3) as made:
        yield made


def test_devices_of_one_kind_agree_and_those_of_two_are_named_to_all(
    three: list[LaunchContext],
) -> None:
    together(3, lambda rank: agree_on_devices(meeting(three[rank]), "cpu"))
    with worlds(3) as others:
        kinds = ["cuda", "cuda", "cpu"]
        errors = endings(3, lambda rank: agree_on_devices(meeting(others[rank]), kinds[rank]))
    assert [type(error) for error in errors] == [DisagreementError] * 3
    assert all(str(e).startswith("device 2 computes on cpu, but device 0 on cuda:") for e in errors)
    assert "CUDA_VISIBLE_DEVICES" in str(errors[0])


def test_two_processes_on_one_card_are_named_to_all(three: list[LaunchContext]) -> None:
    cards = ["0000:3b of host a", "0000:3b of host b", "0000:3b of host a"]
    errors = endings(3, lambda rank: agree_on_devices(meeting(three[rank]), "cuda", cards[rank]))
    assert [type(error) for error in errors] == [DisagreementError] * 3
    assert all(str(e).startswith("devices 0 and 2 are the same card, or parts") for e in errors)


def test_a_name_is_drawn_by_the_lead_for_each_trainer(three: list[LaunchContext]) -> None:
    def named(trainer: int, rank: int) -> str:
        return agree_on_name(meeting(three[rank]), trainer)

    drawn = {name for trainer in range(2) for name in together(3, partial(named, trainer))}
    assert sorted(len(bytes.fromhex(name)) for name in drawn) == [16, 16]
    other_run = replace(three[1], run_id="another one with the same store")
    with pytest.raises(PeerTimeout, match=r"^device 0 did not join within 0\.1 s: every") as caught:
        agree_on_name(meeting(other_run, 0.1), 0)
    assert (caught.value.device, caught.value.step) == (0, 0)


def test_who_does_not_join_is_named_while_it_is_waited_for_and_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    with worlds(4) as made:
        errors = endings(
            3, lambda rank: agree_on_devices(meeting(made[(0, 2, 3)[rank]], 0.3), "cpu")
        )
    for error in errors:
        assert type(error) is PeerTimeout
        assert str(error).startswith("device 1 did not join within 0.3 s: every device must run")
        assert (error.device, error.step) == (1, 0)
    said = [r.getMessage() for r in caplog.records if r.name == "onefold.waiting"]
    words = "device 0 has waited for 0 s: still missing, of 4 devices: 1 (they meet at node1:29500)"
    assert said == [words]


def test_who_has_ended_is_not_waited_for_and_what_it_had_said_is_heard(
    three: list[LaunchContext],
) -> None:
    ends = meeting(three[0]).has_ended
    assert not any(ends(rank) for rank in range(3))
    with pytest.raises(PeerTimeout):
        agree_on_devices(meeting(three[1], 0.05), "cpu")
    tell_end(three[1])
    tell_end(three[2])
    assert [ends(rank) for rank in range(3)] == [False, True, True]
    with pytest.raises(PeerLost, match=r"^device 2 reached the end of its script") as caught:
        agree_on_devices(meeting(three[0]), "cpu")
    assert caught.value.device == 2


def beside_other_groups(place: str) -> list[object]:
    """Train before, while, and after the script has a default group of its own."""
    rank = onefold.launcher.environment.current_context().rank
    trainers = [make_trainer(devices=None)]
    found: list[object] = [dist.is_initialized()]
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    theirs = dist.group.WORLD
    trainers.append(make_trainer(devices=None))
    for trainer in trainers:
        trainer.step(points(8))
    found.append(dist.group.WORLD is theirs)
    total = torch.ones(1)
    dist.all_reduce(total)
    prints = {trainer.fingerprint() for trainer in trainers}
    for trainer in trainers:
        trainer.close()
    dist.destroy_process_group()
    last = make_trainer(devices=None)
    last.step(points(8))
    return [*found, total.item(), prints == {last.fingerprint()}]


@pytest.mark.processes
def test_trainers_and_the_group_of_a_script_leave_each_other_alone(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    found = onefold.launch(
        beside_other_groups, devices="cpu:2", args=(place,), exchange="collective"
    )
    assert found == [False, True, 2.0, True]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "wrong", "outcome"),
    [
        (([2], [1, 3]), ([], []), ["4 attempts, [b'0', b'1']"] * 2),
        (
            ([], []),
            ([], [1]),
            [
                "DisagreementError: device 1 rejected a process",
                "DisagreementError: device 1 knows somebody",
            ],
        ),
    ],
)
def test_connections_that_break_while_they_are_made_are_made_anew(
    tmp_path: Path,
    broken: Sequence[Sequence[int]],
    wrong: Sequence[Sequence[int]],
    outcome: Sequence[str],
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), json.dumps(broken[rank]), json.dumps(wrong[rank])],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    came = [process.communicate(timeout=3 * LIMIT_S)[0] for process in processes]
    for found, expected in zip(came, outcome, strict=True):
        assert expected in found


WORLD = LaunchContext(rank=1, size=3, run_id="run", launcher="torch", local_rank=0, local_size=1)


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of somebody who listens there and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


@for_each(
    ("host", "words"),
    [
        ("no-such-machine.invalid", "the name no-such-machine.invalid does not resolve on "),
        ("127.0.0.1", "no process listens at this port yet"),
        ("a stranger", "the program that listens there is not a store of PyTorch"),
        ("silence", r"no answer (timed out; is there a firewall?)"),
    ],
)
def test_who_cannot_be_reached_is_named_with_the_reason(
    host: str,
    words: str,
    listening: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(*_: object, **__: object) -> NoReturn:
        raise TimeoutError("timed out")

    if host == "silence":
        monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    port = listening if host == "a stranger" else free_port()
    address = f"{host if '.' in host else '127.0.0.1'}:{port}"
    with pytest.raises(PeerTimeout) as caught:
        reach_store(replace(WORLD, address=address), 0.3)
    assert f"did not reach device 0 at {address} within 0.3 s: {words}" in str(caught.value)
    said = f"device 0 cannot be reached at {address}: {words}"
    assert said in caplog.text or host == "a stranger"  # for whom PyTorch waits that long


def test_what_cannot_be_an_address_is_refused_at_once(listening: int) -> None:
    context = replace(WORLD, address=f"{'a' * 70}:29500")
    with pytest.raises(LaunchError, match="MASTER_ADDR must be the name of a machine, but got aaa"):
        reach_store(context, 60)
    context = replace(WORLD, rank=0, address=f"127.0.0.1:{listening}")
    with pytest.raises(LaunchError, match=r"EADDRINUSE.*Set MASTER_PORT to a port that is free"):
        reach_store(context, 60)


@for_each("host", ["127.0.0.1", "no-such-machine.invalid", "192.0.2.1", "a launcher's"])
def test_the_lead_need_not_know_the_name_by_which_others_reach_it(host: str) -> None:
    if host == "a launcher's":
        agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = replace(WORLD, address=f"127.0.0.1:{agent.port}", agent_store=True)
        served = reach_store(replace(context, rank=0), 60)
    else:
        context = replace(WORLD, address=f"127.0.0.1:{free_port()}")
        own = context.address.replace("127.0.0.1", host)
        served = reach_store(replace(context, rank=0, address=own), 60)
    found = reach_store(context, 60)
    served.set("key", "value")
    assert found.get("key") == b"value"
    store: Any = found
    assert store.timeout == timedelta(seconds=60)


NAME = "GLOO_SOCKET_IFNAME"


@for_each(
    ("one_host", "said", "inside"),
    [(True, None, "lo"), (True, "eth1", "eth1"), (True, "", ""), (False, None, None)],
)
def test_gloo_stays_on_one_host_while_the_group_is_made(
    one_host: bool, said: str | None, inside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, said or "")
    if said is None:
        monkeypatch.delenv(NAME)
    here = LaunchContext(one_host=one_host, address="127.0.0.1:29500")
    with contextlib.suppress(ArithmeticError), gloo_interface(here, ["", ""]):
        assert os.environ.get(NAME) == inside
        raise ArithmeticError
    assert os.environ.get(NAME) == said


class Probe(contextlib.AbstractContextManager["Probe"]):
    """A socket on a machine whose name has no address, and that sends from a secondary one."""

    asked: ClassVar[list[str]] = []

    def __init__(self, **_: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def bind(self, place: object) -> None:
        raise OSError

    def connect(self, place: tuple[str, int]) -> None:
        self.asked.append(place[0])
        if ":" in place[0]:
            raise OSError("an address of another family")

    def getsockname(self) -> tuple[str, int]:
        return "10.9.9.9", 1


def test_an_address_of_no_interface_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr("onefold.exchange.group.socket.socket", Probe)
    monkeypatch.setattr("onefold.exchange.group.socket.if_nameindex", list)
    caplog.set_level("INFO", "onefold")
    here = LaunchContext(one_host=False, address="[fe80::1]:29500")
    with gloo_interface(here, []):
        assert NAME not in os.environ
    assert caplog.text == ""
    with gloo_interface(here, ["10.9.9.8", "node"]):
        assert NAME not in os.environ
    assert Probe.asked == ["fe80::1", "fe80::1", "10.9.9.8"]
    assert f"no interface has 10.9.9.9 as its first address: gloo may need {NAME}" in caplog.text


APART = Path(__file__).parent.parent / "scripts" / "apart.py"


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@for_each("lead", ["10.77.0.1", "lead"])
def test_hosts_whose_own_names_are_loopback_addresses_connect(lead: str, tmp_path: Path) -> None:
    """As on Debian: /etc/hosts has 127.0.1.1 for the host's own name, the lead's included."""
    names = (f"{socket.gethostname()} lead", f"{socket.gethostname()}\n10.77.0.1 lead")
    place = {"MASTER_ADDR": lead, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    place |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment = {k: v for k, v in os.environ.items() if k != NAME} | place
    with two_hosts(Cable(mbit_per_s=1000)) as hosts:
        processes = []
        for rank, (host, own) in enumerate(zip(hosts, names, strict=True)):
            file = tmp_path / f"hosts{rank}"
            file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n")
            script = f"mount --bind {file} /etc/hosts && exec {sys.executable} {APART} train"
            processes.append(
                subprocess.Popen(
                    host.command(["sh", "-c", script]),
                    env=environment | {"RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert re.fullmatch("[0-9a-f]{16}", said[0].splitlines()[-1])
    assert not any("to connect all devices failed" in each for each in said)
