"""Scores of a data set: each sample counts once, in any shards, on any devices."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import LossError, SampleError
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

Scores = dict[str, Any]

both = for_each("devices", [1, 3])


def loss_of(model: nn.Module, batch: Batch) -> Scores:
    return {"loss": square(model, batch)}


def data(samples: int = 8) -> TensorDataset:
    return TensorDataset(*points(samples))


class Mixture(nn.Module):
    """Has all that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())
        self.frozen = nn.BatchNorm1d(3).eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.parts(self.frozen(inputs))


@settings(max_examples=30)
@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    batch_size=st.integers(1, 45),
    shards=st.integers(1, 6),
    drawn=st.data(),
)
def test_every_sample_is_scored_once_and_a_mean_is_a_ratio_of_sums(
    weights: list[int], batch_size: int, shards: int, drawn: st.DataObject
) -> None:
    devices = drawn.draw(st.integers(1, shards))
    values = [float(3 * i % 7) for i in range(len(weights))]
    seen: list[int] = []

    def score(model: nn.Module, batch: Any) -> Scores:
        number, value, weight = batch
        seen.extend(number.tolist())
        by_weight = onefold.Mean((value * weight).sum(), weight.sum())
        return {"number": number.double(), "by weight": by_weight}

    samples = list(zip(range(len(weights)), values, weights, strict=True))
    trainer = make_trainer(shards=shards, devices=devices)
    scores = trainer.evaluate(score, samples, batch_size=batch_size)
    assert sorted(seen) == list(range(len(weights)))
    expected = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert scores == {
        "number": pytest.approx((len(weights) - 1) / 2),
        "by weight": pytest.approx(expected),
    }


@both
def test_the_scores_are_those_of_a_plain_loop(devices: int) -> None:
    model, (inputs, targets) = line(), points(23)

    def score(model: nn.Module, batch: Batch) -> Scores:
        return {
            "é loss": square(model, batch),
            "mean": square(model, batch).mean(),
            "accuracy": ((model(batch[0]) > 0) == (batch[1] > 0)).squeeze(1),
            "nothing": onefold.Mean(torch.tensor(0.0), 0),
        }

    trainer = make_trainer(model, devices=devices)
    scores = trainer.evaluate(score, data(23), batch_size=5)
    assert list(scores) == ["é loss", "mean", "accuracy", "nothing"]
    with torch.no_grad():
        loss = square(model, (inputs, targets)).double().mean().item()
        right = ((model(inputs) > 0) == (targets > 0)).sum().item()
    assert scores["é loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["mean"] == pytest.approx(loss, rel=1e-6)
    assert scores["accuracy"] == right / 23
    assert math.isnan(scores["nothing"])


@for_each("samples", [1, 2, 5, 23])
def test_the_bits_do_not_depend_on_the_devices(samples: int) -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"noisy": square(model, batch) * noise}

    alone = make_trainer().evaluate(score, data(samples), batch_size=7)
    for shares in ((0, 4), (3, 1), (1, 1, 1, 1)):
        several = make_trainer(devices=len(shares), shares=shares)
        for _ in range(2):
            assert several.evaluate(score, data(samples), batch_size=7) == alone


def numbers() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@both
@for_each("call", ["evaluate", "predict"])
def test_evaluation_mode_changes_nothing_of_the_run(call: str, devices: int) -> None:
    modes: set[bool] = set()

    def score(model: nn.Module, batch: Batch) -> Scores:
        modes.update(part.training for part in model.modules())
        loss = square(model, batch)
        modes.update((loss.requires_grad, torch.is_grad_enabled()))
        numbers()
        return {"loss": loss}

    prints, drawn = [], []
    for evaluates in (True, False):
        trainer = make_trainer(Mixture(), devices=devices)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        for _ in range(3):
            trainer.step(points(9))
            if evaluates:
                before = bits(trainer.model)
                getattr(trainer, call)(score, data(9), batch_size=4)
                assert bits(trainer.model) == before
        names = {name for name, part in trainer.model.named_modules() if not part.training}
        assert (names, torch.is_grad_enabled()) == ({"frozen"}, True)
        prints.append(trainer.fingerprint())
        drawn.append(numbers())
    assert modes == {False}
    assert prints[0] == prints[1]
    assert drawn[0] == drawn[1]


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("an item")


@for_each(
    ("score", "samples", "words"),
    [
        (lambda model, batch: {}["a label"], data(), "a label"),
        (loss_of, Broken(*points(8)), "reading sample 0 in epoch 0 failed: KeyError: 'an item'"),
    ],
)
def test_a_run_goes_on(score: Any, samples: TensorDataset, words: str) -> None:
    with_failure, without = (make_trainer(Mixture(), devices=2) for _ in range(2))
    for trainer in (with_failure, without):
        trainer.step(points(8))
    with pytest.raises((KeyError, SampleError), match=words):
        with_failure.evaluate(score, samples, batch_size=4)
    modes = {name for name, part in with_failure.model.named_modules() if not part.training}
    assert (modes, torch.is_grad_enabled()) == ({"frozen"}, True)
    for trainer in (with_failure, without):
        trainer.step(points(11))
    assert with_failure.fingerprint() == without.fingerprint()


@for_each(
    ("result", "words"),
    [
        (torch.ones(2), "expected the function to return a dict .* got Tensor"),
        (None, "a dict of values by name, .* got NoneType"),
        ({}, "expected the function to return a dict of values by name"),
        ({"accuracy": 0.5}, "^the value 'accuracy' of batch 0 .*, shard 0: .* got float"),
        ({"accuracy": torch.ones(2, 3)}, r"^the value 'accuracy' of .* got shape \(2, 3\)"),
        ({0: torch.ones(2)}, "expected names of one line"),
    ],
)
def test_a_score_of_another_kind_is_refused(result: object, words: str) -> None:
    with pytest.raises(LossError, match=words):
        make_trainer().evaluate(lambda model, batch: result, data(), batch_size=8)


Two = Callable[[torch.Tensor, torch.Tensor], Any]


def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, y, reduction="sum")


@for_each("batch_size", [3, 6])
@for_each(
    "form",
    [
        total,
        lambda x, y: nn.MSELoss(size_average=False)(x, y),
        lambda x, y: -F.huber_loss(x, y, reduction="sum").detach().double(),
        lambda x, y: total(x, y).view(1).reshape(()),
        lambda x, y: total(x, y) + F.l1_loss(x, y, reduction="sum"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_a_sum_is_not_read_as_a_mean(form: Two, batch_size: int) -> None:
    """Of one sample a shard, or of two."""
    with pytest.raises(LossError, match=r"'a' of batch 0 .*is a sum over the shard \(reduction"):
        make_trainer(shards=3).evaluate(
            lambda m, b: {"a": form(m(b[0]), b[1])}, data(6), batch_size=batch_size
        )


@for_each(
    "form",
    [
        lambda x, y: total(x, y).div_(len(x)),
        lambda x, y: onefold.Mean(total(x, y), len(x)),
        lambda x, y: onefold.losses.mse_loss(x, y, reduction="sum") / 6,
    ],
)
def test_what_is_divided_is_no_sum(form: Two) -> None:
    model, (inputs, targets) = line(), points(6)
    expected = F.mse_loss(model(inputs), targets).item()
    scores = make_trainer(model, shards=3).evaluate(
        lambda m, b: {"a": form(m(b[0]), b[1])}, data(6), batch_size=3
    )
    assert scores["a"] == pytest.approx(expected)


def test_looking_for_sums_does_not_choose_kernels() -> None:
    """PyTorch computes transformers in evaluation another way where it sees a function mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    tokens = TensorDataset(torch.randn(4, 5, 8))
    seen: list[torch.Tensor] = []

    def score(model: nn.Module, batch: list[torch.Tensor]) -> Scores:
        seen.append(model(batch[0]))
        return {"a": seen[-1].mean()}

    make_trainer(layer, shards=2).evaluate(score, tokens, batch_size=4)
    with torch.no_grad():
        assert torch.equal(layer.eval()(tokens[:2][0]), seen[0])
