"""When the time of a training is over."""

from types import SimpleNamespace
from typing import Any

import pytest

from onefold_jobs import meter
from onefold_jobs.meter import TimeLimit
from tests.tables import for_each


@for_each(
    ("step_s", "limit_s", "over_at", "looks"),
    [
        (0.01, 5.0, (500, 505), 14),
        (0.25, 5.0, (20, 21), 20),
        (10.0, 25.0, (3, 3), 3),
        (100.0, 1.0, (1, 1), 1),
    ],
)
def test_the_lead_is_asked_about_once_a_second(
    step_s: float, limit_s: float, over_at: Any, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All devices ask it after the same steps, of which it says the next."""
    asked = []

    def broadcast(value: Any) -> Any:
        asked.append(lead.steps)
        return value

    lead: Any = SimpleNamespace(steps=7, broadcast=broadcast)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: step_s * lead.steps)
    limit = TimeLimit(lead, limit_s)
    assert not limit.is_over()
    while not limit.is_over():
        lead.steps += 1
    assert over_at[0] <= lead.steps - 7 <= over_at[1]
    assert len(asked) - 1 <= looks


def test_without_a_limit_nobody_is_asked() -> None:
    trainer: Any = SimpleNamespace(steps=0, broadcast=lambda _: pytest.fail("asked"))
    assert not TimeLimit(trainer, float("inf")).is_over()
