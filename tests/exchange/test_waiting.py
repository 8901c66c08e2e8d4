"""A device that waits for the others says for whom, where, and why that may be."""

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import pytest
from torch.distributed import TCPStore

from onefold.core.context import LaunchContext
from onefold.errors import LaunchError, PeerTimeout
from onefold.exchange import group, progress
from onefold.exchange.group import reach_store
from tests.tables import for_each

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
        ("127.0.0.1", "nobody listens at this port yet"),
        ("a stranger", "what listens there is no store of PyTorch"),
        ("silence", r"nobody answers (timed out; is there a firewall?)"),
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
        monkeypatch.setattr(group.socket, "create_connection", silent)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    port = listening if host == "a stranger" else free_port()
    address = f"{host if '.' in host else '127.0.0.1'}:{port}"
    with pytest.raises(PeerTimeout) as caught:
        reach_store(replace(WORLD, address=address), 0.3)
    assert f"did not reach device 0 at {address} within 0.3 s: {words}" in str(caught.value)
    said = f"device 0 cannot be reached at {address}, as {words}"
    assert said in caplog.text or host == "a stranger"  # for whom PyTorch waits that long


def test_what_cannot_be_an_address_is_refused_at_once(listening: int) -> None:
    context = replace(WORLD, address=f"{'a' * 70}:29500")
    with pytest.raises(LaunchError, match="expected the name of a machine in MASTER_ADDR, got aaa"):
        reach_store(context, 60)
    context = replace(WORLD, rank=0, address=f"127.0.0.1:{listening}")
    with pytest.raises(LaunchError, match=r"EADDRINUSE.*Expected MASTER_PORT to be a port that is"):
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
    assert found.timeout == timedelta(seconds=60)
