"""A device may be as late as the timeout of the run says, whatever the limit of connecting was."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import onefold

pytestmark = [pytest.mark.full, pytest.mark.processes]

LATE_S = 6.0
"""Longer than gloo's first attempt to connect may take."""


class Slow(nn.Module):
    """A layer that takes its time once, on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.is_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_late and type(x) is torch.Tensor:
            time.sleep(LATE_S)
            self.is_late = False
        return torch.tanh(self.linear(x))


def trained(late: int) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(*[Slow() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = lambda model, batch: model(batch).square().mean(dim=1)  # noqa: E731
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        for layer in model[-1:] if late == 0 else model[:1]:
            layer.is_late = step == 1 and late == (0 if trainer.is_lead else 1)
        trainer.step(batch)
    return trainer.fingerprint()


@pytest.mark.parametrize(("keep", "late"), [("all", 1), ("span", 0), ("stages", 1)])
def test_a_device_that_is_late_is_waited_for(keep: Any, late: int) -> None:
    options: Any = {"keep": keep, "exchange": "collective", "timeout_s": 300}
    found = onefold.launch(trained, devices="cpu:2", args=(late,), **options)
    assert found == onefold.launch(trained, devices=1, args=(-1,))
