"""What is told of a run by the times of its steps."""

from typing import Any, cast

import pytest

from onefold.run.observers import LAUNCH_STEPS, LaunchWatch
from onefold.watch.timing import Phase, Span


class Event:
    """An event of a device that has, or has not, come to it."""

    def __init__(self, past: bool) -> None:
        self.past = past

    def query(self) -> bool:
        return self.past


def spans(*past: bool) -> list[Span]:
    """Those of a step with a shard for each of some events, at which its backward began."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    moments: list[Any] = [Event(each) for each in past]
    found = [Span(phase, "", moment, moment) for moment in moments for phase in phases]
    return [*found, Span("update", "", moments[-1], moments[-1])]


def told(steps: list[dict[int, list[Span]]], caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = LaunchWatch()
    for each in steps:
        watch.observe(cast(Any, None), each)
    return caplog.messages


KEPT_UP, LAGS = {0: spans(True, True)}, {0: spans(True, False)}


def test_a_device_that_waits_for_its_launches_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (message,) = told([KEPT_UP] * (3 * LAUNCH_STEPS), caplog)
    assert message.startswith("device 0 waits for the host")
    assert "2 shards" in message


def test_the_last_device_of_a_process_counts(caplog: pytest.LogCaptureFixture) -> None:
    steps = [{0: spans(True, True, True), 1: spans(True, True)}] * LAUNCH_STEPS
    (message,) = told(steps, caplog)
    assert message.startswith("device 1 waits")
    assert told([{0: spans(True, True), 1: spans(True, False)}] * 30, caplog) == [message]


@pytest.mark.parametrize(
    "steps",
    [
        [LAGS] * 50,
        [*([KEPT_UP] * (LAUNCH_STEPS - 1)), LAGS] * 3,
        # There cannot be fewer shards than one.
        [{0: spans(True)}] * 50,
        # A step that loads nothing and computes nothing.
        [{0: []}] * 50,
    ],
)
def test_nothing_is_told_of_others(
    steps: list[dict[int, list[Span]]], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(steps, caplog) == []
