"""Writes the timeline of a run: when each device computes, communicates and waits."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path

from onefold.core.assignment import Devices
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Spans
from onefold.step.result import Step
from onefold.watch.timeline import TimelinePart, name_row, slice_of
from onefold.watch.timing import (
    Moment,
    PhaseTime,
    Span,
    Stopwatch,
    elapsed_s,
    host_now_s,
    is_past,
)

__all__ = ["Profile", "prepare"]

_log = logging.getLogger("onefold")


PROFILED_STEPS = 1000
"""Number of steps in a timeline, from the run's first; viewers cannot open many more."""


class Profile(Hook):
    """Writes the spans of each step to this process's part of the timeline.

    At the end it logs what limits the steps of the process's first device, without the first step.

    On a GPU, a step is written when the next one is done: by then its times are usually known
    without synchronization. The last step is written at the end of the program.

    Args:
        folder: folder of the timeline's parts.
        devices: devices of the run and of this process.
        watches: stopwatches of this process's devices, by number.
    """

    def __init__(self, folder: Path, devices: Devices, watches: Mapping[int, Stopwatch]) -> None:
        self._group = devices.trainer
        self._part = TimelinePart(folder, f"{devices.trainer}-{devices.seats[0]}")
        self._origins = {number: _origin(watch) for number, watch in watches.items()}
        # The last step and its spans, on which the GPU may still be working.
        self._held: tuple[int, Mapping[int, Sequence[Span]]] = 0, {}
        self._ends = dict.fromkeys(watches, 0.0)
        self._first = devices.own[0]
        self._times: list[PhaseTime] = []
        for number in watches:
            name = f"device {number} ({devices.all[number]})"
            self._part.append(name_row(group=self._group, row=number, name=name))
        atexit.register(self._write_rest)

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Add a step that was computed."""
        if asked.computed:
            self.add_step(step.number, spans)

    def add_step(self, step: int, spans: Mapping[int, Sequence[Span]]) -> None:
        """Add the spans of this process's devices in a step."""
        # The previous step on a GPU has usually finished by now. Otherwise this waits for it, so
        # that at most one step of events is held.
        self._write()
        if step <= PROFILED_STEPS:
            self._held = step, spans
            # Always true on a CPU, whose moments are plain numbers.
            if _is_over(spans):
                self._write()

    def _write_rest(self) -> None:
        """Write the last step without waiting: after a failure, the device may never finish."""
        try:
            if _is_over(self._held[1]):
                self._write()
        # Nothing could catch the error at exit: every query repeats a CUDA error of the run.
        except RuntimeError as error:
            _log.info("the timeline lacks the last step: %s", error)
        # The first step starts the loader's workers, and compiles.
        times = self._times[1:]
        if times and (limit := reduce(add, times).limit):
            _log.warning("device %d is %s", self._first, limit)

    def _write(self) -> None:
        """Write the held step, if there is one."""
        (step, held), self._held = self._held, (0, {})
        for device, spans in held.items():
            if device == self._first:
                self._times.append(PhaseTime.of(spans))
            known = [
                (span.label, span.phase, *self._bounds(device, span))
                for span in spans
                if span.phase not in ("launch", "idle")  # these overlap others, or nothing
            ]
            first, last = min(each[2] for each in known), max(each[3] for each in known)
            rows = [(f"step {step}", "step", first, last), *known]
            self._part.append(
                [slice_of(*row, group=self._group, row=device, step=step) for row in rows]
            )
            self._ends[device] = last

    def _bounds(self, device: int, span: Span) -> tuple[float, float]:
        """Return the start and end of a span, in seconds on the host's clock.

        The slices of a row must not overlap. The clocks of host and GPU drift apart by
        microseconds, enough to make two steps overlap, so both bounds are clamped to the end of the
        last step.
        """
        start, stop = (self._host_s(device, moment) for moment in (span.start, span.stop))
        return max(start, self._ends[device]), max(stop, self._ends[device])

    def _host_s(self, device: int, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        # A GPU only measures the time between two of its events, so place each event relative to
        # one whose time on the host's clock is known.
        host_s, event = self._origins[device]
        return host_s + elapsed_s(event, moment)


def _is_over(spans: Mapping[int, Sequence[Span]]) -> bool:
    """Whether all spans are finished, so that their times are known without waiting."""
    return all(is_past(span.stop) for ones in spans.values() for span in ones)


def _origin(watch: Stopwatch) -> tuple[float, Moment]:
    """Return the same moment on the host's and the device's clock; synchronizes the device."""
    moment = watch.now()
    # elapsed_s waits until the device reaches the event, so that the host's time matches it.
    elapsed_s(moment, moment)
    return host_now_s(), moment


def prepare(start: RunSetup) -> Callable[[RunView], Profile | None]:
    """Write a Trainer's timeline to the run's folder, if that exists."""
    parts = Path(start.context.timeline_parts)

    def begin(run: RunView) -> Profile | None:
        watches = {each.number: each.watch for each in run.engine.context.replicas}
        try:
            return Profile(parts, run.devices, watches)
        except FileNotFoundError:  # a cleaner of temporary files removed it: not a reason to fail
            _log.warning("%s was removed: the timeline lacks this trainer", parts)
            return None

    return begin
