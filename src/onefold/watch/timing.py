"""Where a step's time goes: spans of work, each on the clock of the device that does it.

Nothing here makes anybody wait. On the processor a moment is a number; on a GPU it is an event in
the stream of its work, whose time is only asked for when somebody reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

__all__ = [
    "Moment",
    "Phase",
    "PhaseSeconds",
    "Span",
    "Stopwatch",
    "elapsed_s",
    "host_now_s",
    "is_past",
]

Phase = Literal["data", "forward", "backward", "exchange", "update"]
Moment = float | torch.cuda.Event

host_now_s = time.perf_counter
"""Seconds on the host's clock; on Linux all processes of a host read the same one."""


class Span(NamedTuple):
    """A stretch of work on one device."""

    phase: Phase
    """What kind of work."""
    label: str
    """What exactly, in a few words."""
    start: Moment
    stop: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Seconds of one step by phase, on one device."""

    data: float
    """Waiting for the batch, cutting it, moving it to the device."""
    forward: float
    """The model and the loss, over the device's shards."""
    backward: float
    """Gradients, over the device's shards."""
    exchange: float
    """Handing over gradients, waiting for other devices, adding, handing on parameters."""
    update: float
    """Clipping and the optimizer, on the device's span."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> PhaseSeconds:
        """Add up; on a GPU this waits until the last span is done."""
        seconds = dict.fromkeys(("data", "forward", "backward", "exchange", "update"), 0.0)
        for span in spans:
            seconds[span.phase] += elapsed_s(span.start, span.stop)
        return cls(**seconds)


class Stopwatch:
    """Notes what one device does until somebody takes the notes.

    Args:
        device: whose work it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[Span] = []

    def now(self) -> Moment:
        """This moment, in the order of the device's work."""
        if self.device.type != "cuda":
            return host_now_s()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def note(self, phase: Phase, label: str, start: Moment, stop: Moment | None = None) -> None:
        """Note work that began at ``start`` and ends now, or at ``stop``."""
        self._spans.append(Span(phase, label, start, self.now() if stop is None else stop))

    def take(self) -> list[Span]:
        """Everything noted since the last time."""
        spans, self._spans = self._spans, []
        return spans


def elapsed_s(start: Moment, stop: Moment) -> float:
    """Seconds between two moments of one clock; on a GPU, waits until both have come."""
    if isinstance(start, float):
        return stop - start  # type: ignore[operator]  # both are of one clock
    stop.synchronize()  # type: ignore[union-attr]
    return float(start.elapsed_time(stop)) / 1e3  # type: ignore[arg-type]


def is_past(moment: Moment) -> bool:
    """Whether it has come; nobody waits for it."""
    return isinstance(moment, float) or bool(moment.query())  # type: ignore[no-untyped-call]
