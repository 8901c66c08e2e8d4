"""A CNN of 26 million parameters for 28x28 grey images, nearly all in one dense layer.

Its gradients are large for the little arithmetic that makes them, so it is the model to measure how
fast gradients travel between devices. It is not the model to classify digits well with.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DenseCNN"]


class DenseCNN(nn.Module):
    """Two 3x3 convolutions, one max pool and a dense layer; at 28x28 it has 25.7 million weights.

    Args:
        num_classes: number of logits for each image.
        dropout: share of the dense layer's outputs set to zero in training.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels, a positive even number.

    Raises:
        ValueError: the image size is not a positive even number.

    Example:
        >>> import torch
        >>> model = DenseCNN()
        >>> sum(parameter.numel() for parameter in model.parameters())
        25775882
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        dropout: float = 0.5,
        in_channels: int = 1,
        image_size: int = 28,
    ) -> None:
        super().__init__()
        if image_size < 2 or image_size % 2:
            raise ValueError(f"image_size must be a positive even number, got {image_size}")
        # The convolutions pad by one pixel and keep the size; only the pool changes it.
        pooled_size = image_size // 2
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            # 25.7 of the 25.8 million parameters at 28x28.
            nn.Linear(128 * pooled_size**2, 1024),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(1024, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, image_size, image_size) to logits (n, num_classes), float32."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits
