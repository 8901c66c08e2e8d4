"""What a run keeps in its checkpoints, and what somebody else has put there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from onefold.errors import CheckpointError
from onefold.jobs.training import read_saved
from tests.tables import for_each

BEST = {"epoch": 0, "score": "iou", "value": 0.5, "checkpoint": "checkpoints/step-00000003"}
SAVED = {"part": {"samples": 8.0, "total": math.inf}, "epochs_done": 1, "best": BEST}


def test_what_was_saved_is_read() -> None:
    assert read_saved(SAVED, Path()) == (SAVED["part"], 1, BEST)
    assert read_saved({"part": {}, "epochs_done": 0, "best": None}, Path()) == ({}, 0, None)
    _, _, best = read_saved({**SAVED, "best": {**BEST, "value": math.nan}}, Path())
    assert best is not None
    assert math.isnan(best["value"])


@for_each(
    "extra",
    [
        None,
        3,
        {},
        {**SAVED, "part": 3},
        {**SAVED, "part": {"samples": "x"}},
        {**SAVED, "epochs_done": "x"},
        {**SAVED, "epochs_done": -1},
        {**SAVED, "epochs_done": True},
        {**SAVED, "best": 3},
        {**SAVED, "best": {"epoch": 0}},
        {**SAVED, "best": {**BEST, "checkpoint": "../../other"}},
        {**SAVED, "best": {**BEST, "checkpoint": "checkpoints/step-00000003\n"}},
    ],
)
def test_what_another_script_has_saved_is_refused(extra: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected checkpoints of onefold train, the newest"):
        read_saved(extra, tmp_path)
