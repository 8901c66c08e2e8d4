"""V shards against one: what is the same is found to be, what is not is named."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.nn.functional import dropout

import onefold
from onefold.system.safe_files import read_record
from tests.inside import session_in
from tests.tables import for_each
from tests.tools.verifying.compared import Compared, compared

__all__ = ["compared"]

N = 10
Model = Callable[[], nn.Module]
Loss = Callable[..., object]
cross_entropy = F.cross_entropy
each = partial(F.cross_entropy, reduction="none")


def points() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def noisy() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU()
    return nn.Sequential(nn.Linear(4, 6), *inner, nn.Linear(6, 3))


def agrees(line: dict[str, Any]) -> bool:
    several = (line["loss_difference"], line["gradient_difference"], line["worst_difference"])
    return max(several) < 1e-9 and not line["causes"]


def of_each(model: nn.Module, batch: Any) -> object:
    return each(model(batch[0]), batch[1])


def as_mean(model: nn.Module, batch: Any) -> object:
    return cross_entropy(model(batch[0]), batch[1])


def with_noise(model: nn.Module, batch: Any) -> object:
    """As for a diffusion model: noise and a time of each sample, and functional dropout."""
    x, y = batch
    noise, time = torch.randn_like(x), torch.randint(0, 100, (len(x),))
    share = torch.distributions.Beta(2.0, torch.ones(len(x))).sample().unsqueeze(1)
    kept = torch.empty(len(x), 4).bernoulli_(0.5) * torch.multinomial(torch.ones(len(x), 5), 1)
    hidden = F.dropout(x * share + noise * time.unsqueeze(1) / 100 + kept, 0.3)
    hidden = hidden + torch.normal(torch.zeros(len(x)), 1.0).unsqueeze(1)
    return each(model(hidden), y) + torch.rand(()) + torch.rand(2)[0]


def by_tokens(model: nn.Module, batch: Any) -> onefold.Mean:
    valid = batch[1] > 0
    return onefold.Mean((each(model(batch[0]), batch[1]) * valid).sum(), valid.sum())


def two_terms(model: nn.Module, batch: Any) -> object:
    losses = each(model(batch[0]), batch[1])
    return by_tokens(model, batch) + 0.1 * onefold.Sum(losses.square().sum())


def gathered_root(model: nn.Module, batch: Any) -> object:
    errors = onefold.gather(model(batch[0]) - F.one_hot(batch[1], 3))
    return errors.square().mean().sqrt()


def with_slopes(model: nn.Module, batch: Any) -> object:
    inputs = batch[0].requires_grad_()
    logits = model(inputs)
    (slopes,) = grad(logits.sum(), inputs, create_graph=True)
    return each(logits, batch[1]) + slopes.square().sum(dim=1)


class TimeFirst(nn.Module):
    def __init__(self, layer: nn.Module, *, transposes: bool = False) -> None:
        super().__init__()
        self.layer, self.out, self.transposes = layer, nn.Linear(4, 1), transposes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x.transpose(0, 1) if self.transposes else x)
        out: torch.Tensor = self.out(hidden[0] if isinstance(hidden, tuple) else hidden)
        return out.mean(0) if self.transposes else out


def squares(model: nn.Module, batch: Any) -> object:
    return F.mse_loss(model(batch[0]), batch[1])


def series(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 4, generator=generator), torch.randn(*shape, generator=generator)


@for_each(
    ("model", "loss", "batch"),
    [
        (classifier, of_each, points()),
        *((noisy, loss, points()) for loss in (of_each, as_mean, with_noise)),
        *((noisy, loss, points()) for loss in (by_tokens, two_terms)),
        (classifier, with_slopes, points()),
        (classifier, gathered_root, points()),
        (lambda: TimeFirst(nn.LSTM(4, 4), transposes=True), squares, series(8, 1)),
    ],
)
def test_what_is_right_agrees(
    model: Model, loss: Loss, batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Compared(tmp_path, monkeypatch).step(model(), loss, batch)
    assert agrees(line), line
    assert line["unmatched"] == []


def summed(model: nn.Module, batch: Any) -> object:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def summed_by_hand(model: nn.Module, batch: Any) -> object:
    return (model(batch[0]) - F.one_hot(batch[1], 3)).square().sum()


def weighted(model: nn.Module, batch: Any, reduction: str = "mean") -> object:
    weight = torch.tensor([1.0, 5.0, 0.2], dtype=batch[0].dtype)
    return cross_entropy(model(batch[0]), batch[1], weight=weight, reduction=reduction)


def ignoring(model: nn.Module, batch: Any, reduction: str = "mean") -> object:
    return cross_entropy(model(batch[0]), batch[1], ignore_index=2, reduction=reduction)


def mean_of_tokens(model: nn.Module, batch: Any) -> object:
    valid = 1.0 + batch[1].to(batch[0].dtype)
    return (each(model(batch[0]), batch[1]) * valid).sum() / valid.sum()


def rooted(model: nn.Module, batch: Any, *, mean: bool, masked: bool = False) -> object:
    errors = (model(batch[0]) - F.one_hot(batch[1], 3)).square().sum(dim=1)
    errors = errors[batch[1] > 0] if masked else errors
    return errors.mean().sqrt() if mean else errors.sum().sqrt()


def rooted_total(model: nn.Module, batch: Any) -> object:
    errors = (model(batch[0]) - F.one_hot(batch[1], 3)).square().mean()
    return onefold.Mean(errors.sqrt() * len(batch[0]), len(batch[0]))


def contrastive(model: nn.Module, batch: Any, reduction: str = "mean") -> object:
    once, again = model(batch[0]), model(batch[0] * 1.1)
    return cross_entropy(once @ again.T, torch.arange(len(once)), reduction=reduction)


def balanced(model: nn.Module, batch: Any, *, scalar: bool) -> Any:
    """As VQGAN balances its two terms, by the gradients at the last layer."""
    logits = model(batch[0])
    one, other = each(logits, batch[1]), logits.square().mean(dim=1)
    last = list(model.parameters())[-1]
    sizes = [grad(part.mean(), last, retain_graph=True)[0].norm() for part in (one, other)]
    losses = one + (sizes[0] / (sizes[1] + 1e-4)).detach() * other
    return losses.mean() if scalar else losses


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Carrying(nn.Linear):
    """As hidden states are often carried: until a batch of another size comes."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.hidden = torch.zeros(0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.hidden if len(self.hidden) == len(x) else torch.zeros_like(x)
        self.hidden = (x + before).detach()
        return super().forward(x + before)


def drawing(model: nn.Module, batch: Any) -> object:
    """From a generator of the script's own."""
    return each(model(batch[0] + torch.from_numpy(GENERATOR.normal(size=4))), batch[1])


def keeping(model: nn.Module, batch: Any) -> object:
    return each(model(batch[0]), batch[1]) * (1 + next(CALLS))


def attentive() -> nn.Module:
    return TimeFirst(nn.TransformerEncoderLayer(4, 2, 8))


GENERATOR = np.random.default_rng(0)
CALLS = itertools.count()
ROOT = "the loss is a root of a mean or a sum over samples"
OTHERS = "a sample's loss depends on the other samples"


@for_each(
    ("model", "loss", "batch", "words"),
    [
        (classifier, summed, points(), "with reduction='sum'"),
        (classifier, summed_by_hand, points(), "onefold.Sum(total)"),
        (classifier, weighted, points(), "a mean by class weights"),
        (classifier, ignoring, points(), "are ignored"),
        (classifier, mean_of_tokens, points(), "onefold.Mean(total, weight)"),
        (classifier, partial(rooted, mean=True), points(), ROOT),
        (classifier, partial(rooted, mean=False), points(), ROOT),
        (classifier, partial(rooted, mean=True, masked=True), points(), ROOT),
        (classifier, rooted_total, points(), ROOT),
        (classifier, contrastive, points(), OTHERS),
        (classifier, partial(contrastive, reduction="none"), points(), OTHERS),
        (classifier, partial(balanced, scalar=False), points(), "computes gradients itself"),
        (classifier, partial(balanced, scalar=True), points(), "computes gradients itself"),
        (Counting, of_each, points(), "attribute calls of module model (Counting)"),
        (Carrying, of_each, points(), "attribute hidden of module model (Carrying)"),
        (classifier, drawing, points(), "a separate generator, which no step seed"),
        (classifier, keeping, points(), "the loss keeps state from call to call"),
        (lambda: TimeFirst(nn.LSTM(4, 4)), squares, series(8, 3, 1), "layer (LSTM)"),
        (attentive, squares, series(8, 3, 1), "layer.self_attn (MultiheadAttention)"),
    ],
)
def test_what_is_wrong_is_named(
    model: Model,
    loss: Loss,
    batch: Any,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Compared(tmp_path, monkeypatch).step(model(), loss, batch, shards=3)
    assert max(line["loss_difference"], line["gradient_difference"]) > line["tolerance"]
    first = line["causes"][0]
    assert first["kind"] == "error"
    assert words in first["text"], line["causes"]


@pytest.mark.parametrize("loss", [weighted, ignoring])
def test_values_divided_by_n_are_named_though_they_agree(compared: Compared, loss: Loss) -> None:
    line = compared.step(classifier(), partial(loss, reduction="none"), points())
    assert line["loss_difference"] < 1e-9
    (cause,) = line["causes"]
    assert cause["kind"] == "error"
    assert "onefold divides the values by the number of samples" in cause["text"]


def test_the_numbers_of_a_sum_are_shown(compared: Compared) -> None:
    line = compared.step(classifier(), summed, points(), shards=5)
    assert line["alone"] / line["loss"] == pytest.approx(5)
    assert line["gradient_difference"] == pytest.approx(0.8)


def test_a_gradient_that_is_not_a_number_on_one_side_alone_differs(compared: Compared) -> None:
    """Of a shard of one sample; the loss itself is right."""

    def loss(model: nn.Module, batch: Any) -> object:
        logits = model(batch[0])
        spread = (logits - logits.mean(dim=0)).square().sum().sqrt()
        return cross_entropy(logits, batch[1]) + 0.0 * spread

    batch = tuple(part[:4] for part in points())
    line = compared.step(nn.Linear(4, 3), loss, batch, shards=4)
    assert line["loss_difference"] < 1e-9
    assert line["gradient_difference"] == math.inf
    assert line["causes"]


class Seen(nn.Linear):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return super().forward(x)


def test_a_counter_of_samples_in_a_buffer_is_named_with_its_rule(compared: Compared) -> None:
    (cause,) = compared.step(Seen(), of_each, points())["causes"]
    assert "buffer seen is 10 with the shards, 17 with one" in cause["text"]
    assert 'Trainer(buffers={"seen": "sum"})' in cause["text"]
    assert agrees(compared.step(Seen(), of_each, points(), buffers={"seen": "sum"}))


def test_what_cannot_be_compared_is_a_note(compared: Compared) -> None:
    """A permutation of the shard, and a norm over its samples; a sum behind that is still named."""

    def mixed_up(model: nn.Module, batch: Any) -> object:
        x, y = batch
        other = torch.randperm(len(x))
        outputs = model(0.5 * x + 0.5 * x[other])
        return cross_entropy(outputs, y) + cross_entropy(outputs, y[other])

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))

    (cause,) = compared.step(classifier(), mixed_up, points())["causes"]
    assert cause["kind"] == "note"
    assert "randperm" in cause["text"]
    (cause,) = compared.step(normed(), of_each, points(), shards=3)["causes"]
    assert cause["kind"] == "note"
    assert cause["text"].startswith("1 (BatchNorm1d) keeps no running statistics")
    assert compared.step(normed(), summed, points(), shards=3)["causes"][0]["kind"] == "error"


def test_a_batch_without_weight_is_skipped(compared: Compared) -> None:
    x, y = points()
    line = compared.step(classifier(), by_tokens, (x, torch.zeros_like(y)))
    assert line["skipped"]
    assert line["causes"] == []


def test_dropout_is_off_wherever_it_is_called(compared: Compared) -> None:
    class Dropping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(dropout(x, 0.5))
            heads = x[:, None, None]
            x = x + F.scaled_dot_product_attention(heads, heads, heads, None, 0.5)[:, 0, 0]
            return F.alpha_dropout(torch.feature_dropout(x, 0.5, train=True), 0.5)

    model = Dropping(noisy())
    line = compared.step(model, of_each, points())
    assert agrees(line), line
    assert line["unmatched"] == []
    assert all(part.training for part in model.modules())


class Codebook(nn.Module):
    """As VQ-VAE keeps its codes: by averages over time of the vectors that chose each, and their
    number."""

    codes: torch.Tensor

    def __init__(self, *, gathers: bool) -> None:
        super().__init__()
        self.gathers, self.last = gathers, nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = F.one_hot(torch.cdist(x, self.codes).argmin(dim=1), 3).to(x.dtype)
        outputs = self.last(x + chosen @ self.codes)
        if self.training:
            every, vectors = chosen, x
            if self.gathers:
                every, vectors = onefold.gather(chosen), onefold.gather(x)
            self.codes = 0.9 * self.codes + 0.1 * (every.T @ vectors) / (1 + every.sum(0))[:, None]
        return outputs


def test_buffers_that_change_in_training_mode_are_compared(compared: Compared) -> None:
    (cause,) = compared.step(Codebook(gathers=False), of_each, points())["causes"]
    assert cause["text"].startswith("buffer codes is ")
    assert "the values of the shards do not combine to that of the whole batch" in cause["text"]
    assert "onefold.gather" in cause["text"]
    assert agrees(compared.step(Codebook(gathers=True), of_each, points()))


def test_a_comparison_changes_nothing(compared: Compared) -> None:
    """Modes, generators and functions are put back; parameters are those of a run without."""
    model = noisy()
    model.get_submodule("1").eval()
    torch.manual_seed(5)
    before, dropout = torch.get_rng_state(), F.dropout
    compared.step(model, with_noise, points())
    assert torch.equal(torch.get_rng_state(), before)
    assert F.dropout is dropout
    assert [part.training for part in model.children()] == [True, False, True, True, True]
    found, plain = classifier(), classifier().double()
    compared.step(found, of_each, points())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = onefold.Trainer(plain, optimizer, of_each, shards=4, threads=1, devices=["cpu"])
    x, y = points()
    trainer.step((x.double(), y))
    for mine, theirs in zip(found.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Augmented(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return torch.full((4,), index / 20.0) + 0.1 * torch.randn(4), index % 3


def mixing_collate(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.rand(1) * x.flip(0), y


@pytest.mark.processes
@pytest.mark.parametrize(("collate", "workers"), [(None, 2), (mixing_collate, 0)])
def test_batches_of_a_loader_are_compared(
    compared: Compared, collate: Callable[..., Any] | None, workers: int
) -> None:
    trainer, data = compared.trainer(noisy(), of_each, devices=["cpu"] * 3), Augmented(range(20))
    choices: Any = {"batch_size": 10, "shuffle": True, "collate": collate, "workers": workers}
    for batch in trainer.loader(data, **choices):
        trainer.step(batch)
    about, *lines = compared.lines(trainer)
    assert about["shards"] == 4
    assert "of_each" in about["function"]
    assert len(lines) == 2
    assert all(agrees(line) for line in lines), lines
    assert trainer.evaluate(lambda m, b: {"loss": of_each(m, b)}, data, batch_size=8)["loss"] > 0


def padded(samples: list[Any]) -> Any:
    longest = max(len(sample) for sample in samples)
    x = torch.stack([F.pad(s, (0, longest - len(s))) for s in samples])
    return x, torch.tensor([len(s) for s in samples])


@pytest.mark.parametrize("masks", [True, False])
def test_padding_matters_where_it_is_not_masked(compared: Compared, masks: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> object:
        x, lengths = batch
        squared = model(x.unsqueeze(-1)).square().squeeze(-1)
        valid = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        return (squared * valid).sum(1) / lengths if masks else squared.mean(1)

    torch.manual_seed(0)
    data = [torch.randn(length) for length in (3, 9, 4, 2, 6, 5, 7, 8)]
    trainer = compared.trainer(nn.Linear(1, 1), loss)
    for batch in trainer.loader(data, batch_size=8, collate=padded):
        trainer.step(batch)
    (line,) = compared.lines(trainer)[1:]
    if masks:
        assert agrees(line)
    else:
        assert "padding that is not masked)" in line["causes"][0]["text"]


@pytest.mark.parametrize(("rounded", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_a_part_in_a_lower_precision_may_differ_by_rounding(
    compared: Compared, rounded: torch.dtype, tolerance: float
) -> None:
    """As many published models compute: their norms, or their loss, always in float32."""

    def loss(model: nn.Module, batch: Any) -> object:
        return cross_entropy(model(batch[0]).to(rounded), batch[1])

    line = compared.step(classifier(), loss, points())
    assert 1e-9 < line["loss_difference"] <= line["tolerance"] == tolerance
    assert not line["causes"]


@pytest.mark.parametrize("from_function", [True, False])
def test_what_every_shard_has_does_not_end_the_comparison(
    compared: Compared, from_function: bool
) -> None:
    """Also one that is as long as a shard; of a part that is cut by itself it does."""

    def loss(model: nn.Module, batch: Any) -> object:
        x, knobs = batch
        return ((model(x) * knobs["scale"].mean() + knobs["shift"]) ** 2).mean(dim=1)

    def batch(*_: object) -> object:
        knobs = {"scale": torch.tensor([2.0, 3.0]), "shift": 2}
        return points()[0][:8], onefold.Broadcast(knobs)

    trainer = compared.trainer(nn.Linear(4, 2), loss)
    for each in trainer.batches(batch, per_epoch=2) if from_function else (batch(), batch()):
        trainer.step(each)
    found = compared.lines(trainer)[1:]
    assert len(found) == 2
    assert all(map(agrees, found))


def ranked(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    values = model(batch[0])[:, 0]
    return {"best": (values > values[0]).sum(), "mean": values}


def drawn(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    values = model(batch[0])[:, 0]
    return {"noisy": (values * torch.rand(len(values), dtype=values.dtype)).mean()}


def scores_of(compared: Compared, trainer: onefold.Trainer) -> list[dict[str, Any]]:
    return read_record(compared.folder, f"0-{session_in(trainer).devices.trainer}-scores")


def test_the_first_batch_of_each_score_is_compared_with_one_shard(compared: Compared) -> None:
    trainer = compared.trainer(classifier(), of_each)
    trainer.step(points())

    data = torch.utils.data.TensorDataset(*points())
    for _ in range(2):
        sharded = trainer.evaluate(ranked, data, batch_size=9)
    whole = trainer.evaluate(ranked, data, batch_size=9, whole_batches=True)
    (line,) = scores_of(compared, trainer)
    assert line["function"].startswith("ranked (")
    ((name, (several, one)),) = line["differ"].items()
    assert (name, sharded["best"] == whole["best"], several == one) == ("best", False, False)
    trainer.evaluate(drawn, data, batch_size=9)
    assert scores_of(compared, trainer)[1]["differ"] == {}
