"""LeNet-5, and a CNN with a large dense layer: two models for small grayscale images.

`LeNet` is the smallest model worth training, for examples and tests. `DenseCNN` has 26 million
parameters for 28x28 images, nearly all of them in one dense layer. Its gradients are large relative
to the computation, so it measures how fast devices communicate. It is not the best model for
classifying digits.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DenseCNN", "LeNet"]


class _Classifier(nn.Module):
    """Convolutional ``features``, and a dense ``classifier`` on top."""

    features: nn.Sequential
    classifier: nn.Sequential

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, image_size, image_size) to logits (n, num_classes), float32."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


class LeNet(_Classifier):
    """LeNet-5 with ReLU and max pooling (LeCun et al., 1998, "Gradient-based learning").

    Args:
        num_classes: number of logits per image.
        in_channels: number of image channels.
        image_size: height and width of the images in pixels: 12, 16, 20, 24, 28 and so on, so that
            no max pool drops a row.

    Raises:
        ValueError: the image size is less than 12 or not a multiple of 4.

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
        # The first convolution pads and keeps the size; the second does not and loses four pixels.
        # LeCun's images included this border: 32x32 around digits of 28x28.
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


class DenseCNN(_Classifier):
    """Two 3x3 convolutions, a max pool and a dense layer; 25.8 million parameters at 28x28.

    Args:
        num_classes: number of logits per image.
        dropout: fraction of the dense layer's outputs that training sets to zero.
        in_channels: number of image channels.
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
        # The convolutions pad by one pixel and keep the size; only the pool halves it.
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
