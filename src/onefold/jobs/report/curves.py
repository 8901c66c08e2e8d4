"""Chooses the curves that are drawn of one run, and of several runs over each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

from onefold.jobs.report.charts import Chart, Line, Points, charts_of, of_run
from onefold.jobs.report.folder import EpochLine, Run, finite_or_zero
from onefold.jobs.report.words import is_share

__all__ = ["curves_of_one", "curves_of_several"]

_SPEED = "Training speed in samples/s"
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Shortest duration for which a unit is used, the seconds it has, and its name."""

# By the name that each run has in the page.
Runs = Mapping[str, Run]


def curves_of_one(run: Run) -> list[Chart]:
    """Chart losses, scores, learning rate and speed; nothing before the first numbers."""
    return charts_of(
        [
            Chart(title="Loss", lines=_losses(run), across="step"),
            *(_score(run, name) for name in run.score_names),
            Chart(title="Learning rate", lines=[_rate(run)], across="step"),
            Chart(title=_SPEED, lines=_speed(run), across="step"),
        ]
    )


def _losses(run: Run) -> list[Line]:
    steps = [(line.step, line.loss) for line in run.steps]
    means = [(epoch.step, epoch.loss) for epoch in run.epochs]
    # Over steps as well, so that it can be laid over the training loss.
    test = [(e.step, e.scores["loss"]) for e in run.epochs if "loss" in e.scores]
    return [
        Line(label="training", points=steps, width=1.0, faint=True),
        Line(label="training, mean of the epoch", points=means),
        Line(label="test", points=test, colour=1, dashes=(5.0, 2.0)),
    ]


def _score(run: Run, name: str) -> Chart:
    points = [(epoch.epoch + 1, epoch.score(name)) for epoch in run.epochs]
    line = Line(label=name, points=points, colour=2)
    return Chart(title=f"Test {name}", lines=[line], across="epoch", share=is_share(name))


def _rate(run: Run) -> Line:
    # Steps show a warm-up within an epoch; a short run may have lines of epochs alone.
    points = [(line.step, line.lr) for line in run.steps or run.epochs]
    return Line(label="learning rate", points=points, colour=3)


def _speed(run: Run) -> list[Line]:
    steps = [(line.step, line.samples_per_s) for line in run.steps]
    means = [(epoch.step, epoch.samples_per_s) for epoch in run.epochs]
    return [
        Line(label="steps", points=steps, colour=4, width=1.0, faint=True),
        Line(label="mean of the epoch", points=means, colour=4),
    ]


def curves_of_several(runs: Runs) -> list[Chart]:
    """Chart losses, scores and speed, by epoch and by time; nothing before an epoch has ended."""
    # A dict and not a set, to keep the order: the page must be the same each time.
    names = dict.fromkeys(name for run in runs.values() for name in run.score_names)
    return charts_of(
        [
            _by_epoch(runs, "Training loss", lambda epoch: epoch.loss),
            *(_score_by_epoch(runs, name) for name in ("loss", *names)),
            _score_by_time(runs, next(iter(runs.values())).target[1]),
            _by_epoch(runs, _SPEED, lambda epoch: epoch.samples_per_s),
        ]
    )


def _lines(runs: Runs, points: Callable[[Run], Points]) -> list[Line]:
    return [
        of_run(index, label, points(run), runs=len(runs))
        for index, (label, run) in enumerate(runs.items())
    ]


def _by_epoch(
    runs: Runs, title: str, value: Callable[[EpochLine], float], *, share: bool = False
) -> Chart:
    lines = _lines(runs, lambda run: [(epoch.epoch + 1, value(epoch)) for epoch in run.epochs])
    return Chart(title=title, lines=lines, across="epoch", share=share)


def _score_by_epoch(runs: Runs, name: str) -> Chart:
    return _by_epoch(runs, f"Test {name}", lambda epoch: epoch.score(name), share=is_share(name))


def _score_by_time(runs: Runs, name: str) -> Chart:
    # One unit for all runs, chosen by the longest, as they share the axis.
    longest_s = max(finite_or_zero(run.trained_s) for run in runs.values())
    unit_s, unit = next((size, word) for least, size, word in _UNITS if longest_s >= least)

    def points(run: Run) -> Points:
        passed_s = accumulate(epoch.whole_s for epoch in run.epochs)
        scores = [epoch.score(name) for epoch in run.epochs]
        return [(time_s / unit_s, each) for time_s, each in zip(passed_s, scores, strict=True)]

    lines = _lines(runs, points)
    return Chart(title=f"Test {name} by time", lines=lines, across=unit, share=is_share(name))
