"""Whatever happens to the files of a checkpoint, `load` accepts them as they were or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import CheckpointError
from tests.small import make_trainer, points

FILES = ["run.json", "model.safetensors", "optimizer.safetensors", "buffers.safetensors"]
OLDER, NEWER = "step-00000002", "step-00000004"
State = dict[str, bytes]


class Passing(nn.Module):
    """Has a buffer that its state_dict leaves out."""

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
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return make_trainer(model, optimizer=optimizer, schedule=schedule, seed=seed)


def step(trainer: onefold.Trainer) -> None:
    """The same from the same state; changes every tensor."""
    trainer.step(points(8 + trainer.steps))
    trainer.model.passing.fill_(trainer.steps)


def state(trainer: onefold.Trainer, folder: Path) -> State:
    """All of it, to the last bit: the files of a checkpoint made now, whenever that is."""
    saved = trainer.save(folder / "state")
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    told = json.loads(files["run.json"]) | {"time": "", "sha256": ""}
    files["run.json"] = json.dumps(told).encode()
    shutil.rmtree(folder / "state")
    return files


@dataclass(frozen=True)
class Saved:
    """Checkpoints of two steps of a run, and one of another run."""

    directory: Path
    other: Path
    states: dict[int, State]
    """Of the run, by step."""

    @property
    def older(self) -> Path:
        return self.directory / OLDER

    @property
    def newer(self) -> Path:
        return self.directory / NEWER


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("originals")
    saved = Saved(folder / "run", folder / "other" / NEWER, {})
    one, other = trainer_of(1), trainer_of(2)
    for number in range(1, 5):
        step(one)
        step(other)
        saved.states[number] = state(one, folder)
        if number in (2, 4):
            one.save(saved.directory)
    other.model.passing.fill_(-1)
    other.save(folder / "other")
    for path in (saved.older, saved.newer, saved.other):
        assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    return saved


@pytest.fixture
def saved(originals: Saved, tmp_path: Path) -> Saved:
    """Copies, to be damaged."""
    directory, other = tmp_path / "run", tmp_path / "other" / NEWER
    shutil.copytree(originals.directory, directory)
    shutil.copytree(originals.other, other)
    return Saved(directory, other, originals.states)


@pytest.fixture
def trainer() -> onefold.Trainer:
    """Another state than all that were saved."""
    trainer = trainer_of(1)
    trainer.step(points(20))
    return trainer


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def turn_into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def size(path: Path) -> int:
    return path.stat().st_size


DAMAGES: dict[str, Callable[[Path, Saved], object]] = {
    "cut by one byte": lambda path, saved: cut(path, -1),
    "cut to half": lambda path, saved: cut(path, size(path) // 2),
    "cut to nothing": lambda path, saved: cut(path, 0),
    "one byte more": lambda path, saved: path.write_bytes(path.read_bytes() + b"\0"),
    "first byte flipped": lambda path, saved: flip(path, 0),
    "byte of the header flipped": lambda path, saved: flip(path, 20),
    "byte in the middle flipped": lambda path, saved: flip(path, size(path) // 2),
    "last byte flipped": lambda path, saved: flip(path, -1),
    "missing": lambda path, saved: path.unlink(),
    "a folder": lambda path, saved: turn_into_folder(path),
    "of the older": lambda path, saved: shutil.copy(saved.older / path.name, path),
    "of another run": lambda path, saved: shutil.copy(saved.other / path.name, path),
}
EACH_DAMAGE = [(name, kind) for name in FILES for kind in DAMAGES]


def file_blamed(name: str, kind: str) -> str:
    """The record of another run of the same step is whole; then it is the files that are not."""
    return "model.safetensors" if (name, kind) == ("run.json", "of another run") else name


def refusal(trainer: onefold.Trainer, path: Path) -> str:
    """What is said when a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        trainer.load(path)
    return str(caught.value)


def check_named(said: str, folder: Path, name: str) -> None:
    assert re.search(rf"{re.escape(str(folder))}( is damaged)?: (its )?{re.escape(name)} ", said)


@pytest.mark.parametrize(("name", "kind"), EACH_DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_nothing_is_changed(
    saved: Saved, trainer: onefold.Trainer, tmp_path: Path, name: str, kind: str
) -> None:
    DAMAGES[kind](saved.newer / name, saved)
    before = state(trainer, tmp_path)
    check_named(refusal(trainer, saved.newer), saved.newer, file_blamed(name, kind))
    assert state(trainer, tmp_path) == before


@pytest.mark.parametrize(("name", "kind"), EACH_DAMAGE)
def test_the_older_is_used_in_place_of_a_damaged_one(
    saved: Saved,
    trainer: onefold.Trainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    kind: str,
) -> None:
    DAMAGES[kind](saved.newer / name, saved)
    with caplog.at_level(logging.WARNING, "onefold"):
        assert trainer.load(saved.directory).folder == saved.older
    (record,) = caplog.records
    check_named(record.getMessage(), saved.newer, file_blamed(name, kind))
    assert record.getMessage().endswith(f"; {saved.older} is used instead")
    check_goes_on(trainer, saved, tmp_path)


def check_goes_on(trainer: onefold.Trainer, saved: Saved, folder: Path) -> None:
    """It is where the older one was saved, and goes on as the run then went on."""
    assert state(trainer, folder) == saved.states[2]
    step(trainer)
    step(trainer)
    assert state(trainer, folder) == saved.states[4]


@pytest.mark.parametrize(("name", "kind"), EACH_DAMAGE)
def test_with_no_good_one_left_it_is_told_what_is_wrong_with_each(
    saved: Saved, trainer: onefold.Trainer, tmp_path: Path, name: str, kind: str
) -> None:
    DAMAGES[kind](saved.newer / name, saved)
    cut(saved.older / "optimizer.safetensors", -1)
    before = state(trainer, tmp_path)
    said = refusal(trainer, saved.directory)
    assert said.startswith(f"no checkpoint of {saved.directory} can be used: ")
    check_named(said, saved.older, "optimizer.safetensors")
    check_named(said, saved.newer, file_blamed(name, kind))
    assert state(trainer, tmp_path) == before


FLIPS = (0x01, 0x20, 0x80, 0xFF)


def check_flips(
    saved: Saved,
    trainer: onefold.Trainer,
    folder: Path,
    name: str,
    flips: Callable[[int], tuple[int, ...]],
) -> None:
    """Change each byte of a file, at each place in the ways that are asked for."""
    path = saved.newer / name
    whole = path.read_bytes()
    before = state(trainer, folder)
    for place in range(len(whole)):
        for flip in flips(place):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            check_named(refusal(trainer, saved.newer), saved.newer, name)
    assert state(trainer, folder) == before
    path.write_bytes(whole)
    trainer.load(saved.newer)
    assert state(trainer, folder) == saved.states[4]


@pytest.mark.parametrize("name", FILES)
def test_no_byte_can_be_another(
    saved: Saved, trainer: onefold.Trainer, tmp_path: Path, name: str
) -> None:
    check_flips(saved, trainer, tmp_path, name, lambda place: (FLIPS[place % len(FLIPS)],))


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_no_byte_can_be_another_in_any_way(
    saved: Saved, trainer: onefold.Trainer, tmp_path: Path, name: str
) -> None:
    check_flips(saved, trainer, tmp_path, name, lambda place: FLIPS)


@pytest.mark.parametrize("name", FILES)
def test_no_byte_can_be_missing(saved: Saved, trainer: onefold.Trainer, name: str) -> None:
    path = saved.newer / name
    whole = path.read_bytes()
    for place in range(len(whole)):
        cut_off, taken_out = whole[:place], whole[:place] + whole[place + 1 :]
        path.write_bytes(taken_out if place % 2 else cut_off)
        check_named(refusal(trainer, saved.newer), saved.newer, name)


def empty(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (empty, "run.json is missing"),
    "renamed to a later step": (
        lambda folder: folder.rename(folder.with_name("step-00000007")),
        "its run.json is that of step 4, from another folder",
    ),
    "renamed to an earlier step, later than the older": (
        lambda folder: folder.rename(folder.with_name("step-00000003")),
        "its run.json is that of step 4, from another folder",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_no_longer_that_of_its_checkpoint(
    saved: Saved,
    trainer: onefold.Trainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    damage, text = FOLDERS[kind]
    folder = damage(saved.newer)
    before = state(trainer, tmp_path)
    assert refusal(trainer, folder) == f"{folder} is damaged: {text}"
    assert state(trainer, tmp_path) == before
    with caplog.at_level(logging.WARNING, "onefold"):
        trainer.load(saved.directory)
    (record,) = caplog.records
    assert record.getMessage() == f"{folder} is damaged: {text}; {saved.older} is used instead"
    check_goes_on(trainer, saved, tmp_path)


def test_a_checkpoint_of_another_run_is_not_taken_for_this_one(
    saved: Saved, trainer: onefold.Trainer, tmp_path: Path
) -> None:
    """It is whole, so an older one is no way out: somebody has mixed up two runs."""
    shutil.rmtree(saved.newer)
    shutil.copytree(saved.other, saved.newer)
    before = state(trainer, tmp_path)
    for path in (saved.newer, saved.directory):
        assert "saved with seed 2, this run has 1" in refusal(trainer, path)
    assert state(trainer, tmp_path) == before


def test_a_newer_format_is_refused_and_no_older_one_used(
    saved: Saved, trainer: onefold.Trainer, tmp_path: Path
) -> None:
    path = saved.newer / "run.json"
    record = {**json.loads(path.read_text()), "sha256": "0" * 64, "format": 2}
    text = json.dumps(record, indent=2) + "\n"
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))
    before = state(trainer, tmp_path)
    for place in (saved.newer, saved.directory):
        assert refusal(trainer, place) == (
            f"{saved.newer} is of format 2, this version of onefold knows formats up to 1: install "
            f"a newer onefold"
        )
    assert state(trainer, tmp_path) == before


def make_foreign(path: Path) -> None:
    (path / "step-4").mkdir(parents=True)
    (path / "notes.txt").write_text("mine")


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (Path.mkdir, "it is empty"),
    "missing": (lambda path: None, "there is no such folder"),
    "a file": (lambda path: path.write_text("mine"), "that is a file"),
    "of somebody else": (make_foreign, "it holds notes.txt, step-4"),
}


@pytest.mark.parametrize("name", ["run", NEWER])
@pytest.mark.parametrize("kind", PLACES)
def test_a_place_without_checkpoints_is_told(
    trainer: onefold.Trainer, tmp_path: Path, kind: str, name: str
) -> None:
    make, text = PLACES[kind]
    path = tmp_path / name
    make(path)
    before = state(trainer, tmp_path)
    said = refusal(trainer, path)
    if name == NEWER and path.is_dir():
        assert said == f"{path} is damaged: run.json is missing"
    else:
        assert said.startswith(f"there is no checkpoint in {path}: expected folders called")
        assert said.endswith(text)
    assert state(trainer, tmp_path) == before


@pytest.mark.parametrize("name", FILES)
def test_the_newest_is_missed_though_its_step_is_an_earlier_one(
    saved: Saved,
    trainer: onefold.Trainer,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    """The run went back from step 4 to step 2 and has saved step 3 since."""
    trainer.load(saved.older)
    step(trainer)
    newest = trainer.save(saved.directory)
    cut(newest / name, -1)
    with caplog.at_level(logging.WARNING, "onefold"):
        assert trainer.load(saved.directory).folder == saved.newer
    (record,) = caplog.records
    check_named(record.getMessage(), newest, name)
    assert record.getMessage().endswith(f"; {saved.newer} is used instead")
