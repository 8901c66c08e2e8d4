"""Builds the page of one run, or the one that compares several.

`build_report` builds the page of one run, and `compare_runs` that of several. `device_times` adds
up how each device spent its time.
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
from typing import TYPE_CHECKING, Any, NamedTuple
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
from onefold_jobs.scores import ClassScores, frequent_confusions

if TYPE_CHECKING:
    from onefold_jobs.series import Table

__all__ = ["build_report", "compare_runs"]


REPORT_NAME = "report.html"

_SHOWN_CONFUSIONS = 10
_Confused = dict[tuple[int, int], list[Any]]


def build_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run with the current content of its folder.

    Args:
        run: folder of the run, which may still be in progress.
        output: path of the page; None for ``report.html`` in the folder.

    Returns:
        Path of the page, which is self-contained.

    Raises:
        DataError: the folder does not contain a run, or a file in it cannot be read.
        LaunchError: matplotlib is not installed.
        ValueError: ``output`` exists, and onefold did not write it.
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
        warning=run.warning,
        class_scores=ClassScores(np.array(counts)) if counts else None,
        class_samples=_class_samples(run, len(counts)),
        confusions=frequent_confusions(counts)[:_SHOWN_CONFUSIONS],
        confused=_confused(run, len(counts)),
        number=number,
        picture_of=partial(read_picture, run.folder),
    )


def _class_samples(run: ReportedRun, classes: int) -> dict[str, list[str]]:
    """Return the table columns of each class other than scores; drops those of another length."""
    counts, weights = run.facts.get("class_counts") or (), run.facts.get("class_weights") or ()
    columns = {"training": [amount(each) for each in (counts[0] if counts else ())]}
    columns["weight"] = [plain(each) for each in weights]
    return {name: column for name, column in columns.items() if len(column) == classes > 0}


def _confused(run: ReportedRun, classes: int) -> _Confused:
    """Return the examples of each confusion, by true and predicted class."""
    found = (run.examples or {}).get("confused") or ()
    pairs = {(each["label"], each["predicted"]): each.get("samples") or [] for each in found}
    return {pair: samples for pair, samples in pairs.items() if samples and max(pair) < classes}


def write_page(path: Path, text: str) -> Path:
    """Write a page atomically, so that a browser never reads a partial one.

    Raises:
        ValueError: the path exists, and onefold did not write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_ours(path, is_page, f"{path}: expected a new file, or a page of onefold")
    # "replace", because the page shows file names, which may contain bytes that are not UTF-8.
    write_whole(path, text.encode("utf-8", "replace"))
    return path


_KINDS = {"PNG": "image/png", "JPEG": "image/jpeg"}
_MOST_BYTES = 1 << 23
"""Maximum size of an image, in bytes; a run's own examples are far smaller."""
_MOST_SIDE = 1 << 12


class Picture(NamedTuple):
    """A PNG or JPEG that is embedded in the page."""

    source: str
    """``data:`` URL with the whole file."""
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""


def read_picture(folder: Path, name: object) -> Picture | None:
    """Read an image of a run's folder. Files elsewhere are not read.

    Args:
        folder: folder of the run.
        name: path of the file in it.

    Returns:
        The image; None if the folder contains no such PNG or JPEG.
    """
    # matplotlib, which a page requires, also requires Pillow.
    from PIL import Image

    try:
        content = read_whole(path_inside(folder, name), _MOST_BYTES)
        # Reads only the header.
        with Image.open(BytesIO(content), formats=[*_KINDS]) as picture:
            kind, (width, height) = _KINDS[str(picture.format)], picture.size
    # ValueError: a file that is too large, or a NUL in the name.
    except (OSError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
    if max(width, height) > _MOST_SIDE:
        return None
    return Picture(f"data:{kind};base64,{b64encode(content).decode('ascii')}", width, height)


ALL_PHASES = (*PHASES, "evaluation", "other")
"""The phases of training, the evaluation, and the rest."""

_NEGLIGIBLE = 0.005
"""Evaluation and rest are hidden below this fraction of a device's time."""

Times = Mapping[str, float]


class DeviceTime(NamedTuple):
    """The time of a device over all epochs."""

    name: str
    """Number and name of the device."""
    times_s: Times
    """Seconds in each phase."""
    limit: str = ""
    """A sentence about what limited the last epoch, and what helps; empty if it was balanced."""

    @property
    def total_s(self) -> float:
        """Seconds in all phases."""
        return sum(self.times_s.values())

    def share(self, phase: str) -> float:
        """Return the fraction of a phase in the device's time, 0 to 1."""
        return self.times_s[phase] / self.total_s


def device_times(run: ReportedRun) -> list[DeviceTime]:
    """List the devices with measured times, with all phases that are worth showing."""
    names: dict[int, str] = {}
    limits: dict[int, str] = {}
    times: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ALL_PHASES, 0.0))
    for epoch in run.epochs:
        for index, device in enumerate(epoch.devices):
            names[index] = f"{index}: {device.get('device', '')}"
            limit = device.get("limit")
            limits[index] = f"Device {index} was {limit}." if limit else ""
            for phase, time_s in _spent(epoch, device).items():
                times[index][phase] += time_s
    # Skip devices without any time, because shares are divided by the total.
    measured = {index: spent for index, spent in times.items() if sum(spent.values()) > 0}
    small = {index: _NEGLIGIBLE * sum(spent.values()) for index, spent in measured.items()}
    shown = [
        phase
        for phase in ALL_PHASES
        if phase in PHASES or any(measured[index][phase] > small[index] for index in measured)
    ]
    return [
        DeviceTime(names[index], {phase: measured[index][phase] for phase in shown}, limits[index])
        for index in sorted(measured)
    ]


def _spent(epoch: EpochLine, device: Mapping[str, Any]) -> Times:
    spent = {phase: finite_or_zero(number(device.get(phase))) for phase in PHASES}
    # The clocks of phases and epoch are read separately, so the rest may be slightly below 0.
    other_s = max(0.0, finite_or_zero(epoch.train_s) - sum(spent.values()))
    return {**spent, "evaluation": finite_or_zero(epoch.evaluate_s), "other": other_s}


def compare_runs(runs: Sequence[Path], output: Path, series: Table | None = None) -> Path:
    """Write a page that compares runs.

    Args:
        runs: folders of the runs, in the order of the page.
        output: path of the page; its folder is created if it is missing.
        series: table of the series that the runs belong to.

    Returns:
        ``output``, which is self-contained except for links to the runs' own reports.

    Raises:
        ValueError: ``runs`` is empty; or ``output`` exists, and onefold did not write it.
        DataError: a folder does not contain a run, or a file in it cannot be read.
        LaunchError: matplotlib is not installed.
    """
    if not runs:
        raise ValueError("no runs were given; give the folder of at least one")
    output = Path(output)
    read = [read_reported(Path(run)) for run in runs]
    # Numbered, because two runs may have the same name.
    named = {f"{index}. {run.name}": run for index, run in enumerate(read, start=1)}
    text = page(
        "compare.html.j2",
        title=series.title if series else f"{counted(len(read), 'run')} compared",
        series=series,
        runs=named,
        links={name: _link(run, output.parent) for name, run in named.items()},
        same=_same_models(named),
        warnings={name: found for name, run in named.items() if (found := run.warning)},
        charts=curves_of_several(named),
        differences=_differences(read),
    )
    return write_page(output, text)


def _link(run: ReportedRun, folder: Path) -> str | None:
    """Return a link to the run's own report from a page in a folder; None if it has none."""
    report = run.folder / REPORT_NAME
    if not report.is_file():
        return None
    # Relative, so that links remain valid if all runs are moved or copied together.
    relative = os.path.relpath(report.resolve(), folder.resolve())
    # Keep the bytes of the name, which a browser requests, whether they are UTF-8 or not.
    return quote(Path(relative).as_posix(), errors="surrogateescape")


def _same_models(runs: Runs) -> list[list[str]]:
    """Group the names of runs that trained bit-identical models."""
    together: dict[str, list[str]] = {}
    for name, run in runs.items():
        if run.facts.get("fingerprint"):
            together.setdefault(str(run.facts["fingerprint"]), []).append(name)
    return [names for names in together.values() if len(names) > 1]


def _differences(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """Find the options that differ between runs, each with its value in every run."""
    values = {
        name: [option(run.options[name]) if name in run.options else NOTHING for run in runs]
        for name in sorted({name for run in runs for name in run.options})
    }
    return {name: each for name, each in values.items() if len(set(each)) > 1}


_NOTHING_FROM_ELSEWHERE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Policy that makes the browser itself block scripts and requests to other hosts."""


def page(template: str, **values: object) -> str:
    """Render a self-contained page.

    Args:
        template: file name of the template.
        values: values for the template. Plain text is escaped; markupsafe.Markup is HTML already.

    Raises:
        LaunchError: the page has a chart, but matplotlib is not installed.
    """
    return _environment().get_template(template).render(values)


def is_page(head: bytes) -> bool:
    """Whether a file starts like a page that `page` rendered.

    >>> ours = page("page.html.j2", title="title").encode()
    >>> is_page(ours[:512]), is_page(b"<!doctype html><title>mine</title>")
    (True, False)
    """
    # The policy identifies our pages: hardly any other file starts with it.
    text = unescape(head.decode(errors="replace"))
    return text.startswith("<!doctype html>") and _NOTHING_FROM_ELSEWHERE in text


@cache
def _environment() -> Environment:
    # StrictUndefined, or a misspelled name in a template would silently leave a gap.
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
