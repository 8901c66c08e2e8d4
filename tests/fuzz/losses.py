"""Small samples of everything that a drawn model may read, and losses of every kind."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import onefold
from onefold.core.mean import LossTerms

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
        (x, tokens), (y, weights) = batch["in"], batch["out"]
        return Fields(x, tokens, y, weights["w"])
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


Loss = Callable[[nn.Module, object], object]


@dataclass(frozen=True)
class LossTraits:
    """What may be expected of a loss."""

    exact: bool = True
    """Over a batch it is what it is over one shard that holds it all, to full precision."""


def _of(inner: Callable[[Any, Fields], object]) -> Callable[[nn.Module], Loss]:
    return lambda _: lambda model, batch: inner(model, read_fields(batch))


def _each(model: nn.Module, fields: Fields) -> torch.Tensor:
    return F.cross_entropy(model(fields), fields.y, reduction="none")


def _weighted(model: nn.Module, fields: Fields) -> onefold.Mean:
    """By weights of which some are 0: in small shards nothing may count."""
    return onefold.Mean((_each(model, fields) * fields.w).sum(), fields.w.sum())


def _positives(model: nn.Module, fields: Fields) -> onefold.Mean:
    """Without a gradient where a shard has no sample of class 0."""
    chosen = fields.y == 0
    if not bool(chosen.any()):
        return onefold.Mean(fields.x.new_zeros(()), 0)
    return onefold.Mean(_each(model, fields)[chosen].sum(), int(chosen.sum()))


def _two_means(model: nn.Module, fields: Fields) -> object:
    logits = model(fields)
    losses = F.cross_entropy(logits, fields.y, reduction="none")
    words = onefold.Mean((losses * fields.w).sum(), fields.w.sum())
    return words + 0.5 * onefold.Mean(logits.square().sum(), logits.numel())


def _ready(model: nn.Module, fields: Fields, losses: Any = onefold.losses) -> object:
    weight = torch.linspace(0.5, 1.5, CLASSES).to(fields.x)
    return losses.cross_entropy(
        model(fields), fields.y, weight, ignore_index=1, label_smoothing=0.1
    )


def _mixed_up(model: nn.Module, fields: Fields) -> torch.Tensor:
    """Draws in the loss."""
    other = torch.randperm(len(fields.y))
    share = float(torch.rand(()))
    logits = model(fields._replace(x=share * fields.x + (1 - share) * fields.x[other]))
    first = F.cross_entropy(logits, fields.y, reduction="none")
    return share * first + (1 - share) * F.cross_entropy(logits, fields.y[other], reduction="none")


LOSSES: dict[str, tuple[Callable[[nn.Module], Loss], LossTraits]] = {
    "each": (_of(_each), LossTraits()),
    "weighted": (_of(_weighted), LossTraits()),
    "positives": (_of(_positives), LossTraits()),
    "two means": (_of(_two_means), LossTraits()),
    "ready": (_of(_ready), LossTraits()),
    "mixed up": (_of(_mixed_up), LossTraits(exact=False)),
}

OF_PYTORCH = {"ready": _of(partial(_ready, losses=F))}
"""What a plain loop takes in place of losses of onefold; NaN where nothing counts."""


def value_of(result: object) -> torch.Tensor | None:
    """What a plain loop would go backward from; None where nothing counts."""
    if isinstance(result, torch.Tensor):
        return result.mean() if result.dim() else result
    terms = result.terms if isinstance(result, LossTerms) else (result,)
    values = [value for value in map(_ratio, terms) if value is not None]
    return sum(values[1:], values[0]) if values else None


def _ratio(term: object) -> torch.Tensor | None:
    if isinstance(term, onefold.Sum):
        return term.total
    assert isinstance(term, onefold.Mean)
    return term.total / term.weight if float(term.weight) else None


def score(model: nn.Module, batch: object) -> dict[str, object]:
    """For evaluations: one value of each kind."""
    fields = read_fields(batch)
    logits = model(fields)
    losses = F.cross_entropy(logits, fields.y, reduction="none")
    return {
        "loss": losses,
        "right": logits.argmax(dim=1) == fields.y,
        "weighted": onefold.Mean((losses * fields.w).sum(), fields.w.sum()),
        "several": onefold.Mean(losses.sum(), len(losses)) + onefold.Sum(losses.sum()),
    }
