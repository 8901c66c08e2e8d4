"""Copies a job's run so that ``onefold replay`` can recompute one of its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from onefold.files import read_plain, write_whole
from onefold_jobs.data.scan import MOST_SCAN_BYTES
from onefold_jobs.runfolder import CHECKPOINTS, CONFIG, RUN, SCAN, read_run

__all__ = ["copy_run"]


class _Facts(TypedDict):
    job: str


def copy_run(run: Path, folder: Path, checkpoints: Sequence[str]) -> list[str] | None:
    """Copy a run as of one of its checkpoints. An entry point names this function.

    Args:
        run: folder of any run.
        folder: folder in which the copy is created.
        checkpoints: names of checkpoints; the last one that still exists is used.

    Returns:
        Arguments of ``onefold`` that resume the copy; None if the run is not a job's.

    Raises:
        DataError: ``run.json`` is damaged.
    """
    if not (run / CONFIG).is_file():
        return None
    facts = read_run(run, shape=_Facts)
    copy = folder / run.name
    (copy / CHECKPOINTS).mkdir(parents=True)
    for name in (CONFIG, SCAN):
        if (run / name).is_file():
            write_whole(copy / name, read_plain(run / name, MOST_SCAN_BYTES))
    again = {**facts, "finished": None, "ended": None, "logged_as": None}
    write_whole(copy / RUN, json.dumps(again).encode())
    there = [each for each in checkpoints if (run / CHECKPOINTS / each / RUN).is_file()]
    for each in there[-1:]:
        (copy / CHECKPOINTS / each).symlink_to(run / CHECKPOINTS / each)
    named = ["--runs", str(folder), "--name", copy.name]
    # Replay without a logger, which would continue the log of the original run elsewhere.
    return ["train", facts["job"], "--resume", *named, "--max-time", "999999h", "--log", "none"]
