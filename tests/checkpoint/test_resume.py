"""What a trainer does with checkpoints; the bits of long runs are in tests/bits."""

import json
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import TensorDataset

import onefold
from onefold.checkpoint import resume, saving
from onefold.checkpoint.folder import write_checkpoint
from onefold.core.options import RunOptions
from onefold.errors import CheckpointError, PeerFailed
from onefold.testing import outcomes
from tests import simulated
from tests.checkpoint.folders import full_disk, names_in, reseal, steps_in
from tests.small import bits, line, make_trainer, points, sgd
from tests.tables import for_each

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-4, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
}


class Odd(nn.Module):
    """Several segments, other strides, one number, a layer that is seldom used, several dtypes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 12_000)
        self.image = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Linear(3, 4)
        self.out = nn.Linear(12_000, 1)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.norm(self.frozen(inputs)) + inputs
        if self.training:
            self.seen += 1
        image = self.image(inputs[:, :, None, None].expand(-1, -1, 3, 3)).mean(dim=(1, 2, 3))
        return self.out(self.wide(inputs).tanh()) * self.scale + image[:, None]


def odd_trainer(make: Optimizer, devices: int, **settings: Any) -> onefold.Trainer:
    torch.manual_seed(2)
    model = Odd()
    optimizer = make(list(model.parameters()))
    return make_trainer(model, optimizer=optimizer, devices=devices, **settings)


@for_each("name", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def run(devices: int, steps: int, load: Path | None, save: Path | None) -> str:
        trainer = odd_trainer(OPTIMIZERS[name], devices)
        if load is not None:
            trainer.load(load)
        while trainer.steps < steps:
            trainer.step(points(9))
        if save is not None:
            trainer.save(save)
        return trainer.fingerprint()

    whole = run(1, 6, None, None)
    run(3, 2, None, tmp_path / "a")
    run(1, 4, tmp_path / "a", tmp_path / "b")
    assert run(2, 6, tmp_path / "b", None) == whole


def test_a_loss_scale_doubles_when_it_would_have(tmp_path: Path) -> None:
    """After 2,000 good steps, however often the run was stopped meanwhile."""

    def scale_after_a_step(good_steps: int | None) -> float:
        trainer = make_trainer(precision="fp16")
        if good_steps is not None:
            reseal(trainer.save(tmp_path), good_steps=good_steps)
        trainer.load(tmp_path)
        trainer.step(points(8))
        saved = json.loads((trainer.save(tmp_path) / "run.json").read_text())
        return float(saved["loss_scale"])

    begun = scale_after_a_step(1997)
    assert [scale_after_a_step(None) for _ in range(3)] == [begun, 2 * begun, 2 * begun]


def test_what_was_given_comes_back_as_it_was(tmp_path: Path) -> None:
    extra: dict[object, Any] = {"best": (0.9, 3), 7: [1.0, math.inf], "seen": {1, 2}, "words": []}
    trainer = make_trainer(devices=2)
    prints = []
    for _ in trainer.epochs(3):
        trainer.step(points(4))
        prints.append(trainer.fingerprint())
        scores = {"loss": trainer.steps / 4, "worst": math.nan}
        trainer.save(tmp_path, scores=scores, extra=extra, wait=False)
        extra["words"].append("later")
    trainer.close()
    again = make_trainer()
    found = again.load(tmp_path)
    assert (found.step, found.epoch, found.scores["loss"]) == (3, 3, 0.75)
    assert found.extra == {**extra, "words": ["later"] * 2}
    assert math.isnan(found.scores["worst"])
    assert found.folder == tmp_path / "step-00000003"
    json.loads((found.folder / "run.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert again.step(points(4)).number == 4
    for step, fingerprint in enumerate(prints, 1):
        assert again.load(tmp_path / f"step-{step:08d}").step == step
        assert again.fingerprint() == fingerprint


def test_a_run_that_may_be_the_first_begins_without_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer()
    assert trainer.load(tmp_path / "run", if_any=True) is None
    trainer.step(points(4))
    folder = trainer.save(tmp_path / "run")
    again = make_trainer()
    for place in (tmp_path / "run", folder):
        found = again.load(place, if_any=True)
        assert found is not None
        assert found.step == again.steps == 1
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        again.load(tmp_path / "run", if_any=True)


def in_vain(folder: Path, call: str) -> list[str]:
    """On each device: what is said of a load or a save that fails, and what a step then does."""
    trainer, said = make_trainer(devices=None), []
    for each in (lambda: getattr(trainer, call)(folder / "file"), lambda: trainer.step(points(8))):
        try:
            each()
        except (OSError, onefold.errors.OnefoldError) as error:
            said.append(str(error))
    return [*said, trainer.fingerprint()] if call == "load" else said


@for_each("exchange", ["shared", "collective"])
def test_a_refused_load_is_survived_a_failed_save_not(tmp_path: Path, exchange: Any) -> None:
    (tmp_path / "file").write_text("mine")
    choices: dict[str, Any] = {"devices": "cpu:2", "exchange": exchange}
    said, fingerprint = simulated.launch(in_vain, args=(tmp_path, "load"), **choices)
    assert said.startswith(f"there is no checkpoint in {tmp_path}")
    alone = make_trainer()
    alone.step(points(8))
    assert fingerprint == alone.fingerprint()
    said, after = simulated.launch(in_vain, args=(tmp_path, "save"), **choices)
    assert "file" in said
    assert after.startswith("this trainer has left its run")


@for_each(("kind", "changed"), [(torch.optim.Adam, "optimizer"), (torch.optim.SGD, "scheduler")])
def test_a_new_optimizer_has_the_schedulers_rate(tmp_path: Path, kind: Any, changed: str) -> None:
    def make(kind: Any, scheduler: Any) -> tuple[onefold.Trainer, Any]:
        optimizer = kind((model := line()).parameters(), lr=0.1)
        return make_trainer(model, optimizer=optimizer, scheduler=scheduler(optimizer)), optimizer

    decay, by_step = partial(ExponentialLR, gamma=0.5), partial(StepLR, step_size=1, gamma=0.5)
    trainer, _ = make(torch.optim.SGD, decay)
    for _ in range(3):
        trainer.step(points(8))
    trainer.save(tmp_path)
    other, optimizer = make(kind, decay if changed == "optimizer" else by_step)
    other.load(tmp_path, allow_changed=[changed])
    assert not optimizer.state
    done = 3 if changed == "optimizer" else 0
    for steps in range(2):
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (done + steps)
        other.step(points(8))


def test_settings_are_the_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But for how a device computes, which is the script's choice."""

    def make(rate: float, fused: bool) -> tuple[onefold.Trainer, torch.optim.Optimizer]:
        settings: dict[str, Any] = {"lr": rate, "betas": (0.9, 1 - rate / 100), "fused": fused}
        optimizer = torch.optim.AdamW((model := line()).parameters(), **settings)
        return make_trainer(model, optimizer=optimizer), optimizer

    trainer, optimizer = make(0.1, True)
    trainer.step(points(8))
    optimizer.param_groups[0]["lr"] = 0.025
    trainer.save(tmp_path)
    for rate in (0.1, 0.3):
        assert "at the start of the run that saved" not in caplog.text
        other, optimizer = make(rate, False)
        other.load(tmp_path)
        assert optimizer.param_groups[0]["lr"] == 0.025
        assert optimizer.param_groups[0]["fused"] is False
        other.step(points(8))
    assert (
        "lr of the optimizer's group 0 was 0.1 at the start of the run that saved the checkpoint "
        "and is 0.3 in this script" in caplog.text
    )
    assert "betas of the optimizer's group 0 was (0.9, 0.999) at the start" in caplog.text
    assert "['lr'] after trainer.load" in caplog.text
    caplog.clear()
    other, optimizer = make(0.3, False)
    other.load(tmp_path, allow_changed=["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert "at the start of the run that saved" not in caplog.text


Turn = Callable[[torch.optim.Optimizer, int, int], None]
"""Sets something in the optimizer, given the epoch and the number of steps."""
Started = tuple[onefold.Trainer, torch.optim.Optimizer]


def nothing(optimizer: torch.optim.Optimizer, epoch: int, steps: int) -> None:
    """Leave the optimizer as it is."""


def lowered(optimizer: torch.optim.Optimizer, epoch: int, steps: int) -> None:
    if epoch == 1:
        optimizer.param_groups[0]["lr"] *= 0.1


def decayed(optimizer: torch.optim.Optimizer, epoch: int, steps: int) -> None:
    optimizer.param_groups[0]["weight_decay"] += 0.5


def set_to(optimizer: torch.optim.Optimizer, epoch: int, steps: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * 0.1**epoch


def by_steps(optimizer: torch.optim.Optimizer, epoch: int, steps: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + steps)


class Turns(NamedTuple):
    """What a script does with its optimizer, and where."""

    before_pass: Turn = nothing
    before_step: Turn = nothing
    after_pass: Turn = nothing


def loop(
    run: Started, turns: Turns, *, save_in: Path | None = None, after: int = 0, in_range: bool
) -> float:
    """Train three epochs of three steps; return the learning rate of the first one."""
    trainer, optimizer = run
    loader = trainer.loader(TensorDataset(*points(12)), batch_size=4)
    rates = []
    for epoch in range(3) if in_range else trainer.epochs(3):
        turns.before_pass(optimizer, epoch, trainer.steps)
        for batch in loader:
            turns.before_step(optimizer, epoch, trainer.steps)
            rates.append(optimizer.param_groups[0]["lr"])
            trainer.step(batch)
            if save_in and trainer.steps == after:
                trainer.save(save_in)
                return rates[0]
        turns.after_pass(optimizer, epoch, trainer.steps)
    return rates[0]


def started() -> Started:
    optimizer = torch.optim.SGD((model := line()).parameters(), lr=0.1)
    return make_trainer(model, optimizer=optimizer), optimizer


@pytest.mark.parametrize(
    ("turns", "saved", "in_range", "words"),
    [
        (Turns(lowered), 5, False, "step 6 has lr 0.001"),
        (Turns(lowered), 5, True, "step 6 has lr 0.001"),
        (Turns(after_pass=lowered), 8, True, "step 9 has lr 0.001"),
        (Turns(decayed), 2, False, "step 3 has weight_decay 1.0"),
        (Turns(by_steps), 5, False, "step 6 has lr 0.0166"),
        (Turns(lowered), 2, False, ""),  # the epoch with the line is still to come
        (Turns(after_pass=lowered), 5, False, ""),
        (Turns(set_to), 5, False, ""),
        (Turns(set_to), 5, True, ""),
        (Turns(after_pass=set_to), 5, True, ""),
        (Turns(before_step=by_steps), 5, False, ""),
        (Turns(set_to, by_steps), 5, True, ""),
        (Turns(), 5, False, ""),
    ],
)
def test_a_change_that_acts_twice_is_named(
    turns: Turns,
    saved: int,
    in_range: bool,
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop(started(), turns, save_in=tmp_path, after=saved, in_range=in_range)
    (run := started())[0].load(tmp_path)
    loop(run, turns, in_range=in_range)
    said = [text for each in caplog.records if " acts twice" in (text := each.getMessage())]
    assert len(said) == bool(words)
    assert not words or said[0].startswith(words)
    caplog.clear()
    # Before the first loop, a change is deliberate.
    (run := started())[0].load(tmp_path)
    run[1].param_groups[0]["lr"] = 0.5
    assert loop(run, Turns(), in_range=in_range) == 0.5
    assert "acts twice" not in caplog.text


@pytest.mark.filterwarnings("ignore:Detected call of")
@for_each("every", ["step", "epoch", "script"])
def test_a_scheduler_changes_nothing_twice_where_it_is_stepped_after_a_pass(
    every: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(early: bool) -> tuple[Started, Turns]:
        optimizer = torch.optim.SGD((model := line()).parameters(), lr=0.1)
        own = ExponentialLR(optimizer, 0.5)
        trainer = make_trainer(model, optimizer=optimizer, scheduler=own, scheduler_every=every)

        def step(optimizer: torch.optim.Optimizer, epoch: int, steps: int) -> None:
            own.step()

        turns = Turns(before_pass=step) if early else Turns(after_pass=step)
        return (trainer, optimizer), turns if every == "script" else Turns()

    for early in (False, True):
        for saved in (2, 3, 5):
            folder = tmp_path / f"{early}{saved}"
            run, turns = start(early)
            loop(run, turns, save_in=folder, after=saved, in_range=False)
            run, turns = start(early)
            run[0].load(folder)
            loop(run, turns, in_range=False)
            assert ("acts twice" in caplog.text) == (early and every == "script")
            caplog.clear()


def with_buffer(value: torch.Tensor, persistent: bool = True) -> nn.Module:
    model = line()
    model.register_buffer("count", value, persistent=persistent)
    return model


SEVEN = torch.tensor(7)


@for_each(
    ("saved", "model", "message"),
    [
        (line(), line(4), r"weight is F32 \(1, 3\) in the checkpoint but F32 \(1, 4\) in this mod"),
        (line(), line().bfloat16(), r"weight is F32 \(1, 3\) in the checkpoint but BF16 \(1, 3\)"),
        (line(), nn.Sequential(line()), r"0.weight, of shape \(1, 3\), is in this model but not"),
        (with_buffer(SEVEN), line(), r"count, of shape \(\), is in the checkpoint but not in this"),
        (with_buffer(SEVEN), with_buffer(SEVEN.int()), r"count is I64 \(\) in .* but I32 \(\)"),
        (with_buffer(SEVEN, False), with_buffer(SEVEN.bool(), False), r"count is I64 .* BOOL \(\)"),
    ],
)
def test_another_model_is_refused_by_the_first_name_that_differs(
    tmp_path: Path, saved: nn.Module, model: nn.Module, message: str
) -> None:
    make_trainer(saved).save(tmp_path)
    trainer = make_trainer(model)
    before = bits(model)
    with pytest.raises(CheckpointError, match=rf"step-00000000 does not fit: .*{message}"):
        trainer.load(tmp_path)
    assert bits(model) == before
    trainer.close()


CHANGES: dict[str, tuple[Any, str, str]] = {
    "seed": (1, "seed 0, but this run has 1", "another order"),
    "shards": (2, "shards 4, but this run has 2", "bit-identical"),
    "clip_norm": (1.0, "clip_norm None, but this run has 1.0", "remaining steps differ"),
    "optimizer": (torch.optim.Adam, "optimizer SGD, but this run has Adam", "starts from scratch"),
    "scheduler": (
        ExponentialLR,
        "scheduler None, but this run has ExponentialLR",
        "starts from scratch",
    ),
}


def changed_trainer(what: str, value: Any) -> onefold.Trainer:
    model = line()
    optimizer = value(model.parameters()) if what == "optimizer" else sgd(model)
    value = value(optimizer, 0.5) if what == "scheduler" else value
    return make_trainer(model, **{what: value, "optimizer": optimizer})


@for_each("what", CHANGES)
def test_another_run_is_refused_by_name_and_taken_on_request(tmp_path: Path, what: str) -> None:
    value, said, promise = CHANGES[what]
    trainer = make_trainer()
    trainer.step(points(8))
    trainer.save(tmp_path)
    other = changed_trainer(what, value)
    before = bits(other.model)
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path)
    assert f"was saved with {said}. If the change is intended" in str(caught.value)
    assert f'allow_changed=["{what}"]' in str(caught.value)
    assert promise in str(caught.value)
    assert (bits(other.model), other.steps) == (before, 0)
    with pytest.raises(
        ValueError, match=r"allow_changed must contain only names from .*got \['color'\]"
    ):
        other.load(tmp_path, allow_changed=["color"])
    wrong = sorted(CHANGES.keys() - {what})
    with pytest.raises(CheckpointError):
        other.load(tmp_path, allow_changed=wrong)
    other.load(tmp_path, allow_changed=[what])
    assert (bits(other.model), other.steps) == (bits(trainer.model), 1)
    other.step(points(8))
    other.save(tmp_path)
    assert changed_trainer(what, value).load(tmp_path).step == 2, "it is the run's own from then on"


def test_the_newest_three_stay_unless_told_otherwise(tmp_path: Path) -> None:
    trainer = make_trainer()
    for score in (0.5, 0.9, 0.1, 0.2, 0.3):
        trainer.step(points(4))
        trainer.save(tmp_path / "three")
        trainer.save(tmp_path / "all", keep=None)
        trainer.save(tmp_path / "best", keep=1, best="highest score", scores={"score": score})
    again = make_trainer()  # it tidies up what it wrote before
    again.load(tmp_path / "three")
    again.step(points(4))
    again.save(tmp_path / "best", keep=1)
    assert steps_in(tmp_path / "three") == [3, 4, 5]
    assert steps_in(tmp_path / "all") == [1, 2, 3, 4, 5]
    assert steps_in(tmp_path / "best") == [2, 6]


class Keeping(nn.Linear):
    def get_extra_state(self) -> object:
        return {"calls": 3}


COMPLEX = torch.zeros(1, dtype=torch.complex128)


@for_each(
    ("model", "choices", "text"),
    [
        (line(), {"keep": 0}, "keep must be at least 1, but got 0"),
        (line(), {"keep": 2.5}, "keep must be an integer, but got 2.5"),
        (line(), {"best": "accuracy"}, 'best must be "highest NAME"'),
        (line(), {"best": "lowest loss"}, "but scores has no score of that name"),
        (line(), {"scores": {"loss": "low"}}, "scores must map names to numbers"),
        (line(), {"extra": {"f": print}}, r"extra\['f'\] is of type builtin_function"),
        (Keeping(3, 1), {}, "contains _extra_state, which is neither a parameter nor a buffer"),
        *(
            (with_buffer(COMPLEX, kept), {}, r"count is torch\.complex128, which")
            for kept in (False, True)
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, model: nn.Module, choices: dict[str, Any], text: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make_trainer(model).save(tmp_path / "run", **choices)
    assert not (tmp_path / "run").exists()


def test_a_save_is_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    trainer = odd_trainer(OPTIMIZERS["adam"], 2)
    trainer.step(points(9))
    whole = trainer.save(tmp_path / "whole")
    write = write_checkpoint
    gated: Any = lambda *given: (gate.wait(60), write(*given))[1]  # noqa: E731
    monkeypatch.setattr(saving, "write_checkpoint", gated)
    folder = trainer.save(tmp_path / "beside", wait=False)
    for _ in range(3):
        trainer.step(points(9))
    assert not folder.exists()
    gate.set()
    trainer.close()
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    records = [json.loads((f / "run.json").read_text()) for f in (whole, folder)]
    then, now = (record | {"sha256": "", "time": ""} for record in records)
    assert then == now


@for_each("call", ["step", "save", "load", "evaluate", "close"])
def test_a_failed_write_is_raised_at_the_next_call(tmp_path: Path, call: str) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "good")
    before = set(threading.enumerate())
    with full_disk(64):
        trainer.save(tmp_path / "bad", wait=False)
        for thread in set(threading.enumerate()) - before:
            thread.join()
    data = torch.utils.data.TensorDataset(*points(4))
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: trainer.step(points(4)),
        "save": lambda: trainer.save(tmp_path / "good"),
        "load": lambda: trainer.load(tmp_path / "good"),
        "evaluate": lambda: trainer.evaluate(lambda m, b: {"y": b[1]}, data, batch_size=4),
        "close": trainer.close,
    }
    with pytest.raises(OSError, match=r"bad.*could not be written: File too large"):
        calls[call]()
    calls[call]()
    assert names_in(tmp_path / "bad") == set()


def load(directory: Path) -> None:
    make_trainer(devices=None).load(directory)


@for_each("exchange", ["shared", "collective"])
def test_what_fails_in_the_leads_work_ends_all(tmp_path: Path, exchange: Any) -> None:
    make_trainer().save(tmp_path)
    fail = mock.Mock(side_effect=ArithmeticError("the fault that was asked for"))
    with mock.patch.object(resume, "find_checkpoint", fail):
        lead, other = outcomes(load, 2, args=(tmp_path,), options=RunOptions(exchange=exchange))
    assert fail.call_count == 1
    assert lead.error is fail.side_effect
    assert other.error is not None
    with pytest.raises(PeerFailed, match="ArithmeticError: the fault that was asked for"):
        raise other.error
