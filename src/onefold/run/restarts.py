"""From which checkpoint a run is started again, by how it has failed before."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["checkpoints_to_leave_out", "words_of_restart"]


def checkpoints_to_leave_out(failed_in: Sequence[int]) -> int:
    """How many of the newest checkpoints are passed over by the next attempt.

    The first failure in a step may be an accident. What fails there again may have its cause in the
    checkpoint, so each further failure in the same step goes back by one.

    Args:
        failed_in: for each attempt so far the step in which it failed.

    >>> [checkpoints_to_leave_out(failed_in) for failed_in in ([6], [6, 6], [6, 6, 9])]
    [0, 1, 0]
    """
    same = 0
    for step in reversed(failed_in):
        if step != failed_in[-1]:
            break
        same += 1
    return max(0, same - 1)


def words_of_restart(failed_in: Sequence[int]) -> str:
    """What is said of it: nothing, where the newest checkpoint is used."""
    back = checkpoints_to_leave_out(failed_in)
    if not back:
        return ""
    step = failed_in[-1]
    where = f"in step {step}" if step >= 0 else "before the first step"
    further = "one checkpoint" if back == 1 else f"{back} checkpoints"
    return f", {further} further back than the newest: it failed {where} {back + 1} times in a row"
