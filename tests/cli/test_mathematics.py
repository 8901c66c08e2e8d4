"""What is printed of a comparison of V shards with one."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

from rich.console import Console

from onefold.cli.mathematics import report_mathematics
from onefold.verifying.causes import causes_of
from onefold.verifying.mathematics import Comparison
from tests.tables import for_each


def step(number: int, **facts: Any) -> dict[str, Any]:
    same: dict[str, Any] = {"skipped": False, "loss": 0.5, "alone": 0.5, "returned": "a scalar"}
    same |= {"loss_difference": 0.0, "gradient_difference": 0.0, "worst_difference": 0.0}
    found = Comparison(4, 10, own_batch=False, **{**same, **facts})
    causes = [asdict(cause) for cause in causes_of(found, [], [], found.tolerance)]
    return {"step": number, **asdict(found), "causes": causes}


def report(*lines: dict[str, Any], shards: int = 4, precision: str = "float64") -> tuple[bool, str]:
    about = {"step": 0, "function": "f[x] (a.py:1)", "shards": shards, "tolerance": 1e-9}
    printed = io.StringIO()
    console = Console(file=printed, width=400)
    agree = report_mathematics(console, precision, [[about, *lines]])
    return agree, " ".join(printed.getvalue().split())


DIFFERS = {"alone": 2.0, "loss_difference": 0.75, "gradient_difference": 0.5, "worst": "w"}


def test_agreement_says_what_was_compared() -> None:
    agree, said = report(step(1), step(2))
    assert agree
    assert (
        "The mathematics agree: 4 shards and one give the same loss and gradient, to 1e-09" in said
    )


def test_one_shard_is_the_plain_loop() -> None:
    agree, said = report(step(1), shards=1)
    assert agree
    assert said == "One shard: the mathematics is the plain loop's own."


def test_a_difference_shows_both_numbers_and_says_that_the_cause_is_unknown() -> None:
    agree, said = report(step(1), step(2, **DIFFERS, worst_difference=0.25))
    assert not agree
    assert (
        "first in step 2: the loss, f[x] (a.py:1), is 0.5 with 4 shards and 2 with one (4 times)"
        in said
    )
    assert "the gradient of w differs by 0.25 of its norm" in said
    assert "Likely cause: unknown (the losses differ; the loss returned a scalar)" in said


def test_a_parameter_alone_can_differ() -> None:
    agree, said = report(step(1, worst="w", worst_difference=0.1))
    assert not agree
    assert "the losses agree and the gradients do not" in said


def test_chance_is_no_difference() -> None:
    agree, said = report(step(1, **DIFFERS, relation="dependent", unmatched=["randperm"]))
    assert agree
    assert "Not compared: the loss draws random numbers" in said


def test_a_buffer_alone_is_not_what_a_plain_loop_does() -> None:
    agree, said = report(step(1, buffers={"seen": "3 with the shards, 10 with one"}))
    assert not agree
    assert "Not what a plain loop does: f[x] (a.py:1), first in step 1." in said
    assert "Likely cause: buffer seen is 3 with the shards, 10 with one." in said


@for_each(
    ("facts", "precision", "words"),
    [
        ({"evaluation": False}, "float64", "The loss cannot be computed in evaluation mode"),
        ({}, "float32", "The script does not run in float64"),
        ({"skipped": True}, "float64", "skipped"),
    ],
)
def test_what_was_not_as_usual_is_said(facts: dict[str, Any], precision: str, words: str) -> None:
    agree, said = report(step(1, **facts), precision=precision)
    assert agree
    assert words in said


def test_rounding_is_told_where_a_part_is_computed_in_a_lower_precision() -> None:
    differs = {"loss_difference": 3e-7, "tolerance": 1e-4}
    agree, said = report(step(1), step(2, **differs))
    assert agree
    assert "A part of the loss is computed in a lower precision" in said
    assert (
        "The mathematics agree: 4 shards and one give the same loss and gradient, to 0.0001" in said
    )
    assert "lower precision" not in report(step(1))[1]
