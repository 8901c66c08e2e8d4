from __future__ import annotations

import math
import select

import pytest

import onefold
from onefold.core.numbers import MOST_S, check_seconds
from onefold.core.options import RunOptions
from tests.tables import for_each

TOO_LARGE = [1e12, 1e300, math.inf, MOST_S + 1]
NOT_POSITIVE = [0, -1, math.nan, -math.inf]


@for_each("value", [*TOO_LARGE, *NOT_POSITIVE])
def test_what_is_no_limit_is_refused(value: float) -> None:
    words = "finite and at most" if value in TOO_LARGE else "more than 0"
    for refused in (
        lambda: check_seconds("it", value),
        lambda: RunOptions(timeout_s=value),
        lambda: RunOptions(grace_s=value),
        lambda: onefold.launch(len, devices="cpu:1", timeout_s=value),
        lambda: onefold.launch(len, devices="cpu:1", grace_s=value),
    ):
        with pytest.raises(ValueError, match=words):
            refused()
    for other in ("5", None, True):
        with pytest.raises(TypeError, match="expected it to be a number"):
            check_seconds("it", other)


def test_the_system_can_wait_so_long() -> None:
    """For whatever is at the end of it, so that this returns at once."""
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLOUT)
    assert poller.poll(check_seconds("it", MOST_S) * 1000)
