"""A device that waits for its launches is named once; no other one is."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from onefold.watch.timing import LAUNCH_STEPS, LaunchWatch, Stopwatch
from tests.tables import for_each


class Event:
    """An event that a device has, or has not, come to."""

    def __init__(self, past: bool) -> None:
        self.past = past

    def query(self) -> bool:
        return self.past


START = cast(Any, Event(True))


def told(steps: Sequence[tuple[bool, ...]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is told of steps, in each of which a device has or has not done its shards."""
    watch = Stopwatch(torch.device("cpu"))
    launches = LaunchWatch(3, watch)
    for shards in steps:
        for done in shards:
            watch.note("forward", "", START, START)
            # It has begun: the script may have waited for it in forward.
            watch.note("backward", "", START, cast(Any, Event(done)))
        watch.note("exchange", "", START, START)
        launches.sample_device(len(shards))
        watch.drain()
    return caplog.messages


KEPT_UP, LAGS = (True, True), (True, False)


def test_a_device_that_waits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = told([KEPT_UP] * (3 * LAUNCH_STEPS), caplog)
    assert message.startswith("device 3 waits for the host")
    assert "the 2 shards of a step" in message


@for_each(
    "steps",
    [
        [LAGS] * 50,
        [*([KEPT_UP] * (LAUNCH_STEPS - 1)), LAGS] * 3,
        # There cannot be fewer shards than one, or than none.
        [(True,)] * 50,
        [()] * 50,
    ],
)
def test_no_other_device_is_named(
    steps: list[tuple[bool, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(steps, caplog) == []
