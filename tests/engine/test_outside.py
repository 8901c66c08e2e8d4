"""State that the loss uses and that is not the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from onefold.errors import StateError
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

both = for_each("devices", [1, 2])


@both
def test_statistics_of_a_second_module_are_refused(devices: int) -> None:
    second = nn.BatchNorm1d(3)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, (second(batch[0]), batch[1]))

    trainer = make_trainer(line(), loss, devices=devices)
    words = r"step 1, the loss: a module of BatchNorm1d is called .* its buffer running_mean"
    with pytest.raises(StateError, match=words):
        trainer.step(points(8))


@both
def test_a_teacher_that_does_not_learn_is_fine(devices: int) -> None:
    teacher = nn.Sequential(nn.BatchNorm1d(3), line()).eval()
    before = bits(teacher)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)

    trainer = make_trainer(line(), loss, devices=devices)
    for _ in range(5):
        trainer.step(points(8))
    assert bits(teacher) == before


def test_a_synchronised_batch_norm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 0 is a SyncBatchNorm, .* expected BatchNorm"):
        make_trainer(nn.Sequential(nn.SyncBatchNorm(3), line()))


def test_an_attribute_that_is_called_sparse_is_the_users() -> None:
    model = line()
    model.sparse = True
    make_trainer(model).step(points(8))


@both
def test_a_teacher_that_follows_the_model_inside_the_loss_is_refused(devices: int) -> None:
    teacher = line()

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            teacher.weight.lerp_(model.weight, 0.1)
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)

    def called_first(model: nn.Module, batch: Batch) -> torch.Tensor:
        value = (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)
        with torch.no_grad():
            teacher.weight.lerp_(model.weight, 0.1)
        return value

    for function in (called_first, loss):
        trainer = make_trainer(line(), function, devices=devices)
        with pytest.raises(StateError, match=r"a module of Linear is called .* parameter weight"):
            trainer.step(points(8))


def test_with_one_shard_statistics_of_a_second_module_are_those_of_a_plain_loop() -> None:
    second, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, (second(batch[0]), batch[1]))

    trainer = make_trainer(line(), loss, shards=1)
    for _ in range(3):
        trainer.step(points(8))
        other(points(8)[0])
    assert bits(second) == bits(other)


@both
def test_a_module_that_is_made_in_the_loss_is_left_alone(devices: int) -> None:
    """A copy of the model with statistics of its own, as in meta-learning."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            clone = copy.deepcopy(model)
            shift = clone(batch[0]).mean()
        return square(model, batch) + shift

    model = nn.Sequential(nn.BatchNorm1d(3), line())
    trainer = make_trainer(model, loss, devices=devices)
    for _ in range(4):
        trainer.step(points(8))


def test_scores_of_a_module_that_they_change_are_refused() -> None:
    second = nn.BatchNorm1d(3)
    trainer = make_trainer()
    data = TensorDataset(*points(8))
    with pytest.raises(StateError, match=r"first batch of an evaluation: .* buffer running_mean"):
        trainer.evaluate(lambda m, b: {"x": second(b[0]).mean(dim=1)}, data, batch_size=8)


def replaced(model: nn.Sequential) -> None:
    model[1] = nn.Linear(3, 1)


def put_in(model: nn.Sequential) -> None:
    model.extra = nn.Linear(3, 1)


def normed(model: nn.Sequential) -> None:
    model.extra = nn.BatchNorm1d(3, affine=False)


@both
@pytest.mark.parametrize("change", [replaced, put_in, normed])
def test_parts_that_are_put_in_afterwards_are_refused(
    change: Callable[[nn.Module], None], devices: int
) -> None:
    model = nn.Sequential(nn.Tanh(), line())
    trainer = make_trainer(model, devices=devices)
    trainer.step(points(8))
    change(model)
    with pytest.raises(ValueError, match=r"was put in, taken out or replaced|has been replaced"):
        trainer.step(points(8))
