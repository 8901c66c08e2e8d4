"""The engine against a plain PyTorch loop: what it computes is what was asked for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.token_models import LSTMClassifier, TransformerClassifier
from torch import nn

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.errors import GradientError
from onefold.testing import simulate
from onefold_jobs.models import LeNet, resnet18
from tests.small import Batch, make_trainer, sgd
from tests.tables import for_each

SIZES = (12, 12, 7, 2)  # a short batch, and one with fewer samples than shards

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
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
MODELS: dict[str, Callable[[], nn.Module]] = {
    # Its first layer is cut into several segments, with an odd end.
    "wide": lambda: nn.Sequential(nn.Linear(37, 1501), nn.Tanh(), nn.Linear(1501, 10)),
    "lenet": LeNet,
    "resnet18": lambda: resnet18(in_channels=1, width=16),
    "transformer": lambda: TransformerClassifier(50, 32, 2, length=12, dropout=0.0),
    "lstm": lambda: LSTMClassifier(50, width=24, dropout=0.0),
}


def build(model: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]().to(dtype)


def batches(model: str, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"wide": (37,), "lenet": (1, 28, 28), "resnet18": (1, 28, 28)}
    found = []
    for size in SIZES:
        inputs = torch.randint(0, 50, (size, 12), generator=generator)
        if model in shapes:
            inputs = torch.randn(size, *shapes[model], generator=generator, dtype=dtype)
        found.append((inputs, torch.randint(0, 10, (size,), generator=generator)))
    return found


def scalar(model: nn.Module, batch: Batch, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


per_sample = partial(scalar, reduction="none")


def by_weight(model: nn.Module, batch: Batch) -> onefold.Mean:
    """A mean whose weight is not the number of samples, as with tokens."""
    weights = 1.0 + batch[1].to(next(model.parameters()).dtype)
    return onefold.Mean((per_sample(model, batch) * weights).sum(), weights.sum())


def with_penalty(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As WGAN-GP: the norm of the gradient between samples and others."""
    between = (0.3 * batch[0] + 0.7 * batch[0].flip(1)).requires_grad_(True)
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return per_sample(model, batch) + 0.1 * (slope.norm(dim=1) - 1).square()


def plain(
    model: nn.Module, optimizer: Any, loss: Any, data: list[Batch], clip: Any = None
) -> list[float]:
    """What anybody would write."""
    values = []
    for batch in data:
        optimizer.zero_grad()
        result = loss(model, batch)
        result = result.total / result.weight if isinstance(result, onefold.Mean) else result
        result.mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        values.append(result.mean().item())
    return values


def both(model: str, name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """A model twice, each with its optimizer."""
    models = build(model, dtype), build(model, dtype)
    return [each for m in models for each in (m, OPTIMIZERS[name]([*m.parameters()]))]


@for_each(
    ("model", "loss", "name"),
    [
        *[("wide", loss, "sgd") for loss in (per_sample, scalar, by_weight, with_penalty)],
        *[("wide", per_sample, name) for name in OPTIMIZERS if name != "sgd"],
        ("lenet", scalar, "sgd"),
        ("resnet18", by_weight, "sgd"),
        ("transformer", per_sample, "sgd"),
        ("lstm", scalar, "sgd"),
    ],
)
def test_one_shard_has_the_bits_of_the_plain_loop(model: str, loss: Any, name: str) -> None:
    """Also where the script changes rates between steps."""
    ours, optimizer, theirs, other = both(model, name)
    trainer = make_trainer(ours, loss, optimizer=optimizer, shards=1)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (optimizer, other)]
    for batch in batches(model):
        value = float(trainer.step(batch).loss)
        assert value == pytest.approx(plain(theirs, other, loss, [batch])[0], rel=1e-6)
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@for_each(
    ("model", "loss", "shards", "choices"),
    [
        ("wide", per_sample, 4, {"devices": 3, "clip_norm": 0.1}),
        ("wide", scalar, 7, {"microbatch": 1}),
        ("wide", by_weight, 2, {"devices": 2}),
        ("wide", with_penalty, 4, {"devices": 3}),
        ("wide", with_penalty, 2, {"microbatch": 2}),
        ("lenet", by_weight, 4, {}),
        ("lenet", scalar, 2, {"devices": 2}),
        ("transformer", per_sample, 7, {"devices": 3}),
        ("lstm", by_weight, 7, {}),
    ],
)
def test_many_shards_agree_with_the_whole_batch(
    model: str, loss: Any, shards: int, choices: dict[str, Any]
) -> None:
    ours, optimizer, theirs, other = both(model, "sgd", torch.float64)
    data = batches(model, torch.float64)
    trainer = make_trainer(ours, loss, optimizer=optimizer, shards=shards, **choices)
    values = [float(trainer.step(batch).loss) for batch in data]
    expected = plain(theirs, other, loss, data, choices.get("clip_norm"))
    assert values == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-14)


@for_each(("name", "devices"), [("sgd", 3), ("adamw", 1), ("adagrad", 3), ("adafactor", 3)])
def test_state_that_an_optimizer_already_has_is_kept(name: str, devices: int) -> None:
    ours, optimizer, theirs, other = both("wide", name, torch.float64)
    data = batches("wide", torch.float64)
    plain(ours, optimizer, per_sample, data[:2])
    plain(theirs, other, per_sample, data)
    trainer = make_trainer(ours, per_sample, optimizer=optimizer, shards=3, devices=devices)
    for batch in data[2:]:
        trainer.step(batch)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-10, atol=1e-12)


# What devices keep of the model

CLIP = 0.05
GENERATOR = torch.Generator().manual_seed(4)
BATCHES = [torch.randn(10, 6, generator=GENERATOR) for _ in range(3)]


class Mixed(nn.Module):
    """A parameter of more than one segment, one in bfloat16, one that is rarely used."""

    def __init__(self, *, rare: bool = False) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.first, self.wide = nn.Linear(6, 150), nn.Linear(150, 150)
        self.low = nn.Linear(150, 4).to(torch.bfloat16)
        self.rare = nn.Linear(4, 4) if rare else None  # no line of devices can choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(torch.tanh(self.first(x)))
        out: torch.Tensor = self.low(hidden.to(torch.bfloat16)).float()
        return out + self.rare(out) if self.rare and bool(x[0, 0] > 0) else out


def mean_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 3).square().mean()


def weighted(model: nn.Module, batch: torch.Tensor, kit: Any = F) -> Any:
    """A loss whose mean is not the bits of a sum that is divided."""
    weight, targets = torch.tensor([0.3, 2.0, 1.1, 0.7]), torch.arange(10) % 4
    return kit.cross_entropy(model(batch), targets, weight, label_smoothing=0.1)


def cut(model: Any, loss: Any = mean_of, **options: Any) -> onefold.Trainer:
    options["stages"] = [part for part in model.children() if isinstance(part, nn.Linear)]
    return make_trainer(model, loss, shards=1, **options)


def run(model: nn.Module, loss: Any = mean_of, **options: Any) -> list[Any]:
    """The loss and the norm of each step, and the values of the model."""
    trainer = cut(model, loss, clip_norm=CLIP, **options)
    steps = [trainer.step(batch) for batch in BATCHES]
    with trainer.gathered():
        values = [parameter.flatten().tolist() for parameter in model.parameters()]
    trainer.close()
    return [[(float(step.loss), step.grad_norm) for step in steps], values]


def plain_run(model: nn.Module, loss: Any = mean_of) -> list[Any]:
    """The loop that everybody writes."""
    optimizer, steps = sgd(model), []
    for batch in BATCHES:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        steps.append((value.item(), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))))
        optimizer.step()
    assert all(norm > CLIP for _, norm in steps)
    return [steps, [parameter.flatten().tolist() for parameter in model.parameters()]]


PLACES: list[tuple[Any, int]] = [("replicate", 1), ("offload", 1), ("pipeline", 1), ("pipeline", 3)]
each_placement = for_each(("placement", "devices"), PLACES)


def keeping(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context = LaunchContext(options=RunOptions(placement=placement))
    monkeypatch.setattr("onefold.trainer.current_context", lambda: context)


@each_placement
def test_the_bits_are_those_of_a_plain_loop(
    placement: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping(placement, monkeypatch)
    make = partial(Mixed, rare=devices == 1)
    assert run(make(), devices=devices) == plain_run(make())
    ours = partial(weighted, kit=onefold.losses)
    assert run(make(), ours, devices=devices) == plain_run(make(), weighted)


@each_placement
def test_gradients_that_are_not_finite_are_found(
    placement: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping(placement, monkeypatch)

    def step(factor: float, **more: Any) -> onefold.Step:
        """With a gradient that is changed before anybody takes it."""
        trainer = cut(model := Mixed(rare=devices == 1), devices=devices, **more)
        before = trainer.fingerprint()
        hook = model.wide.weight.register_hook(lambda grad: grad * factor)
        try:
            return trainer.step(BATCHES[0])
        finally:
            hook.remove()
            assert (trainer.fingerprint() == before) == (factor != 1e22)
            assert factor == 1e22 or not trainer.step(BATCHES[0]).skipped
            trainer.close()

    with pytest.raises(GradientError, match=r"wide\.weight is not finite"):
        step(torch.nan)
    assert step(torch.inf, on_nonfinite="skip").skipped
    assert 1e19 < float(step(1e22).grad_norm or 0) < 1e30  # a norm that overflows in its dtype


@for_each("exchange", ["shared", "collective"])
def test_processes_of_a_line_share_the_norms_of_their_parameters(exchange: Any) -> None:
    found = simulate(lambda: run(Mixed(), devices=None), 3, placement="pipeline", exchange=exchange)
    assert found == [plain_run(Mixed())] * 3
