"""A CNN of 26 million parameters, nearly all in one dense layer.

Its gradients are large beside the arithmetic that makes them, so it is the model to measure
how fast gradients travel between devices. It is not the model to classify digits well with.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DenseCNN"]


class DenseCNN(nn.Module):
    """Two 3x3 convolutions, one max pool and a dense layer of 25.7 million weights.

    Args:
        num_classes: number of logits for each image.
        dropout: share of the dense layer's outputs set to zero in training.

    Example:
        >>> import torch
        >>> model = DenseCNN()
        >>> sum(parameter.numel() for parameter in model.parameters())
        25775882
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(128 * 14 * 14, 1024),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(1024, num_classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, num_classes) float32 for images (n, 1, 28, 28) float32."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits
