"""Chooses the checkpoint from which a failed run is started again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["checkpoints_to_leave_out", "newest_step", "words_of_restart"]


def newest_step(directory: str) -> int:
    """The highest step of the checkpoints in a directory; -1 if there are none."""
    names = (path.name for path in Path(directory).glob("step-*")) if directory else ()
    found = (re.fullmatch(r"step-(\d+)", name) for name in names)
    return max((int(each[1]) for each in found if each), default=-1)


def checkpoints_to_leave_out(failed_in: Sequence[int]) -> int:
    """How many of the newest checkpoints the next attempt passes over.

    The first failure in a step may be an accident. A second one in the same step may be due to the
    checkpoint itself, so each further failure there goes back by one.

    Args:
        failed_in: the step in which each attempt so far has failed.

    >>> [checkpoints_to_leave_out(failed_in) for failed_in in ([6], [6, 6], [6, 6, 9])]
    [0, 1, 0]
    """
    same = 0
    for step in reversed(failed_in):
        if step != failed_in[-1]:
            break
        same += 1
    return max(0, same - 1)


def words_of_restart(failed_in: Sequence[int], devices: int = 0) -> str:
    """How a message mentions it: not at all if the newest checkpoint is used.

    Args:
        failed_in: the step in which each attempt so far has failed.
        devices: how many devices are left, if some were left out.
    """
    left = f", with {devices} device{'' if devices == 1 else 's'}" if devices else ""
    back = checkpoints_to_leave_out(failed_in)
    if not back:
        return left
    step = failed_in[-1]
    where = f"in step {step}" if step >= 0 else "before the first step"
    further = "one checkpoint" if back == 1 else f"{back} checkpoints"
    newest = f"further back than the newest: it failed {where} {back + 1} times in a row"
    return f"{left}, {further} {newest}"
