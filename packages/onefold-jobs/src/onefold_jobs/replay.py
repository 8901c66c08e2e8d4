"""Copies a run of a job so that ``onefold replay`` can compute one of its steps again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from onefold_jobs.runfolder import CHECKPOINTS, CONFIG, RUN, SCAN, read_run

__all__ = ["copy_run"]


def copy_run(run: Path, folder: Path, checkpoints: Sequence[str]) -> list[str] | None:
    """Copy a run as it was after one of its checkpoints; an entry point names this function.

    Args:
        run: the folder of any run.
        folder: the folder that the copy is made in.
        checkpoints: names of checkpoints; the last one that is still there is used.

    Returns:
        The arguments of ``onefold`` that resume the copy; None if no job made the run.

    Raises:
        DataError: ``run.json`` is damaged.
    """
    if not (run / CONFIG).is_file():
        return None
    facts = read_run(run)
    copy = folder / run.name
    (copy / CHECKPOINTS).mkdir(parents=True)
    for name in (CONFIG, SCAN):
        if (run / name).is_file():
            shutil.copyfile(run / name, copy / name)
    (copy / RUN).write_text(json.dumps({**facts, "finished": None, "ended": None}))
    there = [each for each in checkpoints if (run / CHECKPOINTS / each / RUN).is_file()]
    for each in there[-1:]:
        (copy / CHECKPOINTS / each).symlink_to(run / CHECKPOINTS / each)
    named = ["--runs", str(folder), "--name", copy.name]
    return ["train", facts["job"], "--resume", *named, "--max-time", "999999h"]
