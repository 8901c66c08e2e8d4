"""The user's module, sorted: its parts are those that it had when Trainer was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onefold.engine.modelparts import ModelParts
from onefold.errors import StateError
from tests.tables import for_each


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return model


def test_parameters_are_sorted_and_tied_ones_count_once() -> None:
    parts = ModelParts(tied(), ["0.weight", "0.bias"])
    assert list(parts.trained) == ["0.weight", "0.bias"]
    assert list(parts.other) == ["1.bias"]
    assert [home[0] for home in parts.homes] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert parts.trainable() == [True, True, False]


def test_what_may_require_a_gradient_is_put_back() -> None:
    model = tied()
    parts = ModelParts(model, ["0.weight", "0.bias"])
    found = parts.trainable()
    model.requires_grad_(True)
    model[0].bias.requires_grad_(False)
    parts.restore_frozen(found)
    assert parts.trainable() == found


def test_a_parameter_that_was_replaced_is_named() -> None:
    model = tied()
    parts = ModelParts(model, ["0.weight", "0.bias"])
    parts.check_held()
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"^parameter 1\.weight has been replaced"):
        parts.check_held()


EACH_LOOK = for_each("look", [ModelParts.check_held, ModelParts.check_parts])


@EACH_LOOK
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.append(nn.Linear(3, 1)), r"^parameter 2\.weight of the model was put in"),
        (lambda m: m.register_buffer("new", torch.ones(1)), "^buffer new of the model was put in"),
        (lambda m: m.insert(0, nn.Linear(3, 3)), "^parameter 0.weight of the model was put in"),
        (lambda m: m[1].register_parameter("new", nn.Parameter(torch.ones(1))), "new of the model"),
        (lambda m: setattr(m, "1", nn.Linear(3, 3)), r"^parameter 1\.weight of the model was"),
        (lambda m: m.pop(1), r"^parameter 1\.weight of the model was put in, taken out"),
    ],
)
def test_a_model_that_was_given_other_parts_is_refused(
    change: Callable[[nn.Sequential], object], words: str, look: Callable[[ModelParts], None]
) -> None:
    model = tied()
    parts = ModelParts(model, ["0.weight", "0.bias"])
    look(parts)
    change(model)
    with pytest.raises(StateError, match=words):
        look(parts)


@EACH_LOOK
def test_parts_without_parameters_may_come_and_go(look: Callable[[ModelParts], None]) -> None:
    model = tied().append(nn.ModuleList())
    parts = ModelParts(model, ["0.weight", "0.bias"])
    model.append(nn.Dropout())
    look(parts)
    model[3] = nn.ReLU()
    del model[2]
    look(parts)
    assert len(parts.modes.read()) == len([*model.modules()])
