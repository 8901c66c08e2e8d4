from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.jobs.options import (
    ScaleRate,
    Schedule,
    TrainOptions,
    make_optimizer,
    rate_factor,
    scaled_rate,
)
from tests.tables import for_each

HALF = math.sqrt(2) / 2
COSINE = [(1 + HALF) / 2, 0.75, 0.5, 0.25, (1 - HALF) / 2]


STEP, STAYS = {"schedule": "step"}, {"schedule": "constant"}
VALUES: list[tuple[dict[str, Any], int, int, list[float]]] = [
    ({"schedule": "cosine"}, 1, 4, [1.0, COSINE[0], 0.5, COSINE[4], 0.0]),
    ({"warmup_epochs": 1.0}, 2, 4, [0.2, 0.4, 0.6, 0.8, 1.0, COSINE[0], 0.5, COSINE[4], 0.0]),
    ({**STEP, "decay": 0.5, "decay_epochs": 2}, 3, 2, [1.0] * 4 + [0.5] * 3),
    # A warm-up does not put the decay off, and may take a fraction of a step.
    ({**STEP, "decay_epochs": 1, "warmup_epochs": 1.0}, 2, 2, [1 / 3, 2 / 3, 0.1, 0.1, 0.01]),
    ({**STAYS, "warmup_epochs": 1}, 3, 2, [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({**STAYS, "warmup_epochs": 0.25}, 1, 6, [0.4, 0.8] + [1.0] * 5),
]
# By itself the rate decays after a third of the epochs.
VALUES += [
    (STEP, epochs, 1, [0.1 ** (done // every) for done in range(epochs + 1)])
    for epochs, every in ((9, 3), (10, 3), (3, 1), (2, 1), (1, 1))
]


@for_each(("chosen", "epochs", "steps", "expected"), VALUES)
def test_a_schedule_has_these_values(chosen: Any, epochs: int, steps: int, expected: Any) -> None:
    options = TrainOptions(**{"warmup_epochs": 0, **chosen})
    factor = rate_factor(options, epochs=epochs, steps=steps)
    found = [factor(done) for done in range(epochs * steps + 1)]
    assert found == pytest.approx(expected, abs=1e-12)


@given(
    schedule=st.sampled_from(["constant", "step", "cosine"]),
    warmup_epochs=st.floats(0, 12) | st.integers(0, 4).map(float),
    decay=st.floats(1e-3, 1),
    decay_epochs=st.none() | st.integers(1, 9),
    epochs=st.integers(1, 8),
    steps=st.integers(1, 30),
)
def test_a_factor_rises_evenly(schedule: Schedule, epochs: int, steps: int, **chosen: Any) -> None:
    options = TrainOptions(schedule=schedule, **chosen)
    first, second = (rate_factor(options, epochs=epochs, steps=steps) for _ in range(2))
    last = epochs * steps
    found = [first(done) for done in range(last + 20)]
    assert all(0.0 < value <= 1.0 for value in found[:last])  # no step is for nothing
    assert [second(done) for done in reversed(range(last + 20))] == found[::-1]
    warmup = options.warmup_epochs * steps
    if schedule != "step":
        rising = [(done + 1) / (warmup + 1) for done in range(min(int(warmup), last))]
        assert found[: len(rising)] == pytest.approx(rising)
    if schedule == "cosine" and warmup + 1 <= last:
        assert set(found[last:]) == {0.0}  # and does not rise again


SCALED: list[tuple[ScaleRate, int, int, float]] = [("none", 1024, 256, 0.5)]
SCALED += [("linear", 1024, 256, 2.0), ("linear", 16, 256, 0.03125), ("linear", 96, 32, 1.5)]
SCALED += [("sqrt", 1024, 256, 1.0), ("sqrt", 16, 256, 0.125)]


@for_each(("rule", "batch_size", "base", "rate"), SCALED)
def test_the_batch_size_scales(rule: Any, batch_size: int, base: int, rate: float) -> None:
    chosen = TrainOptions(lr=0.5, scale_lr=rule, batch_size=batch_size, base_batch_size=base)
    assert scaled_rate(chosen) == rate


def test_an_optimizer_gets_what_was_chosen() -> None:
    for name, kind, rate in (("sgd", torch.optim.SGD, 0.05), ("adamw", torch.optim.AdamW, 1e-3)):
        options = TrainOptions(optimizer=name, momentum=0.75, weight_decay=0.125)  # type: ignore[arg-type]
        assert scaled_rate(options) == rate
        optimizer = make_optimizer(options, [{"params": [torch.zeros(2)], "lr": 0.5}])
        (group,) = optimizer.param_groups
        assert type(optimizer) is kind
        assert (group["lr"], group["weight_decay"], group.get("momentum", 0.75)) == (
            0.5,
            0.125,
            0.75,
        )
