"""Models with such short steps that overhead matters.

Does not import onefold, so that `_first_step.py` can time programs without it.
"""

import torch
from torch import nn

__all__ = ["Ladder", "new_mlp"]


def new_mlp() -> nn.Module:
    """Make an MLP 64-128-128-10, whose step takes well under 2 ms."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class Ladder(nn.Module):
    """Many small linear layers with residual connections: two parameter tensors per layer.

    The sum of the layers is scaled by their number, so that the signal keeps its magnitude.
    """

    def __init__(self, layers: int = 500, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.rungs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.head = nn.Linear(width, classes)
        self.scale = layers**-0.5

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) of features (n, width) float32."""
        for rung in self.rungs:
            features = features + torch.tanh(rung(features)) * self.scale
        return self.head(features)
