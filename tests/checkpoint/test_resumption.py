"""What scripts do to the model around the loop acts once, wherever the run was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from tests.checkpoint.inprocess import Life, Runs, Script
from tests.small import points, square

EPOCHS = 3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "run", monkeypatch)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def data() -> TensorDataset:
    return TensorDataset(*points(24))


def result(trainer: onefold.Trainer, *more: object) -> str:
    """All that a run leaves, buffers and settings included; read from the model itself."""
    values = [v.double().sum().item().hex() for v in trainer.model.state_dict().values()]
    settings = trainer._session.engine.update.optimizer.param_groups[0]["lr"]
    return f"{trainer.fingerprint()} {trainer.steps} {settings} {more} {values}"


def change(trainer: onefold.Trainer, by: float = 0.5) -> None:
    with trainer.changing(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(by)


def made(life: Life, model: nn.Module | None = None) -> onefold.Trainer:
    model = model or network()
    return life.trainer(model, square, optimizer=adam(model))


def zeroed_head(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    with trainer.changing():
        nn.init.zeros_(trainer.model[3].weight)  # type: ignore[index]
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            life.tick()
            trainer.step(batch)
            life.tick()
    return result(trainer)


def changed_at_each_epoch(life: Life) -> str:
    """At its top, in the middle of a pass, at its end, and when all is done; a rate by hand."""
    trainer = made(life)
    optimizer = trainer._session.engine.update.optimizer
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for epoch in trainer.epochs(EPOCHS):
        life.tick()
        change(trainer)
        optimizer.param_groups[0]["lr"] *= 0.9
        life.tick()
        for number, batch in enumerate(loader):
            trainer.step(batch)
            life.tick()
        assert number < 3
        change(trainer, 2.0 + epoch)
        life.tick()
    change(trainer, 3.0)
    return result(trainer)


def target_network(life: Life) -> str:
    model = nn.ModuleDict({"online": network(), "target": network()})
    model["target"].requires_grad_(False)

    def loss(models: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        wanted = targets + 0.5 * models["target"](inputs).detach()  # type: ignore[operator]
        return (models["online"](inputs) - wanted).square().mean(dim=1)  # type: ignore[operator]

    optimizer = torch.optim.Adam(model["online"].parameters(), lr=0.01)
    trainer = life.trainer(model, loss, optimizer=optimizer)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            step = trainer.step(batch)
            life.tick()
            if step.number % 2 == 0:
                with trainer.changing():
                    model["target"].load_state_dict(model["online"].state_dict())
                life.tick()
    return result(trainer)


def counted_steps(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    change(trainer)
    while trainer.steps < 8:
        change(trainer, 1.5)
        for batch in loader:
            if trainer.steps == 8:
                break
            life.tick()
            trainer.step(batch)
            life.tick()
            if trainer.steps % 4 == 0:
                change(trainer, 1.25)
                life.tick()
    change(trainer)
    return result(trainer)


def plain_range(life: Life) -> str:
    """The epochs that are done are gone through again, and pruned again."""
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for epoch in range(EPOCHS):
        change(trainer, 1.5)
        for batch in loader:
            trainer.step(batch)
            life.tick()
        trainer.evaluate(lambda m, b: {"loss": square(m, b)}, data(), batch_size=8)
        change(trainer, 0.5 + epoch)
        life.tick()
    return result(trainer)


def two_phases(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for last in (1, EPOCHS):
        for _ in trainer.epochs(last):
            for batch in loader:
                trainer.step(batch)
                life.tick()
        change(trainer, 0.5 + last)
        life.tick()
    return result(trainer)


def updates_of_its_own(life: Life) -> str:
    trainer = made(life)
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    change(trainer)
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            with trainer.changing():
                for parameter in trainer.model.parameters():
                    parameter.data.mul_(0.99)
                trainer.gradient(batch)
                life.tick()
                for parameter in trainer.model.parameters():
                    parameter.data.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            life.tick()
    return result(trainer)


def averages_and_schedule(life: Life) -> str:
    """The schedule is stepped where an epoch begins, by a score; the average begins with one."""
    model = network()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    trainer = life.trainer(
        model, square, optimizer=optimizer, schedule=schedule, schedule_every="script"
    )
    loader = trainer.loader(data(), batch_size=8, shuffle=True)
    for epoch in trainer.epochs(EPOCHS):
        if epoch == 1:
            trainer.average(decay=0.9)
        if epoch > 0:
            schedule.step()
        for batch in loader:
            trainer.step(batch)
            life.tick()
    with trainer.averaged():
        averaged = trainer.fingerprint()
    return result(trainer, averaged)


SCRIPTS = (
    *(zeroed_head, changed_at_each_epoch, target_network, counted_steps, plain_range, two_phases),
    *(updates_of_its_own, averages_and_schedule),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_goes_on_wherever_it_died(runs: Runs, script: Script) -> None:
    """Killed between any two lines, twice, on other numbers of devices; then run once more."""
    whole = runs.whole(script)
    for dies, devices in zip(range(1, runs.ticks + 1), _devices(), strict=False):
        runs.folder = runs.folder.with_name(f"run{dies}")
        assert runs.start(script, devices[0], dies=dies, every=1 + dies % 2) is None
        assert runs.start(script, devices[1], dies=3) in (None, whole)
        assert runs.start(script, devices[2]) == whole
        assert runs.start(script, devices[0]) == whole, "all is done"


def _devices() -> Iterator[tuple[int, int, int]]:
    while True:
        yield from ((1, 2, 3), (2, 1, 1), (3, 3, 2))
