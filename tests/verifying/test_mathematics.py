"""V shards against one: what is the same is found to be, what is not is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

import onefold
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]

N = 10


def points(width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, width, generator=generator)
    return x, torch.randint(0, 3, (N,), generator=generator)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def causes(line: dict[str, Any]) -> str:
    return " | ".join(cause["text"] for cause in line["causes"])


def agrees(line: dict[str, Any]) -> bool:
    several = (line["loss_difference"], line["gradient_difference"], line["worst_difference"])
    return max(several) < 1e-9 and not line["causes"]


def noisy_model() -> nn.Module:
    """Batch norm, dropout and noise."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3)
    )


def of_each(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def as_mean(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1])


def with_noise(model: nn.Module, batch: Any) -> object:
    """As for a diffusion model: noise and a time of each sample, and functional dropout."""
    x, y = batch
    noise, time = torch.randn_like(x), torch.randint(0, 100, (len(x),), device=x.device)
    hidden = F.dropout(x + noise * time.unsqueeze(1) / 100, 0.3)
    return F.cross_entropy(model(hidden), y, reduction="none") + torch.rand(()) + torch.rand(2)[0]


def by_tokens(model: nn.Module, batch: Any) -> object:
    valid = batch[1] > 0
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return onefold.Mean((losses * valid).sum(), valid.sum())


def two_terms(model: nn.Module, batch: Any) -> object:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    first = onefold.Mean((losses * (batch[1] > 0)).sum(), (batch[1] > 0).sum())
    return first + 0.1 * onefold.Sum(losses.square().sum())


@pytest.mark.parametrize("loss", [of_each, as_mean, with_noise, by_tokens, two_terms])
@pytest.mark.parametrize("model", [classifier, noisy_model])
def test_what_is_right_agrees(
    compared: Compared, model: Callable[[], nn.Module], loss: Callable[..., object]
) -> None:
    line = compared.step(model(), loss, points())
    assert agrees(line), line
    assert line["evaluation"]
    assert line["unmatched"] == []


def test_several_devices_of_one_process_agree(compared: Compared) -> None:
    trainer = compared.trainer(noisy_model(), of_each, devices=["cpu", "cpu", "cpu"])
    for _ in range(2):
        trainer.step(points())
    assert all(agrees(line) for line in compared.lines(trainer)[1:])


def not_a_number_alone(model: nn.Module, batch: Any) -> object:
    """Its value is right, but the gradient of a shard of one sample is not a number."""
    logits = model(batch[0])
    spread = (logits - logits.mean(dim=0)).square().sum().sqrt()
    return F.cross_entropy(logits, batch[1]) + 0.0 * spread


def test_a_gradient_that_is_not_a_number_on_one_side_alone_differs(compared: Compared) -> None:
    batch = tuple(part[:4] for part in points())
    line = compared.step(nn.Linear(4, 3), not_a_number_alone, batch, shards=4)
    assert line["loss_difference"] < 1e-9
    assert line["gradient_difference"] == math.inf
    assert not agrees(line)
    assert line["causes"]


def summed(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def summed_by_hand(model: nn.Module, batch: Any) -> object:
    return (model(batch[0]) - F.one_hot(batch[1], 3)).square().sum()


def weighted(model: nn.Module, batch: Any) -> object:
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=batch[0].dtype)
    return F.cross_entropy(model(batch[0]), batch[1], weight=weight)


def ignoring(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=2)


def mean_of_tokens(model: nn.Module, batch: Any) -> object:
    valid = 1.0 + batch[1].to(batch[0].dtype)
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * valid).sum() / valid.sum()


def contrastive(model: nn.Module, batch: Any) -> object:
    once, again = model(batch[0]), model(batch[0] * 1.1)
    return F.cross_entropy(once @ again.T, torch.arange(len(once)))


def contrastive_of_each(model: nn.Module, batch: Any) -> object:
    once, again = model(batch[0]), model(batch[0] * 1.1)
    return F.cross_entropy(once @ again.T, torch.arange(len(once)), reduction="none")


def over_the_batch(model: nn.Module, batch: Any) -> object:
    outputs = model(batch[0])
    return F.cross_entropy((outputs - outputs.mean(0)) / outputs.std(0), batch[1])


def neighbours(model: nn.Module, batch: Any) -> object:
    outputs = model(batch[0])
    return (outputs[1:] - outputs[:-1]).square().mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (summed, "with reduction='sum'"),
        (summed_by_hand, "onefold.Sum(total)"),
        (weighted, "a mean by class weights"),
        (ignoring, "are ignored"),
        (mean_of_tokens, "onefold.Mean(total, weight)"),
        (contrastive, "a sample's loss depends on the other samples"),
        (contrastive_of_each, "a sample's loss depends on the other samples"),
        (over_the_batch, "a sample's loss depends on the other samples"),
        (neighbours, "the loss changes when the samples of the batch change places"),
    ],
)
def test_what_is_wrong_is_named(
    compared: Compared, loss: Callable[..., object], words: str
) -> None:
    line = compared.step(classifier(), loss, points(), shards=3)
    assert max(line["loss_difference"], line["gradient_difference"]) > 1e-9
    first = line["causes"][0]
    assert first["kind"] == "error"
    assert words in first["text"], causes(line)


def test_the_numbers_of_a_sum_are_shown(compared: Compared) -> None:
    line = compared.step(classifier(), summed, points(), shards=5)
    assert line["alone"] / line["loss"] == pytest.approx(5)
    assert line["gradient_difference"] == pytest.approx(0.8)


@pytest.mark.parametrize("choice", ["weight", "ignore_index"])
def test_values_that_are_divided_by_n_are_named_though_they_agree(
    compared: Compared, choice: str
) -> None:
    chosen = {"weight": torch.tensor([1.0, 5.0, 0.2]).double(), "ignore_index": 2}[choice]

    def loss(model: nn.Module, batch: Any) -> object:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none", **{choice: chosen})

    line = compared.step(classifier(), loss, points())
    assert line["loss_difference"] < 1e-9
    (cause,) = line["causes"]
    assert cause["kind"] == "error"
    assert "onefold divides the values by the number of samples" in cause["text"]


class TimeFirst(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return self.out(hidden[0] if isinstance(hidden, tuple) else hidden)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: nn.LSTM(4, 4), "layer (LSTM)"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8), "layer.self_attn (MultiheadAttention)"),
    ],
)
def test_a_batch_that_is_cut_along_time_is_named(
    compared: Compared, layer: Callable[[], nn.Module], name: str
) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 4), torch.randn(8, 3, 1))  # time, samples, values

    def loss(model: nn.Module, batch: Any) -> object:
        return F.mse_loss(model(batch[0]), batch[1])

    line = compared.step(TimeFirst(layer()), loss, batch)
    first = line["causes"][0]["text"]
    assert "cut along time" in first
    assert name in first


def test_time_first_inside_a_model_of_samples_first_is_right(compared: Compared) -> None:
    class Transposing(TimeFirst):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1)).mean(0)

    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 4), torch.randn(8, 1))

    def loss(model: nn.Module, batch: Any) -> object:
        return F.mse_loss(model(batch[0]), batch[1])

    assert agrees(compared.step(Transposing(nn.LSTM(4, 4)), loss, batch))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


def test_an_attribute_that_forward_changes_is_named(compared: Compared) -> None:
    line = compared.step(Counting(), of_each, points())
    (cause,) = line["causes"]
    assert "attribute calls of module model (Counting)" in cause["text"]


def test_a_generator_of_the_scripts_own_is_named(compared: Compared) -> None:
    generator = np.random.default_rng(0)

    def loss(model: nn.Module, batch: Any) -> object:
        x, y = batch
        x = x + torch.from_numpy(generator.normal(size=4))
        return F.cross_entropy(model(x), y, reduction="none")

    line = compared.step(classifier(), loss, points())
    assert "generator, which" in line["causes"][0]["text"]
    assert "a generator of its own" in line["causes"][0]["text"]


def test_a_memory_that_is_not_seen_is_said_to_be_somewhere(compared: Compared) -> None:
    calls = iter(range(1000))

    def loss(model: nn.Module, batch: Any) -> object:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none") * (1 + next(calls))

    line = compared.step(classifier(), loss, points())
    (cause,) = line["causes"]
    assert "the loss keeps something from call to call" in cause["text"]


class Seen(nn.Module):
    seen: torch.Tensor

    def __init__(self, start: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("seen", torch.tensor(start).long())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.inner(x)


def test_a_counter_of_samples_in_a_buffer_is_named_with_its_rule(compared: Compared) -> None:
    line = compared.step(Seen(7), of_each, points())
    (cause,) = line["causes"]
    assert "buffer seen is 10 with the shards, 17 with one" in cause["text"]
    assert 'Trainer(buffers={"seen": "sum"})' in cause["text"]


def test_a_buffer_of_infinities_agrees_with_itself(compared: Compared) -> None:
    """The mask of attention is one."""
    model = classifier()
    model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    assert agrees(compared.step(model, of_each, points()))


def test_with_its_rule_a_counter_agrees(compared: Compared) -> None:
    assert agrees(compared.step(Seen(7), of_each, points(), buffers={"seen": "sum"}))


def mixed_up(model: nn.Module, batch: Any) -> object:
    x, y = batch
    other = torch.randperm(len(x))
    outputs = model(0.5 * x + 0.5 * x[other])
    return F.cross_entropy(outputs, y) + F.cross_entropy(outputs, y[other])


def test_a_permutation_of_the_shard_is_not_compared(compared: Compared) -> None:
    line = compared.step(classifier(), mixed_up, points())
    (cause,) = line["causes"]
    assert cause["kind"] == "note"
    assert "randperm" in cause["text"]


def test_a_batch_norm_without_statistics_is_not_compared(compared: Compared) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    line = compared.step(model, of_each, points(), shards=3)
    (cause,) = line["causes"]
    assert cause["kind"] == "note"
    assert cause["text"].startswith("1 (BatchNorm1d) keeps no running statistics")


def test_a_sum_behind_such_a_norm_is_still_named(compared: Compared) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    line = compared.step(model, summed, points(), shards=3)
    assert line["causes"][0]["kind"] == "error"


def test_a_batch_without_weight_is_skipped(compared: Compared) -> None:
    x, y = points()
    line = compared.step(classifier(), by_tokens, (x, torch.zeros_like(y)))
    assert line["skipped"]
    assert line["causes"] == []


def test_numbers_of_numpy_are_computed_with(compared: Compared) -> None:
    def loss(model: nn.Module, batch: Any) -> object:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    x, y = points()
    data = [{"x": a.numpy(), "y": b.numpy()} for a, b in zip(x, y, strict=True)]
    trainer = compared.trainer(classifier(), loss)
    for batch in trainer.loader(data, batch_size=10):
        trainer.step(batch)
    assert agrees(compared.lines(trainer)[1])


def test_what_is_unknown_is_said_to_be(compared: Compared) -> None:
    def loss(model: nn.Module, batch: Any) -> object:
        parameter = next(model.parameters())
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return onefold.Mean(losses.sum(), len(losses)) + onefold.Sum(parameter.square().sum())

    line = compared.step(classifier(), loss, points())
    assert line["loss_difference"] > 1e-9
    assert line["causes"]


def test_a_model_that_cannot_evaluate_is_compared_in_its_own_mode(compared: Compared) -> None:
    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = noisy_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise NotImplementedError("no evaluation")
            return F.dropout(self.inner(x), 0.5)

    model = Training()
    line = compared.step(model, of_each, points())
    assert agrees(line)
    assert not line["evaluation"]
    assert all(part.training for part in model.modules())


def test_modes_generators_and_functions_are_put_back(compared: Compared) -> None:
    model = noisy_model()
    model[1].eval()
    torch.manual_seed(5)
    before, dropout = torch.get_rng_state(), F.dropout
    compared.step(model, with_noise, points())
    assert torch.equal(torch.get_rng_state(), before)
    assert F.dropout is dropout
    assert [part.training for part in model] == [True, False, True, True, True]


def test_the_step_is_that_of_the_shards(compared: Compared) -> None:
    """Comparing changes nothing: parameters and buffers are those of a run without."""
    plain = classifier().double()
    x, y = points()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = onefold.Trainer(plain, optimizer, of_each, shards=4, threads=1, devices=["cpu"])
    trainer.step((x.double(), y))
    model = classifier()
    compared.step(model, of_each, (x, y))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Augmented(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index / 20.0) + 0.1 * torch.randn(4), index % 3


def mixing_collate(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.rand(1) * x.flip(0), y


@pytest.mark.parametrize("collate", [None, mixing_collate])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_batches_of_a_loader_are_compared(
    compared: Compared, collate: Callable[..., Any] | None, workers: int
) -> None:
    trainer = compared.trainer(noisy_model(), of_each)
    loader = trainer.loader(
        Augmented(), batch_size=10, shuffle=True, collate=collate, workers=workers
    )
    for batch in loader:
        trainer.step(batch)
    about, *lines = compared.lines(trainer)
    assert about["shards"] == 4
    assert "of_each" in about["function"]
    assert len(lines) == 2
    assert all(agrees(line) for line in lines), lines


def padded(samples: list[Any]) -> Any:
    longest = max(len(sample) for sample in samples)
    x = torch.stack([F.pad(s, (0, longest - len(s))) for s in samples])
    return x, torch.tensor([len(s) for s in samples])


@pytest.mark.parametrize("masks", [True, False])
def test_padding_matters_where_it_is_not_masked(compared: Compared, masks: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> object:
        x, lengths = batch
        outputs = model(x.unsqueeze(-1)).squeeze(-1)
        valid = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        total = (outputs.square() * valid).sum(1) if masks else outputs.square().sum(1)
        return total / (lengths if masks else x.shape[1])

    torch.manual_seed(0)
    data = [torch.randn(length) for length in (3, 9, 4, 2, 6, 5, 7, 8)]
    trainer = compared.trainer(nn.Linear(1, 1), loss)
    for batch in trainer.loader(data, batch_size=8, collate=padded):
        trainer.step(batch)
    (line,) = compared.lines(trainer)[1:]
    if masks:
        assert agrees(line)
    else:
        assert "padding that is not masked out" in line["causes"][0]["text"]


def test_evaluation_works_in_the_precision_of_the_comparison(compared: Compared) -> None:
    trainer = compared.trainer(noisy_model(), of_each)
    scores = trainer.evaluate(lambda m, b: {"loss": of_each(m, b)}, Augmented(), batch_size=8)
    assert scores["loss"] > 0


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
def test_a_part_in_a_lower_precision_may_differ_by_rounding(
    compared: Compared, rounded: torch.dtype
) -> None:
    """As many published models compute: their norms, or their loss, always in float32."""

    def loss(model: nn.Module, batch: Any) -> object:
        return F.cross_entropy(model(batch[0]).to(rounded), batch[1])

    line = compared.step(classifier(), loss, points())
    assert 1e-9 < line["loss_difference"] <= line["tolerance"] == TOLERANCES[rounded]
    assert not line["causes"]


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2}


def test_a_part_in_a_lower_precision_hides_no_other_loss(compared: Compared) -> None:
    def loss(model: nn.Module, batch: Any) -> object:
        logits = model(batch[0]).float()
        return logits.logsumexp(1).mean() + logits.std()

    line = compared.step(classifier(), loss, points())
    assert line["loss_difference"] > line["tolerance"] == 1e-4
    assert "depends on the other samples of its batch" in causes(line)


def test_what_was_never_in_float64_is_not_rounded(compared: Compared) -> None:
    def loss(model: nn.Module, batch: Any) -> object:
        weights = (batch[1] + 1).float()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights

    line = compared.step(classifier(), loss, points())
    assert line["tolerance"] == 1e-9
    assert agrees(line)


@pytest.mark.parametrize("scalar", [False, True])
def test_an_adaptive_weight_by_gradients_of_the_loss_is_named(
    compared: Compared, scalar: bool
) -> None:
    """As VQGAN balances its two terms, by the gradients at the last layer."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        one = F.cross_entropy(logits, batch[1], reduction="none")
        other = logits.square().mean(dim=1)
        last = list(model.parameters())[-1]
        sizes = [grad(each.mean(), last, retain_graph=True)[0].norm() for each in (one, other)]
        losses = one + (sizes[0] / (sizes[1] + 1e-4)).detach() * other
        return losses.mean() if scalar else losses

    line = compared.step(classifier(), loss, points())
    assert line["loss_difference"] > 1e-9
    (cause,) = line["causes"]
    assert "the loss takes gradients itself (torch.autograd.grad), such as those" in str(cause)


def test_gradients_of_each_sample_in_a_loss_are_no_cause(compared: Compared) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs = batch[0].requires_grad_()
        logits = model(inputs)
        (slopes,) = grad(logits.sum(), inputs, create_graph=True)
        return F.cross_entropy(logits, batch[1], reduction="none") + slopes.square().sum(dim=1)

    assert agrees(compared.step(classifier(), loss, points()))
