"""The engine against a plain PyTorch loop: what it computes is what was asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from benchmarks.token_models import LSTMClassifier, TransformerClassifier
from torch import nn

import onefold
from onefold.models import LeNet, resnet18
from tests.tables import for_each

Batch = tuple[torch.Tensor, torch.Tensor]
SIZES = (12, 12, 7, 2)  # a short batch, and one with fewer samples than shards

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.02),
}


class Wide(nn.Module):
    """Large enough for its first layer to be cut into several pieces, with an odd end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 1501)
        self.second = nn.Linear(1501, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def batches(model: str, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"wide": (37,), "lenet": (1, 28, 28), "resnet18": (1, 28, 28)}
    result = []
    for size in SIZES:
        labels = torch.randint(0, 10, (size,), generator=generator)
        if model in shapes:
            inputs = torch.randn(size, *shapes[model], generator=generator, dtype=dtype)
        else:
            inputs = torch.randint(0, 50, (size, 12), generator=generator)
        result.append((inputs, labels))
    return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wide": Wide,
    "lenet": LeNet,
    "resnet18": lambda: resnet18(in_channels=1, width=16),
    "transformer": lambda: TransformerClassifier(50, 32, 2, length=12, dropout=0.0),
    "lstm": lambda: LSTMClassifier(50, width=24, dropout=0.0),
}


def build(model: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]().to(dtype)


def per_sample(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def scalar(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_weight(model: nn.Module, batch: Batch) -> onefold.Mean:
    """A mean whose weight is not the number of samples, as with tokens."""
    weights = 1.0 + batch[1].to(next(model.parameters()).dtype)
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return onefold.Mean((losses * weights).sum(), weights.sum())


LOSSES = {"per-sample": per_sample, "scalar": scalar, "by-weight": by_weight}


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, data: list[Batch]
) -> list[float]:
    """What anybody would write."""
    values = []
    for batch in data:
        optimizer.zero_grad()
        result = LOSSES[kind](model, batch)
        if isinstance(result, onefold.Mean):
            result = result.total / result.weight
        value = result.mean()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


@for_each("kind", LOSSES)
@for_each("model", MODELS)
def test_one_shard_has_the_bits_of_the_plain_loop(model: str, kind: str) -> None:
    ours, theirs = build(model), build(model)
    optimizer = OPTIMIZERS["sgd"](list(ours.parameters()))
    trainer = onefold.Trainer(ours, optimizer, LOSSES[kind], shards=1, threads=1)
    values = [float(trainer.step(batch).loss) for batch in batches(model)]
    expected = plain(theirs, OPTIMIZERS["sgd"](list(theirs.parameters())), kind, batches(model))
    assert values == pytest.approx(expected, rel=1e-6)
    assert_same_bits(ours, theirs)


@for_each("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_the_plain_loop(name: str) -> None:
    ours, theirs = build("wide"), build("wide")
    optimizer = OPTIMIZERS[name](list(ours.parameters()))
    trainer = onefold.Trainer(ours, optimizer, per_sample, shards=1, threads=1)
    for batch in batches("wide"):
        trainer.step(batch)
    plain(theirs, OPTIMIZERS[name](list(theirs.parameters())), "per-sample", batches("wide"))
    assert_same_bits(ours, theirs)


@for_each("shards", [2, 4, 7])
@for_each("kind", LOSSES)
@for_each("model", ["wide", "lenet", "transformer", "lstm"])
def test_many_shards_agree_with_the_whole_batch(model: str, kind: str, shards: int) -> None:
    ours, theirs = build(model, torch.float64), build(model, torch.float64)
    data = batches(model, torch.float64)
    trainer = onefold.Trainer(
        ours, OPTIMIZERS["sgd"](list(ours.parameters())), LOSSES[kind], shards=shards
    )
    values = [float(trainer.step(batch).loss) for batch in data]
    expected = plain(theirs, OPTIMIZERS["sgd"](list(theirs.parameters())), kind, data)
    assert values == pytest.approx(expected, rel=1e-12)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: n + m)


def test_the_mean_of_unequal_shares_is_the_mean_of_the_samples() -> None:
    """Losses of 0.3, 0.2 and 0.8 on two devices: 0.433, not the 0.525 of a mean of means."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = onefold.Trainer(model, optimizer, loss, shards=2, devices=["cpu", "cpu"])
    step = trainer.step((torch.tensor([[0.3], [0.2], [0.8]]),))
    assert step.loss.item() == pytest.approx(1.3 / 3, rel=1e-7)
    assert model.weight.item() == pytest.approx(1 - 1.3 / 3, rel=1e-6)


def test_clipping_agrees_with_pytorch() -> None:
    ours, theirs = build("wide", torch.float64), build("wide", torch.float64)
    data = batches("wide", torch.float64)
    optimizer = OPTIMIZERS["sgd"](list(ours.parameters()))
    trainer = onefold.Trainer(
        ours, optimizer, per_sample, shards=4, devices=["cpu"] * 3, clip_norm=0.1
    )
    other = OPTIMIZERS["sgd"](list(theirs.parameters()))
    for batch in data:
        trainer.step(batch)
        other.zero_grad()
        per_sample(theirs, batch).mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        other.step()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-14)


def test_a_batch_of_no_weight_is_skipped_and_says_so() -> None:
    model = build("wide")
    before = [p.clone() for p in model.parameters()]

    def loss(model: nn.Module, batch: Batch) -> onefold.Mean:
        return onefold.Mean((model(batch[0]) * 0).sum(), 0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = onefold.Trainer(model, optimizer, loss, shards=3)
    step = trainer.step(batches("wide")[0])
    assert step.skipped
    assert step.loss.isnan()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_scheduler_of_the_users_own_optimizer_works() -> None:
    ours, theirs = build("wide"), build("wide")
    optimizer, other = (OPTIMIZERS["sgd"](list(m.parameters())) for m in (ours, theirs))
    trainer = onefold.Trainer(ours, optimizer, per_sample, shards=1, threads=1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, other)]
    for batch in batches("wide"):
        trainer.step(batch)
        plain(theirs, other, "per-sample", [batch])
        for schedule in schedules:
            schedule.step()
    assert_same_bits(ours, theirs)


@for_each("devices", [1, 3])
@for_each("name", ["sgd", "adamw", "adagrad", "adafactor"])
def test_state_that_an_optimizer_already_has_is_kept(name: str, devices: int) -> None:
    ours, theirs = build("wide", torch.float64), build("wide", torch.float64)
    optimizer, other = (OPTIMIZERS[name](list(m.parameters())) for m in (ours, theirs))
    data = batches("wide", torch.float64)
    plain(ours, optimizer, "per-sample", data[:2])
    plain(theirs, other, "per-sample", data)
    trainer = onefold.Trainer(ours, optimizer, per_sample, shards=3, devices=["cpu"] * devices)
    for batch in data[2:]:
        trainer.step(batch)
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)


def test_channels_last_stays_channels_last() -> None:
    ours = build("resnet18").to(memory_format=torch.channels_last)
    optimizer = OPTIMIZERS["sgd"](list(ours.parameters()))
    trainer = onefold.Trainer(ours, optimizer, per_sample, shards=2, devices=["cpu", "cpu"])
    trainer.step(batches("resnet18")[0])
    weight = ours.get_parameter("layer1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)


def assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    state = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, state[name]), (
            f"{name} differs by {(value - state[name]).abs().max()}"
        )
