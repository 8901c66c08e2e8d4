"""Makes pages that show a training run, or compare several, from what runs left in their folders.

Nothing here trains, and a run draws nothing while it is at work. The pages are made from files, so
a run that was killed, or is still going on, has a report too.
"""

from __future__ import annotations

from onefold_jobs.report.page import build_report, compare_runs

__all__ = ["build_report", "compare_runs"]
