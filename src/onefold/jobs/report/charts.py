"""Curves as pictures inside the page, drawn by matplotlib without any of its global state.

Colours become the page's own, so that a chart is legible in light and in dark. What a user named
(runs, scores, devices) stands in HTML beside the picture, never in it: it is escaped there, found
by a search, and cannot be taken for a formula or lack a glyph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING
from zlib import crc32

from onefold.errors import LaunchError
from onefold.jobs.report.markup import Markup, tag
from onefold.jobs.report.style import COLOURS
from onefold.jobs.report.words import counted, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Line", "chart", "of_run"]

Points = Sequence[tuple[float, float]]

_MOST_POINTS = 500
"""Of a line; a longer one is drawn as means of neighbours."""
_MARKED_POINTS = 30
"""A line of more points is drawn without a mark at each."""
_LOGARITHMIC_RATIO = 200
"""Of the largest value to the smallest, above which small values would not be told apart."""

_DASHES = (None, (5.0, 2.0), (1.5, 1.5), (7.0, 2.0, 1.5, 2.0))
_INK = "#0000fe"
_INKS = tuple(f"#0000{number:02x}" for number in range(1, COLOURS + 1))
"""Stand for the colours of the page while matplotlib draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve."""

    label: str
    """What it shows."""
    points: Points
    """Its (x, y) in order of x; y is NaN where there was no finite number."""
    colour: int = 0
    """Number of one of the page's colours."""
    dashes: int = 0
    """Number of a pattern; 0 is a whole line."""
    width: float = 2.0
    """Of the line, in points."""
    faint: bool = False
    """Pale and without marks, for what lies behind the others."""


def of_run(index: int, label: str, points: Points, *, runs: int) -> Line:
    """The curve of one run among several.

    No two of 28 have both colour and pattern in common. Each is thinner than the one before, so
    that runs of the same numbers are all seen.
    """
    return Line(
        label=label,
        points=points,
        colour=index % COLOURS,
        dashes=index % len(_DASHES),
        width=1.6 + 3.2 * (runs - 1 - index) / max(1, runs - 1),
    )


def chart(title: str, lines: Sequence[Line], *, across: str, share: bool = False) -> Markup:
    """A figure with its title, curves and the names of the curves.

    Args:
        title: what is shown; no other chart of the page has the same.
        lines: the curves; those without a finite number are left out.
        across: what the x axis counts.
        share: show values in percent.

    Returns:
        The figure; nothing where there is no finite number at all.

    Raises:
        LaunchError: matplotlib is not installed.
    """
    drawn = [line for line in lines if _finite(line.points)]
    if not drawn:
        return Markup("")
    legend = tag("ul", *map(_legend_entry, drawn), class_="legend")
    told = "; ".join(f"{line.label}: {_course(line.points)}" for line in drawn)
    picture = _picture(drawn, across=across, share=share)
    svg = _own(picture, prefix=f"c{crc32(title.encode('utf-8', 'replace')):08x}")
    opening = tag("svg", class_="chart", role="img", aria_label=f"{title} by {across}. {told}")
    svg = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"\n\1>", svg, count=1)
    svg = opening.removesuffix("></svg>") + " " + svg.lstrip()
    return tag("figure", tag("figcaption", title), Markup(svg), legend)


def _finite(points: Points) -> list[float]:
    return [y for _, y in points if math.isfinite(y)]


def _course(points: Points) -> str:
    values = _finite(points)
    return f"from {plain(values[0])} to {plain(values[-1])}"


def _legend_entry(line: Line) -> Markup:
    dashes = _DASHES[line.dashes]
    sample = tag(
        "line",
        x1=0,
        x2=30,
        y1=5,
        y2=5,
        stroke=f"var(--c{line.colour})",
        stroke_width=line.width,
        stroke_dasharray=" ".join(f"{2 * length:g}" for length in dashes) if dashes else None,
    )
    swatch = tag("svg", sample, viewBox="0 0 30 10", aria_hidden="true")
    lost = len(line.points) - len(_finite(line.points))
    note = f" ({counted(lost, 'number')} not finite, left out)" if lost else ""
    return tag("li", swatch, line.label, tag("small", note))


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
    return Figure(figsize=(5.4, 3.0), dpi=72, layout="constrained", facecolor="none")


def _picture(lines: Sequence[Line], *, across: str, share: bool) -> str:
    figure = _figure()
    axes = figure.subplots()
    for depth, line in enumerate(lines):
        _draw(axes, line, depth=depth)
    _dress(axes, across=across)
    _scale(axes, [y for line in lines for y in _finite(line.points)], across=across, share=share)
    written = StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def _draw(axes: Axes, line: Line, *, depth: int) -> None:
    points = thinned(line.points)
    marked = len(points) <= _MARKED_POINTS and not line.faint
    dashes = _DASHES[line.dashes]
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=_INKS[line.colour],
        linewidth=line.width,
        alpha=0.5 if line.faint else 1.0,
        linestyle=(0, dashes) if dashes else "-",
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


def _scale(axes: Axes, values: Sequence[float], *, across: str, share: bool) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    if across in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif min(values) > 0 and max(values) / min(values) > _LOGARITHMIC_RATIO:
        axes.set_yscale("log")
    if min(values) >= 0 and axes.get_yscale() == "linear" and min(values) < 0.4 * max(values):
        axes.set_ylim(bottom=0)


def _own(picture: str, *, prefix: str) -> str:
    """An SVG file as a part of the page: its colours, and names that no other chart has."""
    svg = picture[picture.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    for number, ink in enumerate(_INKS):
        svg = svg.replace(ink, f"var(--c{number})")
    return re.sub(r"\s*\n\s*", "\n", _renamed(svg, prefix=prefix))


def _renamed(svg: str, *, prefix: str) -> str:
    """Names that are used, counted; matplotlib draws them by lot."""
    used = dict.fromkeys(re.findall(r"(?:href=\"|url\()#([^\")]+)", svg))
    numbers = {name: f"{prefix}-{number}" for number, name in enumerate(used)}
    svg = re.sub(
        r' id="([^"]+)"',
        lambda found: f' id="{numbers[found[1]]}"' if found[1] in numbers else "",
        svg,
    )
    return re.sub(r"(href=\"|url\()#([^\")]+)", lambda f: f"{f[1]}#{numbers[f[2]]}", svg)
