"""The curves of one run, over its steps and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable

from onefold.jobs.report.charts import Line, chart
from onefold.jobs.report.folder import EpochLine, Run, StepsLine
from onefold.jobs.report.markup import Markup, section, table, tag
from onefold.jobs.report.words import duration, is_share, plain, score, speed

__all__ = ["curves_section", "epochs_section"]


def curves_section(run: Run) -> Markup:
    """Losses, scores, learning rate and speed; nothing before the first numbers."""
    charts = [
        _losses(run),
        *(_score(run, name) for name in run.score_names),
        _rate(run),
        _speed(run),
    ]
    if not any(charts):
        return Markup("")
    return section("Curves", tag("div", *charts, class_="charts"))


def _by_step(run: Run, value: Callable[[StepsLine], float]) -> list[tuple[float, float]]:
    return [(line.step, value(line)) for line in run.steps]


def _losses(run: Run) -> Markup:
    lines = [
        Line(label="training", points=_by_step(run, lambda line: line.loss), width=1.0, faint=True),
        Line(
            label="training, mean of the epoch",
            points=[(epoch.step, epoch.loss) for epoch in run.epochs],
        ),
        Line(
            label="test",
            points=[(e.step, e.scores["loss"]) for e in run.epochs if "loss" in e.scores],
            colour=1,
            dashes=1,
        ),
    ]
    return chart("Loss", lines, across="step")


def _score(run: Run, name: str) -> Markup:
    points = [(e.epoch + 1, e.scores.get(name, math.nan)) for e in run.epochs]
    lines = [Line(label=name, points=points, colour=2)]
    return chart(f"Test {name}", lines, across="epoch", share=is_share(name))


def _rate(run: Run) -> Markup:
    points = _by_step(run, lambda line: line.lr) or [(e.step, e.lr) for e in run.epochs]
    lines = [Line(label="learning rate", points=points, colour=3)]
    return chart("Learning rate", lines, across="step")


def _speed(run: Run) -> Markup:
    lines = [
        Line(
            label="steps",
            points=_by_step(run, lambda line: line.samples_per_s),
            colour=4,
            width=1.0,
            faint=True,
        ),
        Line(
            label="mean of the epoch",
            points=[(e.step, e.samples_per_s) for e in run.epochs],
            colour=4,
        ),
    ]
    return chart("Training speed in samples/s", lines, across="step")


def epochs_section(run: Run) -> Markup:
    """What the curves show in numbers, folded."""
    if not run.epochs:
        return Markup("")
    names = tuple(dict.fromkeys(["loss", *run.score_names]))
    headings = ["epoch", "step", "training loss", *(f"test {name}" for name in names)]
    rows = [_numbers(epoch, names) for epoch in run.epochs]
    numbers = table(
        [*headings, "learning rate", "training", "evaluation", "samples/s"],
        rows,
        caption="Every epoch",
    )
    return tag("details", tag("summary", "The epochs in numbers"), numbers)


def _numbers(epoch: EpochLine, names: tuple[str, ...]) -> list[str]:
    return [
        f"{epoch.epoch + 1}",
        f"{epoch.step:,}",
        plain(epoch.loss),
        *(score(name, epoch.scores.get(name, math.nan)) for name in names),
        plain(epoch.lr),
        duration(epoch.train_s),
        duration(epoch.evaluate_s),
        speed(epoch.samples_per_s),
    ]
