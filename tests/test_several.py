"""Several models, optimizers and losses in one Trainer: as in a plain loop, with equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import onefold
from tests import simulated
from tests.inside import session_in
from tests.several import (
    LOSSES,
    all_of_it,
    batch_of,
    data,
    judged,
    made,
    one_steps_another_loss,
    train,
    trainer_of,
)
from tests.small import bits
from tests.tables import for_each


def plain(
    models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer], rounds: int
) -> None:
    """The same in a plain loop."""
    for number in range(1, rounds + 1):
        batch = batch_of(number)
        for name in ("discriminator", "discriminator", "generator"):
            optimizers[name].zero_grad()
            LOSSES[name](models, batch).mean().backward()
            optimizers[name].step()


@pytest.fixture
def no_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", lambda values, p, training: values)


@pytest.mark.usefixtures("no_dropout")
def test_with_one_shard_the_bits_are_those_of_a_plain_loop() -> None:
    models, optimizers = made()
    plain(models, optimizers, 4)
    trainer = train(trainer_of(shards=1), 1, 4)
    assert bits(trainer.model) == bits(nn.ModuleDict(models))


@pytest.mark.usefixtures("no_dropout")
def test_many_shards_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x * self.weight + self.bias)
    models, optimizers = made()
    trainer = trainer_of(3)
    plain(models, optimizers, 4)
    train(trainer, 1, 4)
    for (name, ours), theirs in zip(
        trainer.model.named_parameters(), nn.ModuleDict(models).parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)


@for_each("precision", [None, "bf16-params", "fp16"])
@for_each("microbatch", [None, 4])
def test_the_bits_do_not_depend_on_the_devices(
    precision: str | None, microbatch: int | None
) -> None:
    found = {
        train(
            trainer_of(devices, plan=plan, precision=precision, microbatch=microbatch), 1, 3
        ).fingerprint()
        for devices, plan in ((1, None), (2, None), (3, (0, 3, 1)))
    }
    assert len(found) == 1


@for_each("devices", [(1, 3, 2), (3, 2, 1)])
def test_a_stopped_run_goes_on_with_the_same_bits(
    devices: tuple[int, int, int], tmp_path: Path
) -> None:
    whole, stopped, going_on = map(trainer_of, devices)
    for trainer in (whole, stopped):
        trainer.average(decay=0.9, after="generator")
    train(whole, 1, 5)
    train(stopped, 1, 3).save(tmp_path)
    going_on.load(tmp_path)
    train(going_on, 4, 5)
    trained = whole.fingerprint()
    assert going_on.fingerprint() == trained
    with going_on.averaged(), whole.averaged():
        assert going_on.fingerprint() == whole.fingerprint() != trained


@for_each("exchange", ["shared", "collective"])
def test_every_process_has_the_same(exchange: str, tmp_path: Path) -> None:
    found = simulated.launch(
        all_of_it,
        devices="cpu:3",
        args=(None, str(tmp_path / "launched")),
        exchange=exchange,
    )
    assert found == all_of_it(1, str(tmp_path / "alone"))
    assert found == all_of_it(2, str(tmp_path / "two"))


def test_devices_that_step_different_losses_are_named() -> None:
    words = simulated.launch(one_steps_another_loss, devices="cpu:2")
    assert "device 1 computes loss 1 of the Trainer's and device 0 loss 0" in words


def test_a_step_says_which_loss_it_is_of() -> None:
    trainer = trainer_of()
    steps = [trainer.step(batch_of(1), name) for name in LOSSES]
    assert [step.name for step in steps] == list(LOSSES)
    assert [step.number for step in steps] == [1, 2]


@pytest.mark.usefixtures("no_dropout")
@pytest.mark.parametrize("shards", [1, 4])
def test_the_norm_is_that_of_the_parameters_of_the_step(shards: int) -> None:
    models, _ = made()
    trainer = trainer_of(shards=shards)
    LOSSES["discriminator"](models, batch_of(1)).mean().backward()
    expected = nn.utils.get_total_norm([p.grad for p in models["discriminator"].parameters()])
    if shards == 1:
        assert trainer.step(batch_of(1), "discriminator").grad_norm == float(expected)
    else:  # batch norm sees a shard
        step = trainer.step(batch_of(1), "discriminator")
        assert step.grad_norm == pytest.approx(float(expected), rel=0.2)


@pytest.mark.usefixtures("no_dropout")
def test_an_average_follows_the_steps_of_one_loss() -> None:
    models, optimizers = made()
    trainer = trainer_of(shards=1)
    trainer.average(mean=True, after="generator")
    train(trainer, 1, 3)
    averaged = AveragedModel(models["generator"], use_buffers=True)
    for number in range(1, 4):
        for name in ("discriminator", "discriminator", "generator"):
            optimizers[name].zero_grad()
            LOSSES[name](models, batch_of(number)).mean().backward()
            optimizers[name].step()
        averaged.update_parameters(models["generator"])
    with trainer.averaged():
        ours = trainer.model["generator"].state_dict()  # type: ignore[index]
        for name, theirs in averaged.module.state_dict().items():
            if theirs.is_floating_point():
                torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_functions_are_given_one_model_or_all() -> None:
    trainer = trainer_of(2)
    alone = trainer.evaluate(judged, data(), batch_size=8, model="generator")
    given = trainer.evaluate(
        lambda models, batch: judged(models["generator"], batch), data(), batch_size=8
    )
    assert alone == given
    rows = trainer.predict(judged, data(), batch_size=8, model="generator")
    assert rows["x"].shape == (30,)
    assert rows["x"].double().mean().item() == pytest.approx(alone["x"])


# Schedules


def scheduled(
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
    return {
        "generator": torch.optim.lr_scheduler.StepLR(optimizers["generator"], 2, gamma=0.5),
        "discriminator": torch.optim.lr_scheduler.ExponentialLR(optimizers["discriminator"], 0.9),
    }


@pytest.mark.usefixtures("no_dropout")
def test_each_schedule_follows_the_steps_of_its_optimizer() -> None:
    models, optimizers = made()
    schedules = scheduled(optimizers)
    for number in range(1, 5):
        for name in ("discriminator", "discriminator", "generator"):
            optimizers[name].zero_grad()
            LOSSES[name](models, batch_of(number)).mean().backward()
            optimizers[name].step()
            schedules[name].step()
    others, ours = made()
    trainer = given(model=others, optimizer=ours, shards=1, schedule=scheduled(ours))
    train(trainer, 1, 4)
    for name, optimizer in ours.items():
        assert optimizer.param_groups[0]["lr"] == optimizers[name].param_groups[0]["lr"]
    assert bits(trainer.model) == bits(nn.ModuleDict(models))


def test_schedules_go_on_with_a_checkpoint(tmp_path: Path) -> None:
    def new(devices: int) -> onefold.Trainer:
        models, optimizers = made()
        named = ["cpu"] * devices
        schedules = scheduled(optimizers)
        return given(model=models, optimizer=optimizers, schedule=schedules, devices=named)

    whole = train(new(1), 1, 5).fingerprint()
    train(new(2), 1, 3).save(tmp_path)
    going_on = new(1)
    going_on.load(tmp_path)
    assert train(going_on, 4, 5).fingerprint() == whole


@for_each("changed", ["optimizer", "schedule"])
def test_a_load_with_another_part_keeps_the_rates_of_unscheduled_optimizers(
    changed: str, tmp_path: Path
) -> None:
    def new(rate: float) -> tuple[onefold.Trainer, torch.optim.Optimizer]:
        models, optimizers = made()
        optimizers["discriminator"].param_groups[0]["lr"] = rate
        schedule = {"generator": scheduled(optimizers)["generator"]}
        made_of = given(model=models, optimizer=optimizers, schedule=schedule)
        return made_of, optimizers["discriminator"]

    train(new(0.25)[0], 1, 2).save(tmp_path)
    trainer, optimizer = new(0.125)
    trainer.load(tmp_path, changed=[changed])
    assert optimizer.param_groups[0]["lr"] == (0.125 if changed == "optimizer" else 0.25)


def test_a_schedule_of_one_optimizer_does_not_hide_that_another_is_not_saved() -> None:
    models, optimizers = made()
    schedules = scheduled(optimizers)
    trainer = given(
        model=models, optimizer=optimizers, schedule={"generator": schedules["generator"]}
    )
    assert session_in(trainer).checkpoints.schedule.is_missing
    models, optimizers = made()
    trainer = given(model=models, optimizer=optimizers, schedule=scheduled(optimizers))
    assert not session_in(trainer).checkpoints.schedule.is_missing


def test_gradients_of_two_losses_are_two_steps_outside_of_a_block() -> None:
    models, _ = made()
    trainer = onefold.Trainer(models, None, LOSSES, shards=2, threads=1)
    batch = batch_of(1)
    numbers = [trainer.gradient(batch, name).number for name in (*LOSSES, "generator")]
    assert numbers == [1, 2, 2]
    with trainer.changing():
        numbers = [trainer.gradient(batch, name).number for name in LOSSES]
    assert numbers[0] == numbers[1]


def test_schedules_that_do_not_belong_to_the_optimizers_are_refused() -> None:
    models, optimizers = made()
    schedules = scheduled(optimizers)
    with pytest.raises(ValueError, match="schedule has the name 'critic': expected some of 'disc"):
        given(model=models, optimizer=optimizers, schedule={"critic": schedules["generator"]})
    with pytest.raises(ValueError, match="give a dict of schedules, under the same names"):
        given(model=models, optimizer=optimizers, schedule=schedules["generator"])
    with pytest.raises(ValueError, match="was made for another optimizer"):
        given(
            model=models, optimizer=optimizers, schedule={"discriminator": schedules["generator"]}
        )
    with pytest.raises(TypeError, match="expected one schedule, as Trainer was given one"):
        onefold.Trainer(
            models["generator"],
            optimizers["generator"],
            lambda m, batch: m(batch).mean(1),
            shards=1,
            schedule={"generator": schedules["generator"]},
        )


# A teacher, a loss with parameters, two losses of one optimizer


def from_teacher(models: Mapping[str, nn.Module], batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = models["teacher"](batch)
    return (models["student"](batch) - wanted).square().mean(dim=1)


def test_a_teacher_keeps_its_values_and_its_mode() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).eval()
    student = nn.Linear(3, 5)
    before = bits(teacher)
    trainer = onefold.Trainer(
        {"student": student, "teacher": teacher},
        torch.optim.Adam(student.parameters(), lr=0.1),
        from_teacher,
        shards=2,
    )
    losses = [float(trainer.step(torch.randn(8, 3)).loss) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert bits(teacher) == before
    assert not teacher.training
    assert student.training


class Weighed(nn.Module):
    """A loss that learns how much each of its parts counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        parts = torch.stack([(given - wanted).abs().mean(1), (given - wanted).square().mean(1)], 1)
        return (parts * torch.exp(-self.scale) + self.scale).sum(dim=1)


def learned(models: Mapping[str, nn.Module], batch: Any) -> torch.Tensor:
    inputs, wanted = batch
    return models["criterion"](models["net"](inputs), wanted)


@for_each("devices", [1, 2])
def test_a_loss_with_parameters_is_one_of_the_models(devices: int) -> None:
    torch.manual_seed(0)
    models = {"net": nn.Linear(2, 4), "criterion": Weighed()}
    copies = {name: type(m)(2, 4) if name == "net" else Weighed() for name, m in models.items()}
    for name, module in copies.items():
        module.load_state_dict(models[name].state_dict())
    both = nn.ModuleDict(models)
    trainer = onefold.Trainer(
        models,
        torch.optim.SGD(both.parameters(), lr=0.1),
        learned,
        shards=2,
        devices=["cpu"] * devices,
    )
    plain_optimizer = torch.optim.SGD(nn.ModuleDict(copies).parameters(), lr=0.1)
    for number in range(5):
        inputs, _ = batch_of(number)
        batch = inputs, batch_of(number + 50)[1]
        trainer.step(batch)
        plain_optimizer.zero_grad()
        learned(copies, batch).mean().backward()
        plain_optimizer.step()
    scale = models["criterion"].scale
    assert scale.abs().min() > 0.01
    torch.testing.assert_close(scale, copies["criterion"].scale)


def test_two_losses_may_share_one_optimizer() -> None:
    model = nn.Linear(3, 2)
    copy = nn.Linear(3, 2)
    copy.load_state_dict(model.state_dict())
    losses = {
        "near": lambda m, x: m(x).square().mean(1),
        "far": lambda m, x: (m(x) - 5).square().mean(1),
    }
    trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), losses, shards=1)
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    for number, name in enumerate(("near", "far", "far", "near")):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        trainer.step(batch, name)
        optimizer.zero_grad()
        losses[name](copy, batch).mean().backward()
        optimizer.step()
    assert bits(model) == bits(copy)


def test_a_loss_of_several_terms_beside_one_of_a_single_term() -> None:
    def several(models: Any, batch: torch.Tensor) -> onefold.Means:
        total = models["b"](batch).square().sum()
        return onefold.Mean(total, len(batch)) + onefold.Mean(total, 3 * len(batch))

    found = set()
    for devices in (1, 2, 3):
        torch.manual_seed(0)
        models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
        trainer = onefold.Trainer(
            models,
            {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()},
            {"a": lambda m, x: m["a"](x).square().mean(1), "b": several},
            shards=3,
            devices=["cpu"] * devices,
        )
        for number in range(3):
            batch = torch.randn(7, 3, generator=torch.Generator().manual_seed(number))
            trainer.step(batch, "b")
            trainer.step(batch, "a")
        found.add(trainer.fingerprint())
    assert len(found) == 1


# What is refused


def given(**changes: Any) -> onefold.Trainer:
    models, optimizers = made()
    parts = {"model": models, "optimizer": optimizers, "loss": LOSSES, "shards": 2} | changes
    return onefold.Trainer(**parts, threads=1)


def test_names_that_do_not_belong_together_are_refused() -> None:
    models, optimizers = made()
    with pytest.raises(ValueError, match=r"under the same names, .* optimizers are 'generator'"):
        given(optimizer={"generator": optimizers["generator"]})
    with pytest.raises(ValueError, match="at least one model, got an empty dict"):
        given(model={})
    with pytest.raises(ValueError, match=r"model\['a.b'\]: expected another name"):
        given(model={"a.b": models["generator"]})
    with pytest.raises(TypeError, match=r"expected model\['generator'\] to be a torch.nn.Module"):
        given(model={**models, "generator": 3})
    with pytest.raises(TypeError, match=r"expected optimizer\['generator'\] to be"):
        given(optimizer={**optimizers, "generator": 3})
    with pytest.raises(TypeError, match=r"expected loss\['generator'\] to be a function"):
        given(loss={**LOSSES, "generator": 3})


def test_a_parameter_has_one_optimizer() -> None:
    models, optimizers = made()
    everything = nn.ModuleDict(models).parameters()
    both = {**optimizers, "generator": torch.optim.Adam(everything)}
    with pytest.raises(ValueError, match="is in the optimizers 'discriminator' and 'generator'"):
        given(model=models, optimizer=both)


def test_a_step_names_its_loss() -> None:
    trainer = trainer_of()
    with pytest.raises(TypeError, match=r"such as trainer.step\(batch, 'discriminator'\)"):
        trainer.step(batch_of(1))
    with pytest.raises(ValueError, match="one of the losses 'discriminator', 'generator', got"):
        trainer.step(batch_of(1), "critic")
    model = nn.Linear(2, 1)
    alone = onefold.Trainer(
        model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean(1), shards=1
    )
    with pytest.raises(TypeError, match="no name of a loss"):
        alone.step(torch.ones(2, 2), "critic")
    with pytest.raises(TypeError, match="no dict of models"):
        alone.evaluate(judged, data(), batch_size=2, model="critic")


def test_what_needs_a_single_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="looks for the largest pieces of one loss"):
        trainer_of(microbatch="auto")
    trainer = trainer_of()
    trainer.average(decay=0.9)
    with (
        pytest.raises(ValueError, match="update_bn runs the model by the loss"),
        trainer.averaged(update_bn=data(), batch_size=4),
    ):
        raise AssertionError("the block is not entered")


@for_each("name", ["generator", "discriminator"])
def test_the_optimizers_own_steps_are_refused(name: str) -> None:
    models, optimizers = made()
    given(model=models, optimizer=optimizers)
    with pytest.raises(RuntimeError, match="step\\(\\) was called by the script"):
        optimizers[name].step()
    with pytest.raises(RuntimeError, match="divided among the devices"):
        optimizers[name].state_dict()
