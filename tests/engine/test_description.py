"""What must be alike on every device when a run begins, and how a difference is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onefold.core.shard import Plan
from onefold.engine.description import compare, describe
from onefold.engine.modelparts import ModelParts
from onefold.errors import DisagreementError
from tests.engine.assembled import settings_of, team_of
from tests.small import sgd
from tests.tables import for_each

Make = Callable[[torch.optim.Optimizer], Any]


def said(
    change: Callable[[nn.Sequential], object] = lambda _: None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    schedule: Make | None = None,
    plan: tuple[int, ...] = (2, 2),
    trainer: int = 0,
    **settings: Any,
) -> dict[str, str]:
    """What one of two devices says."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    change(module)
    parts = ModelParts(module, [n for n, p in module.named_parameters() if p.requires_grad])
    made = optimizer(module)
    return describe(
        parts,
        made,
        settings_of(**settings),
        team_of(2, own=[1], trainer=trainer),
        Plan(plan),
        None if schedule is None else schedule(made),
    )


def compared(*each: dict[str, str]) -> None:
    compare([json.dumps(one).encode() for one in each])


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


def test_devices_that_are_alike_are_not_refused() -> None:
    compared(said(), said(), said())
    # Where functions lie in memory differs.
    for schedule in (decay, by_lambda):
        compared(said(schedule=schedule), said(schedule=schedule))


Change = Callable[[nn.Sequential], object]
DIFFERENT: dict[str, dict[str, Any]] = {
    "shards is 4 on device 0 and 8 on device 1: every device": {"shards": 8},
    "seed is 0 on device 0 and 1 on": {"seed": 1},
    "clip_norm is None on device 0 and 0.5 on": {"clip_norm": 0.5},
    "the rules of buffers is {} on device 0 and": {"buffers": {"*": "max"}},
    "the number of Trainers before this one is 0 on device 0": {"trainer": 1},
    "the schedule is None on device 0 and StepLR on": {"schedule": decay},
    "the optimizer is SGD on device 0 and Rprop on": {
        "optimizer": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1)
    },
    r"optimizer group 0 lr is 0\.1 on device 0 and 0\.2 on": {
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9)
    },
}
OTHER_MODELS: dict[str, Change] = {
    r"parameter 2\.weight is trained torch\.float32 .* torch.float64": lambda m: m[2].double(),
    r"parameter 3\.weight is absent .* and trained torch\.float32 \(2, 1\)": (
        lambda m: m.append(nn.Linear(1, 2))
    ),
    r"parameter 0\.weight is trained .* \(3, 1\) on device 0 and .* \(1, 4\) on": (
        lambda m: setattr(m[0].weight, "data", torch.zeros(3, 4).t())
    ),
    r"parameter 0\.bias is trained .* other torch\.f": lambda m: m[0].bias.requires_grad_(False),
    "buffer mask is absent on device 0": lambda m: m.register_buffer("mask", torch.zeros(2)),
}


@for_each(
    ("words", "choices"),
    [*DIFFERENT.items(), *((words, {"change": each}) for words, each in OTHER_MODELS.items())],
)
def test_what_differs_is_named_with_the_device_and_both_values(
    words: str, choices: dict[str, Any]
) -> None:
    with pytest.raises(DisagreementError, match=f"^{words}"):
        compared(said(), said(**choices))
    with pytest.raises(DisagreementError, match=r" on device 2\b"):
        compared(said(), said(), said(**choices))


def test_other_hashes_of_text_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Only sets depend on them, so this is no error."""
    compared(said(), {**said(), "a hash": "12345"})
    assert [m for m in caplog.messages if "set PYTHONHASHSEED=0" in m]


def test_scripts_may_set_the_precision_of_products_for_one_kind_of_device() -> None:
    """Asked in the old way after it was set in the new one, PyTorch raises."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert said()["the precision of matrix products"] == "none"
    finally:
        matmul.fp32_precision = before
