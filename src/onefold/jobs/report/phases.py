"""Where the time of a run went: bars and a table, by device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from onefold.jobs.report.folder import PHASES, Run, finite_or_zero
from onefold.jobs.report.markup import Markup, card, joined, section, table, tag
from onefold.jobs.report.words import duration, percent

__all__ = ["phase_times", "phases_section"]

_EVALUATION = "evaluation"
_OTHER = "other"
_ALL = (*PHASES, _EVALUATION, _OTHER)
_WIDE = 0.09
"""Share of a bar that has room for its own number."""
_NEGLIGIBLE = 0.005
"""Share of time under which what is in no phase is not told."""

Times = Mapping[str, float]


def phase_times(run: Run) -> list[tuple[str, dict[str, float]]]:
    """Seconds of all epochs that each device spent in each phase.

    Args:
        run: of which the devices are looked at.

    Returns:
        For each device its name and times: the phases of training, the evaluation (where all
        devices take part), and what is left of the training's duration.
    """
    names: dict[int, str] = {}
    times: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_ALL, 0.0))
    for epoch in run.epochs:
        for index, (name, phases) in enumerate(epoch.devices):
            names[index] = name
            spent = {phase: finite_or_zero(time_s) for phase, time_s in phases.items()}
            for phase, time_s in spent.items():
                times[index][phase] += time_s
            times[index][_EVALUATION] += finite_or_zero(epoch.evaluate_s)
            left_s = finite_or_zero(epoch.train_s) - sum(spent.values())
            times[index][_OTHER] += max(0.0, left_s)
    return [(f"{index}: {names[index]}", times[index]) for index in sorted(names)]


def phases_section(run: Run) -> Markup:
    """Bars and their numbers; nothing before the first epoch has ended."""
    devices = [(name, times) for name, times in phase_times(run) if sum(times.values()) > 0]
    if not devices:
        return Markup("")
    shown = [phase for phase in _ALL if any(_is_shown(phase, times) for _, times in devices)]
    bars = [joined([tag("div", f"device {name}"), _bar(times, shown)]) for name, times in devices]
    legend = tag("ul", *map(_legend_entry, shown), class_="legend", aria_hidden="true")
    return section(
        "Where the time went",
        card(tag("div", *map(_boxed, bars), class_="bars"), legend, _table(devices, shown)),
    )


def _boxed(bar: str) -> Markup:
    return tag("div", bar)


def _is_shown(phase: str, times: Times) -> bool:
    return phase in PHASES or times[phase] > _NEGLIGIBLE * sum(times.values())


def _bar(times: Times, shown: Sequence[str]) -> Markup:
    total_s = sum(times[phase] for phase in shown)
    return tag(
        "div",
        *(_piece(phase, times[phase] / total_s) for phase in shown),
        class_="bar",
        aria_hidden="true",
    )


def _piece(phase: str, share: float) -> Markup:
    style = f"width:{share:.3%};background:var(--c{_ALL.index(phase)})"
    return tag("span", f"{share:.0%}" if share >= _WIDE else "", style=style, title=phase)


def _legend_entry(phase: str) -> Markup:
    box = tag("rect", width=30, height=10, rx=2, fill=f"var(--c{_ALL.index(phase)})")
    return tag("li", tag("svg", box, viewBox="0 0 30 10", aria_hidden="true"), phase)


def _table(devices: Sequence[tuple[str, Times]], shown: Sequence[str]) -> Markup:
    return table(
        ["device", *shown, "together"],
        [[name, *_cells(times, shown)] for name, times in devices],
        caption="Share and duration of each phase, over all epochs",
    )


def _cells(times: Times, shown: Sequence[str]) -> list[str]:
    total_s = sum(times[phase] for phase in shown)
    cells = [_cell(times[phase] / total_s, times[phase]) for phase in shown]
    return [*cells, duration(total_s)]


def _cell(share: float, time_s: float) -> str:
    return joined([percent(share), tag("br"), tag("small", duration(time_s))])
