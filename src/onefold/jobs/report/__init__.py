"""Pages that show a training run, or compare several, from what the run left in its folder.

Nothing here trains, and nothing is drawn while a run is at work: the pages are made from files, so
a run that was killed, or is still going on, has a report too.
"""

from __future__ import annotations

from onefold.jobs.report.compare import compare_runs
from onefold.jobs.report.page import build_report

__all__ = ["build_report", "compare_runs"]
