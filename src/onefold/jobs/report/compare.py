"""Makes the page that compares several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from onefold.jobs.report.curves import Runs, curves_of_several
from onefold.jobs.report.folder import Run, read_run
from onefold.jobs.report.markup import page
from onefold.jobs.report.page import REPORT_NAME, write_page
from onefold.jobs.report.words import NOTHING, option
from onefold.system.words import counted

__all__ = ["compare_runs"]


def compare_runs(runs: Sequence[Path], output: Path) -> Path:
    """Write one page that compares runs.

    Args:
        runs: their folders, in the order of the page.
        output: path of the page; its folder is created if it is missing.

    Returns:
        ``output``: one file that needs no other, with links to the runs' own reports.

    Raises:
        ValueError: ``runs`` is empty; or something that onefold did not make is at ``output``.
        DataError: a folder is not that of a run, or a file in it cannot be read.
        LaunchError: matplotlib is not installed.
    """
    if not runs:
        raise ValueError("expected one run or more, got none; give the folders of some runs")
    output = Path(output)
    read = [read_run(Path(run)) for run in runs]
    # Numbered, because two runs may have the same name.
    named = {f"{index}. {run.name}": run for index, run in enumerate(read, start=1)}
    text = page(
        "compare.html.j2",
        title=f"{counted(len(read), 'run')} compared",
        runs=named,
        links={name: _link(run, output.parent) for name, run in named.items()},
        same=_same_models(named),
        charts=curves_of_several(named),
        differences=_differences(read),
    )
    return write_page(output, text)


def _link(run: Run, folder: Path) -> str | None:
    """Make a link to the run's own report, from a page in this folder; None if it has none."""
    report = run.folder / REPORT_NAME
    if not report.is_file():
        return None
    # Relative, so that the links still hold when all runs are moved or copied together.
    relative = os.path.relpath(report.resolve(), folder.resolve())
    # The bytes of a name as they are: a browser asks for just these, whether UTF-8 or not.
    return quote(Path(relative).as_posix(), errors="surrogateescape")


def _same_models(runs: Runs) -> list[list[str]]:
    """Group the names of runs that trained the same model, bit for bit."""
    together: dict[str, list[str]] = {}
    for name, run in runs.items():
        if run.facts.get("fingerprint"):
            together.setdefault(str(run.facts["fingerprint"]), []).append(name)
    return [names for names in together.values() if len(names) > 1]


def _differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Find the options that are not the same in all runs, each with its value in every run."""
    values = {
        name: [option(run.options[name]) if name in run.options else NOTHING for run in runs]
        for name in sorted({name for run in runs for name in run.options})
    }
    return {name: each for name, each in values.items() if len(set(each)) > 1}
