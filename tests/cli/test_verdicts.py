"""What is printed of a comparison of V shards with one."""

import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from onefold.cli import Screen
from onefold.cli.verdicts import report_mathematics, unequal_passes
from onefold.tools.verifying.causes import causes_of
from onefold.tools.verifying.mathematics import Comparison
from tests.tables import for_each

DIFFERS = {"alone": 2.0, "loss_difference": 0.75, "gradient_difference": 0.5, "worst": "w"}
AGREE = "The mathematics agree: 4 shards and one give the same loss and gradient, to"
ROUNDED = {"loss_difference": 3e-7, "tolerance": 1e-4}


def step(number: int, **facts: Any) -> dict[str, Any]:
    same: dict[str, Any] = {"skipped": False, "loss": 0.5, "alone": 0.5, "returned": "a scalar"}
    same |= {"loss_difference": 0.0, "gradient_difference": 0.0, "worst_difference": 0.0}
    found = Comparison(4, 10, own_batch=False, **{**same, **facts})
    causes = [asdict(cause) for cause in causes_of(found, [], [])]
    return {"step": number, **asdict(found), "causes": causes}


def report(
    *facts: dict[str, Any],
    shards: int = 4,
    precision: str = "float64",
    scores: Sequence[dict[str, Any]] = (),
) -> tuple[bool, str]:
    about = {"step": 0, "function": "f[x] (a.py:1)", "shards": shards, "tolerance": 1e-9}
    lines = [step(number, **each) for number, each in enumerate(facts, 1)]
    printed = io.StringIO()
    console = Screen(file=printed, width=400)
    agree = report_mathematics(console, precision, [[about, *lines]], [scores])
    return agree, " ".join(printed.getvalue().split())


CHANCE = {**DIFFERS, "relation": "dependent", "unmatched": ["randperm"]}
TABLE: list[tuple[list[dict[str, Any]], bool, str]] = [
    ([{}, {}], True, f"{AGREE} 1e-09"),
    (
        [{}, {**DIFFERS, "worst_difference": 0.25}],
        False,
        (
            "first in step 2: the loss, f[x] (a.py:1), is 0.5 with 4 shards and 2 with one (4 t|"
            "the gradient of w differs by 0.25 of its norm|"
            "Likely cause: unknown (the losses differ; the loss returned a scalar)"
        ),
    ),
    ([{"worst": "w", "worst_difference": 0.1}], False, "the losses agree but the gradients do not"),
    ([{"worst": "w", "worst_difference": 0.1}], False, "0.5 with 4 shards and 0.5 with one; the g"),
    ([CHANCE], True, "Not compared: the loss draws random numbers"),
    (
        [{"carried": ["h", "c"]}],
        True,
        "Not compared: with the rule 'per_shard' for h, c, every shard",
    ),
    (
        [{"buffers": {"seen": "3 with the shards, 10 with one"}}],
        False,
        (
            "Not what a plain loop does: f[x] (a.py:1), first in step 1.|"
            "Likely cause: buffer seen is 3 with the shards, 10 with one."
        ),
    ),
    ([{}, ROUNDED], True, f"Part of the loss is computed in a lower precision|{AGREE} 0.0001"),
]


@for_each(("facts", "agree", "words"), TABLE)
def test_what_was_compared_is_said(facts: list[dict[str, Any]], agree: bool, words: str) -> None:
    agreed, said = report(*facts)
    assert agreed is agree
    assert all(each in said for each in words.split("|")), said
    assert ("lower precision" in said) == (ROUNDED in facts)


def test_one_shard_is_the_plain_loop() -> None:
    assert report({}, shards=1) == (True, "One shard: the mathematics is the plain loop's own.")
    agree, said = report({}, precision="float32")
    assert agree
    assert "The script does not run in float64" in said


def test_no_table_is_shown_of_what_was_not_compared() -> None:
    said = report({"carried": ["h"], "skipped": True}, {"carried": ["h"], "skipped": True})[1]
    assert said.startswith("Not compared")
    said = report({"skipped": True, "loss": math.nan})[1]
    assert "skipped" in said
    assert "Not compared" not in said


def test_passes_of_another_length_are_named() -> None:
    def passes(*numbers: tuple[int, int]) -> list[dict[str, Any]]:
        return [{"stream": s, "kind": f"stream {s}", "samples": n} for s, n in numbers]

    one = passes((0, 300), (1, 50), (0, 300))
    assert unequal_passes({"1 device": one, "2 devices": one[:1], "3 devices": one}) == ""
    grown = {"1 device": one[:2], "2 devices": [], "3 devices": passes((1, 50), (0, 300), (0, 150))}
    assert unequal_passes(grown) == ""  # only one run came so far
    found = unequal_passes({**grown, "1 device": one})
    assert found.startswith("pass 1 of stream 0 has 300 samples on 1 device and 150 on 3 devices. ")


def test_a_score_over_a_batch_is_named_with_the_ways_out() -> None:
    line = {"function": "hit (a.py:3)", "shards": 4, "differ": {"hit@3": (0.675, 0.2)}}
    agree, text = report({}, scores=[{**line, "differ": {}}, line])
    assert not agree
    assert "'hit@3' of hit (a.py:3) is 0.675 with 4 shards and 0.2 with one" in text
    assert all(way in text for way in ("trainer.predict", "onefold.Mean", "whole_batches=True"))
    assert report({}, scores=[{**line, "differ": {}}])[0]
    assert report({}, scores=[line, {**line, "differ": {"hit@3": (0.7, 0.3)}}])[1] == text
