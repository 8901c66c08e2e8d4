from __future__ import annotations

import pytest
import torch

from onefold.models import ResNet, resnet18, resnet34, resnet50, resnet101
from onefold.models.resnet import Bottleneck
from tests.tables import for_each

DOWNSAMPLE = ["downsample.0.weight", "downsample.1.weight", "downsample.1.bias"]
BUILDERS = {"18": resnet18, "34": resnet34, "50": resnet50, "101": resnet101}
BLOCKS = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 3), "50": (3, 4, 6, 3), "101": (3, 4, 23, 3)}
CONVOLUTIONS = {"18": 2, "34": 2, "50": 3, "101": 3}
PARAMETERS = {"18": 11_689_512, "34": 21_797_672, "50": 25_557_032, "101": 44_549_160}


def block_names(convolutions: int) -> list[str]:
    """The parameters of one block without its projection."""
    rows = ("conv{}.weight", "bn{}.weight", "bn{}.bias")
    return [row.format(number) for number in range(1, convolutions + 1) for row in rows]


def torchvision_names(depth: str) -> list[str]:
    """The parameters of torchvision's ResNet of that depth, in its order."""
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for layer, blocks in enumerate(BLOCKS[depth], start=1):
        widens = layer > 1 or CONVOLUTIONS[depth] == 3
        for block in range(blocks):
            inner = block_names(CONVOLUTIONS[depth])
            inner += DOWNSAMPLE if widens and block == 0 else []
            names += [f"layer{layer}.{block}.{name}" for name in inner]
    return [*names, "fc.weight", "fc.bias"]


def torchvision_buffers(depth: str) -> list[str]:
    """The buffers of torchvision's ResNet of that depth: three for each batch norm."""
    biases = [name for name in torchvision_names(depth) if name.endswith(".bias")]
    norms = [name.removesuffix("bias") for name in biases if name != "fc.bias"]
    rows = ("running_mean", "running_var", "num_batches_tracked")
    return [norm + row for norm in norms for row in rows]


def resnet_without_storage(depth: str) -> ResNet:
    with torch.device("meta"):
        return BUILDERS[depth](num_classes=1000, small_images=False)


@for_each("depth", BUILDERS)
def test_parameters_and_buffers_are_named_as_in_torchvision(depth: str) -> None:
    model = resnet_without_storage(depth)
    assert [name for name, _ in model.named_parameters()] == torchvision_names(depth)
    assert [name for name, _ in model.named_buffers()] == torchvision_buffers(depth)


@for_each("depth", BUILDERS)
def test_resnets_for_large_images_have_the_published_sizes(depth: str) -> None:
    model = resnet_without_storage(depth)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[depth]


def test_the_3x3_convolution_of_a_bottleneck_has_the_stride() -> None:
    block = ResNet(blocks=(1, 1), width=4, bottleneck=True).layer2[0]
    strides = [c.stride for c in (block.conv1, block.conv2, block.conv3, block.downsample[0])]
    assert strides == [(1, 1), (2, 2), (1, 1), (2, 2)]


def test_a_block_adds_its_input() -> None:
    block = Bottleneck(8, 8).eval()
    torch.nn.init.zeros_(block.bn3.weight)
    features = torch.linspace(-1, 1, 8 * 9).view(1, 8, 3, 3)
    assert torch.equal(block(features), features.relu())


@for_each(("small_images", "bottleneck"), [(True, False), (False, True)])
def test_feature_maps_have_the_channels_and_strides_that_the_model_tells(
    small_images: bool, bottleneck: bool
) -> None:
    model = ResNet(blocks=(1, 1, 1), width=4, small_images=small_images, bottleneck=bottleneck)
    maps = model.feature_maps(torch.zeros(2, 3, 32, 48))
    expected = zip(model.channels, model.strides, strict=True)
    assert [tuple(m.shape) for m in maps] == [(2, c, 32 // s, 48 // s) for c, s in expected]
    assert model.strides == ((1, 1, 2, 4) if small_images else (2, 4, 8, 16))
    assert model.channels == ((4, 16, 32, 64) if bottleneck else (4, 4, 8, 16))


def test_without_a_last_layer_the_mean_features_come_out() -> None:
    model = ResNet(blocks=(1, 1), num_classes=None, width=4).eval()
    images = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    means = model.feature_maps(images)[-1].mean(dim=(2, 3))
    assert torch.allclose(model(images), means)
    assert not any(name.startswith("fc") for name in model.state_dict())


def test_the_stem_for_large_images_is_the_published_one() -> None:
    assert resnet_without_storage("18").conv1.weight.shape == (64, 3, 7, 7)


@for_each(("small_images", "pixels", "features"), [(True, 32, 4), (True, 8, 1), (False, 224, 7)])
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


@for_each("blocks", [(), (2, 0)])
def test_a_stage_without_blocks_is_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="blocks must be one or more positive numbers"):
        ResNet(blocks=blocks)
