"""A run whose assignment changes between two steps: other partitions, the same bits."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests import simulated
from tests.inside import engine_in
from tests.small import make_trainer
from tests.tables import for_each

CUTS = [(0, 1, 2, 4), (0, 0, 4, 4), (0, 3, 3, 4)]
"""Where the partitions of 3 devices begin, in quarters of the pieces."""
PLANS = [(1, 3, 0), (0, 1, 3), (2, 1, 1)]

Make = Callable[[Any], torch.optim.Optimizer]


def by_element(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def by_parameter(parameters: Any) -> torch.optim.Optimizer:
    """Updates whole parameters: its pieces are the user's own where one process has them."""
    return torch.optim.Adafactor(parameters, lr=0.01)


def train(make: Make, devices: int | None = None, *, changes: bool = True) -> list[str]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(40, 500), nn.BatchNorm1d(500), nn.ReLU(), nn.Dropout(0.2), nn.Linear(500, 200)
    )
    trainer = make_trainer(
        model,
        lambda module, batch: module(batch).square().mean(dim=1),
        optimizer=make(model.parameters()),
        devices=devices,
        clip_norm=0.5,
    )
    trainer.average(decay=0.9)
    prints = []
    for step in range(2 * len(CUTS)):
        trainer.step(torch.randn(12, 40, generator=torch.Generator().manual_seed(step)))
        prints.append(trainer.fingerprint())
        if changes and step % 2:
            assignment = engine_in(trainer).assignment
            cuts = [assignment.pieces * quarter // 4 for quarter in CUTS[step // 2]]
            partitions = [range(start, stop) for start, stop in pairwise(cuts)]
            plan = type(assignment.plan)(PLANS[step // 2])
            engine_in(trainer).bind(assignment.next(plan=plan, partitions=partitions))
    with trainer.averaged():
        prints.append(trainer.fingerprint())
    trainer.close()
    return prints


@for_each(
    ("make", "exchange", "placement"),
    [
        (by_element, "", "replicate"),
        (by_parameter, "", "replicate"),
        (by_element, "shared", "replicate"),
        (by_element, "collective", "replicate"),
        (by_element, "collective", "shard"),
    ],
)
def test_spans_and_shares_change_hands(make: Make, exchange: Any, placement: str) -> None:
    if exchange:
        how: Any = {"exchange": exchange, "placement": placement}
        moved = simulated.launch(train, devices="cpu:3", args=(make,), **how)
    else:
        moved = train(make, 3)
    assert moved == train(make, 1, changes=False)
