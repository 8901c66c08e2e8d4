"""Curves as pictures inside the page, drawn by matplotlib without any of its global state.

Colours become the page's own, so that a chart is legible in light and in dark. Names stand beside
the picture, in the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING
from zlib import crc32

from markupsafe import Markup

from onefold.errors import LaunchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "Line", "Points", "charts_of", "of_run"]

Points = Sequence[tuple[float, float]]

_MOST_POINTS = 500
"""Of a line; a longer one is drawn as means of neighbours."""
_MARKED_POINTS = 30
"""A line of more points is drawn without a mark at each."""
_LOGARITHMIC_RATIO = 200
"""Of the largest value to the smallest, above which small values would not be told apart."""

_WIDTH_POINTS, _HEIGHT_POINTS = 388.8, 216.0
_POINTS_PER_INCH = 72

_COLOURS = 7
"""Number of the page's colours for lines; style.css names them ``--c0``, ``--c1`` and so on."""
_INK = "#0000fe"
_INKS = tuple(f"#0000{number:02x}" for number in range(1, _COLOURS + 1))
"""Stand for the colours of the page while matplotlib draws."""
_DASHES = ((), (5.0, 2.0), (1.5, 1.5), (7.0, 2.0, 1.5, 2.0))
"""Patterns of lines, as lengths of dashes and gaps; the first is a whole line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve."""

    label: str
    """What it shows."""
    points: Points
    """Its (x, y) in order of x; y is NaN where there was no finite number."""
    colour: int = 0
    """Number of one of the page's colours."""
    dashes: Sequence[float] = ()
    """Lengths of its dashes and gaps; a whole line has none."""
    width: float = 2.0
    """Of the line, in points."""
    faint: bool = False
    """Pale and without marks, for what lies behind the others."""

    @property
    def finite(self) -> list[float]:
        """Its values, without those that are not finite."""
        return _finite(self.points)


def of_run(index: int, label: str, points: Points, *, runs: int) -> Line:
    """The curve of one run among several.

    No two of 28 have both colour and pattern in common. Each is thinner than the one before, so
    that runs of the same numbers are all seen.
    """
    return Line(
        label=label,
        points=points,
        colour=index % _COLOURS,
        dashes=_DASHES[index % len(_DASHES)],
        width=1.6 + 3.2 * (runs - 1 - index) / max(1, runs - 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """What is shown; no other chart of the page has the same."""
    lines: Sequence[Line]
    """The curves; those without a finite number are left out."""
    across: str
    """What the x axis counts."""
    share: bool = False
    """Show values in percent."""

    @property
    def view_box(self) -> str:
        """Of the drawing, as an SVG element has it."""
        return f"0 0 {_WIDTH_POINTS:g} {_HEIGHT_POINTS:g}"

    def drawing(self) -> Markup:
        """What the SVG element holds: axes and lines, in the page's colours.

        Raises:
            LaunchError: matplotlib is not installed.
        """
        svg = _picture(self)
        svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
        svg = re.sub(r"<(metadata|style).*?</\1>|<!--.*?-->", "", svg, flags=re.DOTALL)
        svg = svg.replace(_INK, "currentColor")
        for number, ink in enumerate(_INKS):
            svg = svg.replace(ink, f"var(--c{number})")
        svg = re.sub(r"\s*\n\s*", "\n", svg).strip()
        return Markup(_renamed(svg, prefix=f"c{crc32(self.title.encode('utf-8', 'replace')):08x}"))


def charts_of(charts: Iterable[Chart]) -> list[Chart]:
    """The charts in which there is something to see, with the lines that have a finite number."""
    seen = (replace(chart, lines=[each for each in chart.lines if each.finite]) for chart in charts)
    return [chart for chart in seen if chart.lines]


def _finite(points: Points) -> list[float]:
    return [y for _, y in points if math.isfinite(y)]


def thinned(points: Points) -> Points:
    """At most 500 points: means of neighbours that are finite.

    >>> len(thinned([(float(x), 1.0) for x in range(1001)]))
    334
    """
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], _mean(_finite(group))) for group in groups]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LaunchError(
            "a report needs matplotlib, which is not installed here; "
            'run: pip install "onefold[report]"'
        ) from None
    size = (_WIDTH_POINTS / _POINTS_PER_INCH, _HEIGHT_POINTS / _POINTS_PER_INCH)
    return Figure(figsize=size, dpi=_POINTS_PER_INCH, layout="constrained", facecolor="none")


def _picture(chart: Chart) -> str:
    figure = _figure()
    axes = figure.subplots()
    for depth, line in enumerate(chart.lines):
        _draw(axes, line, depth=depth)
    _dress(axes, across=chart.across)
    _scale(axes, chart)
    written = StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def _draw(axes: Axes, line: Line, *, depth: int) -> None:
    points = thinned(line.points)
    marked = len(points) <= _MARKED_POINTS and not line.faint
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=_INKS[line.colour],
        linewidth=line.width,
        alpha=0.5 if line.faint else 1.0,
        linestyle=(0, line.dashes) if line.dashes else "-",
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
    if chart.across in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if chart.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif least > 0 and most / least > _LOGARITHMIC_RATIO:
        axes.set_yscale("log")
    if 0 <= least < 0.4 * most and axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)


def _renamed(svg: str, *, prefix: str) -> str:
    """Names that are used, counted; matplotlib draws them by lot."""
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    numbers = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    name = r'(?<= id=")[^"]+|(?<=href="#)[^"]+|(?<=url\(#)[^)]+'
    svg = re.sub(name, lambda found: numbers.get(found[0], ""), svg)
    return svg.replace(' id=""', "")
