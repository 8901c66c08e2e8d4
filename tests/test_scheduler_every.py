"""When the scheduler is stepped: after steps, at the end of epochs, or by the script."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

import onefold
from onefold.errors import CheckpointError
from onefold.testing import simulate
from tests.checkpoint.folders import reseal
from tests.small import Batch, line, make_trainer, points, sgd, square
from tests.tables import for_each

EPOCHS = 4
DATA = TensorDataset(*points(10))
Make = Callable[[torch.optim.Optimizer], Any]
EACH: dict[str, Make] = {
    "cosine": lambda o: lrs.CosineAnnealingLR(o, EPOCHS),
    "sequence": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, total_iters=2), lrs.ExponentialLR(o, 0.5)], [2]
    ),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.9),
}
Place = tuple[int, int | str]
"""An epoch, and a batch of it or the "end" of the pass, or "after" the epoch."""


def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"loss": square(model, batch)}


class Script:
    """A run that may be saved somewhere, and gone on with by another one."""

    def __init__(self, name: str, devices: int | None = 1, every: str = "epoch") -> None:
        self.optimizer = sgd(model := line())
        self.scheduler = EACH[name](self.optimizer)
        self.steps_itself = name == "plateau"
        choices = {"optimizer": self.optimizer, "scheduler": self.scheduler, "devices": devices}
        every = "script" if self.steps_itself else every
        self.trainer = make_trainer(model, scheduler_every=every, **choices)
        self.rates: dict[int, float] = {}
        """The learning rate of each step."""

    def run(self, folder: Path | None = None, until: Place | None = None) -> str:
        """Save at a place and leave; or go on from a folder, without a place."""
        loader = self.trainer.loader(DATA, batch_size=4, shuffle=True)
        if folder is not None and until is None:
            self.trainer.load(folder)
        for epoch in self.trainer.epochs(EPOCHS):
            for batch in loader:
                rate = self.optimizer.param_groups[0]["lr"]
                self.rates[self.trainer.step(batch).number] = rate
                if until == (epoch, (self.trainer.steps - 1) % 3):
                    return self.saved(folder)
            if until == (epoch, "end"):
                return self.saved(folder)
            if self.steps_itself:
                scores = self.trainer.evaluate(score, DATA, batch_size=4)
                self.scheduler.step(scores["loss"])
            if until == (epoch, "after") and epoch < EPOCHS - 1:
                break  # of an epoch that is done
        return self.saved(folder if until else None)

    def saved(self, folder: Path | None) -> str:
        if folder is not None:
            self.trainer.save(folder)
        return self.trainer.fingerprint()


@for_each("name", [name for name in EACH if name != "plateau"])
def test_the_rate_of_an_epoch_is_that_of_a_plain_loop(name: str) -> None:
    optimizer = sgd(line())
    scheduler, rates = EACH[name](optimizer), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter")
        for _ in range(EPOCHS):
            rates += [optimizer.param_groups[0]["lr"]] * 3
            optimizer.step()
            scheduler.step()
        scripts = [Script(name, devices) for devices in (1, 3)]
        ends = [script.run() for script in scripts]
        assert simulate(lambda: Script(name, None).run(), 3) == [ends[0]] * 3 == [ends[1]] * 3
    assert [[*script.rates.values()] for script in scripts] == [rates] * 2


@for_each("name", ["cosine", "plateau"])
@for_each("place", [(e, b) for e in (0, 1, EPOCHS - 1) for b in (0, 2, "end", "after")])
def test_it_is_stepped_once_wherever_the_run_was_saved(
    name: str, place: Place, tmp_path: Path
) -> None:
    if name == "plateau" and place[1] == "end":
        return  # the script saves before it steps the scheduler: then the epoch is done
    whole, first, second = Script(name), Script(name, 2), Script(name, 3)
    fingerprint = whole.run()
    assert len(set(whole.rates.values())) > 2, "the test would show nothing"
    first.run(tmp_path, place)
    assert second.run(tmp_path) == fingerprint
    assert first.rates | second.rates == whole.rates
    assert first.rates.keys().isdisjoint(second.rates)


def test_another_way_to_step_it_does_not_fit(tmp_path: Path) -> None:
    Script("cosine").run(tmp_path, (1, 0))
    other = Script("cosine", every="step").trainer
    with pytest.raises(CheckpointError, match="scheduler_every epoch, but this run has"):
        other.load(tmp_path)
    assert other.load(tmp_path, allow_changed=["scheduler"]).epoch == 1


def halving(every: str) -> tuple[onefold.Trainer, lrs.ExponentialLR]:
    scheduler = lrs.ExponentialLR(optimizer := sgd(model := line()), 0.5)
    choices: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scheduler_every": every,
    }
    return make_trainer(model, **choices), scheduler


def test_epochs_without_steps_and_epochs_that_are_broken_off_do_not_step_it() -> None:
    trainer, scheduler = halving("epoch")
    loader = trainer.loader(DATA, batch_size=4)
    for epoch in trainer.epochs(4):
        if epoch == 2:
            trainer.step(next(iter(loader)))
            break
    assert (trainer.steps, scheduler.last_epoch) == (1, 0)
    for _ in trainer.epochs(4):
        for batch in loader:
            trainer.step(batch)
    # The third epoch continues with its second batch.
    assert (trainer.steps, scheduler.last_epoch) == (6, 2)


@for_each("every", ["step", "epoch"])
def test_a_line_that_is_left_over_is_named(every: str) -> None:
    """Or the rate would fall twice as fast."""
    trainer, scheduler = halving(every)
    for _ in trainer.epochs(1):
        trainer.step(points(8))
        scheduler.step()
        with pytest.raises(RuntimeError, match=r"ExponentialLR.step\(\) was called by the script"):
            trainer.step(points(8))
    assert trainer.steps == 1


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="but there is none"):
        make_trainer(scheduler_every="epoch")
    with pytest.raises(ValueError, match='scheduler_every must be one of "step"'):
        make_trainer(scheduler_every="week")
    trainer, _ = halving("epoch")
    with pytest.raises(ValueError, match=r"scheduler_every=.epoch. .*this step is in none\. Loop"):
        trainer.step(points(8))
    assert trainer.steps == 0
    plateau = EACH["plateau"](optimizer := sgd(model := line()))
    for every in ("step", "epoch"):
        with pytest.raises(TypeError, match=r'needs a metric .*scheduler_every="script", and call'):
            make_trainer(model, optimizer=optimizer, scheduler=plateau, scheduler_every=every)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the warnings name that another script had set."""
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [text for text in lines if "at the start of the run that saved" in text]


def decay(optimizer: torch.optim.Optimizer, gamma: float) -> lrs.SequentialLR:
    parts = [lrs.ConstantLR(optimizer, 1.0), lrs.MultiStepLR(optimizer, [3], gamma)]
    return lrs.SequentialLR(optimizer, parts, [2])


def by_rule(optimizer: torch.optim.Optimizer, factor: float) -> lrs.LambdaLR:
    return lrs.LambdaLR(optimizer, lambda _: factor)


@for_each(
    ("make", "was", "now", "words"),
    [
        (lrs.CosineAnnealingLR, 20, 40, "scheduler.T_max was 20 {} 40"),
        (
            lrs.MultiStepLR,
            [3],
            [4],
            "scheduler.milestones was Counter({{3: 1}}) {} Counter({{4:",
        ),
        (decay, 0.5, 0.1, "scheduler._schedulers[1].gamma was 0.5 {} 0.1"),
        (by_rule, 1.0, 0.5, "lr of the optimizer's group 0 was 0.1 {} 0.05"),
    ],
)
def test_other_settings_are_named_and_taken_on_request(
    make: Callable[[Any, Any], Any],
    was: Any,
    now: Any,
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def start(value: Any) -> tuple[onefold.Trainer, Any]:
        optimizer = torch.optim.SGD((model := line()).parameters(), lr=0.1)
        scheduler = make(optimizer, value)
        return make_trainer(model, optimizer=optimizer, scheduler=scheduler), scheduler

    trainer, _ = start(was)
    trainer.step(points(8))
    trainer.save(tmp_path)
    for value, changed in ((was, ()), (now, ["scheduler"])):
        trainer, scheduler = start(value)
        before = scheduler.state_dict()
        trainer.load(tmp_path, allow_changed=changed)
        assert not said(caplog)
        assert (scheduler.state_dict() == before) == bool(changed)
    start(now)[0].load(tmp_path)
    (text,) = said(caplog)
    assert text.startswith(words.format("at the start of the run that saved the checkpoint and is"))
    assert "; the checkpoint's value is used" in text
    assert text.endswith(
        "after trainer.load, or restart the scheduler with the script's settings: "
        "trainer.load(..., allow_changed=['scheduler'])"
    )


def by_factor(optimizer: torch.optim.Optimizer, steps: int) -> lrs.MultiplicativeLR:
    return lrs.MultiplicativeLR(optimizer, lambda step: 1 - 0.5 / steps)


def by_wave(optimizer: torch.optim.Optimizer, steps: int) -> lrs.CyclicLR:
    scale = lambda step: 1 - step / steps / 2  # noqa: E731
    settings = {"scale_fn": scale, "scale_mode": "iterations", "cycle_momentum": False}
    return lrs.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3, **settings)  # type: ignore[arg-type]


def by_length(optimizer: torch.optim.Optimizer, steps: int) -> lrs.LambdaLR:
    return lrs.LambdaLR(optimizer, partial(remaining, steps=steps))


def remaining(step: int, steps: int) -> float:
    return max(0.0, 1 - step / steps)


def after_warmup(optimizer: torch.optim.Optimizer, steps: int) -> lrs.SequentialLR:
    return lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer), by_length(optimizer, steps)], [2])


def of_parts(optimizer: torch.optim.Optimizer, steps: int) -> lrs.ChainedScheduler:
    """Two of them, of which only the first one has a rate of its own."""
    return lrs.ChainedScheduler([by_length(optimizer, steps), by_factor(optimizer, steps)])


def with_constant(optimizer: torch.optim.Optimizer, steps: int) -> lrs.ChainedScheduler:
    return lrs.ChainedScheduler([by_length(optimizer, steps), lrs.ConstantLR(optimizer, 1.0)])


@pytest.mark.parametrize(
    "make", [by_factor, by_wave, by_length, after_warmup, with_constant, of_parts]
)
def test_a_function_of_another_length_is_named(
    make: Callable[[Any, int], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(steps: int) -> tuple[onefold.Trainer, Any]:
        optimizer = torch.optim.SGD((model := line()).parameters(), lr=0.1, momentum=0.5)
        scheduler = make(optimizer, steps)
        return make_trainer(model, optimizer=optimizer, scheduler=scheduler), scheduler

    trainer, _ = start(20)
    trainer.save(tmp_path / "0")
    for step in range(1, 6):
        trainer.step(points(8))
        trainer.save(tmp_path / str(step))
        start(20)[0].load(tmp_path / str(step))
    start(40)[0].load(tmp_path / "0")
    assert "function" not in caplog.text  # the first rate is the same
    other, scheduler = start(40)
    before = scheduler.state_dict()
    other.load(tmp_path / "5", allow_changed=["scheduler"])
    assert scheduler.state_dict() == before
    assert "function" not in caplog.text
    other.load(tmp_path / "5")
    (text,) = [each.getMessage() for each in caplog.records if "function" in each.getMessage()]
    assert " whose function gives the learning rate " in text
    if make is by_length:
        assert text.startswith("scheduler is a LambdaLR whose function gives the learning rate ")
        assert (
            " 0.0875 after 5 of its steps, where the run that saved the checkpoint had 0.075. "
            in text
        )


def test_an_older_checkpoint_does_not_say_what_was_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = halving("step")
    trainer.step(points(8))
    folder = trainer.save(tmp_path)
    written = json.loads((folder / "run.json").read_text())["scheduler"]
    assert written.pop("settings_at_start")["scheduler.gamma"] == 0.5
    reseal(folder, scheduler=written)
    other, scheduler = halving("step")
    other.load(tmp_path)
    assert (scheduler.last_epoch, said(caplog)) == (1, [])
