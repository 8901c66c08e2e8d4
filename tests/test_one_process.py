"""Several devices driven by one process: whatever is done to the model holds on all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

SHARDS, SAMPLES = 6, 18


class Small(nn.Module):
    """Parts whose attributes matter, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.3)
        self.line = line()
        self.factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(self.drop(self.norm(inputs))) * self.factor


Change = Callable[[Small], object]


def _hook_before(model: Small) -> None:
    model.line.weight.register_hook(lambda gradient: gradient * 0.5)


def _hook_after(model: Small) -> None:
    model.line.register_forward_hook(lambda module, inputs, output: output + 1)


def _attribute(model: Small) -> None:
    model.factor = 3.0


def _dropout(model: Small) -> None:
    model.drop.p = 0.9


def _momentum(model: Small) -> None:
    model.norm.momentum = 0.5


def _data(model: Small) -> None:
    model.line.weight.data.mul_(0.5)
    model.line.bias.data[0] += 1


def _in_place(model: Small) -> None:
    with torch.no_grad():
        model.line.weight.add_(1)


def _mode(model: Small) -> None:
    model.norm.eval()


def _buffer(model: Small) -> None:
    model.norm.running_mean.add_(1)


def _buffer_data(model: Small) -> None:
    model.norm.running_mean.data = torch.ones(3)


def _submodule(model: Small) -> None:
    model.drop = nn.Identity()


def _frozen(model: Small) -> None:
    model.line.bias.requires_grad_(False)


CHANGES: dict[str, Change] = {
    "parameter hook": _hook_before,
    "forward hook": _hook_after,
    "attribute": _attribute,
    "dropout": _dropout,
    "momentum": _momentum,
    "data": _data,
    "in place": _in_place,
    "mode": _mode,
    "buffer": _buffer,
    "buffer data": _buffer_data,
    "submodule": _submodule,
    "frozen": _frozen,
}


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


@for_each("before", [True, False], ids=["before", "after"])
@for_each("change", CHANGES)
def test_what_is_changed_holds_on_every_device(change: str, before: bool) -> None:
    alone = trained(1, CHANGES[change], before=before)
    assert trained(3, CHANGES[change], before=before) == alone
    assert alone != trained(1, lambda model: None, before=before)


@for_each("devices", [1, 3])
def test_a_loss_may_close_over_the_model(devices: int) -> None:
    model = Small()

    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, batch) + model.line.weight.square().sum()

    def given(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, batch) + model.line.weight.square().sum()

    other = Small()
    for module, function in ((model, loss), (other, given)):
        trainer = make_trainer(module, function, shards=SHARDS, devices=devices)
        for _ in range(2):
            trainer.step(points(SAMPLES))
    assert bits(model) == bits(other)


def test_the_model_is_the_users_own_between_calls() -> None:
    model = Small()
    weight, mean = model.line.weight, model.norm.running_mean
    trainer = make_trainer(model, shards=SHARDS, devices=3)
    places = weight.data_ptr(), mean.data_ptr()
    trainer.step(points(SAMPLES))
    trainer.evaluate(
        lambda m, b: {"loss": square(m, b)},
        torch.utils.data.TensorDataset(*points(9)),
        batch_size=9,
    )
    assert trainer.model is model
    assert model.line.weight is weight
    assert model.norm.running_mean is mean
    assert (weight.data_ptr(), mean.data_ptr()) == places


class Counted(nn.Module):
    """A line of its own, and statistics that another module has as well."""

    def __init__(self, statistics: nn.Module) -> None:
        super().__init__()
        self.statistics = statistics
        self.line = line()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(self.statistics(inputs))


@for_each("devices", [1, 2])
def test_two_trainers_may_share_buffers(devices: int) -> None:
    """Each takes over what the other has left in them, as two plain loops would."""
    shared = nn.BatchNorm1d(3, affine=False)
    trainers = [
        make_trainer(Counted(shared), shards=2, devices=devices, threads=1) for _ in range(2)
    ]
    alone = nn.BatchNorm1d(3, affine=False)
    one = make_trainer(Counted(alone), shards=2, devices=devices)
    for turn in range(4):
        trainers[turn % 2].step(points(8))
        one.step(points(8))
    assert bits(shared) == bits(alone)
    assert shared.num_batches_tracked == 4
