"""What all models have in common: shapes, gradients for every parameter, examples that run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onefold import models
from tests.tables import for_each

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "LeNet": (lambda: models.LeNet(num_classes=7), (1, 28, 28), (7,)),
    "LeNet, small": (lambda: models.LeNet(7, in_channels=3, image_size=12), (3, 12, 12), (7,)),
    "DenseCNN": (lambda: models.DenseCNN(num_classes=7), (1, 28, 28), (7,)),
    "DenseCNN, colour": (
        lambda: models.DenseCNN(num_classes=7, in_channels=3, image_size=32),
        (3, 32, 32),
        (7,),
    ),
    "ResNet": (lambda: models.ResNet(blocks=(1, 2), width=8), (3, 28, 28), (10,)),
    "ResNet, one block": (
        lambda: models.ResNet(blocks=(1,), in_channels=1, width=4),
        (1, 8, 8),
        (10,),
    ),
    "ResNet, large images": (
        lambda: models.resnet18(num_classes=7, in_channels=1, small_images=False, width=8),
        (1, 28, 28),
        (7,),
    ),
    "ResNet, bottlenecks": (
        lambda: models.ResNet(blocks=(1, 2), width=8, bottleneck=True),
        (3, 28, 28),
        (10,),
    ),
    "VGG": (lambda: models.VGG(blocks=(1, 2), in_channels=1, width=4), (1, 8, 8), (8, 2, 2)),
    "UNet, vgg16": (lambda: models.UNet("vgg16", width=4), (3, 64, 32), (1, 64, 32)),
    "UNet, resnet18": (
        lambda: models.UNet("resnet18", width=4, in_channels=1, out_channels=5),
        (1, 64, 96),
        (5, 64, 96),
    ),
    "UNet, resnet101": (lambda: models.UNet("resnet101", width=4), (3, 64, 64), (1, 64, 64)),
}


@pytest.fixture
def _deterministic() -> object:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@for_each("name", MODELS)
def test_every_parameter_takes_part_and_a_seed_gives_the_same_gradients(name: str) -> None:
    build, image, expected = MODELS[name]
    images = torch.randn(3, *image, generator=torch.Generator().manual_seed(1))
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build()
        output = model(images)
        assert (output.shape, output.dtype) == ((3, *expected), torch.float32)
        output.square().sum().backward()
        without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert without == []
        gradients.append(nn.utils.parameters_to_vector(p.grad for p in model.parameters()))
    assert torch.equal(*gradients)


@for_each(
    ("build", "words"),
    [
        *(
            (lambda size=size: models.LeNet(image_size=size), f"at least 12, got {size}$")
            for size in (8, 13, 30, 0, -4)
        ),
        *(
            (lambda size=size: models.DenseCNN(image_size=size), f"even number, got {size}$")
            for size in (27, 0, -2)
        ),
        *(
            (lambda kind=kind, blocks=blocks: kind(blocks=blocks), "blocks must be one or more pos")
            for kind in (models.ResNet, models.VGG)
            for blocks in ((), (2, 0))
        ),
        *(
            (lambda width=width: models.UNet("resnet18", width=width), f"even number, got {width}")
            for width in (0, -2, 5)
        ),
        (lambda: models.UNet("resnet51"), r"one of resnet18, .*vgg16, got 'resnet51'"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()
