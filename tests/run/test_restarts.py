"""From which checkpoint a run goes on after failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from onefold.core.options import RunOptions
from onefold.run import launch
from onefold.run.crew import Outcome
from onefold.run.devices import Selection
from onefold.run.launch import checkpoints_to_leave_out, newest_step, words_of_restart
from tests.tables import for_each


@for_each(
    ("failed_in", "left_out"),
    [
        ([], 0),
        ([6], 0),
        ([6, 6], 1),
        ([6, 6, 6], 2),
        ([6, 7], 0),
        ([6, 6, 9], 0),
        ([9, 6, 6], 1),
        ([6, 9, 6], 0),
        ([-1, -1], 1),
    ],
    ids=str,
)
def test_each_further_failure_in_one_step_goes_back_by_one(
    failed_in: list[int], left_out: int
) -> None:
    assert checkpoints_to_leave_out(failed_in) == left_out
    assert checkpoints_to_leave_out(tuple(failed_in)) == left_out


@for_each("failed_in", [[], [6], [6, 7], [6, 6, 9]], ids=str)
def test_nothing_is_said_of_the_newest_checkpoint(failed_in: list[int]) -> None:
    assert words_of_restart(failed_in) == ""


@for_each(
    ("failed_in", "words"),
    [
        ([6, 6], "one checkpoint further back than the newest: it failed in step 6 2 times"),
        ([3, 6, 6, 6], "2 checkpoints further back than the newest: it failed in step 6 3 times"),
        ([0, 0], "one checkpoint further back than the newest: it failed in step 0 2 times"),
        ([-1, -1], "one checkpoint further back than the newest: it failed before the first step"),
    ],
    ids=str,
)
def test_it_is_said_how_far_it_goes_back_and_why(failed_in: list[int], words: str) -> None:
    said = words_of_restart(failed_in)
    assert said.startswith(f", {words}")
    assert said.endswith("in a row")


@for_each(
    ("names", "step"),
    [
        ([], -1),
        (["step-00000003", "step-00000012", "step-00000007.part", ".step-00000099"], 12),
        (["other", "step-x"], -1),
    ],
    ids=str,
)
def test_how_far_a_run_has_come_is_seen_by_its_checkpoints(
    names: list[str], step: int, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    assert newest_step(str(tmp_path)) == step
    assert newest_step("") == newest_step(str(tmp_path / "nowhere")) == -1


class Scripted:
    """A run whose attempts fail as was written down: the step that was saved, and who was lost."""

    def __init__(self, folder: Path, attempts: list[tuple[int, int]]) -> None:
        self.folder, self.attempts = folder, attempts
        self.devices: list[int] = []

    def attempt(self, run: launch._Run, leave_out: int) -> Outcome:
        self.devices.append(len(run.selection.devices))
        saved, lost = self.attempts.pop(0)
        if saved >= 0:
            (self.folder / f"step-{saved:08d}").mkdir(exist_ok=True)
        if not self.attempts:
            return Outcome(0, final=True)
        return Outcome(1, "a failure", lost=lost, failed=True)


def supervised(
    attempts: list[tuple[int, int]], folder: Path, patch: pytest.MonkeyPatch, **options: object
) -> tuple[int, list[int]]:
    scripted = Scripted(folder, [*attempts, (-1, -1)])
    patch.setattr(launch._Run, "attempt", lambda run, leave_out: scripted.attempt(run, leave_out))
    chosen = RunOptions(checkpoint=str(folder), **options)  # type: ignore[arg-type]
    devices = Selection(("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
    outcome = launch.supervise(["train.py"], devices, chosen)
    return outcome.exit_code, scripted.devices


@for_each(
    ("saved", "code", "attempts"),
    [
        ([-1, -1], 0, 3),
        ([-1, -1, -1], 1, 3),
        ([3, 3, 3], 1, 3),
        ([3, 6, 9, 12, 15], 0, 6),
        ([3, 3, 6, 6, 9], 0, 6),
        ([9, 6, 6], 1, 3),
        ([3, 6, 6, 6, 9], 1, 4),
    ],
    ids=str,
)
def test_failures_are_counted_since_the_last_progress(
    saved: list[int], code: int, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = [(step, -1) for step in saved]
    ended, devices = supervised(came, tmp_path, monkeypatch, restarts=2)
    assert (ended, len(devices)) == (code, attempts)


@for_each(
    ("lost", "options", "devices"),
    [
        ([1, 0, -1], {}, [4, 4, 4, 4]),
        ([1, 0, -1], {"restarts_with": "fewer"}, [4, 3, 2, 2]),
        ([0, 0, 0, 0, 0], {"restarts_with": "fewer"}, [4, 3, 2, 1, 1, 1]),
        ([3, 1], {"restarts_with": "fewer", "keep": "stages:2"}, [4, 2, 2]),
        ([3, 1], {"restarts_with": "fewer", "keep": "stages"}, [4, 3, 2]),
    ],
    ids=str,
)
def test_a_device_that_was_lost_may_be_left_out(
    lost: list[int],
    options: dict[str, object],
    devices: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    came = [(-1, rank) for rank in lost]
    ended, used = supervised(came, tmp_path, monkeypatch, restarts=9, **options)
    assert (ended, used) == (0, devices)
    said = capsys.readouterr().err
    assert (", with 2 devices" in said) == (2 in devices)
