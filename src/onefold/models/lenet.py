"""LeNet-5 for 28x28 grey images: the smallest model worth training, for examples and tests."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LeNet"]


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling (LeCun et al., 1998, "Gradient-based learning").

    Args:
        num_classes: number of logits for each image.

    Example:
        >>> import torch
        >>> LeNet()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, num_classes) float32 for images (n, 1, 28, 28) float32."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits
