"""Stages that are larger than a device are refused before work begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onefold
from onefold.core.options import KeepName, RunOptions
from onefold.core.world import World
from onefold.engine import assembly
from tests.tables import for_each

WIDTH = 64
STAGE_BYTES = 4 * WIDTH * WIDTH


def new_trainer() -> onefold.Trainer:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return onefold.Trainer(model, optimizer, lambda m, x: m(x).mean(dim=1), shards=2, threads=1)


@for_each(
    ("keep", "capacity", "fits"),
    [
        ("span", 2 * STAGE_BYTES, True),
        ("span", 2 * STAGE_BYTES - 1, False),
        ("host", STAGE_BYTES, True),
        ("host", STAGE_BYTES - 1, False),
        ("all", 1, True),
    ],
)
def test_a_stage_that_no_device_can_have_is_named(
    keep: KeepName, capacity: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "capacity_bytes", lambda _: capacity)
    monkeypatch.setattr(
        "onefold.trainer.current_world", lambda: World(options=RunOptions(keep=keep))
    )
    if fits:
        new_trainer().close()
        return
    expected = rf"stage 0 is larger .* at most {capacity:,} bytes, which cpu .*onefold\.Sliced"
    with pytest.raises(ValueError, match=expected):
        new_trainer()
