"""Says what limits the steps of a run: the host, which launches their work, or their data.

Note: how it is known
---------------------
**The host.** An accelerator computes while the host launches further work. If it has enough work,
it still computes when the host has launched the last backward pass, even if the host waited for it
in forward, where a script reads a value. So `LaunchWatch` notes the time of the launches only if
the device had done all shards by then: it was idle between them. On a CPU, launches are the work.

**The data.** A wait for a batch limits a CPU device as long as it takes. An accelerator may compute
the last step meanwhile, so it waits at most as long as it is idle between the two steps; see
`PhaseTime.of`.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from onefold.watch.timing import PhaseTime, Stopwatch, host_now_s, is_past

__all__ = ["DATA_SHARE", "HOST_SHARE", "LAUNCH_STEPS", "LEAST_DATA_S", "LaunchWatch", "limit_of"]

_log = logging.getLogger("onefold")

HOST_SHARE = 0.5
"""Part of a step that launches take if the host limits it, at least."""
DATA_SHARE = 0.25
"""Part of a step that waits for its batch if data limit it, at least."""
LEAST_DATA_S = 0.005
"""Shortest such wait, in seconds: another process needs as long to send a batch."""
LAUNCH_STEPS = 20
"""Number of consecutive steps with waits before a warning; the first steps compile and check."""

_LAUNCH_LESS = "Use fewer shards, larger batches, graphs=True or compile=True"
_READ_AHEAD = "Use workers= (onefold train: --workers), which read batches ahead, or more of them"


def limit_of(seconds: PhaseTime) -> str:
    """Describe what limits the steps, and what helps; empty if they are balanced."""
    total = seconds.data + seconds.forward + seconds.backward + seconds.exchange + seconds.update
    shown = f"of {1e3 * total / seconds.steps:.0f} ms"
    if seconds.launch >= max(HOST_SHARE * total, seconds.data) and seconds.launch:
        launch_ms = 1e3 * seconds.launch / seconds.steps
        return (
            f"limited by the host: launches take {launch_ms:.0f} {shown} of a step. {_LAUNCH_LESS}"
        )
    waits_s = seconds.data / seconds.steps
    if seconds.data >= DATA_SHARE * total and waits_s >= LEAST_DATA_S:
        return (
            f"limited by data: a step waits for its batch for {1e3 * waits_s:.0f} {shown}. "
            f"{_READ_AHEAD}"
        )
    return ""


class LaunchWatch(AbstractContextManager[None]):
    """Surrounds the launch of a step's shards; notes its time if the devices wait for the host.

    Warns once if they do so in many steps.

    Args:
        number: number of the last device of this process.
        first: stopwatch of the first device of this process, which notes the time.
        last: stopwatch of the last one.
    """

    def __init__(self, number: int, first: Stopwatch, last: Stopwatch) -> None:
        self._number, self._first, self._last = number, first, last
        self._waited = 0
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = host_now_s()

    def __exit__(self, kind: object, *_: object) -> None:
        """Check the last device after the launch of a step's last backward; does not block."""
        passes = [span for span in self._last.spans if span.phase == "backward"]
        if kind is not None or not passes:
            return
        waits = is_past(passes[-1].stop)
        if waits:
            self._first.note("launch", "launch shards", self._start_s, host_now_s())
        # A device with one shard gets no warning, because there cannot be fewer.
        shards = len({span.label for span in passes})
        if shards == 1 or self._waited == LAUNCH_STEPS:
            return
        self._waited = self._waited + 1 if waits else 0
        if self._waited == LAUNCH_STEPS:
            _log.warning(
                "device %d waits for the host, which takes longer to launch the %d shards of a "
                "step than the device takes to compute them. %s",
                *(self._number, shards, _LAUNCH_LESS),
            )
