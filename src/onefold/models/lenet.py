"""LeNet-5: the smallest model worth training, for examples and tests."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LeNet"]


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling (LeCun et al., 1998, "Gradient-based learning").

    Args:
        num_classes: number of logits for each image.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels: 12, 16, 20, 24, 28 and so on, so that
            no max pool leaves a row out.

    Raises:
        ValueError: the image size is less than 12 or no multiple of 4.

    Example:
        >>> import torch
        >>> LeNet()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        if image_size < 12 or image_size % 4:
            raise ValueError(
                f"image_size must be a multiple of 4 and at least 12, got {image_size}"
            )
        # The first convolution pads and keeps the size, the second does not and loses four pixels.
        # LeCun's images had that border already: 32x32 around digits of 28x28.
        pooled_size = (image_size // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * pooled_size**2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, image_size, image_size) to logits (n, num_classes), float32."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits
