"""Builds pages that show a training run, or compare several, from the files of the runs.

Nothing here trains, and a run draws nothing during training. The pages are built from files, so a
run that was killed, or is still in progress, has a report too.
"""

from __future__ import annotations

from onefold_jobs.report.page import build_report, compare_runs

__all__ = ["build_report", "compare_runs"]
