"""When the schedule is stepped: after steps, at the end of epochs, or by the script."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

import onefold
from tests import simulated
from tests.small import line, make_trainer, points, sgd, square
from tests.tables import for_each

EPOCHS = 4
SAMPLES = 10
BATCH = 4
"""Three steps an epoch, the last of them short."""
EACH = {
    "cosine": lambda o: lrs.CosineAnnealingLR(o, EPOCHS),
    "steps": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "sequence": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=2), lrs.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
}


class Place(NamedTuple):
    """Where a run is saved and left."""

    epoch: int
    batch: int | str
    """After which batch of the epoch, or at the ``"end"`` of the pass, or ``"after"`` the epoch."""


PLACES = [Place(e, b) for e in (0, 1, EPOCHS - 1) for b in (0, 2, "end", "after")]


def data() -> TensorDataset:
    return TensorDataset(*points(SAMPLES))


class Left(Exception):
    """The script is left here."""


class Script:
    """A run that may be saved somewhere, and gone on with by another one."""

    def __init__(self, folder: Path, devices: int, every: str, make: Callable[..., Any]) -> None:
        self.folder = folder
        self.optimizer = sgd(model := line())
        self.schedule = make(self.optimizer)
        self.trainer = make_trainer(
            model,
            optimizer=self.optimizer,
            devices=devices,
            schedule=self.schedule,
            schedule_every=every,
        )
        self.rates: dict[int, float] = {}
        """The learning rate of each step."""

    def run(self, until: Place | None = None, *, load: bool = False) -> str:
        loader = self.trainer.loader(data(), batch_size=BATCH, shuffle=True)
        if load:
            self.trainer.load(self.folder)
        try:
            for epoch in self.trainer.epochs(EPOCHS):
                for batch in loader:
                    self.step(batch)
                    self.leave(until, Place(epoch, (self.trainer.steps - 1) % 3))
                self.leave(until, Place(epoch, "end"))
                self.end_epoch()
                if until == Place(epoch, "after") and epoch < EPOCHS - 1:
                    break  # of an epoch that is done
        except Left:
            return ""
        if until is not None:
            self.trainer.save(self.folder)
        return self.trainer.fingerprint()

    def step(self, batch: object) -> None:
        rate = self.optimizer.param_groups[0]["lr"]
        self.rates[self.trainer.step(batch).number] = rate

    def leave(self, until: Place | None, here: Place) -> None:
        if here == until:
            self.trainer.save(self.folder)
            raise Left

    def end_epoch(self) -> None:
        """Nothing: the trainer steps the schedule."""


class Plateau(Script):
    """The script steps its schedule, by a score."""

    def end_epoch(self) -> None:
        scores = self.trainer.evaluate(
            lambda model, batch: {"loss": square(model, batch)}, data(), batch_size=4
        )
        self.schedule.step(scores["loss"])


def plain_rates(make: Callable[..., Any]) -> list[float]:
    """Of a plain loop that ends each epoch with a step of the schedule."""
    optimizer = sgd(line())
    schedule, rates = make(optimizer), []
    for _ in range(EPOCHS):
        rates += [optimizer.param_groups[0]["lr"]] * 3
        optimizer.step()
        schedule.step()
    return rates


@for_each("name", EACH)
def test_the_rate_of_an_epoch_is_that_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter")
        for devices in (1, 2, 3):
            script = Script(tmp_path, devices, "epoch", EACH[name])
            found.append((script.run(), list(script.rates.values())))
        assert found[0] == found[1] == found[2]
        assert found[0][1] == plain_rates(EACH[name])


def gone_on(
    kind: type[Script], folder: Path, every: str, make: Callable[..., Any], at: Place
) -> None:
    whole = kind(folder, 1, every, make)
    fingerprint = whole.run()
    first = kind(folder, 2, every, make)
    first.run(at)
    second = kind(folder, 3, every, make)
    assert second.run(load=True) == fingerprint
    assert first.rates | second.rates == whole.rates
    assert first.rates.keys().isdisjoint(second.rates)


@for_each("place", PLACES, ids=str)
def test_it_is_stepped_once_wherever_the_run_was_saved(tmp_path: Path, place: Place) -> None:
    gone_on(Script, tmp_path, "epoch", EACH["cosine"], place)


@for_each("place", [p for p in PLACES if p.batch != "end"], ids=str)
def test_a_plateau_is_followed_across_a_stop(tmp_path: Path, place: Place) -> None:
    """The best score so far, and for how long it has been the best, are in the checkpoint.

    Not where the script saves before it steps the schedule, after the pass: then the epoch is done.
    """

    def make(optimizer: torch.optim.Optimizer) -> lrs.ReduceLROnPlateau:
        return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)

    whole = Plateau(tmp_path, 1, "script", make)
    whole.run()
    assert len(set(whole.rates.values())) > 2, "the test would show nothing"
    gone_on(Plateau, tmp_path, "script", make, place)


def test_a_script_that_leaves_epochs_out_does_not_step_it_there() -> None:
    optimizer = sgd(model := line())
    schedule = lrs.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule, schedule_every="epoch")
    for epoch in trainer.epochs(4):
        if epoch < 2:
            continue
        trainer.step(points(8))
    assert schedule.last_epoch == 2


def test_a_loop_that_is_broken_off_within_an_epoch_does_not_step_it() -> None:
    optimizer = sgd(model := line())
    schedule = lrs.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule, schedule_every="epoch")
    loader = trainer.loader(data(), batch_size=4)
    for _ in trainer.epochs(4):
        for batch in loader:
            trainer.step(batch)
            break
        break
    assert (trainer.steps, schedule.last_epoch) == (1, 0)
    for _ in trainer.epochs(1):
        for batch in loader:
            trainer.step(batch)
    assert (trainer.steps, schedule.last_epoch) == (4, 1)


def test_a_step_that_is_in_no_epoch_is_refused_where_epochs_step_it() -> None:
    optimizer = sgd(model := line())
    schedule = lrs.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule, schedule_every="epoch")
    with pytest.raises(ValueError, match=r"schedule_every=.epoch. .*this step is in none: loop"):
        trainer.step(points(8))
    assert trainer.steps == 0


@for_each("every", ["step", "epoch"])
def test_a_line_that_is_left_over_is_named(every: str) -> None:
    """Or the rate would fall twice as fast."""
    optimizer = sgd(model := line())
    schedule = lrs.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule, schedule_every=every)

    def loop() -> None:
        for _ in trainer.epochs(3):
            trainer.step(points(8))
            schedule.step()

    with pytest.raises(RuntimeError, match=r"ExponentialLR.step\(\) was called by the script"):
        loop()
    assert trainer.steps == 1


def test_the_script_may_step_it_whenever_it_likes() -> None:
    optimizer = sgd(model := line())
    schedule = lrs.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(model, optimizer=optimizer, schedule=schedule, schedule_every="script")
    for steps in (0, 1, 3):
        for _ in range(steps):
            schedule.step()
        trainer.step(points(8))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no schedule": ({"schedule_every": "epoch"}, ValueError, "and there is none"),
    "another word": (
        {"schedule_every": "week"},
        ValueError,
        'expected schedule_every to be "step"',
    ),
}


@for_each("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    settings, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        make_trainer(**settings)


@for_each("every", ["step", "epoch"])
def test_a_plateau_is_for_the_script(every: str) -> None:
    optimizer = sgd(model := line())
    schedule = lrs.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match=r'needs a score .*schedule_every="script", and call'):
        make_trainer(model, optimizer=optimizer, schedule=schedule, schedule_every=every)


def saved(folder: Path, every: str) -> None:
    script = Script(folder, 1, every, EACH["cosine"])
    script.run(Place(1, 0))


def test_another_way_to_step_it_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path, "epoch")
    other = Script(tmp_path, 1, "step", EACH["cosine"])
    with pytest.raises(onefold.errors.CheckpointError, match="schedule_every epoch, this run has"):
        other.trainer.load(tmp_path)
    assert other.trainer.load(tmp_path, changed=["schedule"]).epoch == 1


def test_a_checkpoint_of_before_was_stepped_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onefold.engine.schedule import RunSchedule, write_schedule

    def before(self: RunSchedule) -> object:
        assert self.schedule is not None
        return write_schedule(self.schedule)

    with monkeypatch.context() as patch:
        patch.setattr(RunSchedule, "to_json", before)
        saved(tmp_path, "step")
    whole = Script(tmp_path, 1, "step", EACH["cosine"])
    fingerprint = whole.run()
    second = Script(tmp_path, 2, "step", EACH["cosine"])
    assert second.run(load=True) == fingerprint
    assert second.rates.items() <= whole.rates.items()


def _trained(every: str, folder: Path) -> Sequence[object]:
    script = Script(folder, 1, every, EACH["cosine"])
    return script.run(), list(script.rates.values())


def _launched(every: str) -> Sequence[object]:
    optimizer = sgd(model := line())
    schedule = lrs.CosineAnnealingLR(optimizer, EPOCHS)
    trainer = make_trainer(
        model, optimizer=optimizer, devices=None, schedule=schedule, schedule_every=every
    )
    loader = trainer.loader(data(), batch_size=BATCH, shuffle=True)
    rates = []
    for _ in trainer.epochs(EPOCHS):
        for batch in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            trainer.step(batch)
    return trainer.fingerprint(), rates


@for_each("exchange", ["shared", "collective"])
def test_processes_come_to_the_same(tmp_path: Path, exchange: str) -> None:
    found = simulated.launch(_launched, devices="cpu:3", args=("epoch",), exchange=exchange)
    assert found == _trained("epoch", tmp_path)


def _lead_alone(every: str) -> None:
    optimizer = sgd(model := line())
    schedule = lrs.ExponentialLR(optimizer, 0.5)
    trainer = make_trainer(
        model, optimizer=optimizer, devices=None, schedule=schedule, schedule_every=every
    )
    trainer.step(points(8))
    if trainer.is_lead:
        schedule.step()
    trainer.step(points(8))


def test_a_script_that_steps_it_on_the_lead_alone_is_named() -> None:
    with pytest.raises(
        onefold.errors.DisagreementError, match="the optimizer's settings of device 1"
    ):
        simulated.launch(_lead_alone, devices="cpu:2", args=("script",))
