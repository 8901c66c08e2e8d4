"""What all models have in common: shapes, gradients for every parameter, examples that run."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn

from onefold import models
from tests.tables import for_each

IMAGES = torch.linspace(-1, 1, 3 * 28 * 28).view(3, 1, 28, 28)
COLOUR_IMAGES = torch.linspace(-1, 1, 3 * 3 * 32 * 32).view(3, 3, 32, 32)

CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "LeNet": (lambda: models.LeNet(num_classes=7), IMAGES),
    "DenseCNN": (lambda: models.DenseCNN(num_classes=7), IMAGES),
    "LeNet, colour": (
        lambda: models.LeNet(num_classes=7, in_channels=3, image_size=32),
        COLOUR_IMAGES,
    ),
    "DenseCNN, colour": (
        lambda: models.DenseCNN(num_classes=7, in_channels=3, image_size=32),
        COLOUR_IMAGES,
    ),
    "ResNet": (lambda: models.ResNet(blocks=(1, 2), num_classes=7, in_channels=1, width=8), IMAGES),
    "ResNet, large images": (
        lambda: models.resnet18(num_classes=7, in_channels=1, small_images=False, width=8),
        IMAGES,
    ),
    "ResNet, bottlenecks": (
        lambda: models.ResNet(
            blocks=(1, 2), num_classes=7, in_channels=1, width=8, bottleneck=True
        ),
        IMAGES,
    ),
}


@for_each("name", CLASSIFIERS)
def test_logits_have_one_row_a_sample_and_one_column_a_class(name: str) -> None:
    build, inputs = CLASSIFIERS[name]
    logits = build()(inputs)
    assert logits.shape == (3, 7)
    assert logits.dtype == torch.float32


@for_each("name", CLASSIFIERS)
def test_every_parameter_takes_part(name: str) -> None:
    build, inputs = CLASSIFIERS[name]
    torch.manual_seed(0)
    model = build()
    model(inputs).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@for_each("name", CLASSIFIERS)
def test_the_same_seed_builds_the_same_model(name: str) -> None:
    build, inputs = CLASSIFIERS[name]
    logits = []
    for _ in range(2):
        torch.manual_seed(0)
        logits.append(build().eval()(inputs))
    assert torch.equal(*logits)


def test_dropout_acts_in_training_only() -> None:
    build, inputs = CLASSIFIERS["DenseCNN"]
    torch.manual_seed(0)
    model = build()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


@for_each("dropout", [0.0, 0.5])
def test_dropout_of_the_dense_cnn_is_settable(dropout: float) -> None:
    rates = [m.p for m in models.DenseCNN(dropout=dropout).modules() if isinstance(m, nn.Dropout)]
    assert rates == [dropout]


@for_each("size", [8, 10, 13, 30, 0, -4])
def test_lenet_refuses_a_size_that_its_pools_do_not_divide(size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4 and at least 12, got {size}$"):
        models.LeNet(image_size=size)


@for_each("size", [12, 16, 20, 36])
def test_lenet_takes_any_size_that_its_pools_divide(size: int) -> None:
    assert models.LeNet(image_size=size)(torch.zeros(2, 1, size, size)).shape == (2, 10)


@for_each("size", [27, 0, -2])
def test_the_dense_cnn_refuses_a_size_that_is_not_even(size: int) -> None:
    with pytest.raises(ValueError, match=f"positive even number, got {size}$"):
        models.DenseCNN(image_size=size)


MODULES = [
    "catalog",
    "lenet",
    "resnet",
    "unet",
]


@for_each("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(import_module(f"onefold.models.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
