"""Batch norm over the whole batch: that of one big batch, on any number of devices."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.errors import GradientError, LossError
from tests.tables import for_each
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Batch norms of both kinds of input, without weights, and with a mean of all steps."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
        self.drop = nn.Dropout(dropout)
        self.third = nn.Sequential(nn.Linear(96, 16), nn.BatchNorm1d(16, affine=False))
        self.out = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.second(self.first(images)).flatten(1)
        return self.out(self.third(self.drop(found)))


def synced(**options: Any) -> nn.Module:
    return onefold.SyncBatchNorm.convert(Net(**options))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batches(steps: int, samples: int = 11, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64) + 3
        labels = torch.randint(0, 5, (samples,), generator=generator)
        found.append((images.to(dtype), labels))
    return found


def trainer_of(
    model: nn.Module, *, devices: int = 1, shards: int = 5, loss: Any = loss, **options: Any
) -> onefold.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    devices_ = ["cpu"] * devices
    return onefold.Trainer(
        model, optimizer, loss, shards=shards, devices=devices_, threads=1, **options
    )


def result(trainer: onefold.Trainer, steps: list[Batch]) -> tuple[str, str]:
    last = [trainer.step(batch) for batch in steps][-1]
    return trainer.fingerprint(), float(last.loss).hex()


def plain(model: nn.Module, steps: list[Batch]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in steps:
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()


def furthest(one: nn.Module, other: nn.Module) -> float:
    """Over parameters and buffers, relative where they are large."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    gaps = [(mine[n] - v).abs() / v.abs().clamp(min=1) for n, v in theirs.items()]
    return max(float(gap.max()) for gap in gaps)


@for_each(("shards", "devices"), [(2, 1), (5, 2), (16, 3)])
def test_it_is_the_batch_norm_of_one_big_batch(shards: int, devices: int) -> None:
    model, expected = synced().double(), Net().double()
    steps = batches(3, dtype=torch.float64)
    plain(expected, steps)
    result(trainer_of(model, shards=shards, devices=devices), steps)
    assert furthest(model, expected) < 1e-13


def test_twenty_steps_are_those_of_one_big_batch() -> None:
    model, expected, steps = synced(), Net(), batches(20)
    plain(expected, steps)
    result(trainer_of(model), steps)
    assert furthest(model, expected) < 1e-5


def test_one_shard_has_the_bits_of_batch_norm() -> None:
    model, expected, steps = synced(), Net(), batches(3)
    plain(expected, steps)
    result(trainer_of(model, shards=1), steps)
    assert furthest(model, expected) == 0.0


@for_each(
    "options",
    [
        {"clip_norm": 0.5},
        {"precision": "bf16"},
        {"precision": "fp16-params"},
        {"samples": 3},
    ],
)
def test_the_bits_do_not_depend_on_the_devices(options: dict[str, Any]) -> None:
    options = dict(options)
    steps = batches(3, options.pop("samples", 11))
    found = set()
    for plan in ((5,), (3, 2), (2, 2, 1), (0, 4, 1), (5, 0)):
        trainer = trainer_of(synced(dropout=0.3), devices=len(plan), plan=plan, **options)
        found.add(result(trainer, steps))
    assert len(found) == 1


def test_it_may_stand_beside_a_loss_that_gathers() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1]) + onefold.gather(scores).std(dim=0).sum()

    def whole(model: nn.Module, batch: Batch) -> torch.Tensor:
        scores = model(batch[0])
        return F.cross_entropy(scores, batch[1]) + scores.std(dim=0).sum()

    model, expected = synced().double(), Net().double()
    before, steps = copy.deepcopy(expected), batches(1, dtype=torch.float64)
    trainer = trainer_of(model, loss=loss, devices=2)
    trainer.step(steps[0])
    whole(expected, steps[0]).backward()
    for name, parameter in expected.named_parameters():
        moved = before.get_parameter(name) - model.get_parameter(name)
        assert float((moved - 0.1 * parameter.grad).detach().abs().max()) < 1e-13, name


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    steps = batches(5)
    whole = result(trainer_of(synced()), steps)
    first = trainer_of(synced(), devices=3)
    for batch in steps[:2]:
        first.step(batch)
    first.save(tmp_path / "run")
    second = trainer_of(synced(), devices=2)
    second.load(tmp_path / "run")
    assert result(second, steps[2:]) == whole


def test_hooks_run_once_a_shard_with_its_own_gradient() -> None:
    def put(parameter: nn.Parameter) -> None:
        seen.append(parameter.grad.norm().item())

    found = []
    for devices in (1, 2):
        seen: list[float] = []
        model = synced()
        model.out.weight.register_post_accumulate_grad_hook(put)
        result(trainer_of(model, devices=devices), batches(1))
        found.append(seen)
    assert len(found[0]) == 5
    assert sorted(found[0]) == sorted(found[1])


def test_nothing_of_a_step_stays_in_memory() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def noting(model: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(weakref.ref(batch[0]))
        return loss(model, batch)

    trainer = trainer_of(synced(), loss=noting)
    for batch in batches(2):
        trainer.step(batch)
    gc.collect()
    assert len(seen) >= 10
    assert [each for each in seen if each() is not None] == []


def test_evaluation_and_other_calls_are_those_of_batch_norm() -> None:
    model, other = synced(), Net()
    images = batches(1)[0][0]
    assert torch.equal(model(images), other(images))
    assert furthest(model, other) == 0.0
    trainer = trainer_of(model)
    found = trainer.predict(lambda m, b: {"v": m(b)}, list(images), batch_size=11)
    torch.testing.assert_close(torch.as_tensor(found["v"]), other.eval()(images).detach())
    assert model.training


def test_layers_that_are_not_in_training_take_no_part() -> None:
    model = synced()
    for part in model.modules():
        if isinstance(part, onefold.SyncBatchNorm):
            part.eval()
    before = model.first[1].running_mean.clone()
    found = {result(trainer_of(copy.deepcopy(model), devices=d), batches(2)) for d in (1, 2)}
    assert len(found) == 1
    assert torch.equal(model.first[1].running_mean, before)


def test_onefold_verify_finds_it_right(compared: Compared) -> None:
    line = compared.step(synced(), loss, batches(1)[0])
    assert line["gradient_difference"] < 1e-9
    assert not line["causes"]


def test_convert_keeps_parameters_names_and_modes() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, eps=0.1, momentum=0.2), nn.Conv2d(1, 1, 1))
    shared = nn.BatchNorm2d(2, track_running_stats=False).eval()
    net.extend([shared, shared, nn.SyncBatchNorm(2)])
    names, weight = list(net.state_dict()), net[0].weight
    found = onefold.SyncBatchNorm.convert(net)
    assert found is net
    assert list(net.state_dict()) == names
    assert net[0].weight is weight
    assert (net[0].eps, net[0].momentum, net[2].running_mean) == (0.1, 0.2, None)
    assert net[2] is net[3]
    assert [type(part) for part in net].count(onefold.SyncBatchNorm) == 4
    assert [part.training for part in net] == [True, True, False, False, True]
    assert onefold.SyncBatchNorm.convert(net)[0] is net[0]
    assert isinstance(onefold.SyncBatchNorm.convert(nn.BatchNorm2d(2)), onefold.SyncBatchNorm)


def test_convert_refuses_what_knows_no_channels() -> None:
    with pytest.raises(ValueError, match=r"LazyBatchNorm1d does not know its number of channels"):
        onefold.SyncBatchNorm.convert(nn.Sequential(nn.LazyBatchNorm1d()))


def test_what_cannot_be_normalised_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected input \(n, C, \.\.\.\), got shape \(3,\)"):
        onefold.SyncBatchNorm(3)(torch.ones(3))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), onefold.SyncBatchNorm(5))
    with pytest.raises(ValueError, match="expected more than one value per channel in the whole"):
        trainer_of(model).step(batches(1, samples=1)[0])
    with pytest.raises(LossError, match="as microbatch has cut it"):
        trainer_of(model, microbatch=1).step(batches(1)[0])


def test_the_error_of_a_shard_ends_the_others() -> None:
    def failing(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = loss(model, batch)
        if bool((batch[0][0] == steps[0][0][5]).all()):
            losses.register_hook(spoil)
        return losses

    def spoil(gradient: torch.Tensor) -> None:
        raise ArithmeticError("the fault")

    model, steps = synced(), batches(1)
    before = copy.deepcopy(model)
    with pytest.raises(ArithmeticError, match="the fault") as caught:
        trainer_of(model, loss=failing).step(steps[0])
    assert any("step 1, shard 2" in note for note in caught.value.__notes__)
    assert threading.active_count() == 1
    assert furthest(model, before) == 0.0
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_is_found() -> None:
    def bad(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = loss(model, batch)
        if bool((batch[0][0] == steps[0][0][5]).all()):
            losses.register_hook(lambda gradient: gradient * torch.inf)
        return losses

    steps = batches(1)
    with pytest.raises(GradientError, match=r"step 1, shard 2 \(samples 5 to 6 of the batch\)"):
        trainer_of(synced(), loss=bad, devices=2).step(steps[0])
