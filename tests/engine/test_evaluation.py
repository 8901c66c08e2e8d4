from __future__ import annotations

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
from onefold.errors import DisagreementError, LossError
from tests.small import Batch, bits, line, make_trainer, points, square
from tests.tables import for_each

Scores = dict[str, Any]

both = for_each("devices", [1, 3])


def loss_of(model: nn.Module, batch: Batch) -> Scores:
    return {"loss": square(model, batch)}


class Mixture(nn.Module):
    """Has all that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())
        self.frozen = nn.BatchNorm1d(3).eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.parts(self.frozen(inputs))


@settings(max_examples=40)
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 45),
    shards=st.integers(1, 6),
    data=st.data(),
)
def test_every_sample_is_scored_once(
    samples: int, batch_size: int, shards: int, data: st.DataObject
) -> None:
    devices = data.draw(st.integers(1, shards))
    seen: list[int] = []

    def score(model: nn.Module, batch: torch.Tensor) -> Scores:
        seen.extend(batch.tolist())
        return {"sum": batch.double(), "count": onefold.Mean(torch.tensor(len(batch) * 1.0), 1)}

    trainer = make_trainer(shards=shards, devices=devices)
    scores = trainer.evaluate(score, range(samples), batch_size=batch_size)
    assert sorted(seen) == list(range(samples))
    assert scores["sum"] == pytest.approx(sum(range(samples)) / samples)


@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any),
    batch_size=st.integers(1, 9),
)
@settings(max_examples=40)
def test_a_mean_is_a_ratio_of_sums(weights: list[int], batch_size: int) -> None:
    values = [float(3 * i % 7) for i in range(len(weights))]

    def score(model: nn.Module, batch: Batch) -> Scores:
        value, weight = batch
        return {"by weight": onefold.Mean((value * weight).sum(), weight.sum())}

    scores = make_trainer(shards=3).evaluate(
        score, list(zip(values, weights, strict=True)), batch_size=batch_size
    )
    expected = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert scores == {"by weight": pytest.approx(expected)}


@both
def test_the_scores_are_those_of_a_plain_loop(devices: int) -> None:
    model, (inputs, targets) = line(), points(23)

    def score(model: nn.Module, batch: Batch) -> Scores:
        return {
            "loss": square(model, batch),
            "mean": square(model, batch).mean(),
            "accuracy": ((model(batch[0]) > 0) == (batch[1] > 0)).squeeze(1),
        }

    trainer = make_trainer(model, devices=devices)
    scores = trainer.evaluate(score, TensorDataset(inputs, targets), batch_size=5)
    with torch.no_grad():
        loss = square(model, (inputs, targets)).double().mean().item()
        right = ((model(inputs) > 0) == (targets > 0)).sum().item()
    assert scores["loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["mean"] == pytest.approx(loss, rel=1e-6)
    assert scores["accuracy"] == right / 23


@for_each("samples", [2, 5, 23])
@for_each("plan", [(2, 2), (0, 4), (3, 1), (1, 1, 1, 1)])
def test_the_bits_do_not_depend_on_the_devices(samples: int, plan: tuple[int, ...]) -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"noisy": square(model, batch) * noise}

    data = TensorDataset(*points(samples))
    alone = make_trainer().evaluate(score, data, batch_size=7)
    several = make_trainer(devices=len(plan), plan=plan)
    assert several.evaluate(score, data, batch_size=7) == alone
    assert several.evaluate(score, data, batch_size=7) == alone


@both
def test_fewer_samples_than_devices(devices: int) -> None:
    scores = make_trainer(devices=devices).evaluate(
        lambda model, batch: {"value": batch[0]}, TensorDataset(torch.tensor([7.0])), batch_size=8
    )
    assert scores == {"value": 7.0}


def test_a_sum_of_weights_of_zero_gives_no_number() -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        return {"nothing": onefold.Mean(torch.tensor(0.0), 0), "loss": square(model, batch)}

    scores = make_trainer().evaluate(score, TensorDataset(*points(9)), batch_size=4)
    assert math.isnan(scores["nothing"])
    assert scores["loss"] > 0


@both
def test_the_model_is_in_evaluation_mode_and_its_modes_are_restored(devices: int) -> None:
    model = Mixture()
    trainer = make_trainer(model, devices=devices)
    modes: set[bool] = set()
    gradients: set[bool] = set()

    def score(model: nn.Module, batch: Batch) -> Scores:
        modes.update(part.training for part in model.modules())
        loss = square(model, batch)
        gradients.update((loss.requires_grad, torch.is_grad_enabled()))
        return {"loss": loss}

    trainer.evaluate(score, TensorDataset(*points(9)), batch_size=4)
    assert modes == {False}
    assert gradients == {False}
    assert torch.is_grad_enabled()
    assert {name for name, part in model.named_modules() if not part.training} == {"frozen"}


def test_modes_are_restored_after_a_failure() -> None:
    model = Mixture()

    def score(model: nn.Module, batch: Batch) -> Scores:
        raise KeyError("a label")

    with pytest.raises(KeyError, match="a label"):
        make_trainer(model).evaluate(score, TensorDataset(*points(9)), batch_size=4)
    assert {name for name, part in model.named_modules() if not part.training} == {"frozen"}
    assert torch.is_grad_enabled()


@both
def test_nothing_of_the_run_is_changed(devices: int) -> None:
    trainers = [make_trainer(Mixture(), devices=devices) for _ in range(2)]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for trainer, evaluates in zip(trainers, (True, False), strict=True):
        for _ in range(3):
            trainer.step(points(9))
            if evaluates:
                before = bits(trainer.model)
                trainer.evaluate(loss_of, TensorDataset(*points(9)), batch_size=4)
                assert bits(trainer.model) == before
    assert trainers[0].fingerprint() == trainers[1].fingerprint()
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected


@for_each("devices", [1, 2])
def test_names_that_differ_between_shards_are_refused(devices: int) -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        name = "first" if batch[0][0, 0] == 0 else "other"
        return {name: square(model, batch)}

    data = points(8)
    data[0][:2] = 0  # the first shard
    data[0][2:] = 1
    words = r"'other'.*'first'|'first'.*'other'"
    with pytest.raises(DisagreementError, match=words):
        make_trainer(shards=4, devices=devices, plan=(4,) if devices == 1 else (1, 3)).evaluate(
            score, TensorDataset(*data), batch_size=8
        )


@for_each(
    ("result", "words"),
    [
        (torch.ones(2), "expected the function to return a dict .* got Tensor"),
        (None, "a dict of values by name, .* got NoneType"),
        ([("loss", torch.ones(2))], "got list"),
        ({}, "expected the function to return a dict of values by name"),
        ({"accuracy": 0.5}, "^the value 'accuracy' of batch 0 .*, shard 0: .* got float"),
        ({"accuracy": torch.ones(2, 3)}, r"^the value 'accuracy' of .* got shape \(2, 3\)"),
    ],
    ids=["tensor", "none", "list", "empty", "number", "shape"],
)
def test_a_score_of_another_kind_is_refused(result: object, words: str) -> None:
    trainer = make_trainer()
    with pytest.raises(LossError, match=words):
        trainer.evaluate(lambda model, batch: result, TensorDataset(*points(8)), batch_size=8)


@for_each("name", [0, "", "two\nlines"])
def test_names_must_be_words(name: Any) -> None:
    with pytest.raises(LossError, match="expected names of one line"):
        make_trainer().evaluate(
            lambda model, batch: {name: square(model, batch)},
            TensorDataset(*points(8)),
            batch_size=8,
        )


def test_the_order_of_values_does_not_matter_to_their_names() -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        return {"b é": batch[0].sum(dim=1), "a": batch[1].squeeze(1), "c": batch[1].mean()}

    inputs, targets = points(9)
    scores = make_trainer(devices=2).evaluate(score, TensorDataset(inputs, targets), batch_size=4)
    assert list(scores) == ["b é", "a", "c"]
    assert scores["b é"] == pytest.approx(inputs.sum(dim=1).mean().item(), rel=1e-5)
    assert scores["a"] == scores["c"] == pytest.approx(targets.mean().item(), rel=1e-5)


@pytest.mark.processes
def test_workers_and_collate_are_those_of_a_loader() -> None:
    def read(workers: int) -> dict[str, float]:
        return make_trainer().evaluate(
            lambda model, batch: {"value": batch},
            [float(i) for i in range(10)],
            batch_size=4,
            workers=workers,
            collate=doubled,
        )

    assert read(0) == read(2) == {"value": 9.0}


def doubled(samples: list[float]) -> torch.Tensor:
    return 2 * torch.tensor(samples)


@for_each("choice", [{"batch_size": 0}, {"batch_size": 4, "workers": -1}])
def test_wrong_numbers_are_refused(choice: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="of at least"):
        make_trainer().evaluate(loss_of, TensorDataset(*points(8)), **choice)


@for_each("fails", ["in a score", "in an item"])
def test_a_run_goes_on_after_an_evaluation_that_failed(fails: str) -> None:
    def score(model: nn.Module, batch: Batch) -> Scores:
        raise KeyError("a label")

    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("an item")

    data: dict[str, tuple[Callable[..., Scores], TensorDataset]] = {
        "in a score": (score, TensorDataset(*points(8))),
        "in an item": (loss_of, Broken(*points(8))),
    }
    with_failure, without = make_trainer(devices=2), make_trainer(devices=2)
    for trainer in (with_failure, without):
        trainer.step(points(8))
    with pytest.raises((KeyError, onefold.errors.SampleError), match=r"a label|an item"):
        with_failure.evaluate(*data[fails], batch_size=4)
    for trainer in (with_failure, without):
        trainer.step(points(7))
    assert with_failure.fingerprint() == without.fingerprint()


SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a function": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "a module": lambda x, y: nn.L1Loss(reduction="sum")(x, y),
    "of old": lambda x, y: nn.MSELoss(size_average=False)(x, y),
    "in another dtype": lambda x, y: -F.huber_loss(x, y, reduction="sum").detach().double(),
    "in another view": lambda x, y: F.mse_loss(x, y, reduction="sum").view(1).reshape(()),
    "of two": lambda x, y: F.mse_loss(x, y, reduction="sum") + F.l1_loss(x, y, reduction="sum"),
}
NO_SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a mean": F.mse_loss,
    "divided": lambda x, y: F.mse_loss(x, y, reduction="sum") / len(x),
    "divided where it is": lambda x, y: F.mse_loss(x, y, reduction="sum").div_(len(x)),
    "a Mean": lambda x, y: onefold.Mean(F.mse_loss(x, y, reduction="sum"), len(x)),
    "a Sum": lambda x, y: onefold.losses.mse_loss(x, y, reduction="sum") / 6,
}


def paired(samples: int) -> TensorDataset:
    return TensorDataset(*points(samples))


@for_each("batch_size", [3, 6], ids=["one sample a shard", "two"])
@for_each("form", SUMS)
@pytest.mark.filterwarnings("ignore:size_average")
def test_a_sum_is_not_read_as_a_mean(form: str, batch_size: int) -> None:
    trainer = make_trainer(shards=3)
    with pytest.raises(LossError, match=r"'a' of batch 0 .*is a sum over the shard \(reduction"):
        trainer.evaluate(
            lambda m, b: {"a": SUMS[form](m(b[0]), b[1])}, paired(6), batch_size=batch_size
        )


@for_each("form", NO_SUMS)
def test_what_is_divided_is_no_sum(form: str) -> None:
    model, (inputs, targets) = line(), points(6)
    expected = F.mse_loss(model(inputs), targets).item()
    scores = make_trainer(model, shards=3).evaluate(
        lambda m, b: {"a": NO_SUMS[form](m(b[0]), b[1])}, paired(6), batch_size=3
    )
    assert scores["a"] == pytest.approx(expected)


def test_a_sum_over_all_there_is_may_be_returned() -> None:
    scores = make_trainer(shards=1).evaluate(
        lambda m, b: {"a": SUMS["a function"](b[0], b[0] + 1)}, paired(6), batch_size=6
    )
    assert scores["a"] == 6 * 3


def test_looking_for_sums_does_not_choose_kernels() -> None:
    """PyTorch computes transformers in evaluation another way where it sees a function mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    data = TensorDataset(torch.randn(4, 5, 8))
    seen: list[torch.Tensor] = []

    def score(model: nn.Module, batch: list[torch.Tensor]) -> Scores:
        seen.append(model(batch[0]))
        return {"a": seen[-1].mean()}

    make_trainer(layer, shards=2).evaluate(score, data, batch_size=4)
    with torch.no_grad():
        assert torch.equal(layer.eval()(data[:2][0]), seen[0])
