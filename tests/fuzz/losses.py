"""Losses of every kind that a script may return, and what each of them is over a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.mean import Means
from tests.fuzz.data import CLASSES, FEATURES, Fields, read_fields

__all__ = ["LOSSES", "LossTraits", "of_pytorch", "score", "value_of"]

Loss = Callable[[nn.Module, object], object]
Inner = Callable[[nn.Module, Fields], object]


@dataclass(frozen=True)
class LossTraits:
    """What may be expected of a loss."""

    exact: bool = True
    """Over a batch it is what it is over one shard that holds it all, to full precision."""
    twice: bool = False
    """It needs the gradient of a gradient by the inputs."""
    gradient_of_inputs: bool = False


def _of(inner: Inner) -> Callable[[nn.Module], Loss]:
    def make(model: nn.Module) -> Loss:
        return lambda m, batch: inner(m, read_fields(batch))

    return make


def _each(model: nn.Module, fields: Fields) -> torch.Tensor:
    return F.cross_entropy(model(fields), fields.y, reduction="none")


def _column(model: nn.Module, fields: Fields) -> torch.Tensor:
    return (model(fields)[:, :1] - fields.x[:, :1]).square()


def _scalar(model: nn.Module, fields: Fields) -> torch.Tensor:
    return F.cross_entropy(model(fields), fields.y)


def _weighted(model: nn.Module, fields: Fields) -> onefold.Mean:
    """By weights of which some are 0: in small shards nothing may count."""
    return onefold.Mean((_each(model, fields) * fields.w).sum(), fields.w.sum())


def _positives(model: nn.Module, fields: Fields) -> onefold.Mean:
    """Without a gradient where a shard has no sample of class 0."""
    chosen = fields.y == 0
    if not bool(chosen.any()):
        return onefold.Mean(fields.x.new_zeros(()), 0)
    return onefold.Mean(_each(model, fields)[chosen].sum(), int(chosen.sum()))


def _sum(model: nn.Module, fields: Fields) -> onefold.Sum:
    return onefold.Sum(_each(model, fields).sum())


def _two_means(model: nn.Module, fields: Fields) -> object:
    logits = model(fields)
    losses = F.cross_entropy(logits, fields.y, reduction="none")
    words = onefold.Mean((losses * fields.w).sum(), fields.w.sum())
    return words + 0.5 * onefold.Mean(logits.square().sum(), logits.numel())


def _mean_and_sum(model: nn.Module, fields: Fields) -> object:
    logits = model(fields)
    losses = F.cross_entropy(logits, fields.y, reduction="none")
    return onefold.Mean(losses.sum(), len(losses)) + 0.01 * onefold.Sum(logits.square().sum())


def _penalised(model: nn.Module, fields: Fields) -> object:
    penalty = sum(p.double().square().sum() for p in model.parameters() if p.requires_grad)
    losses = _each(model, fields)
    return onefold.Mean(losses.sum(), len(losses)) + 0.01 * onefold.Mean(penalty, 1)


class _Kit:
    """Where losses come from."""

    losses: Any = onefold.losses


_kit = _Kit()


@contextmanager
def of_pytorch() -> Iterator[None]:
    """Take losses from `torch.nn.functional`, as a plain loop does."""
    _kit.losses = F
    try:
        yield
    finally:
        _kit.losses = onefold.losses


def _ready(model: nn.Module, fields: Fields) -> object:
    weight = torch.linspace(0.5, 1.5, CLASSES).to(fields.x)
    return _kit.losses.cross_entropy(
        model(fields), fields.y, weight, ignore_index=1, label_smoothing=0.1
    )


def _ready_sum(model: nn.Module, fields: Fields) -> object:
    target = F.one_hot(fields.y, CLASSES).to(fields.x)
    return _kit.losses.binary_cross_entropy_with_logits(model(fields), target, reduction="sum")


def _ready_two(model: nn.Module, fields: Fields) -> object:
    logits = model(fields)
    target = F.one_hot(fields.y, CLASSES).to(fields.x)
    return _kit.losses.mse_loss(logits, target) + 0.3 * _kit.losses.cross_entropy(
        logits, fields.y, ignore_index=2
    )


def _wide(model: nn.Module, fields: Fields) -> torch.Tensor:
    return _each(model, fields).double()


def _autocast(model: nn.Module, fields: Fields) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(fields).float(), fields.y, reduction="none")


def _attack(model: nn.Module, fields: Fields) -> torch.Tensor:
    """As tutorials have it: a backward of its own, and zero_grad."""
    x = fields.x.clone().requires_grad_(True)
    F.cross_entropy(model(fields._replace(x=x)), fields.y, reduction="sum").backward()
    attacked = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return _each(model, fields._replace(x=attacked))


def _smooth(model: nn.Module, fields: Fields) -> torch.Tensor:
    """A penalty on the gradient by the inputs."""
    x = fields.x.clone().requires_grad_(True)
    logits = model(fields._replace(x=x))
    (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
    losses = F.cross_entropy(logits, fields.y, reduction="none")
    return losses + 0.1 * slope.square().sum(dim=1)


def _mixed_up(model: nn.Module, fields: Fields) -> torch.Tensor:
    """Draws in the loss."""
    other = torch.randperm(len(fields.y))
    share = float(torch.rand(()))
    logits = model(fields._replace(x=share * fields.x + (1 - share) * fields.x[other]))
    first = F.cross_entropy(logits, fields.y, reduction="none")
    return share * first + (1 - share) * F.cross_entropy(logits, fields.y[other], reduction="none")


def _one_by_one(model: nn.Module, fields: Fields) -> torch.Tensor:
    """Calls the model without its own parameters, as functional code does."""
    values = dict(model.named_parameters())
    logits = torch.func.functional_call(model, values, (fields,))
    return F.cross_entropy(logits, fields.y, reduction="none")


def _two_models(model: nn.Module, fields: Fields) -> torch.Tensor:
    """Freezes a part for a while, and leaves it as it was."""
    wanted = [p.requires_grad for p in model.stem.parameters()]
    model.stem.requires_grad_(False)
    first = _each(model, fields)
    for p, want in zip(model.stem.parameters(), wanted, strict=True):
        p.requires_grad_(want)
    return first + 0.1 * model(fields).square().mean(dim=1)


def _scored_on_the_way(model: nn.Module, fields: Fields) -> torch.Tensor:
    """Looks at its outputs in evaluation mode first, and puts each part's mode back."""
    modes = [part.training for part in model.modules()]
    model.eval()
    with torch.no_grad():
        sure = model(fields).softmax(dim=1).amax(dim=1)
    for part, mode in zip(model.modules(), modes, strict=True):
        part.training = mode
    return _each(model, fields) * (1 + sure.detach())


def _closing_over(model: nn.Module) -> Loss:
    """Has the model from elsewhere than its argument."""

    def loss(_: nn.Module, batch: object) -> torch.Tensor:
        fields = read_fields(batch)
        weight = model.head.weight
        return _each(model, fields) + 0.01 * (fields.x[:, :8] @ weight.t()).square().mean(dim=1)

    return loss


def _taught(model: nn.Module) -> Loss:
    """By a module outside of the model."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        teacher = nn.Sequential(
            nn.Linear(FEATURES, 6, dtype=torch.float32),
            nn.BatchNorm1d(6, dtype=torch.float32),
            nn.Linear(6, CLASSES, dtype=torch.float32),
        )
    teacher.to(model.head.weight.dtype).eval().requires_grad_(False)

    def loss(m: nn.Module, batch: object) -> torch.Tensor:
        fields = read_fields(batch)
        aim = teacher(fields.x).softmax(dim=1)
        return -(aim * m(fields).log_softmax(dim=1)).sum(dim=1)

    return loss


LOSSES: dict[str, tuple[Callable[[nn.Module], Loss], LossTraits]] = {
    "each": (_of(_each), LossTraits()),
    "column": (_of(_column), LossTraits()),
    "scalar": (_of(_scalar), LossTraits()),
    "weighted": (_of(_weighted), LossTraits()),
    "positives": (_of(_positives), LossTraits()),
    "sum": (_of(_sum), LossTraits()),
    "two means": (_of(_two_means), LossTraits()),
    "mean and sum": (_of(_mean_and_sum), LossTraits()),
    "penalised": (_of(_penalised), LossTraits()),
    "ready": (_of(_ready), LossTraits()),
    "ready sum": (_of(_ready_sum), LossTraits()),
    "ready two": (_of(_ready_two), LossTraits()),
    "wide": (_of(_wide), LossTraits()),
    "autocast": (_of(_autocast), LossTraits(exact=False)),
    "attack": (_of(_attack), LossTraits(gradient_of_inputs=True)),
    "smooth": (_of(_smooth), LossTraits(twice=True, gradient_of_inputs=True)),
    "mixed up": (_of(_mixed_up), LossTraits(exact=False)),
    "one by one": (_of(_one_by_one), LossTraits()),
    "two models": (_of(_two_models), LossTraits()),
    "scored on the way": (_of(_scored_on_the_way), LossTraits()),
    "closing over": (_closing_over, LossTraits()),
    "taught": (_taught, LossTraits()),
}


def value_of(result: object) -> torch.Tensor | None:
    """What a plain loop would go backward from; None where nothing counts."""
    if isinstance(result, torch.Tensor):
        return result.mean() if result.dim() else result
    terms = result.terms if isinstance(result, Means) else (result,)
    values = [_ratio(term) for term in terms]
    counted = [value for value in values if value is not None]
    return sum(counted[1:], counted[0]) if counted else None


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
