"""A run whose roster changes between two steps: other plans, other spans, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

import onefold
from tests import simulated
from tests.inside import engine_in
from tests.tables import for_each

SHARDS = 4
CUTS = [(0, 1, 2, 4), (0, 0, 4, 4), (0, 3, 3, 4)]
"""Where the spans of 3 devices begin, in quarters of the pieces."""


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(40, 500), nn.BatchNorm1d(500), nn.ReLU(), nn.Dropout(0.2), nn.Linear(500, 200)
    )


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(batch).square().mean(dim=1)
    return result


def by_element(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def by_parameter(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Updates whole parameters: its pieces are the user's own where one process has them."""
    return torch.optim.Adafactor(parameters, lr=0.01)


def train(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    devices: list[str] | None = None,
    changes: bool = True,
) -> tuple[list[str], int]:
    """Fingerprints after each step, and the generation of the last roster."""
    module = model()
    optimizer = make(list(module.parameters()))
    trainer = onefold.Trainer(
        module, optimizer, loss, shards=SHARDS, devices=devices, threads=1, clip_norm=0.5
    )
    prints = []
    for step in range(2 * len(CUTS)):
        trainer.step(torch.randn(12, 40, generator=torch.Generator().manual_seed(step)))
        prints.append(trainer.fingerprint())
        if changes and step % 2:
            roster = engine_in(trainer).roster
            cuts = [roster.pieces * quarter // 4 for quarter in CUTS[step // 2]]
            spans = [range(start, stop) for start, stop in pairwise(cuts)]
            plan = roster.plan.__class__(((1, 3, 0), (0, 1, 3), (2, 1, 1))[step // 2])
            engine_in(trainer).bind(roster.next(plan=plan, spans=spans))
    generation = engine_in(trainer).roster.generation
    trainer.close()
    return prints, generation


@for_each("make", [by_element, by_parameter])
def test_spans_and_shares_change_hands_in_one_process(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    alone, _ = train(make, changes=False)
    moved, generation = train(make, devices=["cpu"] * 3)
    assert moved == alone
    assert generation == len(CUTS)


@for_each(("exchange", "keep"), [("shared", "all"), ("collective", "all"), ("collective", "span")])
def test_spans_and_shares_change_hands_between_processes(exchange: str, keep: str) -> None:
    alone, _ = train(by_element, changes=False)
    moved, generation = simulated.launch(
        train, devices="cpu:3", args=(by_element,), exchange=exchange, keep=keep
    )
    assert moved == alone
    assert generation == len(CUTS)
