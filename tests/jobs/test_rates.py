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


@for_each(
    ("chosen", "epochs", "steps", "expected"),
    [
        ({"schedule": "cosine"}, 1, 4, [1.0, COSINE[0], 0.5, COSINE[4], 0.0]),
        ({"warmup_epochs": 1.0}, 2, 4, [0.2, 0.4, 0.6, 0.8, 1.0, COSINE[0], 0.5, COSINE[4], 0.0]),
        ({"schedule": "step", "decay": 0.5, "decay_epochs": 2}, 3, 2, [1.0] * 4 + [0.5] * 3),
        # A warm-up does not put the decay off.
        (
            {"schedule": "step", "decay_epochs": 1, "warmup_epochs": 0.5},
            2,
            4,
            [1 / 3, 2 / 3, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.01],
        ),
        (
            {"schedule": "constant", "warmup_epochs": 1},
            3,
            2,
            [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0],
        ),
        # A fraction of a step is warmed up as well.
        ({"schedule": "constant", "warmup_epochs": 0.25}, 1, 6, [0.4, 0.8] + [1.0] * 5),
        # By itself the rate decays after a third of the epochs.
        *(
            (
                {"schedule": "step"},
                epochs,
                1,
                [0.1 ** (done // every) for done in range(epochs + 1)],
            )
            for epochs, every in ((9, 3), (10, 3), (3, 1), (2, 1), (1, 1))
        ),
    ],
)
def test_a_schedule_has_these_values(
    chosen: dict[str, Any], epochs: int, steps: int, expected: list[float]
) -> None:
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
def test_a_factor_rises_by_equal_parts_stays_between_0_and_1_and_depends_on_the_step_alone(
    schedule: Schedule, epochs: int, steps: int, **chosen: Any
) -> None:
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
    if schedule == "cosine" and warmup < last:
        assert set(found[last:]) == {0.0}  # and does not rise again


@for_each(
    ("rule", "batch_size", "base", "rate"),
    [
        ("none", 1024, 256, 0.5),
        ("linear", 1024, 256, 2.0),
        ("sqrt", 1024, 256, 1.0),
        ("linear", 16, 256, 0.03125),
        ("sqrt", 16, 256, 0.125),
        ("linear", 96, 32, 1.5),
    ],
)
def test_the_rate_follows_the_batch_size(
    rule: ScaleRate, batch_size: int, base: int, rate: float
) -> None:
    chosen = TrainOptions(lr=0.5, scale_lr=rule, batch_size=batch_size, base_batch_size=base)
    assert scaled_rate(chosen) == rate


@for_each(
    ("name", "kind", "rate"),
    [
        ("sgd", torch.optim.SGD, 0.05),
        ("adam", torch.optim.Adam, 1e-3),
        ("adamw", torch.optim.AdamW, 1e-3),
    ],
)
def test_each_optimizer_has_its_rate_and_gets_what_was_chosen(
    name: Any, kind: type[torch.optim.Optimizer], rate: float
) -> None:
    options = TrainOptions(optimizer=name, momentum=0.75, weight_decay=0.125)
    assert scaled_rate(options) == rate
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = make_optimizer(options, [{"params": [one], "lr": 0.5}, {"params": [other]}])
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 0.5
    for group in optimizer.param_groups:
        assert (group["weight_decay"], group.get("momentum", 0.75)) == (0.125, 0.75)
