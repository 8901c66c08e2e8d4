"""U-Nets, which return logits per pixel, and the convolutions of VGG-16 as an encoder.

`UNet` follows Ronneberger et al. (2015, "U-Net: convolutional networks"). Its encoder is a
classification network without the last layer, so that training can start from published weights. It
also differs from the paper by padded convolutions and by batch norm in the decoder: the output has
the size of the input.

`vgg16` builds the convolutions of VGG-16 (Simonyan and Zisserman, 2014, "Very deep convolutional
networks"). Its parameters have the names of torchvision's VGG, so torchvision's weights load here
except for those of the classifier: three dense layers that an encoder does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from onefold_jobs.models.resnet import ResNet, conv2d, initialize, resnet18, resnet34, resnet101

__all__ = ["VGG", "UNet", "vgg16"]


class VGG(nn.Module):
    """Stages of 3x3 convolutions with ReLU, each followed by a max pool that halves the image.

    Args:
        blocks: number of convolutions per stage.
        in_channels: number of image channels.
        width: channels of the first stage; the next stages have 2, 4, 8, 8, 8 ... times as many.

    Attributes:
        channels: number of channels of each feature map.
        strides: image pixels per pixel of each feature map, along a side.

    Raises:
        ValueError: ``blocks`` is empty, or contains a number below 1.

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
            for _ in range(count):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
                before = after
            layers.append(nn.MaxPool2d(2))
        # All stages are in one Sequential, because torchvision numbers all layers consecutively,
        # including ReLUs.
        self.features = nn.Sequential(*layers)
        self.apply(initialize)

    def feature_maps(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Compute the output of each stage before its max pool.

        Args:
            images: (n, in_channels, h, w) float32.

        Returns:
            For each of ``channels`` and ``strides``, a tensor (n, channels, h / stride, w / stride)
            float32, with quotients rounded down.
        """
        maps, features = [], images
        for layer in self.features:
            # A kept map is not overwritten: the next in-place ReLU writes to a convolution's
            # output.
            if isinstance(layer, nn.MaxPool2d):
                maps.append(features)
            features = layer(features)
        return maps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the last max pool's output for images (n, in_channels, h, w) float32."""
        features: torch.Tensor = self.features(images)
        return features


def vgg16(in_channels: int = 3, width: int = 64) -> VGG:
    """Build the 13 convolutions of VGG-16, without batch norm; see `VGG` for the arguments.

    Returns:
        The network, initialized from PyTorch's global generator.

    Example:
        >>> sum(parameter.numel() for parameter in vgg16().parameters())
        14714688
    """
    return VGG(blocks=(2, 2, 3, 3, 3), in_channels=in_channels, width=width)


Encoder = ResNet | VGG


_RESNETS = {"resnet18": resnet18, "resnet34": resnet34, "resnet101": resnet101}
# The large stem even for small images, because published weights have no other.
ENCODERS: Mapping[str, Callable[..., Encoder]] = MappingProxyType(
    {name: partial(build, None, small_images=False) for name, build in _RESNETS.items()}
    | {"vgg16": vgg16}
)
"""Builders of the encoders by name, without a last layer; they take two keyword arguments."""


class UNet(nn.Module):
    """An encoder, and a decoder that upsamples its features to the size of the images.

    The encoder's parameters and buffers have the names of torchvision's network without the last
    layers (``fc`` or ``classifier``), prefixed with ``encoder.``. To start from published weights,
    leave these layers out and load the others into ``model.encoder``.

    All operations here have deterministic kernels on CPUs and, according to the documentation of
    `torch.use_deterministic_algorithms`, on CUDA devices.

    Args:
        encoder: one of "vgg16", "resnet18", "resnet34", "resnet101".
        in_channels: number of image channels.
        out_channels: number of logits per pixel.
        width: channels of the encoder's first layer, an even number; the decoder has half as many
            at full resolution. Published weights require 64.

    Attributes:
        stride: height and width of the images must be multiples of this number.

    Raises:
        ValueError: the encoder is unknown, or the width is not a positive even number.

    Example:
        >>> import torch
        >>> model = UNet("resnet18", width=8)
        >>> model.stride
        32
        >>> model(torch.zeros(2, 3, 64, 96)).shape
        torch.Size([2, 1, 64, 96])
    """

    def __init__(
        self,
        encoder: str = "resnet34",
        *,
        in_channels: int = 3,
        out_channels: int = 1,
        width: int = 64,
    ) -> None:
        super().__init__()
        if encoder not in ENCODERS:
            raise ValueError(f"encoder must be one of {', '.join(ENCODERS)}, got {encoder!r}")
        if width < 2 or width % 2:
            raise ValueError(f"width must be a positive even number, got {width}")
        self.encoder = ENCODERS[encoder](in_channels=in_channels, width=width)
        self.stride = self.encoder.strides[-1]
        self.decoder = decoder(self.encoder, width)
        self.head = nn.Conv2d(width // 2, out_channels, 1)
        # The encoder already initialized its weights; the head keeps PyTorch's default
        # initialization.
        self.decoder.apply(initialize)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute one or ``out_channels`` logits per pixel.

        Args:
            images: (n, in_channels, h, w) float32.

        Returns:
            Logits (n, out_channels, h, w) float32.

        Raises:
            ValueError: h or w is not a multiple of ``stride``.
        """
        height, width = images.shape[-2:]
        # Otherwise torch.cat would fail with two sizes that mean nothing to the caller.
        if height % self.stride or width % self.stride:
            raise ValueError(
                f"height and width of the images must be multiples of {self.stride}, got "
                f"{height}x{width} pixels; pad or crop the images"
            )
        features, *skips = reversed(self.encoder.feature_maps(images))
        # A ResNet has no features at full resolution, so the last step has nothing to concatenate.
        for index, step in enumerate(self.decoder):
            features = step(features, skips[index] if index < len(skips) else None)
        logits: torch.Tensor = self.head(features)
        return logits


class DecoderStep(nn.Module):
    """Doubles the resolution, concatenates the encoder's features, and convolves twice.

    Args:
        in_channels: number of input channels.
        skip_channels: number of encoder channels, 0 for none.
        out_channels: number of output channels.
    """

    def __init__(self, in_channels: int, skip_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = conv2d(in_channels + skip_channels, out_channels, 3)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv2d(out_channels, out_channels, 3)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: torch.Tensor, skip: torch.Tensor | None) -> torch.Tensor:
        """Map features (n, in_channels, h, w) to (n, out_channels, 2h, 2w), all float32.

        Args:
            features: output of the previous step.
            skip: features of the encoder (n, skip_channels, 2h, 2w), or None.
        """
        # The backward of bilinear on CUDA sums gradients in nondeterministic order.
        joined = F.interpolate(features, scale_factor=2, mode="nearest")
        if skip is not None:
            joined = torch.cat([joined, skip], dim=1)
        once = self.relu(self.bn1(self.conv1(joined)))
        twice: torch.Tensor = self.relu(self.bn2(self.conv2(once)))
        return twice


def decoder(encoder: Encoder, width: int) -> nn.ModuleList:
    """Make a decoder step for each resolution, from the encoder's second to last to the image's.

    The output of a step has ``width * stride / 2`` channels, but at most ``4 * width``.
    """
    # Keyed by stride, because encoders have features at different resolutions.
    skips = dict(zip(encoder.strides[:-1], encoder.channels[:-1], strict=True))
    steps = nn.ModuleList()
    channels, stride = encoder.channels[-1], encoder.strides[-1]
    while stride > 1:
        stride //= 2
        out_channels = min(width * stride // 2, 4 * width)
        steps.append(DecoderStep(channels, skips.get(stride, 0), out_channels))
        channels = out_channels
    return steps
