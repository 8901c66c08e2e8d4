"""Residual networks (He et al., 2015, "Deep residual learning for image recognition").

Parameters and buffers have the names of torchvision's ResNet, so weights are interchangeable if the
shapes agree: the stem for large images, width 64 and the blocks of one of torchvision's networks.

Note: in-place ReLU
-------------------
ReLU overwrites its input, which saves the memory of one feature map each time. Its input is always
the output of a batch norm or of an addition, and backward needs neither: a batch norm saves its
input, and an addition saves nothing. Nothing is ever written to the shortcut, because with the stem
for small images it is one of the `feature_maps`, which a decoder still needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

__all__ = ["ResNet", "resnet18", "resnet34", "resnet50", "resnet101"]


def conv2d(in_channels: int, out_channels: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps the size at stride 1. Its batch norm provides the bias."""
    padding = size // 2
    return nn.Conv2d(in_channels, out_channels, size, stride, padding, bias=False)


def projection(in_channels: int, out_channels: int, *, stride: int) -> nn.Sequential | None:
    """Make the projection from a block's input shape to its output shape; None if they are
    equal."""
    if stride == 1 and in_channels == out_channels:
        return None
    convolution = conv2d(in_channels, out_channels, 1, stride=stride)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, added to the block's input.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: stride of the first convolution.
    """

    expansion = 1
    """Channels of the output relative to those of the 3x3 convolutions."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv2d(in_channels, out_channels, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv2d(out_channels, out_channels, 3)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = projection(in_channels, out_channels, stride=stride)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, out_channels, h / stride, w / stride), float32."""
        shortcut = features if self.downsample is None else self.downsample(features)
        residual = self.relu(self.bn1(self.conv1(features)))
        # This addition is not in place: see the note at the head of the file.
        summed: torch.Tensor = self.relu(self.bn2(self.conv2(residual)) + shortcut)
        return summed


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with batch norm, added to the block's input.

    The first convolution narrows to a quarter of ``out_channels``, and the last one widens again.
    The 3x3 convolution has the stride, as in torchvision; in the paper the first convolution has
    it.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, a multiple of 4.
        stride: stride of the 3x3 convolution.
    """

    expansion = 4
    """Channels of the output relative to those of the 3x3 convolution."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        narrow = out_channels // self.expansion
        self.conv1 = conv2d(in_channels, narrow, 1)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = conv2d(narrow, narrow, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = conv2d(narrow, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(in_channels, out_channels, stride=stride)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, out_channels, h / stride, w / stride), float32."""
        shortcut = features if self.downsample is None else self.downsample(features)
        residual = self.relu(self.bn1(self.conv1(features)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        # This addition is not in place: see the note at the head of the file.
        summed: torch.Tensor = self.relu(self.bn3(self.conv3(residual)) + shortcut)
        return summed


class ResNet(nn.Module):
    """A residual network; stage ``i`` has ``blocks[i]`` blocks.

    The blocks of stage ``i`` are basic blocks of ``width * 2**i`` channels, or bottlenecks that
    narrow to that number and return four times as many.

    Args:
        blocks: number of blocks per stage; every stage after the first halves the image.
        num_classes: number of logits per image; None for a network without a last layer, which
            returns the mean of the last stage's features.
        in_channels: number of image channels.
        small_images: True for a 3x3 stem of stride 1 without max pool (images of 8 to 64 pixels),
            False for the 7x7 stem of stride 2 with max pool (images of 224 pixels).
        width: number of stem channels.
        bottleneck: True for `Bottleneck` blocks, False for `BasicBlock`.

    Attributes:
        channels: number of channels of each feature map.
        strides: image pixels per pixel of each feature map, along a side.

    Raises:
        ValueError: ``blocks`` is empty, or contains a number below 1.

    Example:
        >>> import torch
        >>> model = ResNet(blocks=(1, 1), in_channels=1, width=8)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> [tuple(features.shape) for features in model.feature_maps(torch.zeros(2, 1, 8, 8))]
        [(2, 8, 8, 8), (2, 8, 8, 8), (2, 16, 4, 4)]
    """

    def __init__(
        self,
        blocks: Sequence[int],
        num_classes: int | None = 10,
        in_channels: int = 3,
        small_images: bool = True,
        width: int = 64,
        *,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1:
            raise ValueError(f"blocks must be one or more positive numbers, got {tuple(blocks)}")
        block = Bottleneck if bottleneck else BasicBlock
        outputs = tuple(width * 2**index * block.expansion for index in range(len(blocks)))
        self.channels = (width, *outputs)
        # The feature map of the stem precedes its max pool, the input of the first stage follows
        # it.
        of_stem, first = (1, 1) if small_images else (2, 4)
        self.strides = (of_stem, *(first * 2**index for index in range(len(blocks))))
        # Kernel size, stride and padding.
        shape = (3, 1, 1) if small_images else (7, 2, 3)
        self.conv1 = nn.Conv2d(in_channels, width, *shape, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        # Identity has no parameters, and no caller has to check which stem this is.
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        # Named modules instead of a ModuleList, whose indices would change torchvision's names.
        self.stages = tuple(f"layer{number}" for number in range(1, len(blocks) + 1))
        for index, (name, count) in enumerate(zip(self.stages, blocks, strict=True)):
            before, after = self.channels[index : index + 2]
            # The stem already made the image small enough for the first stage.
            stride = 1 if index == 0 else 2
            rest = (block(after, after) for _ in range(count - 1))
            self.add_module(name, nn.Sequential(block(before, after, stride=stride), *rest))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Identity() if num_classes is None else nn.Linear(outputs[-1], num_classes)
        # Initialize everything last: the order of the draws is part of what a seed means.
        self.apply(initialize)

    def feature_maps(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Compute the stem's output before its max pool, and the output of each stage.

        Args:
            images: (n, in_channels, h, w) float32.

        Returns:
            For each of ``channels`` and ``strides``, a tensor (n, channels, h / stride, w / stride)
            float32, with quotients rounded up.
        """
        maps = [self.relu(self.bn1(self.conv1(images)))]
        features = self.maxpool(maps[0])
        for name in self.stages:
            features = self.get_submodule(name)(features)
            maps.append(features)
        return maps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute logits (n, num_classes) float32 of images (n, in_channels, h, w) float32."""
        last = self.feature_maps(images)[-1]
        logits: torch.Tensor = self.fc(self.avgpool(last).flatten(1))
        return logits


def initialize(module: nn.Module) -> None:
    """Draw a convolution's weights as He et al. do; other layers keep PyTorch's initialization."""
    # fan_out and no bias, as in torchvision, so that results of training from scratch are
    # comparable.
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


resnet18 = partial(ResNet, (2, 2, 2, 2))
"""Build ResNet-18, with two basic blocks per stage; takes the other arguments of `ResNet`."""
resnet34 = partial(ResNet, (3, 4, 6, 3))
"""Build ResNet-34, with 3, 4, 6 and 3 basic blocks."""
resnet50 = partial(ResNet, (3, 4, 6, 3), bottleneck=True)
"""Build ResNet-50, with 3, 4, 6 and 3 bottlenecks."""
resnet101 = partial(ResNet, (3, 4, 23, 3), bottleneck=True)
"""Build ResNet-101, with 3, 4, 23 and 3 bottlenecks."""
