"""Selects the curves of one run, or of several runs together, and draws them for the page.

`curves_of_one` and `curves_of_several` select the curves. A `Chart` draws its curves as an inline
SVG, with matplotlib but without its global state. Names are next to the drawing, in HTML.

Note: colors
------------
A chart must be legible on light and dark pages, so its colors are variables of the page's style
sheet. matplotlib does not support variables. So it draws in placeholder inks, blues that nothing
else uses, and the SVG text is searched for them afterwards.
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
from onefold_jobs.report.folder import ReportedRun, StepsLine, finite_or_zero, number
from onefold_jobs.report.words import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curves_of_one", "curves_of_several"]


_SPEED = "Training speed in samples/s"
_RATES = "learning rate"
"""Quantity of an axis that is logarithmic."""
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Units of time: shortest duration that uses the unit, seconds per unit, and name."""

# Keyed by the name that each run has on the page.
Runs = Mapping[str, ReportedRun]


def curves_of_one(run: ReportedRun) -> list[Chart]:
    """Chart losses, scores, learning rate and speed; empty before the first numbers."""
    # Over steps as well, so that it can share a chart with the training loss.
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
    # Steps show a warmup within an epoch; a short run may only have epochs.
    rates = [_by_step(run.steps or run.epochs, "lr", "learning rate", color=3)]
    return charts_of(
        [
            Chart(title="Loss", lines=losses, across="step"),
            *(
                _score(name, [*_baseline(run, name), _of_epochs(run, name)])
                for name in run.score_names
            ),
            Chart(title="Learning rate", lines=rates, across="step"),
            *_range_test(run),
            Chart(title=_SPEED, lines=speeds, across="step"),
        ]
    )


def _range_test(run: ReportedRun) -> list[Chart]:
    """Chart the losses of ``--lr auto`` over the learning rate, with the chosen one."""
    found = run.facts.get("range_test")
    if not found:
        return []
    losses, smoothed = ([*map(number, found[name])] for name in ("losses", "smoothed"))
    ends = [min(filter(math.isfinite, smoothed), default=0.0), losses[0]]
    lines = [
        Curve(
            label="loss", points=[*zip(found["rates"], losses, strict=True)], width=1.0, faint=True
        ),
        Curve(label="moving average", points=[*zip(found["rates"], smoothed, strict=True)]),
        Curve(
            label="chosen",
            points=[(found["rate"], y) for y in ends],
            color=6,
            dashes=(5.0, 2.0),
            faint=True,
        ),
    ]
    return [Chart(title="Loss by learning rate (--lr auto)", lines=lines, across=_RATES)]


def curves_of_several(runs: Runs) -> list[Chart]:
    """Chart losses, scores and speed, by epoch and by time; empty before an epoch has ended."""
    # A dict instead of a set keeps the order, so that the page is reproducible.
    names = dict.fromkeys(name for run in runs.values() for name in run.score_names)
    target = next(iter(runs.values())).target
    # All runs get the unit of the longest one, because they share the axis.
    longest_s = max(finite_or_zero(run.trained_s) for run in runs.values())
    unit_s, unit = next((size, word) for least, size, word in _UNITS if longest_s >= least)

    def by_epoch(title: str, number: str) -> Chart:
        lines = _of_runs(runs, lambda run: [(e.epoch, getattr(e, number)) for e in run.epochs])
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
    return [(epoch.epoch, epoch.score(name)) for epoch in run.epochs]


def _score(name: str, lines: list[Curve]) -> Chart:
    return Chart(title=f"Test {name}", lines=lines, across="epoch", share=is_share(name))


def _of_epochs(run: ReportedRun, name: str) -> Curve:
    return Curve(label=name, points=_scores(run, name), color=2)


def _baseline(run: ReportedRun, name: str) -> list[Curve]:
    """Return the baseline, from half an epoch before the first to half an epoch after the last."""
    least, epochs = run.baseline(name), [each.epoch for each in run.epochs]
    if not epochs or math.isnan(least):
        return []
    points = [(epochs[0] - 0.5, least), (epochs[-1] + 0.5, least)]
    return [Curve(label="baseline", points=points, color=6, dashes=(5.0, 2.0), faint=True)]


def _of_runs(runs: Runs, points: Callable[[ReportedRun], Points]) -> list[Curve]:
    """Make the curve of each run.

    Each line is thinner than the previous one, so that runs with equal numbers all remain visible.
    """
    # 7 colors and 4 patterns have no common factor, so the first 28 runs all look different.
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
"""Lines with more points are drawn as means of neighbors, or the page would have megabytes."""
_LARGEST = 1e300
"""Limit of values, because matplotlib also computes sums and multiples, which must be finite."""
_MARKED_POINTS = 30
"""Lines with more points are drawn without markers."""
_LOGARITHMIC_RATIO = 200
"""Ratio of largest to smallest value from which the axis is logarithmic."""
_LEAST_SHARE = 0.05
_LEAST_PART = 0.1
"""Minimum extent of an axis: of shares, and of other values as a part of the largest. Otherwise
noise would fill a chart of equal values."""

_WIDTH_POINTS, _HEIGHT_POINTS = 388.8, 216.0
_POINTS_PER_INCH = 72
"""matplotlib's fixed resolution of SVG."""

_COLORS = 7
"""Number of line colors of the page; style.css names them ``--c0``, ``--c1`` and so on."""
_INK = "#0000fe"
_INKS = tuple(f"#0000{number:02x}" for number in range(1, _COLORS + 1))
"""Placeholders for the page's text color, and its line colors, while matplotlib draws."""
_DASHES = ((), (5.0, 2.0), (1.5, 1.5), (7.0, 2.0, 1.5, 2.0))
"""Line patterns, as lengths of dashes and gaps in points; the first is a solid line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A curve."""

    label: str
    """Label in the legend."""
    points: Points
    """Points (x, y) in order of x; y is NaN if there was no finite number."""
    color: int = 0
    """Index of the page's line color."""
    dashes: Sequence[float] = ()
    """Lengths of dashes and gaps, in points; empty for a solid line."""
    width: float = 2.0
    """Line width, in points."""
    faint: bool = False
    """Whether to draw it as a background: without markers, and pale unless it is dashed."""

    @property
    def finite(self) -> list[float]:
        """Finite values of y."""
        return _finite(self.points)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """Title, which must be unique on the page."""
    lines: Sequence[Curve]
    """Curves; those without a finite number are left out."""
    across: str
    """Quantity on the x axis."""
    share: bool = False
    """Whether values are displayed in percent."""

    @property
    def view_box(self) -> str:
        """Extent of the drawing, as the ``viewBox`` of an SVG element."""
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
        for index, ink in enumerate(_INKS):
            svg = svg.replace(ink, f"var(--c{index})")
        svg = re.sub(r"\s*\n\s*", "\n", svg).strip()
        # Markup, or the template would escape it; the drawing contains no text of a run.
        # "replace": the title may contain a score name with lone surrogates from a JSON file.
        return Markup(_renamed(svg, prefix=f"c{crc32(self.title.encode('utf-8', 'replace')):08x}"))


def charts_of(charts: Iterable[Chart]) -> list[Chart]:
    """Drop lines without a finite number, and charts without a line."""
    seen = (replace(chart, lines=[each for each in chart.lines if each.finite]) for chart in charts)
    return [chart for chart in seen if chart.lines]


def _finite(points: Points) -> list[float]:
    return [y for _, y in points if abs(y) < _LARGEST]


def thinned(points: Points) -> Points:
    """Reduce a line to at most 500 points, by averaging the finite values of neighbors.

    >>> len(thinned([(float(x), 1.0) for x in range(1001)]))
    334
    """
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    # A group keeps the x of its last point, so that a growing line ends where its run is.
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], fmean(_finite(group) or [math.nan])) for group in groups]


def _picture(chart: Chart) -> str:
    require("a report", "report", "matplotlib")
    # pyplot would select a window system, and keep every figure until it is closed.
    from matplotlib.figure import Figure

    size = (_WIDTH_POINTS / _POINTS_PER_INCH, _HEIGHT_POINTS / _POINTS_PER_INCH)
    figure = Figure(figsize=size, dpi=_POINTS_PER_INCH, layout="constrained", facecolor="none")
    axes = figure.subplots()
    for depth, line in enumerate(chart.lines):
        _draw(axes, line, depth=depth)
    _dress(axes, across=chart.across)
    _scale(axes, chart)
    written = StringIO()
    # Without the date, so that the same numbers always give the same page.
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
        # A single point has no visible line.
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
        # Center a single point, or its number would appear at each tick of the axis.
        axes.set_xlim(min(places) - 0.5, min(places) + 0.5)
    if chart.across in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if chart.across == _RATES:
        axes.set_xscale("log")
    if chart.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif least > 0 and most / least > _LOGARITHMIC_RATIO:
        axes.set_yscale("log")
    extent = _LEAST_SHARE if chart.share else _LEAST_PART * max(abs(least), abs(most)) or 1.0
    if most - least < extent:
        bottom = (least + most - extent) / 2
        if chart.share and least >= 0 and most <= 1:
            bottom = min(max(bottom, 0.0), 1.0 - extent)
        axes.set_ylim(bottom - extent / 20, bottom + extent * 21 / 20)
    # Start at 0 if the curves still get three fifths of the height.
    elif 0 <= least < 0.4 * most and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)


def _renamed(svg: str, *, prefix: str) -> str:
    """Rename the ids that are referenced, by number, and remove the others.

    matplotlib draws ids at random, so no two pages of a run would be equal. The prefix separates
    charts: ids are global on the page, and one chart would be clipped by another one's frame.
    """
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    numbers = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    name = r'(?<= id=")[^"]+|(?<=href="#)[^"]+|(?<=url\(#)[^)]+'
    svg = re.sub(name, lambda found: numbers.get(found[0], ""), svg)
    return svg.replace(' id=""', "")
