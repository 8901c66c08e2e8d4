from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from onefold.models import UNet, resnet18, resnet34, resnet101, vgg16
from onefold.models.unet import ENCODERS, DecoderStep
from tests.tables import for_each

STRIDES = {"vgg16": 16, "resnet18": 32, "resnet34": 32, "resnet101": 32}
RESNETS = {"resnet18": resnet18, "resnet34": resnet34, "resnet101": resnet101}


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def small_unet(encoder: str, **arguments: int) -> UNet:
    torch.manual_seed(0)
    return UNet(encoder, width=4, **arguments)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_every_encoder_is_tested_here() -> None:
    assert set(ENCODERS) == set(STRIDES)


@for_each("encoder", STRIDES)
def test_the_output_has_the_size_of_the_images(encoder: str) -> None:
    logits = small_unet(encoder)(noise(2, 3, 64, 96))
    assert logits.shape == (2, 1, 64, 96)
    assert logits.dtype == torch.float32


@for_each("encoder", ["vgg16", "resnet18"])
def test_channels_of_images_and_logits_are_free(encoder: str) -> None:
    model = small_unet(encoder, in_channels=1, out_channels=5)
    assert model(noise(2, 1, 32, 64)).shape == (2, 5, 32, 64)
    assert model.head.out_channels == 5


@for_each("encoder", STRIDES)
def test_every_parameter_takes_part(encoder: str) -> None:
    model = small_unet(encoder)
    model(noise(2, 3, 64, 64)).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@for_each("encoder", STRIDES)
@for_each(("taller", "wider"), [(1, 0), (0, 1), (8, 8)])
def test_a_size_that_the_stride_does_not_divide_is_refused(
    encoder: str, taller: int, wider: int
) -> None:
    model = small_unet(encoder)
    assert model.stride == STRIDES[encoder]
    height, width = 64 + taller, 64 + wider
    with pytest.raises(ValueError, match=f"multiples of {model.stride}, got {height}x{width}"):
        model(torch.zeros(1, 3, height, width))


@for_each("encoder", RESNETS)
def test_weights_of_a_resnet_load_into_the_encoder(encoder: str) -> None:
    published = RESNETS[encoder](num_classes=6, small_images=False, width=4).state_dict()
    kept = {name: value for name, value in published.items() if not name.startswith("fc.")}
    model = small_unet(encoder)
    assert set(model.encoder.state_dict()) == set(kept)
    model.encoder.load_state_dict(kept)
    assert torch.equal(
        model.state_dict()["encoder.layer4.0.conv1.weight"], kept["layer4.0.conv1.weight"]
    )


def test_weights_of_a_vgg_load_into_the_encoder() -> None:
    published = vgg16(width=4).state_dict() | {"classifier.0.weight": torch.zeros(3, 3)}
    kept = {name: value for name, value in published.items() if not name.startswith("classifier.")}
    model = small_unet("vgg16")
    assert set(model.encoder.state_dict()) == set(kept)
    model.encoder.load_state_dict(kept)
    assert torch.equal(model.state_dict()["encoder.features.28.bias"], kept["features.28.bias"])


@pytest.mark.parametrize("encoder", STRIDES)
@pytest.mark.usefixtures("deterministic")
def test_the_same_seed_gives_the_same_gradients_with_deterministic_algorithms(encoder: str) -> None:
    gradients = []
    for _ in range(2):
        model = small_unet(encoder)
        model(noise(2, 3, 64, 64)).square().sum().backward()
        gradients.append(nn.utils.parameters_to_vector(p.grad for p in model.parameters()))
    assert torch.equal(*gradients)


@for_each("encoder", ["vgg16", "resnet34", "resnet101"])
def test_the_full_size_decoder_narrows_towards_the_images(encoder: str) -> None:
    with torch.device("meta"):
        model = UNet(encoder)
    widths = [step.conv2.out_channels for step in model.decoder]
    assert widths == [256, 256, 128, 64, 32][-len(widths) :]
    assert 2 ** len(widths) == model.stride


def test_a_decoder_step_doubles_the_features_and_sees_the_skip() -> None:
    step = DecoderStep(2, 3, 4)
    seen: list[torch.Tensor] = []
    step.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    features, skip = noise(1, 2, 2, 2), noise(1, 3, 4, 4)
    assert step(features, skip).shape == (1, 4, 4, 4)
    doubled = features.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    assert torch.equal(seen[0], torch.cat([doubled, skip], dim=1))


@for_each("width", [0, -2, 5])
def test_a_width_without_a_half_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"positive even number, got {width}"):
        UNet("resnet18", width=width)


def test_an_unknown_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of resnet18, .*vgg16, got 'resnet51'"):
        UNet("resnet51")
