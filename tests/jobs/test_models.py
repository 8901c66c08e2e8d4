"""What all models have in common: shapes, gradients for every parameter, examples that run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onefold_jobs import models
from onefold_jobs.models import (
    MODELS,
    UNet,
    build_model,
    head_name,
    head_of,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    vgg16,
)
from onefold_jobs.models.unet import ENCODERS
from tests.tables import for_each

Shape = tuple[int, ...]
BUILT: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Shape, Shape]] = {
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
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


@pytest.mark.usefixtures("_deterministic")
@for_each("name", BUILT)
def test_every_parameter_takes_part_and_a_seed_gives_the_same_gradients(name: str) -> None:
    build, how, image, expected = BUILT[name]
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
        gradients.append(nn.utils.parameters_to_vector(gradients_of(model)))
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


HEADS = {"lenet": "classifier.5", "mnist-cnn": "classifier.4"}
HEADS |= dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101"), "fc")


def build(name: str, **sizes: Any) -> nn.Module:
    """A model without storage, for its shapes."""
    with torch.device("meta"):
        return build_model(name, **{"num_classes": 7, "in_channels": 3, "image_size": 32, **sizes})


def test_a_model_of_the_catalog_has_its_shape_and_last_layer() -> None:
    assert list(MODELS) == list(HEADS)
    for name, head in HEADS.items():
        model = build(name)
        assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 7)
        assert head_name(model) == head
        assert head_of(model) is dict(model.named_modules())[head]
        assert list(model.state_dict())[-2:] == [f"{head}.weight", f"{head}.bias"]


SIZES = ("num_classes", "in_channels", "image_size")
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    *((n, {"small_images": False}, "for ResNets only") for n in ("lenet", "timm:resnet10t")),
    *((n, {}, f"or timm:NAME, got '{n}'") for n in ("resnet19", "", "timm", "timm:", "LeNet")),
    *(("resnet18", {wrong: 0}, f"{wrong} must be positive, got 0") for wrong in SIZES),
]


@for_each(("name", "sizes", "words"), UNKNOWN)
def test_what_cannot_be_built_is_refused(name: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, **sizes)


DOWNSAMPLE = ["downsample.0.weight", "downsample.1.weight", "downsample.1.bias"]
DEPTHS = {
    resnet18: ((2, 2, 2, 2), 2, 11_689_512),
    resnet34: ((3, 4, 6, 3), 2, 21_797_672),
    resnet50: ((3, 4, 6, 3), 3, 25_557_032),
    resnet101: ((3, 4, 23, 3), 3, 44_549_160),
}
"""Blocks, convolutions of a block, and the published number of parameters."""


def torchvision_names(blocks: tuple[int, ...], convolutions: int) -> list[str]:
    """The parameters of torchvision's ResNet, in its order."""
    names = ["conv1.weight", "bn1.weight", "bn1.bias"]
    rows = ("conv{}.weight", "bn{}.weight", "bn{}.bias")
    for layer, count in enumerate(blocks, start=1):
        widens = layer > 1 or convolutions == 3
        for block in range(count):
            inner = [row.format(n) for n in range(1, convolutions + 1) for row in rows]
            inner += DOWNSAMPLE if widens and block == 0 else []
            names += [f"layer{layer}.{block}.{name}" for name in inner]
    return [*names, "fc.weight", "fc.bias"]


@for_each("build", DEPTHS)
def test_parameters_and_buffers_are_those_of_torchvision(build: Any) -> None:
    blocks, convolutions, numbers = DEPTHS[build]
    with torch.device("meta"):
        model = build(num_classes=1000, small_images=False)
    names = torchvision_names(blocks, convolutions)
    assert [name for name, _ in model.named_parameters()] == names
    norms = [name.removesuffix("bias") for name in names if name.endswith(".bias")][:-1]
    rows = ("running_mean", "running_var", "num_batches_tracked")
    assert [name for name, _ in model.named_buffers()] == [n + row for n in norms for row in rows]
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
    assert model.conv1.weight.shape == (64, 3, 7, 7)


STRIDES = {"vgg16": 16, "resnet18": 32, "resnet34": 32, "resnet101": 32}
RESNETS = {"resnet18": resnet18, "resnet34": resnet34, "resnet101": resnet101}
# Where torchvision's vgg16 has its convolutions: a ReLU follows each, a max pool each stage.
CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
POOLS = (4, 9, 16, 23, 30)


@for_each("encoder", ENCODERS)
def test_an_encoder_takes_published_weights_and_says_its_stride(encoder: str) -> None:
    model = UNet(encoder, width=4)
    assert model.stride == STRIDES[encoder]
    if encoder in RESNETS:
        published = RESNETS[encoder](num_classes=6, small_images=False, width=4)
        kept = {n: v for n, v in published.state_dict().items() if not n.startswith("fc.")}
    else:
        kept = vgg16(width=4).state_dict()
    assert set(model.encoder.state_dict()) == set(kept)
    model.encoder.load_state_dict(kept)
    for taller, wider in ((1, 0), (0, 1), (8, 8)):
        height, width = 64 + taller, 64 + wider
        with pytest.raises(ValueError, match=f"multiples of {model.stride}, got {height}x{width}"):
            model(torch.zeros(1, 3, height, width))
    with torch.device("meta"):
        decoder: Any = UNet(encoder).decoder
        widths = [step.conv2.out_channels for step in decoder]
    assert widths == [256, 256, 128, 64, 32][-len(widths) :]
    assert 2 ** len(widths) == model.stride


def test_vgg16_is_that_of_torchvision_without_its_classifier() -> None:
    with torch.device("meta"):
        model = vgg16()
    names = [f"features.{index}.{kind}" for index in CONVOLUTIONS for kind in ("weight", "bias")]
    assert list(model.state_dict()) == names
    pools = [i for i, layer in enumerate(model.features) if isinstance(layer, nn.MaxPool2d)]
    assert tuple(pools) == POOLS
    # The published 138,357,544 less the three dense layers of the classifier.
    assert sum(parameter.numel() for parameter in model.parameters()) == 14_714_688
