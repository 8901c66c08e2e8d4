"""Makes the page of one run, or the one that compares several.

`build_report` makes the page of one run, and `compare_runs` that of several. `device_times` adds up
where the time of a run went, by device.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from onefold.cli import counted
from onefold.files import write_whole
from onefold_jobs.data.files import read_whole, require_ours
from onefold_jobs.progress import PHASES
from onefold_jobs.report import words
from onefold_jobs.report.curves import Runs, curves_of_one, curves_of_several
from onefold_jobs.report.folder import EpochLine, ReportedRun, finite_or_zero, number, read_reported
from onefold_jobs.report.words import NOTHING, amount, option, plain
from onefold_jobs.runfolder import path_inside
from onefold_jobs.scores import Baseline, ClassScores, no_better

__all__ = ["build_report", "compare_runs"]


REPORT_NAME = "report.html"

_SHOWN_CONFUSIONS = 10


def build_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run, with all that its folder holds at the moment.

    Args:
        run: folder of the run, which may still be going on.
        output: path of the page; ``report.html`` in the folder if None.

    Returns:
        Path of the page: one file that needs no other.

    Raises:
        DataError: the folder is not that of a run, or a file in it cannot be read.
        LaunchError: matplotlib is not installed.
        ValueError: something that onefold did not make is at ``output``.
    """
    read = read_reported(Path(run))
    return write_page(output or read.folder / REPORT_NAME, _page(read))


def _page(run: ReportedRun) -> str:
    counts = (run.examples or {}).get("confusion") or ()
    return page(
        "report.html.j2",
        title=f"{run.name}: training report",
        run=run,
        charts=curves_of_one(run),
        tests={f"test {name}": name for name in ("loss", *run.score_names)},
        devices=device_times(run),
        all_phases=ALL_PHASES,
        warning=_warning(run),
        class_scores=ClassScores(np.array(counts)) if counts else None,
        class_samples=_class_samples(run, len(counts)),
        confusions=frequent_confusions(counts)[:_SHOWN_CONFUSIONS],
        number=number,
        picture_of=partial(read_picture, run.folder),
    )


def _warning(run: ReportedRun) -> str | None:
    """Warn of a run that is no better than its baseline."""
    if not run.best or not run.facts.get("baseline"):
        return None
    told, scores = run.facts["baseline"], {run.target: run.baseline(run.target)}
    baseline = Baseline(str(told.get("answer")), scores, str(told.get("each", "sample")))
    return no_better(str(run.facts.get("score")), run.best[1], baseline)


def _class_samples(run: ReportedRun, classes: int) -> dict[str, list[str]]:
    """List by heading what the run has of each class besides scores; nothing of other lengths."""
    counts, weights = run.facts.get("class_counts") or (), run.facts.get("class_weights") or ()
    columns = {"to train": [amount(each) for each in (counts[0] if counts else ())]}
    columns["weight"] = [plain(each) for each in weights]
    return {name: column for name, column in columns.items() if len(column) == classes > 0}


def write_page(path: Path, text: str) -> Path:
    """Write a page aside and move it into place, so that a browser never finds half of it.

    Raises:
        ValueError: something that onefold did not make is at the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_ours(path, is_page, f"{path}: expected a new file, or a page of onefold")
    # "replace", as the page shows names of files, and a name may hold bytes that are not UTF-8.
    write_whole(path, text.encode("utf-8", "replace"))
    return path


Counts = Sequence[Sequence[int]]  # (classes, classes): true class by row, predicted by column


def frequent_confusions(counts: Counts) -> list[tuple[int, int, int]]:
    """List mistakes as (true class, predicted class, count), the most frequent first.

    >>> frequent_confusions([[5, 1], [3, 7]])
    [(1, 0, 3), (0, 1, 1)]
    """
    mistakes = [
        (true, predicted, count)
        for true, row in enumerate(counts)
        for predicted, count in enumerate(row)
        if true != predicted and count > 0
    ]
    # Negated and not reversed: sorting is stable, so equal counts stay in the order of classes.
    return sorted(mistakes, key=lambda mistake: -mistake[2])


_KINDS = {"PNG": "image/png", "JPEG": "image/jpeg"}
_MOST_BYTES = 1 << 23
"""Of one picture; those that a run keeps as examples are far smaller."""
_MOST_SIDE = 1 << 12


class Picture(NamedTuple):
    """A PNG or JPEG that is part of the page."""

    source: str
    """A ``data:`` URL that holds the whole file."""
    width: int
    """In pixels."""
    height: int
    """In pixels."""


def read_picture(folder: Path, name: object) -> Picture | None:
    """Read a picture of a run's folder; files elsewhere are not the report's to show.

    Args:
        folder: folder of the run.
        name: path of the file below it.

    Returns:
        The picture; None where the folder holds no such PNG or JPEG.
    """
    # matplotlib, which a page needs, needs it as well.
    from PIL import Image

    try:
        content = read_whole(path_inside(folder, name), _MOST_BYTES)
        # Only the header is read.
        with Image.open(BytesIO(content), formats=[*_KINDS]) as picture:
            kind, (width, height) = _KINDS[str(picture.format)], picture.size
    # ValueError for a file that is too large, and for a NUL in the name.
    except (OSError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
    if max(width, height) > _MOST_SIDE:
        return None
    return Picture(f"data:{kind};base64,{b64encode(content).decode('ascii')}", width, height)


ALL_PHASES = (*PHASES, "evaluation", "other")
"""The phases of training, the evaluation, and what is in none of these."""

_NEGLIGIBLE = 0.005
"""Share of a device's time below which evaluation and the rest are not shown."""

Times = Mapping[str, float]


class DeviceTime(NamedTuple):
    """The time of one device over all epochs."""

    name: str
    """Number and name of the device."""
    times_s: Times
    """Seconds in each phase."""

    @property
    def total_s(self) -> float:
        """Seconds in all phases."""
        return sum(self.times_s.values())

    def share(self, phase: str) -> float:
        """Return the share of a phase in the device's time, 0 to 1."""
        return self.times_s[phase] / self.total_s


def device_times(run: ReportedRun) -> list[DeviceTime]:
    """List the devices whose time was measured, all with the phases that are worth showing."""
    names: dict[int, str] = {}
    times: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ALL_PHASES, 0.0))
    for epoch in run.epochs:
        for index, device in enumerate(epoch.devices):
            names[index] = f"{index}: {device.get('device', '')}"
            for phase, time_s in _spent(epoch, device).items():
                times[index][phase] += time_s
    # A device without any time would have no shares: they are divided by its sum.
    measured = {index: spent for index, spent in times.items() if sum(spent.values()) > 0}
    small = {index: _NEGLIGIBLE * sum(spent.values()) for index, spent in measured.items()}
    shown = [
        phase
        for phase in ALL_PHASES
        if phase in PHASES or any(measured[index][phase] > small[index] for index in measured)
    ]
    return [
        DeviceTime(names[index], {phase: measured[index][phase] for phase in shown})
        for index in sorted(measured)
    ]


def _spent(epoch: EpochLine, device: Mapping[str, Any]) -> Times:
    spent = {phase: finite_or_zero(number(device.get(phase))) for phase in PHASES}
    # Clocks of phases and of the epoch are read apart, so the rest may come out below 0.
    other_s = max(0.0, finite_or_zero(epoch.train_s) - sum(spent.values()))
    return {**spent, "evaluation": finite_or_zero(epoch.evaluate_s), "other": other_s}


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
    read = [read_reported(Path(run)) for run in runs]
    # Numbered, because two runs may have the same name.
    named = {f"{index}. {run.name}": run for index, run in enumerate(read, start=1)}
    text = page(
        "compare.html.j2",
        title=f"{counted(len(read), 'run')} compared",
        runs=named,
        links={name: _link(run, output.parent) for name, run in named.items()},
        same=_same_models(named),
        warnings={name: found for name, run in named.items() if (found := _warning(run))},
        charts=curves_of_several(named),
        differences=_differences(read),
    )
    return write_page(output, text)


def _link(run: ReportedRun, folder: Path) -> str | None:
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


def _differences(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """Find the options that are not the same in all runs, each with its value in every run."""
    values = {
        name: [option(run.options[name]) if name in run.options else NOTHING for run in runs]
        for name in sorted({name for run in runs for name in run.options})
    }
    return {name: each for name, each in values.items() if len(set(each)) > 1}


_NOTHING_FROM_ELSEWHERE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A policy by which the browser itself refuses what no page of ours holds: scripts, other hosts."""


def page(template: str, **values: object) -> str:
    """Make a page that needs no other file.

    Args:
        template: name of the template's file.
        values: what the template shows. Plain text is escaped; markupsafe.Markup is HTML already.

    Raises:
        LaunchError: the page has a chart, and matplotlib is not installed.
    """
    return _environment().get_template(template).render(values)


def is_page(head: bytes) -> bool:
    """Whether the beginning of a file is that of a page that `page` has made.

    >>> ours = page("page.html.j2", title="title").encode()
    >>> is_page(ours[:512]), is_page(b"<!doctype html><title>mine</title>")
    (True, False)
    """
    # The policy marks a page as ours: hardly any other file has this one at its very beginning.
    text = unescape(head.decode(errors="replace"))
    return text.startswith("<!doctype html>") and _NOTHING_FROM_ELSEWHERE in text


@cache
def _environment() -> Environment:
    # StrictUndefined, or a misspelled name in a template would leave a gap that nobody notices.
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {name: getattr(words, name) for name in words.__all__}
    environment.globals["counted"] = counted
    environment.globals["policy"] = _NOTHING_FROM_ELSEWHERE
    return environment
