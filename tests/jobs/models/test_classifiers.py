"""What all models have in common: shapes, gradients for every parameter, examples that run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onefold_jobs import models
from tests.tables import for_each

Shape = tuple[int, ...]
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Shape, Shape]] = {
    "LeNet": (models.LeNet, {"num_classes": 7}, (1, 28, 28), (7,)),
    "LeNet, small": (models.LeNet, {"in_channels": 3, "image_size": 12}, (3, 12, 12), (10,)),
    "DenseCNN": (models.DenseCNN, {"num_classes": 7}, (1, 28, 28), (7,)),
    "DenseCNN, color": (models.DenseCNN, {"in_channels": 3, "image_size": 32}, (3, 32, 32), (10,)),
    "ResNet": (models.ResNet, {"blocks": (1, 2), "width": 8}, (3, 28, 28), (10,)),
    "one block": (models.ResNet, {"blocks": (1,), "in_channels": 1, "width": 4}, (1, 8, 8), (10,)),
    "large images": (models.resnet18, {"small_images": False, "width": 8}, (3, 28, 28), (10,)),
    "bottlenecks": (models.resnet50, {"width": 4}, (3, 28, 28), (10,)),
    "VGG": (models.VGG, {"blocks": (1, 2), "in_channels": 1, "width": 4}, (1, 8, 8), (8, 2, 2)),
    "vgg16": (models.UNet, {"encoder": "vgg16", "width": 4}, (3, 64, 32), (1, 64, 32)),
    "resnet18": (models.UNet, {"width": 4, "out_channels": 5}, (3, 64, 96), (5, 64, 96)),
    "resnet101": (models.UNet, {"encoder": "resnet101", "width": 4}, (3, 64, 64), (1, 64, 64)),
}


@pytest.fixture
def _deterministic() -> object:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@for_each("name", MODELS)
def test_every_parameter_takes_part_and_a_seed_gives_the_same_gradients(name: str) -> None:
    build, how, image, expected = MODELS[name]
    images = torch.randn(3, *image, generator=torch.Generator().manual_seed(1))
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build(**how)
        output = model(images)
        assert (output.shape, output.dtype) == ((3, *expected), torch.float32)
        output.square().sum().backward()
        without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert without == []
        gradients.append(nn.utils.parameters_to_vector(p.grad for p in model.parameters()))
    assert torch.equal(*gradients)


WRONG: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *((models.LeNet, {"image_size": n}, f"at least 12, got {n}$") for n in (8, 13, 30, 0, -4)),
    *((models.DenseCNN, {"image_size": n}, f"even number, got {n}$") for n in (27, 0, -2)),
    *((models.ResNet, {"blocks": n}, "blocks must be one or more pos") for n in ((), (2, 0))),
    *((models.VGG, {"blocks": n}, "blocks must be one or more pos") for n in ((), (2, 0))),
    *((models.UNet, {"width": n}, f"even number, got {n}") for n in (0, -2, 5)),
    (models.UNet, {"encoder": "resnet51"}, r"one of resnet18, .*vgg16, got 'resnet51'"),
]


@for_each(("build", "how", "words"), WRONG)
def test_a_shape_that_cannot_be_is_refused(build: Any, how: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(**how)
