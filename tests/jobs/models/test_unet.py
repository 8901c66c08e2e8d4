import pytest
import torch
from torch import nn

from onefold_jobs.models import UNet, resnet18, resnet34, resnet101, vgg16
from onefold_jobs.models.unet import ENCODERS
from tests.tables import for_each

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
        widths = [step.conv2.out_channels for step in UNet(encoder).decoder]
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
