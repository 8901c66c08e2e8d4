"""One page that lays several runs beside and over each other."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from urllib.parse import quote

from onefold.jobs.report.charts import chart, of_run
from onefold.jobs.report.folder import EpochLine, Run, finite_or_zero, read_run
from onefold.jobs.report.markup import Markup, card, page, section, table, tag
from onefold.jobs.report.page import (
    REPORT_NAME,
    devices_in_words,
    option_in_words,
    write_page,
)
from onefold.jobs.report.words import NOTHING, counted, duration, is_share, score, speed

__all__ = ["compare_runs"]

_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From which duration on, how many seconds, and the unit's name."""


def compare_runs(runs: Sequence[Path], output: Path) -> Path:
    """Write one page that compares runs.

    Args:
        runs: their folders, in the order of the page.
        output: path of the page; its folder is made if need be.

    Returns:
        ``output``: one file that needs no other, with links to the runs' own reports.

    Raises:
        ValueError: there is no run.
        DataError: a folder is not that of a run, or a file of it cannot be read.
        LaunchError: matplotlib is not installed.
    """
    if not runs:
        raise ValueError("expected one run or more, got none; give the folders of some runs")
    read = [read_run(Path(run)) for run in runs]
    output = Path(output)
    title = f"{counted(len(read), 'run')} compared"
    parts = [
        tag("header", tag("h1", title)),
        section("Results", card(_results(read, output.parent)), _same_models(read)),
        _curves(read),
        section("Options that differ", _differences(read)),
    ]
    return write_page(output, page(title, *parts))


def _labels(runs: Sequence[Run]) -> list[str]:
    """Names with numbers before them, for two runs may have one name."""
    return [f"{index}. {run.name}" for index, run in enumerate(runs, start=1)]


def _results(runs: Sequence[Run], folder: Path) -> Markup:
    rows = [
        [_linked(run, label, folder), *_result(run)]
        for run, label in zip(runs, _labels(runs), strict=True)
    ]
    headings = ["run", "job, model", "devices", "chosen by", "best", "in epoch", "last", "epochs"]
    headings += ["time", "samples/s", "fingerprint"]
    return table(headings, rows, caption="Scores are those of the test set", words=4)


def _linked(run: Run, label: str, folder: Path) -> str:
    report = run.folder / REPORT_NAME
    if not report.is_file():
        return label
    relative = os.path.relpath(report.resolve(), folder.resolve())
    return tag("a", label, href=quote(Path(relative).as_posix(), errors="surrogateescape"))


def _result(run: Run) -> list[str]:
    _, name = run.target
    best = run.best
    fingerprint = run.facts.get("fingerprint")
    return [
        f"{run.facts.get('job') or NOTHING}, {run.facts.get('model') or NOTHING}",
        devices_in_words(run),
        str(run.facts.get("score") or NOTHING),
        score(name, best[1]) if best else NOTHING,
        f"{best[0] + 1}" if best else NOTHING,
        score(name, run.last_score),
        f"{run.epochs[-1].epoch + 1 if run.epochs else 0}",
        duration(run.trained_s),
        speed(run.samples_per_s),
        tag("code", str(fingerprint)) if fingerprint else NOTHING,
    ]


def _same_models(runs: Sequence[Run]) -> Markup:
    """Which runs trained the same model."""
    together: dict[str, list[str]] = {}
    for run, label in zip(runs, _labels(runs), strict=True):
        if run.facts.get("fingerprint"):
            together.setdefault(str(run.facts["fingerprint"]), []).append(label)
    same = [labels for labels in together.values() if len(labels) > 1]
    texts = [f"The same model, to the last bit: {' and '.join(labels)}." for labels in same]
    return tag("div", *(tag("p", text) for text in texts))


def _curves(runs: Sequence[Run]) -> Markup:
    names = list(dict.fromkeys(name for run in runs for name in run.score_names))
    charts = [
        _by_epoch(runs, "Training loss", lambda epoch: epoch.loss),
        *(_test_score(runs, name) for name in ("loss", *names)),
        _by_time(runs),
        _by_epoch(runs, "Training speed in samples/s", lambda epoch: epoch.samples_per_s),
    ]
    if not any(charts):
        return tag(
            "p", "None of the runs has ended an epoch yet: there are no curves.", class_="note"
        )
    return section("Curves", tag("div", *charts, class_="charts"))


def _by_epoch(
    runs: Sequence[Run], title: str, value: Callable[[EpochLine], float], *, share: bool = False
) -> Markup:
    lines = [
        of_run(
            index, label, [(epoch.epoch + 1, value(epoch)) for epoch in run.epochs], runs=len(runs)
        )
        for index, (run, label) in enumerate(zip(runs, _labels(runs), strict=True))
    ]
    return chart(title, lines, across="epoch", share=share)


def _test_score(runs: Sequence[Run], name: str) -> Markup:
    def value(epoch: EpochLine) -> float:
        return epoch.scores.get(name, math.nan)

    having = [run for run in runs if any(name in epoch.scores for epoch in run.epochs)]
    return _by_epoch(runs, f"Test {name}", value, share=is_share(name)) if having else Markup("")


def _by_time(runs: Sequence[Run]) -> Markup:
    """The score that the first run is judged by, over the time it took."""
    _, name = runs[0].target
    longest_s = max((finite_or_zero(run.trained_s) for run in runs), default=0.0)
    unit_s, unit = next((size, word) for least, size, word in _UNITS if longest_s >= least)
    lines = []
    for index, (run, label) in enumerate(zip(runs, _labels(runs), strict=True)):
        passed = accumulate(
            finite_or_zero(epoch.train_s) + finite_or_zero(epoch.evaluate_s) for epoch in run.epochs
        )
        scores = [epoch.scores.get(name, math.nan) for epoch in run.epochs]
        points = [(time_s / unit_s, each) for time_s, each in zip(passed, scores, strict=True)]
        lines.append(of_run(index, label, points, runs=len(runs)))
    return chart(f"Test {name} by time", lines, across=unit, share=is_share(name))


def _differences(runs: Sequence[Run]) -> Markup:
    names = sorted({name for run in runs for name in run.options})
    rows = []
    for name in names:
        values = [_option(run, name) for run in runs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return tag("p", "None: the runs were started with the same options.")
    headings = ["option", *_labels(runs)]
    caption = "Options by run; a dash where a run has none"
    return card(table(headings, rows, caption=caption, words=len(headings)))


def _option(run: Run, name: str) -> str:
    return option_in_words(run.options[name]) if name in run.options else NOTHING
