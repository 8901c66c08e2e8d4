"""What a line of devices cannot compute is refused by name, on every device, and nobody hangs."""

from __future__ import annotations

import re

import pytest
import torch

import onefold
from onefold.core.options import ExchangeName, RunOptions
from onefold.core.world import World
from onefold.errors import LineError, PeerFailed
from onefold.testing import outcomes
from tests.engine.refused import DEVICES, REFUSED, Layers, Linear, attempt, far, in_order
from tests.tables import for_each

OF_PROCESSES = [name for name, case in REFUSED.items() if case.in_processes != "-"]


@pytest.fixture
def in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched, whose devices are a line."""
    world = World(options=RunOptions(keep="stages"))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("in_line")
def test_devices_of_one_process(name: str) -> None:
    with pytest.raises(LineError, match=REFUSED[name].match):
        attempt(name, devices=["cpu"] * DEVICES)


@for_each("name", REFUSED)
def test_one_device_computes_it(name: str) -> None:
    """Or the refusal would say nothing about lines."""
    attempt(name, devices=["cpu"])


def refused(name: str, exchange: ExchangeName) -> None:
    case = REFUSED[name]
    options = RunOptions(keep="stages", exchange=exchange)
    errors = [each.error for each in outcomes(attempt, DEVICES, args=(name,), options=options)]
    assert {type(error) for error in errors} <= {LineError, PeerFailed}
    causes = [str(error) for error in errors if isinstance(error, LineError)]
    assert re.search(case.in_processes or case.match, causes[0])
    assert all("LineError" in str(error) for error in errors if isinstance(error, PeerFailed))


@for_each("name", OF_PROCESSES)
def test_devices_that_share_memory(name: str) -> None:
    refused(name, "shared")


@for_each("name", ["values", "order", "left out", "scale", "gather", "reentrant"])
def test_devices_that_share_nothing(name: str) -> None:
    refused(name, "collective")


@pytest.mark.usefixtures("in_line")
def test_a_step_after_a_refusal() -> None:
    """One process goes on, with the bits that it would have without."""

    def trained(*, with_refusal: bool) -> str:
        torch.manual_seed(3)
        model = Layers(in_order, Linear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = {"far": far, "gather": REFUSED["gather"].loss}
        trainer = onefold.Trainer(
            model, optimizer, losses, shards=4, threads=1, devices=["cpu"] * DEVICES
        )
        for _ in range(2):
            if with_refusal:
                with pytest.raises(LineError):
                    trainer.step(torch.ones(9, 6), loss="gather")
            trainer.step(torch.ones(9, 6), loss="far")
        trainer.close()
        return trainer.fingerprint()

    assert trained(with_refusal=True) == trained(with_refusal=False)
