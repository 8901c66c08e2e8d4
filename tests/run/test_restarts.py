"""From which checkpoint a run goes on after failures."""

from __future__ import annotations

import pytest

from onefold.run.restarts import checkpoints_to_leave_out, words_of_restart


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("failed_in", [[], [6], [6, 7], [6, 6, 9]], ids=str)
def test_nothing_is_said_of_the_newest_checkpoint(failed_in: list[int]) -> None:
    assert words_of_restart(failed_in) == ""


@pytest.mark.parametrize(
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
