"""Tells of a device that waits for the host, which launches the work of its shards."""

from __future__ import annotations

import logging

from onefold.watch.timing import Stopwatch

__all__ = ["LAUNCH_STEPS", "LaunchWatch"]

_log = logging.getLogger("onefold")

LAUNCH_STEPS = 20
"""In how many steps in a row a device must have waited; the first ones compile and check."""


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
