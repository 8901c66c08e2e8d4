"""Residual networks of basic blocks (He et al., 2015, "Deep residual learning").

Parameters and buffers carry the names of torchvision's ResNet, so weights move between the two
where the shapes agree: a stem for large images, width 64 and four stages of two blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["BasicBlock", "ResNet", "resnet18"]


def conv3x3(in_channels: int, out_channels: int, *, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps the image's size (at stride 1); batch norm brings the bias."""
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the block's input.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: stride of the first convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, out_channels, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(n, in_channels, h, w) to (n, out_channels, h / stride, w / stride), float32."""
        shortcut = features if self.downsample is None else self.downsample(features)
        residual = self.relu(self.bn1(self.conv1(features)))
        summed: torch.Tensor = self.relu(self.bn2(self.conv2(residual)) + shortcut)
        return summed


class ResNet(nn.Module):
    """A residual network: stage ``i`` has ``blocks[i]`` basic blocks of ``width * 2**i`` channels.

    Args:
        blocks: number of blocks of each stage; every stage after the first halves the image.
        num_classes: number of logits for each image.
        in_channels: channels of the images.
        small_images: True for a 3x3 stem of stride 1 without max pool (images of 8 to 64 pixels),
            False for the 7x7 stem of stride 2 with max pool (images of 224 pixels).
        width: channels of the first stage.

    Raises:
        ValueError: there is no stage, or a stage without a block.

    Example:
        >>> import torch
        >>> ResNet(blocks=(1, 1), in_channels=1, width=8)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        *,
        blocks: Sequence[int],
        num_classes: int = 10,
        in_channels: int = 3,
        small_images: bool = True,
        width: int = 64,
    ) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1:
            raise ValueError(f"blocks must be one or more positive numbers, got {tuple(blocks)}")
        self.conv1 = stem(in_channels, width, small_images=small_images)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = tuple(f"layer{number}" for number in range(1, len(blocks) + 1))
        channels = width
        for index, (name, count) in enumerate(zip(self.stages, blocks, strict=True)):
            stride = 1 if index == 0 else 2
            self.add_module(name, stage(channels, width * 2**index, count=count, stride=stride))
            channels = width * 2**index
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        self.apply(initialise)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, num_classes) float32 for images (n, in_channels, h, w) float32."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for name in self.stages:
            features = self.get_submodule(name)(features)
        logits: torch.Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


def stem(in_channels: int, width: int, *, small_images: bool) -> nn.Conv2d:
    """The network's first convolution."""
    if small_images:
        return conv3x3(in_channels, width)
    return nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)


def stage(in_channels: int, out_channels: int, *, count: int, stride: int) -> nn.Sequential:
    """``count`` blocks, of which the first changes the number of channels and the size."""
    first = BasicBlock(in_channels, out_channels, stride=stride)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(count - 1)))


def initialise(module: nn.Module) -> None:
    """He initialisation for convolutions, as in the paper; other layers keep PyTorch's own."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(
    num_classes: int = 10, in_channels: int = 3, small_images: bool = True, width: int = 64
) -> ResNet:
    """ResNet-18: four stages of two basic blocks.

    Args:
        num_classes: number of logits for each image.
        in_channels: channels of the images.
        small_images: see `ResNet`.
        width: channels of the first stage.

    Returns:
        The network, with fresh weights from PyTorch's global generator.

    Example:
        >>> sum(p.numel() for p in resnet18(num_classes=1000, small_images=False).parameters())
        11689512
    """
    return ResNet(
        blocks=(2, 2, 2, 2),
        num_classes=num_classes,
        in_channels=in_channels,
        small_images=small_images,
        width=width,
    )
