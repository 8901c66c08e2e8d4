from __future__ import annotations

import pytest
import torch

from onefold.models import ResNet, resnet18

BLOCK = [
    "conv1.weight",
    *(f"bn1.{name}" for name in ("weight", "bias")),
    "conv2.weight",
    *(f"bn2.{name}" for name in ("weight", "bias")),
]
DOWNSAMPLE = ["downsample.0.weight", "downsample.1.weight", "downsample.1.bias"]


def torchvision_names() -> list[str]:
    """The parameters of torchvision.models.resnet18, in its order."""
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            inner = BLOCK + (DOWNSAMPLE if layer > 1 and block == 0 else [])
            names += [f"layer{layer}.{block}.{name}" for name in inner]
    return [*names, "fc.weight", "fc.bias"]


def test_parameters_are_named_as_in_torchvision() -> None:
    model = resnet18(width=8)
    assert [name for name, _ in model.named_parameters()] == torchvision_names()
    assert len(model.state_dict()) == 122


def test_resnet18_for_large_images_is_the_published_size() -> None:
    model = resnet18(num_classes=1000, small_images=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_689_512
    assert model.conv1.weight.shape == (64, 3, 7, 7)


@pytest.mark.parametrize(
    ("small_images", "pixels", "features"), [(True, 32, 4), (True, 8, 1), (False, 224, 7)]
)
def test_the_image_is_halved_as_often_as_it_should_be(
    small_images: bool, pixels: int, features: int
) -> None:
    model = resnet18(width=4, small_images=small_images).eval()
    seen: list[torch.Size] = []
    model.layer4.register_forward_hook(lambda *call: seen.append(call[-1].shape))
    model(torch.zeros(1, 3, pixels, pixels))
    assert seen == [(1, 32, features, features)]


def test_a_network_may_be_as_small_as_one_block() -> None:
    model = ResNet(blocks=(1,), in_channels=1, width=4)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("blocks", [(), (2, 0)])
def test_a_stage_without_blocks_is_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="blocks must be one or more positive numbers"):
        ResNet(blocks=blocks)
