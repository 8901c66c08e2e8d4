"""Measures the time of each part of a step, in spans of work on the clock of the device.

Recording a time never blocks. On a CPU, a moment is a number; on a GPU it is an event in the
stream, whose time is queried only when it is read. A time taken on the host would instead be the
time at which the work was queued, not the time at which it was done.

`LaunchWatch` warns if a GPU waits for the host, which launches the work of its shards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from onefold.system.accelerator import record_event

__all__ = [
    "LAUNCH_STEPS",
    "LaunchWatch",
    "Moment",
    "Phase",
    "PhaseTime",
    "Span",
    "Stopwatch",
    "elapsed_s",
    "host_now_s",
    "is_past",
]

_log = logging.getLogger("onefold")

LAUNCH_STEPS = 20
"""Number of consecutive steps with waits before a warning; the first steps compile and check."""

Phase = Literal["data", "forward", "backward", "exchange", "update"]
# Seconds on the host's clock, or an event in an accelerator's stream.
Moment = float | torch.Event

host_now_s = time.perf_counter
"""Seconds on the host's clock; on Linux, all processes of a host share this clock."""


class Span(NamedTuple):
    """A span of work on one device."""

    phase: Phase
    """The phase to which the span's time is added."""
    label: str
    """Short description of the work."""
    start: Moment
    stop: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Duration of one step on one device, by phase, in seconds."""

    data: float
    """Waiting for the batch, cutting it, and moving it to the device."""
    forward: float
    """Running the model and the loss, for the device's shards."""
    backward: float
    """Computing gradients, for the device's shards."""
    exchange: float
    """Sending gradients, waiting for other devices, adding, and gathering parameters."""
    update: float
    """Clipping gradients and running the optimizer, for the device's partition."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> PhaseTime:
        """Add up the spans by phase; on a GPU this blocks until the last span is done."""
        seconds = dict.fromkeys(("data", "forward", "backward", "exchange", "update"), 0.0)
        for span in spans:
            seconds[span.phase] += elapsed_s(span.start, span.stop)
        return cls(**seconds)


class Stopwatch:
    """Records the spans of one device until `drain` returns them.

    Args:
        device: the device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self._spans: list[Span] = []

    def now(self) -> Moment:
        """Record the current moment in the device's stream of work."""
        return host_now_s() if self._on_host else record_event(self.device, timing=True)

    def note(self, phase: Phase, label: str, start: Moment, stop: Moment | None = None) -> None:
        """Record work from ``start`` until ``stop``, or until now."""
        self._spans.append(Span(phase, label, start, self.now() if stop is None else stop))

    def timed(self, phase: Phase, label: str) -> _Timed:
        """Return a context that records its work, unless it ends with an exception."""
        return _Timed(self, phase, label)

    def has_done(self, phase: Phase) -> bool:
        """Whether the last recorded span of a phase is done; does not block."""
        stops = (span.stop for span in reversed(self._spans) if span.phase == phase)
        return is_past(next(stops, 0.0))

    def drain(self) -> list[Span]:
        """Return and remove all recorded spans."""
        # Start a new list: the caller may keep the old one while the next step records.
        spans, self._spans = self._spans, []
        return spans


class _Timed:
    """The context of `Stopwatch.timed`; a generator would take five times as long."""

    __slots__ = ("_label", "_phase", "_start", "_watch")

    def __init__(self, watch: Stopwatch, phase: Phase, label: str) -> None:
        self._watch, self._phase, self._label = watch, phase, label

    def __enter__(self) -> None:
        self._start = self._watch.now()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._watch.note(self._phase, self._label, self._start)


def elapsed_s(start: Moment, stop: Moment) -> float:
    """Return the seconds between two moments of one clock; on a GPU, blocks until both are past."""
    if isinstance(start, float):
        return stop - start  # type: ignore[operator]  # both are of one clock
    # Synchronize first: elapsed_time raises, instead of blocking, if an event is not past.
    stop.synchronize()  # type: ignore[union-attr]
    return float(start.elapsed_time(stop)) / 1e3  # type: ignore[arg-type]


def is_past(moment: Moment) -> bool:
    """Whether a moment has been reached; does not block."""
    return isinstance(moment, float) or moment.query()


class LaunchWatch:
    """Warns once if a device has finished all shards of a step when the last one is launched.

    A device with enough work still computes its last shards at that time. A script that reads a
    value from the device in forward delays the launch of that shard's backward, but not the end of
    its work.

    Args:
        number: number of the device.
        watch: the device's stopwatch.
    """

    def __init__(self, number: int, watch: Stopwatch) -> None:
        self._number, self._watch = number, watch
        self._waited = 0

    def sample_device(self, shards: int) -> None:
        """Check the device after the launch of a step's backward; does not block.

        Args:
            shards: the device's number of shards; no check with one, because there cannot be fewer.
        """
        if shards < 2 or self._waited == LAUNCH_STEPS:
            return
        self._waited = self._waited + 1 if self._watch.has_done("backward") else 0
        if self._waited == LAUNCH_STEPS:
            _log.warning(
                "device %d waits for the host, which takes longer to launch the %d shards of a "
                "step than the device takes to compute them. Use fewer shards, larger batches or "
                "compile=True",
                *(self._number, shards),
            )
