"""Chooses the curves of one run, or of several runs over each other, and draws them for the page.

`curves_of_one` and `curves_of_several` choose. A `Chart` draws its curves as a picture inside the
page, by matplotlib without any of its global state. Names stand beside the picture, in the page.

Note: colors
-------------
A chart must be legible on a light and on a dark page, so its colors are variables of the page's
style sheet. matplotlib takes no variables. So it draws in inks, blues that nothing else uses, and
the text of the SVG is searched for them afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any
from zlib import crc32

from markupsafe import Markup

from onefold_jobs import require
from onefold_jobs.report.folder import ReportedRun, StepsLine, finite_or_zero
from onefold_jobs.report.words import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curves_of_one", "curves_of_several"]


_SPEED = "Training speed in samples/s"
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Shortest duration for which a unit is used, the seconds it has, and its name."""

# By the name that each run has in the page.
Runs = Mapping[str, ReportedRun]


def curves_of_one(run: ReportedRun) -> list[Chart]:
    """Chart losses, scores, learning rate and speed; nothing before the first numbers."""
    # Over steps as well, so that it can be laid over the training loss.
    test = [(each.step, each.scores["loss"]) for each in run.epochs if "loss" in each.scores]
    losses = [
        _by_step(run.steps, "loss", "training", width=1.0, faint=True),
        _by_step(run.epochs, "loss", "training, mean of the epoch"),
        Curve(label="test", points=test, color=1, dashes=(5.0, 2.0)),
    ]
    timed = [line for line in run.steps if not math.isnan(line.samples_per_s)]
    speeds = [
        _by_step(timed, "samples_per_s", "steps", color=4, width=1.0, faint=True),
        _by_step(run.epochs, "samples_per_s", "mean of the epoch", color=4),
    ]
    # Steps show a warm-up within an epoch; a short run may have lines of epochs alone.
    rates = [_by_step(run.steps or run.epochs, "lr", "learning rate", color=3)]
    return charts_of(
        [
            Chart(title="Loss", lines=losses, across="step"),
            *(
                _score(name, [*_baseline(run, name), _of_epochs(run, name)])
                for name in run.score_names
            ),
            Chart(title="Learning rate", lines=rates, across="step"),
            Chart(title=_SPEED, lines=speeds, across="step"),
        ]
    )


def curves_of_several(runs: Runs) -> list[Chart]:
    """Chart losses, scores and speed, by epoch and by time; nothing before an epoch has ended."""
    # A dict and not a set, to keep the order: the page must be the same each time.
    names = dict.fromkeys(name for run in runs.values() for name in run.score_names)
    target = next(iter(runs.values())).target
    # One unit for all runs, chosen by the longest, as they share the axis.
    longest_s = max(finite_or_zero(run.trained_s) for run in runs.values())
    unit_s, unit = next((size, word) for least, size, word in _UNITS if longest_s >= least)

    def by_epoch(title: str, number: str) -> Chart:
        lines = _of_runs(runs, lambda run: [(e.epoch + 1, getattr(e, number)) for e in run.epochs])
        return Chart(title=title, lines=lines, across="epoch")

    def by_time(run: ReportedRun) -> Points:
        passed_s = accumulate(epoch.whole_s for epoch in run.epochs)
        scores = _scores(run, target)
        return [(time_s / unit_s, y) for time_s, (_, y) in zip(passed_s, scores, strict=True)]

    return charts_of(
        [
            by_epoch("Training loss", "loss"),
            *(
                _score(name, _of_runs(runs, partial(_scores, name=name)))
                for name in ("loss", *names)
            ),
            Chart(
                title=f"Test {target} by time",
                lines=_of_runs(runs, by_time),
                across=unit,
                share=is_share(target),
            ),
            by_epoch(_SPEED, "samples_per_s"),
        ]
    )


def _by_step(lines: Sequence[StepsLine], number: str, label: str, **look: Any) -> Curve:
    points = [(line.step, getattr(line, number)) for line in lines]
    return Curve(label=label, points=points, **look)


def _scores(run: ReportedRun, name: str) -> Points:
    return [(epoch.epoch + 1, epoch.score(name)) for epoch in run.epochs]


def _score(name: str, lines: list[Curve]) -> Chart:
    return Chart(title=f"Test {name}", lines=lines, across="epoch", share=is_share(name))


def _of_epochs(run: ReportedRun, name: str) -> Curve:
    return Curve(label=name, points=_scores(run, name), color=2)


def _baseline(run: ReportedRun, name: str) -> list[Curve]:
    """What the score must be above, from half an epoch before the first to one behind the last."""
    least, epochs = run.baseline(name), [each.epoch + 1 for each in run.epochs]
    if not epochs or math.isnan(least):
        return []
    points = [(epochs[0] - 0.5, least), (epochs[-1] + 0.5, least)]
    return [Curve(label="baseline", points=points, color=6, dashes=(5.0, 2.0), faint=True)]


def _of_runs(runs: Runs, points: Callable[[ReportedRun], Points]) -> list[Curve]:
    """Make the curve of each run.

    Each line is thinner than the one before, so that runs of the same numbers can all be seen.
    """
    # 7 colors and 4 patterns have no factor in common: the first 28 runs all look different.
    return [
        Curve(
            label=label,
            points=points(run),
            color=index % _COLORS,
            dashes=_DASHES[index % len(_DASHES)],
            width=1.6 + 3.2 * (len(runs) - 1 - index) / max(1, len(runs) - 1),
        )
        for index, (label, run) in enumerate(runs.items())
    ]


Points = Sequence[tuple[float, float]]

_MOST_POINTS = 500
"""A line of more points is drawn as means of neighbors; the page would have megabytes of them."""
_LARGEST = 1e300
"""Matplotlib computes with sums and multiples of numbers, which must be finite as well."""
_MARKED_POINTS = 30
"""A line of more points is drawn without a mark at each."""
_LOGARITHMIC_RATIO = 200
"""Largest over smallest value from which on the axis is logarithmic, or small ones look alike."""

_WIDTH_POINTS, _HEIGHT_POINTS = 388.8, 216.0
_POINTS_PER_INCH = 72
"""As matplotlib always counts in an SVG."""

_COLORS = 7
"""Number of the page's colors for lines; style.css names them ``--c0``, ``--c1`` and so on."""
_INK = "#0000fe"
_INKS = tuple(f"#0000{number:02x}" for number in range(1, _COLORS + 1))
"""Stand for the text color of the page, and its colors for lines, while matplotlib draws."""
_DASHES = ((), (5.0, 2.0), (1.5, 1.5), (7.0, 2.0, 1.5, 2.0))
"""Patterns of lines, as lengths of dashes and gaps in points; the first is a solid line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One curve."""

    label: str
    """What it shows."""
    points: Points
    """Its (x, y) in order of x; y is NaN where there was no finite number."""
    color: int = 0
    """Number of one of the page's colors."""
    dashes: Sequence[float] = ()
    """Lengths of its dashes and gaps, in points; a solid line has none."""
    width: float = 2.0
    """Width of the line, in points."""
    faint: bool = False
    """Whether it has no marks, and is pale unless it is dashed, as a background for others."""

    @property
    def finite(self) -> list[float]:
        """Values of y, without those that are not finite."""
        return _finite(self.points)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A set of curves that share their axes."""

    title: str
    """What is shown; different from that of every other chart of the page."""
    lines: Sequence[Curve]
    """The curves; those without a finite number are left out."""
    across: str
    """What the x axis counts."""
    share: bool = False
    """Whether values are shown in percent."""

    @property
    def view_box(self) -> str:
        """Return the drawing's extent, as an SVG element's ``viewBox`` has it."""
        return f"0 0 {_WIDTH_POINTS:g} {_HEIGHT_POINTS:g}"

    def drawing(self) -> Markup:
        """Draw the content of the SVG element: axes and lines, in the page's colors.

        Raises:
            LaunchError: matplotlib is not installed.
        """
        svg = _picture(self)
        svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
        # A style element inside an SVG would apply to the whole page.
        svg = re.sub(r"<(metadata|style).*?</\1>|<!--.*?-->", "", svg, flags=re.DOTALL)
        # See the note on colors.
        svg = svg.replace(_INK, "currentColor")
        for number, ink in enumerate(_INKS):
            svg = svg.replace(ink, f"var(--c{number})")
        svg = re.sub(r"\s*\n\s*", "\n", svg).strip()
        # Markup, or the template would escape it; nothing in the drawing is text of a run.
        # "replace": the title may have the name of a score, with lone surrogates from a JSON file.
        return Markup(_renamed(svg, prefix=f"c{crc32(self.title.encode('utf-8', 'replace')):08x}"))


def charts_of(charts: Iterable[Chart]) -> list[Chart]:
    """Leave out lines without a finite number, and charts without a line."""
    seen = (replace(chart, lines=[each for each in chart.lines if each.finite]) for chart in charts)
    return [chart for chart in seen if chart.lines]


def _finite(points: Points) -> list[float]:
    return [y for _, y in points if abs(y) < _LARGEST]


def thinned(points: Points) -> Points:
    """Reduce a line to at most 500 points: means of neighbors, of those that are finite.

    >>> len(thinned([(float(x), 1.0) for x in range(1001)]))
    334
    """
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    # A group keeps the x of its last point: a line that is still growing ends where its run is.
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], fmean(_finite(group) or [math.nan])) for group in groups]


def _picture(chart: Chart) -> str:
    require("a report", "report", "matplotlib")
    # Not pyplot, which picks a window system, and keeps every figure until it is closed.
    from matplotlib.figure import Figure

    size = (_WIDTH_POINTS / _POINTS_PER_INCH, _HEIGHT_POINTS / _POINTS_PER_INCH)
    figure = Figure(figsize=size, dpi=_POINTS_PER_INCH, layout="constrained", facecolor="none")
    axes = figure.subplots()
    for depth, line in enumerate(chart.lines):
        _draw(axes, line, depth=depth)
    _dress(axes, across=chart.across)
    _scale(axes, chart)
    written = StringIO()
    # Without the date, so that the same numbers always make the same page.
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def _draw(axes: Axes, line: Curve, *, depth: int) -> None:
    points = thinned(line.points)
    marked = len(points) <= _MARKED_POINTS and not line.faint
    axes.plot(
        [x for x, _ in points],
        [y if abs(y) < _LARGEST else math.nan for _, y in points],
        color=_INKS[line.color],
        linewidth=line.width,
        alpha=0.5 if line.faint and not line.dashes else 1.0,
        linestyle=(0, line.dashes) if line.dashes else "-",
        # A single point has no line that could be seen.
        marker="o" if marked or len(points) == 1 else "",
        markersize=2.0 + line.width,
        zorder=3 + depth,
    )


def _dress(axes: Axes, *, across: str) -> None:
    axes.set_facecolor("none")
    axes.set_xlabel(across, color=_INK, fontsize=11)
    axes.tick_params(which="both", color=_INK, labelcolor=_INK, labelsize=10.5)
    axes.grid(color=_INK, alpha=0.15, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
        spine.set_alpha(0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_offset_text().set(color=_INK, fontsize=10)


def _scale(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    values = [value for line in chart.lines for value in line.finite]
    least, most = min(values), max(values)
    places = {x for line in chart.lines for x, _ in line.points}
    if len(places) == 1:
        # Around a single point, or its number would stand at each mark of the axis.
        axes.set_xlim(min(places) - 0.5, min(places) + 0.5)
    if chart.across in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if chart.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif least > 0 and most / least > _LOGARITHMIC_RATIO:
        axes.set_yscale("log")
    # From 0 where that still leaves the curves three fifths of the height.
    if 0 <= least < 0.4 * most and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)


def _renamed(svg: str, *, prefix: str) -> str:
    """Rename the ids that are referred to, by number, and remove the others.

    matplotlib draws ids at random, so no two pages of the same run would be equal. The prefix keeps
    charts apart: ids hold for the whole page, and one chart would be clipped by another's frame.
    """
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    numbers = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    name = r'(?<= id=")[^"]+|(?<=href="#)[^"]+|(?<=url\(#)[^)]+'
    svg = re.sub(name, lambda found: numbers.get(found[0], ""), svg)
    return svg.replace(' id=""', "")
