"""Models of tokens: two small sequence classifiers, and a language model.

The small transformer is one of the workloads; tests of equal bits use it and the recurrent one.
The jobs use other models, because their texts vary in length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "LSTMClassifier", "TransformerClassifier"]


class TransformerClassifier(nn.Module):
    """Token and position embeddings, encoder layers, the mean over positions, and a linear head.

    Args:
        vocabulary: number of different tokens.
        width: embedding size; a multiple of ``heads``.
        layers: number of encoder layers.
        heads: attention heads per layer.
        length: maximum sequence length.
        num_classes: number of logits per sequence.
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
        """Return logits (n, num_classes) float32 for tokens (n, t) int64, t at most ``length``."""
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
        num_classes: number of logits per sequence.
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
        """Return logits (n, num_classes) float32 for tokens (n, t) int64."""
        _, (final_states, _) = self.lstm(self.tokens(tokens))
        logits: torch.Tensor = self.head(self.dropout(final_states[-1]))
        return logits


class GPT(nn.Module):
    """A language model of GPT-2's size: 124 million parameters, with tied embedding and head.

    Args:
        vocabulary: number of different tokens.
        width: embedding size; a multiple of ``heads``.
        layers: number of blocks.
        heads: attention heads per block.
        length: maximum sequence length.
    """

    def __init__(
        self,
        vocabulary: int = 50_304,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        length: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (n, t, vocabulary) for tokens (n, t) int64."""
        found = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        found = self.norm(self.blocks(found))
        return F.linear(found, self.tokens.weight)


class GPTBlock(nn.Module):
    """Causal attention and an MLP of four times the width, each with pre-norm and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        split = self.attend(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(count, length, width))
        narrowed: torch.Tensor = self.narrow(F.gelu(self.widen(self.norm2(x))))
        return x + narrowed
