from __future__ import annotations

import pytest
import torch
from torch import nn

from onefold.models import VGG, vgg16
from tests.tables import for_each

# Where the convolutions of torchvision's vgg16 lie: a ReLU follows each, a max pool each stage.
CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
POOLS = (4, 9, 16, 23, 30)


def torchvision_names() -> list[str]:
    """The parameters of torchvision.models.vgg16 without its classifier, in its order."""
    return [f"features.{index}.{kind}" for index in CONVOLUTIONS for kind in ("weight", "bias")]


def test_parameters_are_named_as_in_torchvision() -> None:
    model = vgg16(width=4)
    assert list(model.state_dict()) == torchvision_names()
    pools = [i for i, layer in enumerate(model.features) if isinstance(layer, nn.MaxPool2d)]
    assert tuple(pools) == POOLS


def test_vgg16_is_the_published_size() -> None:
    with torch.device("meta"):
        model = vgg16()
    # The published 138,357,544 less the three dense layers of the classifier.
    assert sum(parameter.numel() for parameter in model.parameters()) == 14_714_688


def test_feature_maps_lie_before_the_max_pools() -> None:
    torch.manual_seed(0)
    model = vgg16(width=4)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 64).view(2, 3, 32, 64)
    maps = model.feature_maps(images)
    shapes = [(2, c, 32 // s, 64 // s) for c, s in zip(model.channels, model.strides, strict=True)]
    assert [tuple(features.shape) for features in maps] == shapes
    assert model.channels == (4, 8, 16, 32, 32)
    assert model.strides == (1, 2, 4, 8, 16)
    assert all(torch.equal(m, model.features[:i](images)) for m, i in zip(maps, POOLS, strict=True))
    assert torch.equal(model(images), model.features[-1](maps[-1]))


def test_every_parameter_takes_part() -> None:
    torch.manual_seed(0)
    model = VGG(blocks=(1, 2), in_channels=1, width=4)
    model(torch.linspace(-1, 1, 64).view(1, 1, 8, 8)).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )


@for_each("blocks", [(), (2, 0)])
def test_a_stage_without_convolutions_is_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="blocks must be one or more positive numbers"):
        VGG(blocks=blocks)
