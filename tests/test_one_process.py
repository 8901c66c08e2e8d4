"""Several devices driven by one process: whatever is done to the model holds on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

SHARDS, SAMPLES = 6, 18


class Small(nn.Module):
    """Parts whose attributes matter, and one of its own."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm: Any = norm or nn.BatchNorm1d(3)
        self.drop: Any = nn.Dropout(0.3)
        self.line: Any = line()
        self.factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(self.drop(self.norm(inputs))) * self.factor  # type: ignore[no-any-return]


@torch.no_grad()
def in_place(model: Small) -> None:
    model.line.weight.add_(1)


Change = Callable[[Small], object]
CHANGES: list[Change] = [
    in_place,
    lambda model: model.line.weight.data.mul_(0.5),
    lambda model: model.line.weight.register_hook(lambda gradient: gradient * 0.5),
    lambda model: model.line.register_forward_hook(lambda module, inputs, output: output + 1),
    lambda model: setattr(model, "factor", 3.0),
    lambda model: setattr(model, "drop", nn.Identity()),
    lambda model: setattr(model.drop, "p", 0.9),
    lambda model: setattr(model.norm, "momentum", 0.5),
    lambda model: setattr(model.norm.running_mean, "data", torch.ones(3)),
    lambda model: model.norm.running_mean.add_(1),
    lambda model: model.norm.eval(),
    lambda model: model.line.bias.requires_grad_(False),
]


def trained(devices: int, change: Change, *, before: bool) -> dict[str, bytes]:
    model = Small()
    if before:
        change(model)
    trainer = make_trainer(model, shards=SHARDS, devices=devices)
    trainer.step(points(SAMPLES))
    if not before:
        change(model)
    for _ in range(2):
        trainer.step(points(SAMPLES))
    return bits(model)


@for_each("before", [True, False])
def test_what_is_changed_holds_on_every_device(before: bool) -> None:
    unchanged = trained(1, lambda model: None, before=before)
    for number, change in enumerate(CHANGES):
        alone = trained(1, change, before=before)
        assert trained(3, change, before=before) == alone != unchanged, number


@for_each("devices", [1, 3])
def test_the_model_is_the_users_own_and_a_loss_may_close_over_it(devices: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, batch) + model.line.weight.square().sum()

    model, other = Small(), Small()
    weight, mean = model.line.weight, model.norm.running_mean
    closing = make_trainer(model, lambda _, batch: loss(model, batch), shards=6, devices=devices)
    given = make_trainer(other, loss, shards=SHARDS, devices=devices)
    places = weight.data_ptr(), mean.data_ptr()
    for _ in range(2):
        closing.step(points(SAMPLES))
        given.step(points(SAMPLES))
    data = torch.utils.data.TensorDataset(*points(9))
    closing.evaluate(lambda m, b: {"loss": square(m, b)}, data, batch_size=9)
    assert bits(model) == bits(other)
    assert closing.model is model
    assert model.line.weight is weight
    assert model.norm.running_mean is mean
    assert (weight.data_ptr(), mean.data_ptr()) == places


@for_each("devices", [1, 2])
def test_two_trainers_may_share_buffers(devices: int) -> None:
    """Each takes over what the other has left in them, as two plain loops would."""
    shared, alone = (nn.BatchNorm1d(3, affine=False) for _ in range(2))
    trainers = [make_trainer(Small(shared), shards=2, devices=devices) for _ in range(2)]
    one = make_trainer(Small(alone), shards=2, devices=devices)
    for turn in range(4):
        trainers[turn % 2].step(points(8))
        one.step(points(8))
    assert bits(shared) == bits(alone)
    assert shared.num_batches_tracked == 4
