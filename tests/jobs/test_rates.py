import math
from typing import Any

import pytest
import torch

from onefold_jobs.options import (
    ScaleRate,
    TrainOptions,
    full_rate,
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


SCALED: list[tuple[ScaleRate, int, int, float]] = [("none", 1024, 256, 0.5)]
SCALED += [("linear", 1024, 256, 2.0), ("linear", 16, 256, 0.03125), ("linear", 96, 32, 1.5)]
SCALED += [("sqrt", 1024, 256, 1.0), ("sqrt", 16, 256, 0.125)]


@for_each(("rule", "batch_size", "base", "rate"), SCALED)
def test_the_batch_size_scales(rule: Any, batch_size: int, base: int, rate: float) -> None:
    chosen = TrainOptions(lr=0.5, scale_lr=rule, batch_size=batch_size, base_batch_size=base)
    assert scaled_rate(chosen) == rate


@for_each(("name", "decay"), [("sgd", 5e-4), ("adam", 5e-4), ("adamw", 0.01)])
def test_the_decay_suits_the_optimizer(name: Any, decay: float) -> None:
    made = make_optimizer(TrainOptions(optimizer=name), [{"params": [torch.zeros(2)], "lr": 0.5}])
    assert made.param_groups[0]["weight_decay"] == decay


RATES: list[tuple[str, bool, bool, float]] = [
    ("sgd", False, True, 0.05), ("sgd", True, False, 0.01), ("adamw", False, False, 0.001),
    ("adamw", True, False, 0.0002), ("adamw", False, True, 0.003), ("adamw", True, True, 0.0006),
]  # fmt: skip


@for_each(("name", "fine", "small", "rate"), RATES)
def test_the_rate_suits_optimizer_and_model(name: Any, fine: Any, small: Any, rate: float) -> None:
    found = full_rate(TrainOptions(optimizer=name), fine=fine, small=small)
    assert found == pytest.approx(rate)
    assert full_rate(TrainOptions(optimizer=name, lr=0.5), fine=fine, small=small) == 0.5


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
