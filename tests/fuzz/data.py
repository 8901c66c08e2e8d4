"""What the drawn runs train on: small samples of everything that a drawn model may read."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

FEATURES = 12
LENGTH = 5
WORDS = 20
CLASSES = 4


class Fields(NamedTuple):
    """A batch, or one shard of it."""

    x: torch.Tensor
    """(n, FEATURES), of the model's dtype."""
    tokens: torch.Tensor
    """(n, LENGTH) int64, below WORDS."""
    y: torch.Tensor
    """(n,) int64, below CLASSES."""
    w: torch.Tensor
    """(n,) of the model's dtype: weights, some of them 0."""


def samples(number: int, dtype: torch.dtype, seed: int) -> Fields:
    """So many samples, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    tokens = torch.randint(0, WORDS, (number, LENGTH), generator=generator)
    y = torch.randint(0, CLASSES, (number,), generator=generator)
    w = torch.rand(number, generator=generator, dtype=torch.float64)
    return Fields(x, tokens, y, torch.where(w < 0.3, torch.zeros_like(w), w).to(dtype))


def wrapped(fields: Fields, container: str) -> object:
    """A batch as one script or another would hand it over."""
    if container == "nested":
        return {"in": (fields.x, fields.tokens), "out": [fields.y, {"w": fields.w}]}
    return tuple(tensor.numpy() for tensor in fields) if container == "numpy" else fields


def read_fields(batch: Any) -> Fields:
    """The fields again, from whatever a loss or a score was given."""
    if isinstance(batch, dict) and "in" in batch:
        return Fields(*batch["in"], batch["out"][0], batch["out"][1]["w"])
    return Fields(**batch) if isinstance(batch, dict) else Fields(*batch)


class Noisy(Dataset[tuple[torch.Tensor, ...]]):
    """Samples that are augmented with every generator that a data set may draw from."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def __len__(self) -> int:
        return len(self._fields.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        one = Fields(*(tensor[index] for tensor in self._fields))
        factor = random.uniform(0.9, 1.1) * float(np.random.uniform(0.9, 1.1))
        return tuple(one._replace(x=(one.x + 0.1 * torch.randn(FEATURES)).to(one.x) * factor))


def data_set(number: int, dtype: torch.dtype, seed: int, *, noisy: bool) -> Any:
    fields = samples(number, dtype, seed)
    return Noisy(fields) if noisy else TensorDataset(*fields)


def collate(items: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """A collate function of a script's own, which draws a random number too."""
    fields = Fields(*(torch.stack(column) for column in zip(*items, strict=True)))
    return fields._replace(x=fields.x * (1 + 0.1 * random.random()))._asdict()
