"""State that the loss uses and that is not the model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onefold.errors import StateError
from tests.small import Batch, bits, line, make_trainer, points, square

both = pytest.mark.parametrize("devices", [1, 2])


@both
def test_statistics_of_a_second_module_are_refused(devices: int) -> None:
    second = nn.BatchNorm1d(3)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return square(model, (second(batch[0]), batch[1]))

    trainer = make_trainer(line(), loss, devices=devices)
    words = r"step 1: the loss calls a module of BatchNorm1d, .* its buffer running_mean"
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
