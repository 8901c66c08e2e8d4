"""What errors advise is what helps: sentences that sent people the wrong way before."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World
from onefold.errors import CheckpointError, LineError, LossError
from tests.checkpoint.folders import seal
from tests.inside import engine_in
from tests.small import line, make_trainer, points
from tests.tables import for_each

ROWS = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def test_a_criterion_with_parameters_is_given_with_the_model() -> None:
    model, criterion = nn.Linear(3, 2), nn.Linear(2, 1)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)

    words = r"give Trainer both: Trainer\(\{'model': model, 'criterion': criterion\}, \.\.\.\)"
    with pytest.raises(ValueError, match=words):
        make_trainer(model, lambda m, x: criterion(m(x)).mean(1), optimizer=optimizer())
    trainer = onefold.Trainer(
        {"model": model, "criterion": criterion},
        optimizer(),
        lambda both, x: both["criterion"](both["model"](x)).mean(1),
        shards=2,
    )
    assert trainer.step(ROWS).samples == 8


LOSSES: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "not finite": lambda m, x: m(x).std(dim=0).mean(),
    "refused by PyTorch": lambda m, x: F.batch_norm(m(x), None, None, training=True).mean(1),
}


@pytest.mark.filterwarnings("ignore:std():UserWarning")
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("shards", [4, 8])
def test_gather_is_named_where_a_shard_has_one_sample(kind: str, shards: int) -> None:
    trainer = make_trainer(nn.Linear(3, 2), LOSSES[kind], shards=shards)
    if shards == 4:
        trainer.step(ROWS)
        return
    with pytest.raises(ValueError, match=r".") as caught:
        trainer.step(ROWS)
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "one sample" in said
    assert "onefold.gather(rows) gives the loss those of the whole batch" in said


def test_a_loss_that_is_not_finite_for_other_reasons_is_not_sent_there() -> None:
    trainer = make_trainer(nn.Linear(3, 2), lambda m, x: m(x).mean(1) / 0, shards=4)
    with pytest.raises(LossError) as caught:
        trainer.step(ROWS)
    assert "gather" not in str(caught.value)


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bilinear = nn.Linear(3, 4), nn.Bilinear(4, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.autocast(x.device.type, enabled=not self.by_hand):
            return self.bilinear(*(h.float(), h.float()) if self.by_hand else (h, h))  # type: ignore[no-any-return]

    by_hand = False


@for_each("precision", ["bf16", "fp16"])
def test_what_autocast_has_no_rule_for_is_named(precision: str) -> None:
    def step(model: Crossed, precision: str) -> None:
        loss = lambda m, x: m(x).float().square().mean(1)  # noqa: E731
        make_trainer(model, loss, precision=precision).step(ROWS)

    with pytest.raises(RuntimeError) as caught:
        step(Crossed(), precision)
    said = " ".join(caught.value.__notes__)
    assert "autocast has no rule for nn.Bilinear" in said
    assert 'precision="bf16-params"' in said
    # As it says:
    model = Crossed()
    model.by_hand = True
    step(model, precision)


def test_a_mean_and_a_sum_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> object:
        losses = model(x).square()
        return onefold.Mean(losses.sum(), float(losses.numel())) + onefold.Sum(losses.mean())

    def step(keep: str) -> None:
        world = World(options=RunOptions(keep=keep))  # type: ignore[arg-type]
        monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        make_trainer(model, loss, stages=list(model), devices=2).step(ROWS)

    words = (
        r"several terms with divisors of their own \(Mean \+ Mean, or Mean \+ Sum\).*--keep span"
    )
    with pytest.raises(LineError, match=words):
        step("stages")
    step("span")


VALUES: dict[str, tuple[str, Any]] = {
    "a rate that is text": ("lr", "0.1"),
    "a rate that is a truth": ("lr", True),
    "a rate of several numbers": ("lr", [0.1]),
    "one number for two": ("betas", 0.9),
    "one of two": ("betas", {"kind of value": "tuple", "items": [0.9]}),
    "text in two": ("betas", {"kind of value": "tuple", "items": [0.9, "0.99"]}),
    "nothing": ("weight_decay", None),
    "a truth that is text": ("amsgrad", "no"),
    "a number that is a list": ("eps", [1]),
}


def adam() -> onefold.Trainer:
    model = line()
    return make_trainer(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))


def changed(folder: Path, key: str, value: Any) -> None:
    record = json.loads((folder / "run.json").read_text())
    record["optimizer"]["settings"][0][key] = value
    seal(folder, json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n")


@for_each("kind", VALUES)
def test_settings_of_the_wrong_kind_are_refused_when_they_are_loaded(
    kind: str, tmp_path: Path
) -> None:
    key, value = VALUES[kind]
    trainer = adam()
    trainer.step(points(8))
    changed(trainer.save(tmp_path), key, value)
    again = adam()
    before = again.fingerprint()
    words = rf"{key} of the optimizer's group 0 is .* in the checkpoint and .* in this script"
    with pytest.raises(CheckpointError, match=words):
        again.load(tmp_path)
    assert again.fingerprint() == before
    again.step(points(8))


def of_many(values: list[Any]) -> dict[str, Any]:
    return {"kind of value": "tuple", "items": values}


NAN = {"kind of value": "float", "items": "nan"}
RANGES: dict[str, tuple[str, Any, str]] = {
    "a rate below 0": ("lr", -1, "lr .* is -1 .*AdamW refuses .Invalid learning rate: -1.*"),
    "a rate that is no number": ("lr", NAN, "lr .* is nan .*, not finite.*"),
    "a beta of 2": ("betas", of_many([2.0, 0.9]), r"betas .* is \(2.0, 0.9\) .*index 0: 2.0.*"),
    "a beta that is no number": ("betas", of_many([0.9, NAN]), r"betas .* is \(0.9, nan\) .*"),
    "a decay without end": (
        "weight_decay",
        {"kind of value": "float", "items": "inf"},
        "weight_decay .* is inf .*",
    ),
}


@for_each("kind", RANGES)
def test_settings_out_of_range_are_refused_when_they_are_loaded(kind: str, tmp_path: Path) -> None:
    key, value, words = RANGES[kind]
    trainer = adam()
    trainer.step(points(8))
    changed(trainer.save(tmp_path), key, value)
    again = adam()
    before, drawn = again.fingerprint(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"{words}expected settings that AdamW takes"):
        again.load(tmp_path)
    assert again.fingerprint() == before
    assert engine_in(again).update.optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(torch.get_rng_state(), drawn)
    again.load(tmp_path, changed=["optimizer"])


def test_settings_of_several_optimizers_are_asked_of_each(tmp_path: Path) -> None:
    def several() -> onefold.Trainer:
        model = line()
        sgd = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9, nesterov=True)
        optimizers = [torch.optim.AdamW([model.bias]), sgd]
        return make_trainer(model, optimizer=optimizers)  # type: ignore[arg-type]

    trainer = several()
    trainer.step(points(8))
    folder = trainer.save(tmp_path)
    several().load(tmp_path)
    record = json.loads((folder / "run.json").read_text())
    record["optimizer"]["settings"][1]["momentum"] = 0
    seal(folder, json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n")
    words = "momentum of the optimizer's group 1 is 0 .*SGD refuses .Nesterov momentum requires"
    with pytest.raises(CheckpointError, match=words):
        several().load(tmp_path)


class Choosy(torch.optim.SGD):
    """Takes other arguments than its settings, so that nobody else can make one."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__(model.parameters(), lr=rate)


@for_each("made", [lambda m: Choosy(m, 0.1), lambda m: by_hand(m)])
def test_what_a_class_does_not_check_is_loaded(
    made: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    trainer = make_trainer(model := line(), optimizer=made(model))
    trainer.step(points(8))
    trainer.save(tmp_path)
    again = make_trainer(other := line(), optimizer=made(other))
    again.load(tmp_path)
    again.step(points(8))


def by_hand(model: nn.Module) -> torch.optim.Optimizer:
    """Goes uphill, by a rate that the class would refuse."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = -0.1
    return optimizer


@for_each(
    ("key", "value"),
    [("lr", 1), ("lr", {"kind of value": "tensor", "dtype": "float32", "items": 0.5})],
)
def test_numbers_of_any_type_may_be_settings(key: str, value: Any, tmp_path: Path) -> None:
    trainer = adam()
    trainer.step(points(8))
    changed(trainer.save(tmp_path), key, value)
    again = adam()
    again.load(tmp_path)
    again.step(points(8))


SURVIVES = """
import sys
import torch, onefold
from onefold.run.world import current_world

def loss(model, batch):
    if trainer.steps == 1 and current_world().rank == 1:
        raise KeyError("the first")
    return model(batch).square().mean(dim=1)

model = torch.nn.Linear(3, 1)
trainer = onefold.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, shards=2)
for _ in range(3):
    try:
        trainer.step(torch.ones(4, 3))
    except Exception as error:
        print("caught", error)
"""

SPLITS = """
import os
import torch, onefold
from onefold.run.world import current_world


class Split(torch.utils.data.IterableDataset):
    def __iter__(self):
        world = current_world()
        yield from torch.arange(48.0).view(16, 3)[world.rank :: world.size]

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trainer = onefold.Trainer(model, optimizer, lambda m, x: m(x).square().mean(dim=1), shards=2)
for batch in trainer.loader(Split(), batch_size=4):
    trainer.step(batch)
"""


@pytest.mark.processes
@pytest.mark.parametrize("exchange", ["shared", "collective"])
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (SURVIVES, "has left its run, because this device failed in step 2: .*'the first'"),
        (SPLITS, "takes its own part by rank and world size must drop that split"),
    ],
    ids=["survives", "splits"],
)
def test_what_launched_runs_say(script: str, words: str, exchange: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "onefold", "run", "--devices", "cpu:2", "--exchange", exchange]
    done = subprocess.run(
        [*command, "--logs", str(tmp_path / "logs"), str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    said = done.stdout + done.stderr
    assert re.search(words, said), said
