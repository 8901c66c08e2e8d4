"""What a step reports of itself, from what came of it."""

from __future__ import annotations

import math

import torch

from onefold.engine.engine import Outcome
from onefold.engine.step import Step, Verdict
from onefold.watch.timing import Span


def step_of(totals: list[float], weight: float, *, updates: bool = True) -> Step:
    verdict = Verdict(skipped="" if updates else "no weight", stops=False)
    norm = torch.tensor(2.0) if updates else None
    outcome = Outcome(torch.tensor(totals, dtype=torch.float64), weight, verdict, norm)
    spans = [
        Span("forward", "forward shard 0", 1.0, 1.5),
        Span("exchange", "agree", 2.0, 2.25),
        Span("forward", "forward shard 1", 3.0, 4.0),
    ]
    return Step(3, 12, 1, outcome, spans)


def test_the_loss_is_the_sum_of_totals_over_that_of_weights() -> None:
    step = step_of([3.0, 5.0, 2.0], 4.0)
    assert step.loss.dtype == torch.float64
    assert step.loss.shape == ()
    assert float(step.loss) == 2.5


def test_totals_are_added_in_the_folds_order() -> None:
    totals = [1e16, 1.0, -1e16, 1.0]
    folded = (totals[0] + totals[1]) + (totals[2] + totals[3])
    assert folded != sum(totals)
    assert float(step_of(totals, 1.0).loss) == folded


def test_the_loss_of_nothing_is_no_number() -> None:
    assert step_of([0.0, 0.0], 0.0, updates=False).loss.isnan()


def test_a_step_was_skipped_where_the_verdict_says_so() -> None:
    assert step_of([1.0], 1.0).skipped == ""
    assert step_of([1.0], 0.0, updates=False).skipped == "no weight"


def test_the_norm_is_a_number_and_none_of_a_skipped_step() -> None:
    assert step_of([1.0], 1.0).grad_norm == 2.0
    assert math.isnan(step_of([1.0], 0.0, updates=False).grad_norm)


def test_the_time_of_a_step_is_that_of_its_spans_by_phase() -> None:
    seconds = step_of([1.0], 1.0).seconds
    assert (seconds.forward, seconds.exchange, seconds.update) == (1.5, 0.25, 0.0)


def test_a_step_shows_what_a_user_asks_for() -> None:
    step = step_of([1.0], 1.0)
    assert repr(step) == "Step(number=3, samples=12, epoch=1)"
