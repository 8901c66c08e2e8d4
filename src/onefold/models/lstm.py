"""A recurrent network that classifies sequences of tokens."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LSTMClassifier"]


class LSTMClassifier(nn.Module):
    """Token embeddings, an LSTM, and a linear head on the last layer's final state.

    Args:
        vocabulary: number of different tokens.
        width: size of the embeddings and of the hidden state.
        layers: number of LSTM layers.
        num_classes: number of logits for each sequence.
        dropout: dropout rate between the layers and before the head.

    Example:
        >>> import torch
        >>> LSTMClassifier(width=16)(torch.zeros(2, 12, dtype=torch.int64)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        vocabulary: int = 1000,
        width: int = 128,
        layers: int = 2,
        num_classes: int = 10,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        between_layers = dropout if layers > 1 else 0.0
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between_layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (n, num_classes) float32 for tokens (n, t) int64."""
        _, (final_states, _) = self.lstm(self.tokens(tokens))
        logits: torch.Tensor = self.head(self.dropout(final_states[-1]))
        return logits
