"""What devices compare before each call, beside the differences in `tests/test_agreement.py`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from onefold.errors import DisagreementError
from onefold.step.agreement import GroupSettings
from onefold.update.optimizers import settings_of
from tests import simulated
from tests.small import line, make_trainer, points
from tests.tables import for_each

Change = Callable[[nn.Module, bool], object]


def one_value(model: nn.Module, is_lead: bool) -> None:
    """That is not among those that are looked at in every step, on one device."""
    if not is_lead:
        model.get_parameter("weight").data.view(-1)[1] += 1.0


@torch.no_grad()
def in_place(model: nn.Module, is_lead: bool) -> None:
    model.get_parameter("bias").add_(1.0)


def changed(change: Change, steps: int) -> None:
    trainer = make_trainer(line(20_000), devices=None)
    for _ in range(steps):
        trainer.step(points(8, 20_000))
    change(trainer.model, trainer.is_lead)
    trainer.step(points(8, 20_000))


@for_each(
    ("change", "steps", "exchange", "words"),
    [
        (one_value, 1, "collective", "device 1 has other parameters or buffers than device 0"),
        (one_value, 5, "collective", ""),  # it is not due
        (in_place, 1, "collective", "parameter bias changed since the previous call, on device 0"),
        (in_place, 5, "shared", "parameter bias changed since the previous call, on device 0"),
    ],
)
def test_changed_values_are_refused(change: Change, steps: int, exchange: Any, words: str) -> None:
    """The order of such changes would be left to chance."""
    with pytest.raises(DisagreementError, match=words) if words else nullcontext():
        simulated.launch(changed, devices="cpu:2", args=(change, steps), exchange=exchange)


def adam(rate: float | torch.Tensor = 0.1) -> torch.optim.Adam:
    model = line()
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "weight_decay": 0.5},
    ]
    return torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99))


def test_settings_in_another_order_are_the_same() -> None:
    """Or devices would differ in none that could be named."""
    one, other = adam(), adam()
    for group in other.param_groups:
        group["lr"] = group.pop("lr")
    assert GroupSettings(one).checksum() == GroupSettings(other).checksum()
    other.param_groups[0]["lr"] = 0.2
    assert GroupSettings(one).checksum() != GroupSettings(other).checksum()


def test_a_rate_in_a_tensor_counts_by_its_value_and_keeps_its_identity() -> None:
    """A scheduler, or a graph of a GPU, may hold it."""
    lead, other = adam(torch.tensor(0.3)), adam(torch.tensor(0.1))
    rate = other.param_groups[0]["lr"]
    settings = GroupSettings(other)
    for run_checks in (True, False):
        rate.fill_(0.1)
        before = settings.checksum(run_checks=run_checks)
        rate.fill_(0.2)
        assert settings.checksum(run_checks=run_checks) != before
    settings.adopt(settings_of(lead))
    assert other.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)
