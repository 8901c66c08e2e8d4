"""The convolutions of VGG-16 (Simonyan and Zisserman, 2014, "Very deep convolutional networks").

Parameters carry the names of torchvision's VGG, so its weights load here without those of the
classifier: three dense layers that have no use in an encoder and are not made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onefold.models.resnet import initialise

__all__ = ["VGG", "vgg16"]


class VGG(nn.Module):
    """Stages of 3x3 convolutions with ReLU, each stage followed by a max pool that halves.

    Args:
        blocks: number of convolutions of each stage.
        in_channels: channels of the images.
        width: channels of the first stage; the next ones have 2, 4, 8, 8, 8 ... times as many.

    Attributes:
        channels: channels of each of the `feature_maps`.
        strides: width in pixels of the image of one pixel of each of the `feature_maps`.

    Raises:
        ValueError: ``blocks`` is empty, or has a number below 1.

    Example:
        >>> import torch
        >>> model = VGG(blocks=(1, 2), width=8)
        >>> model(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 16, 2, 2])
        >>> [tuple(features.shape) for features in model.feature_maps(torch.zeros(2, 3, 8, 8))]
        [(2, 8, 8, 8), (2, 16, 4, 4)]
    """

    def __init__(self, *, blocks: Sequence[int], in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1:
            raise ValueError(f"blocks must be one or more positive numbers, got {tuple(blocks)}")
        self.channels = tuple(width * min(2**index, 8) for index in range(len(blocks)))
        self.strides = tuple(2**index for index in range(len(blocks)))
        layers: list[nn.Module] = []
        before = in_channels
        for after, count in zip(self.channels, blocks, strict=True):
            layers += stage(before, after, count=count)
            before = after
        # One Sequential for all stages: torchvision numbers the layers through, ReLUs included.
        self.features = nn.Sequential(*layers)
        self.apply(initialise)
        self.apply(without_bias)

    def feature_maps(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Compute what each stage returns before its max pool.

        Args:
            images: (n, in_channels, h, w) float32.

        Returns:
            For each of ``channels`` and ``strides`` a tensor (n, channels, h / stride,
            w / stride) float32, quotients rounded down.
        """
        maps = []
        features = images
        for layer in self.features:
            # A kept map stays as it is: the next ReLU in place overwrites a convolution's output.
            if isinstance(layer, nn.MaxPool2d):
                maps.append(features)
            features = layer(features)
        return maps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the last max pool's output of images (n, in_channels, h, w) float32."""
        features: torch.Tensor = self.features(images)
        return features


def stage(in_channels: int, out_channels: int, *, count: int) -> list[nn.Module]:
    """Make the layers of one stage: ``count`` convolutions with a ReLU each, and the max pool."""
    layers: list[nn.Module] = []
    for channels in (in_channels, *(out_channels,) * (count - 1)):
        layers += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.ReLU(inplace=True)]
    return [*layers, nn.MaxPool2d(2)]


def without_bias(module: nn.Module) -> None:
    """Set a convolution's bias to zero."""
    # As torchvision does; PyTorch's own would be drawn at random.
    if isinstance(module, nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)


def vgg16(in_channels: int = 3, width: int = 64) -> VGG:
    """Build the 13 convolutions of VGG-16, without batch norm; see `VGG` for the arguments.

    Returns:
        The network, with fresh weights from PyTorch's global generator.

    Example:
        >>> sum(parameter.numel() for parameter in vgg16().parameters())
        14714688
    """
    return VGG(blocks=(2, 2, 3, 3, 3), in_channels=in_channels, width=width)
