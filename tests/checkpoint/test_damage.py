"""Whatever happens to the files of a checkpoint, `load` accepts them as they were or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import CheckpointError
from tests.checkpoint.folders import reseal
from tests.small import make_trainer, points
from tests.tables import for_each, some

FILES = ["run.json", "model.safetensors", "optimizer.safetensors", "buffers.safetensors"]
OLDER, NEWER = "step-00000002", "step-00000004"
State = dict[str, bytes]


class Passing(nn.Module):
    passing: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


def trainer_of(seed: int) -> onefold.Trainer:
    torch.manual_seed(seed)
    model = Passing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return make_trainer(model, optimizer=optimizer, scheduler=scheduler, seed=seed)


def step(trainer: onefold.Trainer) -> None:
    """The same from the same state; changes every tensor."""
    trainer.step(points(8 + trainer.steps))
    model: Any = trainer.model
    model.passing.fill_(trainer.steps)


def state(trainer: onefold.Trainer, folder: Path) -> State:
    """All of it, to the last bit: the files of a checkpoint made now, whenever that is."""
    saved = trainer.save(folder / "state")
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    told = json.loads(files["run.json"]) | {"time": "", "sha256": ""}
    files["run.json"] = json.dumps(told).encode()
    shutil.rmtree(folder / "state")
    return files


class Saved:
    """Checkpoints of two steps of a run, with its states by step, and one of another run."""

    def __init__(self, root: Path, states: dict[int, State]) -> None:
        self.root, self.states, self.directory = root, states, root / "run"
        self.older, self.newer = self.directory / OLDER, self.directory / NEWER
        self.other = root / "other" / NEWER

    def copied(self, place: Path) -> Saved:
        return Saved(shutil.copytree(self.root, place / "saved"), self.states)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.set_num_threads(1)
    saved = Saved(tmp_path_factory.mktemp("originals"), {})
    one, other = trainer_of(1), trainer_of(2)
    for number in range(1, 5):
        step(one)
        step(other)
        saved.states[number] = state(one, saved.root)
        if number in (2, 4):
            one.save(saved.directory)
    model: Any = other.model
    model.passing.fill_(-1)
    other.save(saved.other.parent)
    return saved


def elsewhere() -> onefold.Trainer:
    trainer = trainer_of(1)
    trainer.step(points(20))
    return trainer


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path, Saved], object]] = {
    "cut to nothing": lambda path, saved: cut(path, 0),
    "one byte more": lambda path, saved: path.write_bytes(path.read_bytes() + b"\0"),
    "the last byte another": lambda path, saved: path.write_bytes(path.read_bytes()[:-1] + b"\1"),
    "missing": lambda path, saved: path.unlink(),
    "a folder": lambda path, saved: replaced(path, Path.mkdir),
    "a FIFO": lambda path, saved: replaced(path, os.mkfifo),
    "a device": lambda path, saved: replaced(path, lambda link: link.symlink_to("/dev/zero")),
    "of the older": lambda path, saved: shutil.copy(saved.older / path.name, path),
    "of another run": lambda path, saved: shutil.copy(saved.other / path.name, path),
}


def refusal(trainer: onefold.Trainer, path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        trainer.load(path)
    return str(caught.value)


def check_named(said: str, folder: Path, name: str) -> None:
    assert re.search(rf"{re.escape(str(folder))}( is damaged)?: (its )?{re.escape(name)} ", said)


def check_goes_on(trainer: onefold.Trainer, saved: Saved, folder: Path) -> None:
    """It is where the older one was saved, and goes on as the run then went on."""
    assert state(trainer, folder) == saved.states[2]
    step(trainer)
    step(trainer)
    assert state(trainer, folder) == saved.states[4]


@pytest.mark.parametrize("name", some(FILES, 2))
@for_each("kind", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_older_used(
    originals: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    saved, trainer = originals.copied(tmp_path), elsewhere()
    DAMAGES[kind](saved.newer / name, saved)
    # The record of another run of the same step is whole; then it is the files that are not.
    blamed = "model.safetensors" if (name, kind) == ("run.json", "of another run") else name
    before = state(trainer, tmp_path)
    check_named(refusal(trainer, saved.newer), saved.newer, blamed)
    assert state(trainer, tmp_path) == before
    assert trainer.load(saved.directory).folder == saved.older
    (record,) = caplog.records
    check_named(record.getMessage(), saved.newer, blamed)
    assert record.getMessage().endswith(f"; using {saved.older} instead")
    check_goes_on(trainer, saved, tmp_path)
    cut(saved.older / "optimizer.safetensors", -1)
    before = state(trainer, tmp_path)
    said = refusal(trainer, saved.directory)
    assert said.startswith(f"no checkpoint in {saved.directory} is usable: ")
    check_named(said, saved.older, "optimizer.safetensors")
    check_named(said, saved.newer, blamed)
    assert state(trainer, tmp_path) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_no_byte_may_be_another(originals: Saved, tmp_path: Path, name: str, part: int) -> None:
    """Of each three places, one in a fast run; each in another way."""
    saved, trainer = originals.copied(tmp_path), elsewhere()
    path = saved.newer / name
    whole = path.read_bytes()
    before = state(trainer, tmp_path)
    for place in range(part, len(whole), 3):
        head, tail = whole[:place], whole[place + 1 :]
        flipped = (head + bytes([whole[place] ^ flip]) + tail for flip in (0x01, 0x20, 0x80, 0xFF))
        path.write_bytes([*flipped, head, head + tail][place // 3 % 6])
        check_named(refusal(trainer, saved.newer), saved.newer, name)
    assert state(trainer, tmp_path) == before
    path.write_bytes(whole)
    trainer.load(saved.newer)
    assert state(trainer, tmp_path) == saved.states[4]


@for_each("name", ["step-00000007", "step-00000003"])
def test_a_folder_that_is_no_longer_that_of_its_checkpoint(
    originals: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    saved, trainer = originals.copied(tmp_path), elsewhere()
    folder = saved.newer.rename(saved.newer.with_name(name))
    text = "its run.json belongs to step 4, from another folder"
    assert refusal(trainer, folder) == f"{folder} is damaged: {text}"
    trainer.load(saved.directory)
    assert caplog.messages == [f"{folder} is damaged: {text}; using {saved.older} instead"]
    check_goes_on(trainer, saved, tmp_path)


@for_each(
    ("changes", "words"),
    [
        ({"seed": 2}, "saved with seed 2, but this run has 1"),
        ({"format": 2}, "has format 2, but this version of onefold reads formats up to 1: install"),
    ],
)
def test_another_run_or_format_is_no_reason_to_use_an_older_one(
    originals: Saved, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """It is whole: somebody has mixed up two runs, or has a newer onefold."""
    saved, trainer = originals.copied(tmp_path), elsewhere()
    reseal(saved.newer, **changes)
    before = state(trainer, tmp_path)
    for path in (saved.newer, saved.directory):
        assert words in refusal(trainer, path)
    assert state(trainer, tmp_path) == before


@for_each(
    ("make", "text"),
    [
        (Path.mkdir, "this one is empty"),
        (lambda path: None, "this folder does not exist"),
        (lambda path: path.write_text("mine"), "this is a file"),
        (lambda path: (path / "step-4").mkdir(parents=True), "this one contains step-4"),
    ],
)
def test_a_place_without_checkpoints_is_told(tmp_path: Path, make: Any, text: str) -> None:
    make(tmp_path / "run")
    said = refusal(trainer_of(1), tmp_path / "run")
    words = f"there is no checkpoint in {tmp_path / 'run'}: trainer.save creates folders named"
    assert said.startswith(words)
    assert said.endswith(text)
