"""Follows a run step by step, and records in the timeline what this process's devices did."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from onefold.core.team import Team
from onefold.watch.timeline import TimelinePart, name_row, slice_of
from onefold.watch.timing import Moment, Span, Stopwatch, elapsed_s, host_now_s, is_past

__all__ = ["PROFILED_STEPS", "Profile"]

_log = logging.getLogger("onefold")

PROFILED_STEPS = 1000
"""How many steps, the first of the run, a timeline holds; viewers cannot open many more."""


class Profile:
    """Writes the spans of each step to this process's part of the timeline.

    On a GPU a step is written when the next one is done: by then its times are known, in most cases
    without waiting. The last step is written at the end of the program.

    Args:
        folder: folder of the timeline's parts.
        team: the devices of the run, and those of this process.
        watches: the stopwatches of this process's devices, by number.
    """

    def __init__(self, folder: Path, team: Team, watches: Mapping[int, Stopwatch]) -> None:
        self._group = team.trainer
        self._part = TimelinePart(folder, f"{team.trainer}-{team.own[0]}")
        self._origins = {number: _origin(watch) for number, watch in watches.items()}
        # The last step and its spans, while the GPU may still be at work on them.
        self._held: tuple[int, Mapping[int, Sequence[Span]]] | None = None
        self._ends = dict.fromkeys(watches, 0.0)
        for number in watches:
            name = f"device {number} ({team.devices[number]})"
            self._part.append(name_row(group=self._group, row=number, name=name))
        atexit.register(self._write_rest)

    def add_step(self, step: int, spans: Mapping[int, Sequence[Span]]) -> None:
        """Add what each device of this process did in a step."""
        # The last step of a GPU is mostly past by now; if it is not, this waits for it, so that no
        # more than one step of events is ever held.
        if self._held is not None:
            self._write_all(*self._held)
        self._held = (step, spans) if step <= PROFILED_STEPS else None
        # On a CPU always: its moments are numbers.
        if self._held is not None and _is_over(spans):
            self._write_all(*self._held)
            self._held = None

    def _write_rest(self) -> None:
        """Write the last step, without waiting: if the run failed, the device may never finish."""
        try:
            if self._held is not None and _is_over(self._held[1]):
                self._write_all(*self._held)
        # At exit nobody could catch it: a CUDA error of the run is raised again by every query.
        except RuntimeError as error:
            _log.info("the last step is missing in the timeline: %s", error)

    def _write_all(self, step: int, spans: Mapping[int, Sequence[Span]]) -> None:
        for number, ones in spans.items():
            self._write(step, number, ones)

    def _write(self, step: int, device: int, spans: Sequence[Span]) -> None:
        known = [(span, *self._bounds(device, span)) for span in spans]
        first = min(start for _, start, _ in known)
        last = max(stop for _, _, stop in known)
        place = {"group": self._group, "row": device, "step": step}
        events = [slice_of(f"step {step}", "step", first, last, **place)]
        for span, start, stop in known:
            events.append(slice_of(span.label, span.phase, start, stop, **place))
        self._part.append(events)
        self._ends[device] = last

    def _bounds(self, device: int, span: Span) -> tuple[float, float]:
        """When a span starts and stops, in seconds on the host's clock.

        The slices of a row must not overlap. The clocks of host and GPU drift apart by
        microseconds, enough to make two steps overlap: so neither is before the last step's end.
        """
        start, stop = (self._host_s(device, moment) for moment in (span.start, span.stop))
        return max(start, self._ends[device]), max(stop, self._ends[device])

    def _host_s(self, device: int, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        # A GPU only measures between two of its events, so each is placed by one whose time on the
        # host's clock is known.
        host_s, event = self._origins[device]
        return host_s + elapsed_s(event, moment)


def _is_over(spans: Mapping[int, Sequence[Span]]) -> bool:
    """Whether all spans are done, so that their times are known without waiting."""
    return all(is_past(span.stop) for ones in spans.values() for span in ones)


def _origin(watch: Stopwatch) -> tuple[float, Moment]:
    """The same moment on the host's clock and on the device's; waits for the device."""
    moment = watch.now()
    # Asking for the time elapsed waits until the event is reached: only then is it now.
    elapsed_s(moment, moment)
    return host_now_s(), moment
