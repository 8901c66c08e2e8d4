"""Two small models that classify sequences of tokens: a transformer and a recurrent one.

The transformer is one of the workloads; tests of equal bits take both. They are no models of the
jobs, whose texts have lengths of their own.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LSTMClassifier", "TransformerClassifier"]


class TransformerClassifier(nn.Module):
    """Token and position embeddings, encoder layers, the mean over positions, and a linear head.

    Args:
        vocabulary: number of different tokens.
        width: size of the embeddings; a multiple of ``heads``.
        layers: number of encoder layers.
        heads: attention heads of each layer.
        length: longest sequence that the model takes.
        num_classes: number of logits for each sequence.
        dropout: dropout rate of the encoder layers.

    Example:
        >>> import torch
        >>> model = TransformerClassifier(width=32, layers=1)
        >>> model(torch.zeros(2, 64, dtype=torch.int64)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        vocabulary: int = 1000,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        length: int = 64,
        num_classes: int = 10,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (n, num_classes) float32 for tokens (n, t) int64, t at most ``length``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        encoded = self.encoder(self.tokens(tokens) + self.positions(places))
        logits: torch.Tensor = self.head(encoded.mean(dim=1))
        return logits


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
