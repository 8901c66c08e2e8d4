"""Finds what a run says of the tables that it is used on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from onefold_jobs.data.tables import Columns
from onefold_jobs.job import PredictOptions
from onefold_jobs.runfolder import kept_facts, read_run

__all__ = ["columns_of"]


def columns_of(run: Path, kind: Literal["image", "text"], options: PredictOptions) -> Columns:
    """The columns that were named, and otherwise those of the tables that a run was trained on.

    Args:
        run: folder of the run.
        kind: what the samples are.
        options: the names of columns are read.

    Raises:
        DataError: the run's ``run.json`` is damaged.
    """
    kept = read_run(run).get("columns")
    with kept_facts(run):
        columns = msgspec.convert(kept, Columns) if kept else Columns(kind)
    named = options.text_column if kind == "text" else options.image_column
    return columns._replace(sample=named or columns.sample)
