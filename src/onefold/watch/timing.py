"""Measures where a step's time goes: spans of work, each on the clock of the device that does it.

Taking a time makes nobody wait. On a processor a moment is a number; on a GPU it is an event in the
stream of its work, whose time is requested only when somebody reads it. A number taken on the host
instead would be the time at which the work was queued, not the time at which it was done.

`LaunchWatch` warns of a device that waits for the host, which launches the work of its shards.
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
"""In how many steps in a row a device must have waited; the first ones compile and check."""

Phase = Literal["data", "forward", "backward", "exchange", "update"]
# Seconds on the host's clock, or an event in an accelerator's stream.
Moment = float | torch.Event

host_now_s = time.perf_counter
"""Seconds on the host's clock; on Linux all processes of a host read the same one."""


class Span(NamedTuple):
    """A stretch of work on one device."""

    phase: Phase
    """The kind of work, under which its time is added up."""
    label: str
    """What the work is exactly, in a few words."""
    start: Moment
    stop: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """The seconds that one step took on one device, by phase."""

    data: float
    """Waiting for the batch, cutting it, and moving it to the device."""
    forward: float
    """The model and the loss, for the device's shards."""
    backward: float
    """The gradients, for the device's shards."""
    exchange: float
    """Publishing gradients, waiting for other devices, adding, and spreading parameters."""
    update: float
    """Clipping and the optimizer, for the device's partition."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> PhaseTime:
        """Add up the spans by phase; on a GPU this waits until the last one is done."""
        seconds = dict.fromkeys(("data", "forward", "backward", "exchange", "update"), 0.0)
        for span in spans:
            seconds[span.phase] += elapsed_s(span.start, span.stop)
        return cls(**seconds)


class Stopwatch:
    """Collects the spans of one device until somebody takes them.

    Args:
        device: the device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self._spans: list[Span] = []

    def now(self) -> Moment:
        """Mark this moment in the order of the device's work."""
        return host_now_s() if self._on_host else record_event(self.device, timing=True)

    def note(self, phase: Phase, label: str, start: Moment, stop: Moment | None = None) -> None:
        """Record work that began at ``start`` and ends now, or at ``stop``."""
        self._spans.append(Span(phase, label, start, self.now() if stop is None else stop))

    def timed(self, phase: Phase, label: str) -> _Timed:
        """A block whose work is recorded when it ends, unless by an exception."""
        return _Timed(self, phase, label)

    def has_done(self, phase: Phase) -> bool:
        """Whether the last work of a phase that was recorded is done; does not wait."""
        stops = (span.stop for span in reversed(self._spans) if span.phase == phase)
        return is_past(next(stops, 0.0))

    def drain(self) -> list[Span]:
        """Return and forget all spans that were recorded since the last call."""
        # A new list: whoever takes the spans may hold them while the next step adds its own.
        spans, self._spans = self._spans, []
        return spans


class _Timed:
    """A class and no generator, which takes five times as long, as each step has several."""

    __slots__ = ("_label", "_phase", "_start", "_watch")

    def __init__(self, watch: Stopwatch, phase: Phase, label: str) -> None:
        self._watch, self._phase, self._label = watch, phase, label

    def __enter__(self) -> None:
        self._start = self._watch.now()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._watch.note(self._phase, self._label, self._start)


def elapsed_s(start: Moment, stop: Moment) -> float:
    """Seconds between two moments of one clock; on a GPU, waits until both are past."""
    if isinstance(start, float):
        return stop - start  # type: ignore[operator]  # both are of one clock
    # Asking for the time between events that are not past is an error, not a wait.
    stop.synchronize()  # type: ignore[union-attr]
    return float(start.elapsed_time(stop)) / 1e3  # type: ignore[arg-type]


def is_past(moment: Moment) -> bool:
    """Whether a moment has been reached; does not wait."""
    return isinstance(moment, float) or moment.query()


class LaunchWatch:
    """Warns once if a device has done all shards of a step as soon as the last one is launched.

    A device with enough work is still at its last shards then. A script that reads a value of the
    device in forward delays the launch of that shard's backward, but not the end of its work.

    Args:
        number: of the device.
        watch: its stopwatch.
    """

    def __init__(self, number: int, watch: Stopwatch) -> None:
        self._number, self._watch = number, watch
        self._waited = 0

    def sample_device(self, shards: int) -> None:
        """Look at the device, after the launch of a step's backward; does not wait.

        Args:
            shards: how many the device computes in a step; with one there cannot be fewer.
        """
        if shards < 2 or self._waited == LAUNCH_STEPS:
            return
        self._waited = self._waited + 1 if self._watch.has_done("backward") else 0
        if self._waited == LAUNCH_STEPS:
            _log.warning(
                "device %d waits for the host, which takes longer to launch the %d shards of a "
                "step than the device takes to compute them. Fewer shards, larger batches or "
                "compile=True make it faster",
                *(self._number, shards),
            )
