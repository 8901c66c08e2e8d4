"""Losses that see the whole batch: the one meant, and one result for any number of devices."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.errors import GradientError, LossError, RunFailed
from tests.tables import for_each
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]

Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, Batch], object]


class Towers(nn.Module):
    """Two encoders, and how sharply their pairs are told apart."""

    def __init__(self, *, restless: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if restless else nn.Identity()
        drop = nn.Dropout(0.3 if restless else 0.0)
        self.one = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), drop, nn.Linear(16, 8))
        self.other = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), drop, nn.Linear(16, 8))
        self.sharpness = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.one(batch[0]), dim=1), F.normalize(self.other(batch[1]), dim=1)


def of_the_batch(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same number in every shard."""
    one, other = map(onefold.gather, model(batch))
    logits = one @ other.T * model.sharpness.exp()
    targets = torch.arange(len(logits))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def of_own_rows(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One loss for each of the shard's samples."""
    one, other = model(batch)
    (ones, rows), others = onefold.gather(one, rows=True), onefold.gather(other)
    targets = torch.arange(len(ones))[rows]
    scale = model.sharpness.exp()
    losses = F.cross_entropy(one @ others.T * scale, targets, reduction="none")
    return (losses + F.cross_entropy(other @ ones.T * scale, targets, reduction="none")) / 2


def in_a_chain(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What is gathered second depends on what was gathered first, and what is third on nothing."""
    one, other = model(batch)
    ones, rows = onefold.gather(one, rows=True)
    others = onefold.gather(other * ones.mean(dim=0))
    with torch.no_grad():
        middle = onefold.gather(other).mean(dim=0)
    signs = onefold.gather(batch[0][:, 0] > 0)
    own = (ones[rows] - other).square().sum(dim=1) * (1 + signs[rows].to(one.dtype))
    return own + (others - middle).square().sum() * model.sharpness


def of_terms(model: nn.Module, batch: Batch) -> object:
    losses, some = of_own_rows(model, batch), batch[0][:, 0] > 0
    chosen = onefold.Mean((losses * some).sum(), some.sum())
    return onefold.Mean(losses.sum(), len(losses)) + chosen + 0.1 * onefold.Sum(losses.sum())


LOSSES = (of_the_batch, of_own_rows, in_a_chain, of_terms)


def batches(steps: int, samples: int = 11, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(samples, width, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(6), draw(5)) for _ in range(steps)]


def trainer_of(
    loss: LossOf,
    *,
    model: nn.Module | None = None,
    devices: int | None = 1,
    shards: int = 5,
    **options: Any,
) -> onefold.Trainer:
    model = model or Towers(restless=True)
    return onefold.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss,
        shards=shards,
        devices=["cpu"] * devices if devices else None,
        threads=1,
        **options,
    )


def result(trainer: onefold.Trainer, steps: Sequence[Batch]) -> tuple[str, str]:
    last = [trainer.step(batch) for batch in steps][-1]
    return trainer.fingerprint(), float(last.loss).hex()


def plain(model: nn.Module, loss: LossOf, steps: Sequence[Batch]) -> float:
    """An ordinary loop with the whole batch; the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in steps:
        optimizer.zero_grad()
        value = loss(model, batch)
        if isinstance(value, onefold.Means):
            mean, chosen, total = value.terms
            value = mean.total / mean.weight + chosen.total / chosen.weight + total.total
        value = value.mean()
        value.backward()
        optimizer.step()
    return value.item()


def furthest(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@for_each("loss", LOSSES)
@for_each(("shards", "devices"), [(2, 1), (5, 2), (16, 3)])
def test_the_gradient_is_that_of_one_big_batch(loss: LossOf, shards: int, devices: int) -> None:
    model = Towers().double()
    expected, steps = copy.deepcopy(model), batches(1, dtype=torch.float64)
    at = plain(expected, loss, steps)
    trainer = trainer_of(loss, model=model, devices=devices, shards=shards)
    assert float(trainer.step(steps[0]).loss) == pytest.approx(at, rel=1e-12)
    assert furthest(model, expected) < 1e-13


@for_each("loss", [of_the_batch, of_own_rows])
def test_twenty_steps_are_those_of_one_big_batch(loss: LossOf) -> None:
    model, steps = Towers(), batches(20)
    expected = copy.deepcopy(model)
    plain(expected, loss, steps)
    result(trainer_of(loss, model=model), steps)
    assert furthest(model, expected) < 2e-6


@for_each("loss", [of_the_batch, of_own_rows])
def test_one_shard_has_the_bits_of_a_plain_loop(loss: LossOf) -> None:
    model, steps = Towers(), batches(3)
    expected = copy.deepcopy(model)
    plain(expected, loss, steps)
    result(trainer_of(loss, model=model, shards=1), steps)
    assert furthest(model, expected) == 0.0


@for_each("loss", LOSSES)
@for_each(
    "options",
    [
        {"clip_norm": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16-params", "clip_norm": 0.1},
        {"samples": 3},
    ],
)
def test_the_bits_do_not_depend_on_the_devices(loss: LossOf, options: dict[str, Any]) -> None:
    options = dict(options)
    steps = batches(3, options.pop("samples", 11))
    found = set()
    for plan in ((5,), (3, 2), (2, 2, 1), (0, 4, 1), (5, 0)):
        # A batch norm needs two samples in each shard.
        model = Towers(restless=len(steps[0][0]) > 5)
        trainer = trainer_of(loss, model=model, devices=len(plan), plan=plan, **options)
        found.add(result(trainer, steps))
    assert len(found) == 1


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    steps = batches(5)
    whole = result(trainer_of(of_own_rows), steps)
    first = trainer_of(of_own_rows, devices=3)
    for batch in steps[:2]:
        first.step(batch)
    first.save(tmp_path / "run")
    second = trainer_of(of_own_rows, devices=2)
    second.load(tmp_path / "run")
    assert result(second, steps[2:]) == whole


def test_a_step_may_gather_and_the_next_one_not() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if len(seen) % 2:
            return of_own_rows(model, batch)
        one, other = model(batch)
        return (one - other).square().sum(dim=1)

    seen: list[int] = []
    found = set()
    for devices in (1, 2):
        seen.clear()
        trainer = trainer_of(loss, devices=devices)
        for batch in batches(4):
            trainer.step(batch)
            seen.append(1)
        found.add(trainer.fingerprint())
    assert len(found) == 1


class Keeping(Towers):
    """Changes attributes, buffers, modes and random numbers before it gathers."""

    def __init__(self) -> None:
        super().__init__(restless=True)
        self.register_buffer("seen", torch.zeros(()))
        self.last = torch.zeros(())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = super().forward(batch)
        self.last, self.seen = one.mean().detach(), self.seen + one.sum().detach()
        self.one.eval()
        return one, other


def test_a_shard_finds_what_it_left_before_it_gathered() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = of_own_rows(model, batch)
        assert not model.one.training
        again = model.one(batch[0]).sum(dim=1) * (model.last + model.seen + torch.rand(()))
        return losses + F.dropout(again, 0.5)

    found = set()
    for devices, plan in ((1, (5,)), (2, (1, 4)), (5, (1, 1, 1, 1, 1))):
        model = Keeping()
        found.add(result(trainer_of(loss, model=model, devices=devices, plan=plan), batches(3)))
        assert model.training
        assert model.one.training
    assert len(found) == 1


def test_parameters_are_as_they_were_and_hooks_run_once_a_shard() -> None:
    model, calls = Towers(), []
    trainer = trainer_of(of_own_rows, model=model)
    model.sharpness.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    model.one[0].requires_grad_(False)
    before = model.one[0].weight.clone()
    trainer.step(batches(1)[0])
    assert len(calls) == 5
    assert model.sharpness.requires_grad
    assert not model.one[0].weight.requires_grad
    assert torch.equal(before, model.one[0].weight)
    assert all(p.grad is None for p in model.parameters())


def test_shards_may_give_any_number_of_rows() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        chosen = batch[0][:, 0] > 0.5
        return (one @ onefold.gather(other[chosen]).T).sum(dim=1)

    model = Towers().double()
    expected, steps = copy.deepcopy(model), batches(1, dtype=torch.float64)
    plain(expected, loss, steps)
    result(trainer_of(loss, model=model), steps)
    assert furthest(model, expected) < 1e-13


def test_onefold_verify_finds_it_right(compared: Compared) -> None:
    for loss in (of_the_batch, of_own_rows):
        line = compared.step(Towers(restless=True), loss, batches(1)[0])
        assert line["gradient_difference"] < 1e-9
        assert not line["causes"]


# What is refused


def shard_of(batch: Batch) -> bool:
    """Whether it is the third one of the first step."""
    return bool((batch[0][0] == batches(1)[0][0][5]).all())


def other_shape(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, _ = model(batch)
    return onefold.gather(one[:, :7] if shard_of(batch) else one).sum()


def other_calls(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, _ = model(batch)
    return one.sum() if shard_of(batch) else onefold.gather(one).sum()


def without_gradient(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, _ = model(batch)
    with torch.set_grad_enabled(not shard_of(batch)):
        return onefold.gather(one).sum()


@for_each("devices", [1, 2])
@for_each(
    ("loss", "words"),
    [
        (other_shape, r"shard 0 gathers float32 \(3, 8\), and shard 2 gathers float32 \(2, 7\)"),
        (other_calls, r"shard 0 gathers float32 \(3, 8\), and shard 2 has come to its end"),
        (without_gradient, r"shard 2 gathers float32 \(2, 8\), without a gradient"),
    ],
)
def test_shards_that_gather_otherwise_are_named(loss: LossOf, words: str, devices: int) -> None:
    with pytest.raises(LossError, match=rf"step 1 does not gather alike in all .*{words}"):
        trainer_of(loss, devices=devices).step(batches(1)[0])


def test_pieces_of_shards_cannot_gather() -> None:
    for shards in (1, 3):
        with pytest.raises(LossError, match="as microbatch has cut it: expected a whole shard"):
            trainer_of(of_own_rows, shards=shards, microbatch=2).step(batches(1)[0])


def test_scores_cannot_gather() -> None:
    trainer = trainer_of(of_own_rows)
    rows = list(zip(*batches(1)[0], strict=True))
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(
            LossError, match=r"shard 0: onefold.gather is for losses.*trainer.predict"
        ):
            call(lambda model, batch: {"loss": of_own_rows(model, batch)}, rows, batch_size=11)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_cannot_gather(reentrant: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)

        def scores(one: torch.Tensor) -> torch.Tensor:
            return onefold.gather(one * model.sharpness).exp()

        return (checkpoint(scores, one, use_reentrant=reentrant) @ other.T).sum()

    trainer = trainer_of(loss)
    with pytest.raises(LossError, match=r"inside of torch.utils.checkpoint"):
        trainer.step(batches(1)[0])


def test_checkpointed_layers_may_come_before() -> None:
    class Saving(Towers):
        def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            found = checkpoint(super().forward, batch, use_reentrant=False)
            assert isinstance(found, tuple)
            return found

    found = {result(trainer_of(of_own_rows, model=m), batches(2)) for m in (Towers(), Saving())}
    assert len(found) == 1


def test_what_has_no_rows_is_refused() -> None:
    assert onefold.gather(torch.ones(2), rows=True)[1] == slice(0, 2)
    with pytest.raises(TypeError, match="expected a tensor to gather, got float"):
        onefold.gather(1.0)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"shape \(n, \.\.\.\) to gather, got shape \(\)"):
        onefold.gather(torch.ones(()))


# What goes wrong


@for_each("late", [False, True])
@for_each("devices", [1, 2])
def test_the_error_of_a_shard_ends_the_others(devices: int, late: bool) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        if shard_of(batch) and spoil and not late:
            raise ArithmeticError("the fault")
        ones = onefold.gather(one)
        if shard_of(batch) and spoil:
            raise ArithmeticError("the fault")
        return (ones @ onefold.gather(other).T).sum()

    spoil: list[int] = []
    model = Towers(restless=True)
    trainer = trainer_of(loss, model=model, devices=devices)
    steps = batches(2)
    trainer.step(steps[1])
    spoil.append(1)
    with pytest.raises(ArithmeticError, match="the fault") as caught:
        trainer.step(steps[0])
    assert any("step 2, shard 2" in note for note in caught.value.__notes__)
    assert threading.active_count() == 1
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    spoil.clear()
    before = model.one[1].running_mean.clone()
    trainer.step(steps[0])
    assert not torch.equal(before, model.one[1].running_mean)


def test_ctrl_c_ends_all_shards() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        ones = onefold.gather(one)
        if shard_of(batch):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return (ones @ onefold.gather(other).T).sum()

    trainer = trainer_of(loss)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches(1)[0])
    assert threading.active_count() == 1


class Infinite(torch.autograd.Function):
    """Its gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


@for_each(
    ("after", "words"),
    [
        (True, r"shard 2 \(samples 5 to 6 .*gradient of what call 1 of onefold.gather"),
        (False, r"shard 2 \(samples 5 to 6 of the batch\): the gradient of one.0.weight"),
    ],
)
def test_the_shard_whose_gradient_is_not_finite_is_named(after: bool, words: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        one, other = model(batch)
        bad = bool((batch[0] == batches(1)[0][0][5]).all(dim=1).any())
        ones = onefold.gather(Infinite.apply(one) if bad and not after else one)
        return ((Infinite.apply(ones) if bad and after else ones) @ other.T).sum()

    for devices in (1, 2):
        with pytest.raises(GradientError, match=words):
            trainer_of(loss, devices=devices).step(batches(1)[0])


# Several processes


def train_late() -> None:
    trainer = trainer_of(late_on_device_1, devices=None)
    for batch in batches(3):
        trainer.step(batch)
    trainer.close()


def late_on_device_1(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, other = model(batch)
    if os.environ["RANK"] == "1" and bool((batch[0][0] == batches(3)[2][0][9]).all()):
        time.sleep(30)
    return (onefold.gather(one) @ other.T).sum()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_a_device_that_does_not_gather_is_named(exchange: str) -> None:
    with pytest.raises(RunFailed, match=r"device 1 .*did not"):
        onefold.launch(train_late, devices="cpu:2", exchange=exchange, timeout_s=3)
