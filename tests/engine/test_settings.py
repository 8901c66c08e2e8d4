"""The settings of an optimizer's groups, as a number that tells them apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onefold.engine.agreement import GroupSettings
from tests.small import line
from tests.tables import for_each


def adam(rate: float | torch.Tensor = 0.1) -> torch.optim.Adam:
    model = line()
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.5}]
    return torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99))


def put(group: int, key: str, value: object) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[group][key] = value

    return change


CHANGES = {
    "rate": put(0, "lr", 0.2),
    "of the second group": put(1, "lr", 0.2),
    "pair": put(1, "betas", (0.9, 0.999)),
    "truth": put(0, "amsgrad", True),
    "new": put(0, "initial_lr", 0.1),
    "tensor": put(0, "lr", torch.tensor(0.1)),
}


@for_each("name", CHANGES)
def test_another_setting_is_another_number(name: str) -> None:
    optimizer = adam()
    settings = GroupSettings(optimizer)
    before = settings.checksum()
    assert settings.checksum() == before
    CHANGES[name](optimizer)
    after = settings.checksum()
    assert after != before
    fresh = adam()
    CHANGES[name](fresh)
    assert GroupSettings(fresh).checksum() == after  # whatever it was before
    fresh_again = adam()
    assert GroupSettings(fresh_again).checksum() == before


def test_a_change_back_is_the_number_of_before() -> None:
    optimizer = adam()
    settings = GroupSettings(optimizer)
    before = settings.checksum()
    put(0, "lr", 0.3)(optimizer)
    settings.checksum()
    put(0, "lr", 0.1)(optimizer)
    assert settings.checksum() == before


def test_parameters_do_not_count() -> None:
    one, other = adam(), adam()
    with torch.no_grad():
        other.param_groups[0]["params"][0].add_(1.0)
    assert GroupSettings(one).checksum() == GroupSettings(other).checksum()


@for_each("due", [True, False])
def test_a_rate_in_a_tensor_counts_by_its_value(due: bool) -> None:
    optimizer = adam(torch.tensor(0.1))
    settings = GroupSettings(optimizer)
    before = settings.checksum(due=due)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    assert settings.checksum(due=due) != before
    optimizer.param_groups[0]["lr"].fill_(0.1)
    assert settings.checksum(due=due) == before


def travelled(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As other devices get them."""
    found: list[dict[str, Any]] = json.loads(json.dumps(settings))
    return found


@for_each("name", CHANGES)
def test_what_one_device_changed_another_one_takes_over(name: str) -> None:
    lead, other = adam(), adam()
    CHANGES[name](lead)
    theirs = GroupSettings(other)
    theirs.adopt(travelled(GroupSettings(lead).as_json()))
    assert theirs.checksum() == GroupSettings(lead).checksum()
    assert [len(group["params"]) for group in other.param_groups] == [1, 1]


def test_a_tensor_keeps_its_identity() -> None:
    """A schedule, or a graph of a GPU, may hold it."""
    lead, other = adam(torch.tensor(0.3)), adam(torch.tensor(0.1))
    rate = other.param_groups[0]["lr"]
    GroupSettings(other).adopt(travelled(GroupSettings(lead).as_json()))
    assert other.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)


def test_names_of_parameters_are_no_settings() -> None:
    model = line()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    (settings,) = GroupSettings(optimizer).as_json()
    assert not settings.keys() & {"params", "param_names"}
    assert settings["lr"] == 0.1


def test_a_setting_that_cannot_travel_is_named() -> None:
    optimizer = adam()
    put(1, "schedule", object())(optimizer)
    with pytest.raises(TypeError, match="schedule of the optimizer's group 1 is of type object"):
        GroupSettings(optimizer).as_json()
