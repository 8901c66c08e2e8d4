"""Measures the time of each part of a step, in spans of work on the clock of the device.

Recording a time never blocks. On a CPU, a moment is a number; on a GPU it is an event in the
stream, whose time is queried only when it is read. A time taken on the host would instead be the
time at which the work was queued, not the time at which it was done. `onefold.watch.limits` derives
from these times what limits a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from onefold.core.late import load
from onefold.system.accelerator import record_event

__all__ = [
    "Moment",
    "Phase",
    "PhaseTime",
    "Span",
    "Stopwatch",
    "elapsed_s",
    "host_now_s",
    "is_past",
]

Phase = Literal["data", "forward", "backward", "exchange", "update", "launch", "idle"]
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
    """Duration of one step on one device, by phase, in seconds; or of several, added up.

    >>> step = PhaseTime(data=0.03, forward=0.02, backward=0.03, exchange=0.0, update=0.02)
    >>> (step + step).limit.partition(".")[0]
    'limited by data: a step waits for its batch for 30 of 100 ms'
    """

    data: float
    """Waiting for the batch, cutting it, and moving it to the device. An accelerator waits at most
    as long as it is idle between two steps."""
    forward: float
    """Running the model and the loss, for the device's shards."""
    backward: float
    """Computing gradients, for the device's shards."""
    exchange: float
    """Sending gradients, waiting for other devices, adding, and gathering parameters."""
    update: float
    """Clipping gradients and running the optimizer, for the device's partition."""
    launch: float = 0.0
    """Launching the shards on an accelerator, if it had done all of them by then; else 0."""
    steps: int = 1
    """Number of steps that are added up."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> PhaseTime:
        """Add up the spans by phase; on a GPU this blocks until the last span is done."""
        seconds: dict[str, Any] = dict.fromkeys(get_args(Phase), 0.0)
        for span in spans:
            seconds[span.phase] += elapsed_s(span.start, span.stop)
            if span.phase == "idle":
                # So far, data is the host's wait for the batch. The accelerator may have computed
                # the last step meanwhile.
                seconds["data"] = min(seconds["data"], seconds["idle"])
        del seconds["idle"]
        return cls(**seconds)

    def __add__(self, other: PhaseTime) -> PhaseTime:
        names = self.__dataclass_fields__
        return PhaseTime(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def limit(self) -> str:
        """The limit of the steps and a remedy, in words; empty if they are balanced."""
        return str(load("watch.limits").limit_of(self))


class Stopwatch:
    """Records the spans of one device until `drain` returns them.

    Args:
        device: the device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self.spans: list[Span] = []
        """Spans since the last `drain`."""
        self._last: Moment | None = None

    def now(self) -> Moment:
        """Record the current moment in the device's stream of work."""
        return host_now_s() if self._on_host else record_event(self.device, timing=True)

    def note(self, phase: Phase, label: str, start: Moment, stop: Moment | None = None) -> None:
        """Record work from ``start`` until ``stop``, or until now."""
        self.spans.append(Span(phase, label, start, self.now() if stop is None else stop))

    def timed(self, phase: Phase, label: str) -> _Timed:
        """Return a context that records its work, unless it ends with an exception."""
        return _Timed(self, phase, label)

    def drain(self) -> list[Span]:
        """Return and remove all recorded spans; on an accelerator, first its wait for them."""
        # Start a new list: the caller may keep the old one while the next step records.
        spans, self.spans = self.spans, []
        own = [] if self._on_host else [span for span in spans if span.phase != "launch"]
        if own:
            last, self._last = self._last, own[-1].stop
            if last is not None:
                spans.insert(0, Span("idle", "between steps", last, own[0].start))
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
