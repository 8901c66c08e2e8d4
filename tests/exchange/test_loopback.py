"""Where gloo listens: on one host where no other reaches it, on several where the others do."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from benchmarks.network import Cable, two_hosts, why_not

from onefold.core.context import LaunchContext
from onefold.exchange.group import gloo_interface
from tests.tables import for_each

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
    assert f"10.9.9.9 is no interface's first address: gloo may need {NAME}" in caplog.text


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
