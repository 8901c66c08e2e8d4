"""A Trainer's part in a comparison: checkpoints, and when the script has done enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onefold
from onefold.core.world import World
from tests.small import line, points, square
from tests.verifying.compared import Compared, compared

__all__ = ["compared"]


def in_a_plain_run(compared: Compared) -> None:
    compared.world = World()


def test_checkpoints_are_written_aside(compared: Compared, tmp_path: Path) -> None:
    trainer = compared.trainer(line(), square)
    trainer.step(points(6))
    folder = trainer.save(tmp_path / "kept")
    assert folder.is_relative_to(compared.run)
    assert not (tmp_path / "kept").exists()
    assert trainer.load(tmp_path / "kept").step == 1
    assert trainer.load(folder).step == 1
    assert trainer.load(tmp_path / "kept" / folder.name).folder == folder


def test_what_a_real_run_left_is_read_where_it_is_needed(
    compared: Compared, tmp_path: Path
) -> None:
    comparison = compared.world
    in_a_plain_run(compared)
    real = compared.trainer(line().double(), square)
    for _ in range(2):
        real.step(tuple(each.double() for each in points(6)))
    real.save(tmp_path / "left")
    compared.world = comparison
    trainer = compared.trainer(line(), square)
    assert trainer.load(tmp_path / "left", if_any=True) is None
    assert trainer.steps == 0
    assert trainer.load(tmp_path / "left").step == 2
    trainer.step(points(6))
    trainer.save(tmp_path / "left")
    assert trainer.load(tmp_path / "left").step == 3
    assert [path.name for path in (tmp_path / "left").iterdir()] == ["step-00000002"]


def steps_until_the_end(*trainers: onefold.Trainer, later: int = 0) -> list[int]:
    """Of each; the last one begins after so many steps of the others."""

    def script() -> None:
        for turn in range(100):
            for trainer in trainers if turn >= later else trainers[:-1]:
                trainer.step(points(6))

    with pytest.raises(SystemExit, match="0"):
        script()
    return [trainer.steps for trainer in trainers]


def test_a_script_ends_when_all_trainers_have_made_their_steps(compared: Compared) -> None:
    first, second = (compared.trainer(line(), square) for _ in range(2))
    assert steps_until_the_end(first, second, later=4) == [7, 3]
    assert [len(compared.lines(trainer)) - 1 for trainer in (first, second)] == [3, 3]


def test_a_trainer_that_makes_no_step_is_not_waited_for(compared: Compared) -> None:
    first, second = (compared.trainer(line(), square) for _ in range(2))
    assert steps_until_the_end(first, second, later=50) == [30, 0]
    assert [len(compared.lines(trainer)) - 1 for trainer in (first, second)] == [3, 0]


def test_a_plain_run_is_left_alone(compared: Compared, tmp_path: Path) -> None:
    in_a_plain_run(compared)
    model = line()
    trainer = compared.trainer(model, square)
    for _ in range(5):
        trainer.step(points(6))
    assert trainer.save(tmp_path / "kept").is_relative_to(tmp_path / "kept")
    assert model.weight.dtype is torch.float32
    assert list(tmp_path.glob("*.jsonl")) == []
