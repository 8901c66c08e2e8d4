"""Trains several runs of one job in a folder, with one table and one report.

Cross-validation is such a series, with a run for each fold; `onefold_jobs.search` is another, with
a run for each trial. Each run has a folder of its own below that of the series, which contains the
common options (``config.toml``), the scan of the data (``scan.json``), the table (``results.json``)
and a comparison of the runs (``report.html``). An interrupted series resumes at the run in which it
stopped: finished runs are read, not trained again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypedDict

import onefold
from onefold.cli import counted
from onefold.errors import LaunchError
from onefold.files import json_text, write_whole
from onefold_jobs.audience import tell
from onefold_jobs.job import Job
from onefold_jobs.options import TrainOptions
from onefold_jobs.report.folder import read_reported
from onefold_jobs.run import (
    MAY_CHANGE,
    check_run,
    read_data,
    read_options,
    resume_command,
    run_job,
)
from onefold_jobs.runfolder import CONFIG, RUN, RunFolder, read_run
from onefold_jobs.scores import rule_of, spell

__all__ = ["Outcome", "Series", "Table", "cross_validate", "opened", "warned"]

_Scores = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The runs of a series, for a terminal and for a page."""

    title: str
    words: Sequence[str]
    """Headings of the columns of words."""
    numbers: Sequence[str]
    """Headings of the columns of numbers."""
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    """Sentences below the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Scores of a finished run; means over the folds if it was a cross-validation."""

    folder: Path
    runs: Sequence[Path]
    """Folders of the runs that the scores are from."""
    scores: Mapping[str, float]
    """Scores after the best epoch, the selecting one first."""
    last: Mapping[str, float]
    """Scores after the last epoch."""
    epoch: int | None = None
    """The best epoch, from 1; None for several runs."""
    warning: str | None = None
    """Warning that the run, or several of them, learned nothing."""
    table: Table | None = None
    report: Path | None = None

    @property
    def value(self) -> float:
        """The selecting score after the best epoch."""
        return next(iter(self.scores.values()))


class _Ended(TypedDict, total=False):
    """The entries of ``run.json`` that tell whether a run has finished."""

    epochs: int
    finished: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Several runs of a job in one folder. Made by `opened`."""

    job: Job
    options: TrainOptions
    """Options that the runs have in common; their folder is that of the series."""
    rule: str
    """Rule for the best epoch, such as ``highest accuracy``."""
    resumed_by: str
    """Command that resumes the series."""

    def train(self, name: str, **changed: Any) -> Outcome:
        """Train a run of the series to its end, from its last checkpoint if it was stopped.

        Args:
            name: name of the run's folder.
            changed: options in which it differs from the others.

        Raises:
            OnefoldError, ValueError: the run failed, or was stopped.
        """
        place: Any = {"runs": str(self.options.folder), "name": name}
        options = replace(self.options, **place, **changed, resume=False)
        if (options.folder / CONFIG).is_file():
            # The run's own file has the options that it filled in, such as a rate that was found.
            given = {each.name: getattr(options, each.name) for each in fields(options)}
            given = {each: given[each] for each in given if each in MAY_CHANGE}
            options = read_options(self.job, {**given, "resume": True}, None)
        if options.fold and not options.fold.number:
            return cross_validate(self.job, options, self.resumed_by)
        ended = read_run(options.folder, shape=_Ended) if (options.folder / RUN).is_file() else {}
        if not ended.get("finished") or (options.epochs or 0) > ended["epochs"]:
            run_job(self.job, options, self.resumed_by)
        return outcome_of(options.folder)

    def finish(self, table: Table, results: Mapping[str, Any], runs: Sequence[Path]) -> Path | None:
        """Write the table and the report; return the path of the report, if there is one."""
        folder = self.options.folder
        kept = {"job": self.job.name, "score": self.rule, **results}
        write_whole(folder / "results.json", json_text(kept, indent=1).encode())
        if importlib.util.find_spec("matplotlib") is None or not runs:
            return None
        from onefold_jobs.report.page import REPORT_NAME, compare_runs

        return compare_runs(runs, folder / REPORT_NAME, table)


def outcome_of(folder: Path) -> Outcome:
    """Read the scores of a finished run."""
    run = read_reported(folder)
    epochs = {line.epoch: line.scores for line in run.epochs}
    best, last = run.facts.get("best"), run.epochs[-1].scores if run.epochs else {}
    scores = epochs[best["epoch"]] if best else {}
    names = sorted(scores, key=lambda name: name != run.target)
    return Outcome(
        folder=folder,
        runs=[folder],
        scores={name: scores[name] for name in names},
        last={name: last[name] for name in names},
        epoch=best["epoch"] if best else None,
        warning=run.warning,
    )


@contextmanager
def opened(
    job: Job, options: TrainOptions, *, command: str, resumed_by: str = ""
) -> Iterator[Series]:
    """Check the options and the data of a series, and open its folder.

    Args:
        job: the job.
        options: options that its runs have in common.
        command: command of the series: ``train`` or ``tune``.
        resumed_by: command that resumes it, if it is part of another series.

    Raises:
        LaunchError: another launcher started this process, or the folder is in use.
        OnefoldError, OSError, ValueError: an option or the data cannot be used.
    """
    if onefold.is_launched():
        # Each process would decide by itself which runs have finished.
        raise LaunchError(
            f"onefold {command} of several runs starts the devices of each run: use --devices, "
            f"without onefold run, torchrun or srun"
        )
    check_run(job, replace(options, resume=False))
    # Read once before the folder is created, so that data that cannot be used leave nothing behind.
    fold = options.fold
    first = replace(options, folds=f"1/{fold.of}") if fold else options
    data = read_data(job, first)
    settled = job.settle(first, data)
    folder = RunFolder(options.folder, is_lead=True)
    try:
        folder.go_on(options, job.name) if options.resume else folder.create(options, job.name, {})
        folder.keep_scan(data.scan)
        yield Series(
            job=job,
            options=options,
            rule=rule_of(str(settled.best_by)),
            resumed_by=resumed_by or resume_command(command, job, options),
        )
    finally:
        folder.close()


def cross_validate(job: Job, options: TrainOptions, resumed_by: str = "") -> Outcome:
    """Train a run for each fold of the data, tested on that fold.

    Args:
        job: the job.
        options: options with all ``folds``.
        resumed_by: command that resumes it, if it is part of another series.

    Raises:
        OnefoldError, OSError, ValueError: an option or the data cannot be used, or a run failed.
    """
    assert options.fold is not None
    of, outcomes = options.fold.of, []
    with opened(job, options, command="train", resumed_by=resumed_by) as series:
        for number in range(1, of + 1):
            tell(f"fold {number} of {of}")
            outcomes.append(series.train(f"fold-{number}", folds=f"{number}/{of}"))
        means, spreads = (_over([each.scores for each in outcomes], by) for by in (fmean, stdev))
        last, last_spread = (_over([each.last for each in outcomes], by) for by in (fmean, stdev))
        results: dict[str, Any] = {
            "mean": means,
            "spread": spreads,
            "last_mean": last,
            "last_spread": last_spread,
        }
        results["folds"] = [each.scores for each in outcomes]
        table, runs = _table(outcomes, means, spreads, last, last_spread), [*_runs(outcomes)]
        warning = _warning(outcomes)
        table = replace(table, notes=[*warned(warning), *table.notes])
        report = series.finish(table, results, runs)
    return Outcome(
        folder=options.folder,
        runs=runs,
        scores=means,
        last=last,
        warning=warning,
        table=table,
        report=report,
    )


def warned(warning: str | None) -> list[str]:
    """Return a warning as a note of a table; no note without one."""
    return [f"Warning: {warning}."] if warning else []


def _warning(outcomes: Sequence[Outcome]) -> str | None:
    found = [each.warning.partition(". ")[2] for each in outcomes if each.warning]
    runs = counted(len(outcomes), "run")
    return f"{len(found)} of {runs} learned nothing. {found[0]}" if found else None


def _runs(outcomes: Sequence[Outcome]) -> Iterator[Path]:
    return (run for each in outcomes for run in each.runs)


def _over(scores: Sequence[Mapping[str, float]], by: Callable[[list[float]], float]) -> _Scores:
    return {name: by([each[name] for each in scores]) for name in scores[0]}


def _table(outcomes: Sequence[Outcome], *summed: _Scores) -> Table:
    """Make the table of a cross-validation, given means and spreads after best and last epoch."""
    means, spreads, last, last_spread = summed
    target = next(iter(means))

    def row(label: str, epoch: str, scores: Mapping[str, float]) -> list[str]:
        return [label, epoch, *(spell(name, value) for name, value in scores.items())]

    final = f"{spell(target, last[target])}, spread {spell(target, last_spread[target])}"
    rows = [
        row(str(number), str(each.epoch or ""), each.scores)
        for number, each in enumerate(outcomes, start=1)
    ]
    return Table(
        title=f"Cross-validation: {counted(len(outcomes), 'fold')}",
        words=["fold"],
        numbers=["best epoch", *means],
        rows=[*rows, row("mean", "", means), row("spread", "", spreads)],
        notes=[
            "Each run was scored on its fold after its best epoch. Spread: standard deviation.",
            f"After the last epoch, which no score selected: mean {target} {final}.",
        ],
    )
