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

SCHEDULES = ("constant", "step", "cosine")


def factors(*, epochs: int, steps: int, **chosen: Any) -> list[float]:
    """Of every step of a run, and of the one after its last."""
    factor = rate_factor(TrainOptions(**chosen), epochs=epochs, steps=steps)
    return [factor(done) for done in range(epochs * steps + 1)]


def test_the_cosine_after_a_warm_up_has_these_values() -> None:
    found = factors(schedule="cosine", warmup_epochs=0.5, epochs=2, steps=8)
    assert found[:5] == [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0]
    half = math.sqrt(2) / 2
    at = {7: (1 + half) / 2, 8: 0.75, 10: 0.5, 12: 0.25, 13: (1 - half) / 2, 16: 0.0}
    assert {done: found[done] for done in at} == pytest.approx(at, abs=1e-12)


def test_the_cosine_without_a_warm_up_has_these_values() -> None:
    found = factors(schedule="cosine", warmup_epochs=0, epochs=1, steps=4)
    half = math.sqrt(2) / 2
    assert found == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0], abs=1e-12)


def test_after_its_end_the_cosine_does_not_rise_again() -> None:
    factor = rate_factor(TrainOptions(schedule="cosine"), epochs=2, steps=8)
    assert {factor(done) for done in range(16, 40)} == {0.0}


def test_the_rate_decays_every_so_many_epochs() -> None:
    found = factors(schedule="step", decay=0.5, decay_epochs=2, warmup_epochs=0, epochs=5, steps=3)
    assert found == [1.0] * 6 + [0.5] * 6 + [0.25] * 4


def test_the_warm_up_does_not_put_the_decay_off() -> None:
    found = factors(
        schedule="step", decay=0.1, decay_epochs=1, warmup_epochs=0.5, epochs=2, steps=4
    )
    assert found == [1 / 3, 2 / 3, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1**2]


@for_each(("epochs", "every"), [(9, 3), (10, 3), (3, 1), (2, 1), (1, 1)])
def test_the_rate_decays_after_a_third_of_the_epochs_by_itself(epochs: int, every: int) -> None:
    chosen = {"schedule": "step", "warmup_epochs": 0, "epochs": epochs, "steps": 2}
    assert factors(**chosen) == factors(decay_epochs=every, **chosen)


def test_a_constant_rate_stays() -> None:
    found = factors(schedule="constant", warmup_epochs=1, epochs=3, steps=2)
    assert found == [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_fraction_of_a_step_is_warmed_up_as_well() -> None:
    found = factors(schedule="constant", warmup_epochs=0.25, epochs=1, steps=6)
    assert found == [1 / 2.5, 2 / 2.5, 1.0, 1.0, 1.0, 1.0, 1.0]


@given(
    schedule=st.sampled_from(["constant", "cosine"]),
    warmup_epochs=st.integers(0, 4),
    epochs=st.integers(1, 8),
    steps=st.integers(1, 30),
)
def test_the_rate_rises_by_equal_parts_to_its_full_value(
    schedule: Schedule, warmup_epochs: int, epochs: int, steps: int
) -> None:
    options = TrainOptions(schedule=schedule, warmup_epochs=float(warmup_epochs))
    factor = rate_factor(options, epochs=epochs, steps=steps)
    warmup = warmup_epochs * steps
    rising = [factor(done) for done in range(warmup + 1)]
    assert rising[-1] == 1.0
    assert rising == pytest.approx([(done + 1) / (warmup + 1) for done in range(warmup + 1)])


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup_epochs=st.floats(0, 12),
    decay=st.floats(0, 1, exclude_min=True),
    decay_epochs=st.none() | st.integers(1, 9),
    epochs=st.integers(1, 8),
    steps=st.integers(1, 30),
    data=st.data(),
)
def test_a_factor_is_between_0_and_1_and_depends_on_the_step_alone(
    schedule: Schedule,
    warmup_epochs: float,
    decay: float,
    decay_epochs: int | None,
    epochs: int,
    steps: int,
    data: st.DataObject,
) -> None:
    options = TrainOptions(
        schedule=schedule, warmup_epochs=warmup_epochs, decay=decay, decay_epochs=decay_epochs
    )
    first, second = (rate_factor(options, epochs=epochs, steps=steps) for _ in range(2))
    expected = [first(done) for done in range(epochs * steps + 3)]
    assert all(0.0 <= value <= 1.0 for value in expected)
    for done in data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9)):
        assert second(done) == expected[done]


@for_each("schedule", SCHEDULES)
def test_no_step_of_a_run_is_for_nothing(schedule: str) -> None:
    assert min(factors(schedule=schedule, epochs=3, steps=5)[:-1]) > 0


@for_each(
    ("rule", "batch_size", "rate"),
    [
        ("none", 1024, 0.5),
        ("linear", 1024, 2.0),
        ("sqrt", 1024, 1.0),
        ("none", 16, 0.5),
        ("linear", 16, 0.03125),
        ("sqrt", 16, 0.125),
        ("linear", 256, 0.5),
        ("sqrt", 256, 0.5),
    ],
)
def test_the_rate_follows_the_batch_size(rule: ScaleRate, batch_size: int, rate: float) -> None:
    assert scaled_rate(TrainOptions(lr=0.5, scale_lr=rule, batch_size=batch_size)) == rate


def test_the_base_batch_size_may_be_another() -> None:
    chosen = TrainOptions(lr=0.1, scale_lr="linear", batch_size=96, base_batch_size=32)
    assert scaled_rate(chosen) == pytest.approx(0.3)


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
    groups = [{"params": [one], "lr": 0.5}, {"params": [other], "lr": 0.25}]
    optimizer = make_optimizer(options, groups)
    assert type(optimizer) is kind
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.125}
    if name == "sgd":
        assert {group["momentum"] for group in optimizer.param_groups} == {0.75}
