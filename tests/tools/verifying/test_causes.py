"""From what a step showed to the likely causes, in words."""

import math
from typing import Any

from onefold.shard.loss_watch import FindingKind, LossFinding
from onefold.tools.verifying.causes import causes_of
from onefold.tools.verifying.mathematics import Comparison
from tests.tables import for_each

TOLERANCE = 1e-9
ALIKE = {"loss_difference": 0.0, "gradient_difference": 1e-12, "worst_difference": 1e-10}
DIFFERENT = {"loss_difference": 0.3, "gradient_difference": 0.2, "worst_difference": 0.4}


def seen(**what: Any) -> Comparison:
    """A step whose loss and gradient differ, unless said otherwise."""
    fields = {"returned": "a scalar", "relation": "unclear", **DIFFERENT, **what}
    return Comparison(4, 16, own_batch=True, skipped=False, **fields)


def finding(kind: FindingKind) -> LossFinding:
    return LossFinding(kind, f"a finding of kind {kind}")


def texts(found: Comparison) -> list[str]:
    causes = causes_of(found, [], [])
    assert all(cause.kind == "error" for cause in causes)
    return [cause.text for cause in causes]


def test_any_of_the_three_differences_is_enough_and_without_one_nothing_is_the_cause() -> None:
    everything = {"repeats": False, "relation": "sum", "finding": finding("sum")}
    assert causes_of(seen(**everything, **ALIKE), ["a"], ["b"]) == []
    for name in ALIKE:
        assert texts(seen(**{**ALIKE, name: 1e-8}))
        assert not texts(seen(**{**ALIKE, name: TOLERANCE}))
    # As after a step that was skipped; a number on one side alone is infinitely different.
    unknown = dict.fromkeys(ALIKE, math.nan)
    assert not texts(seen(**unknown))
    assert texts(seen(**{**unknown, "loss_difference": math.inf}))
    # A counter of calls is no cause by itself.
    (cause,) = causes_of(seen(), ["model.count"], ["rng"])
    assert "unknown" in cause.text


ALL = {"mean", "sum", "weighted", "dependent", "unclear"}
BELIEVED: dict[FindingKind, set[str]] = dict.fromkeys(("sum", "weights", "ignored"), ALL)
BELIEVED |= {"maybe-sum": {"sum"}, "tokens": {"mean", "weighted", "unclear"}}


@for_each("relation", ALL)
@for_each("kind", BELIEVED)
def test_a_finding_is_believed_with_numbers_that_fit_it(kind: FindingKind, relation: str) -> None:
    found = texts(seen(finding=finding(kind), relation=relation))
    said = f"the loss is a finding of kind {kind}"
    assert (said in found) is (relation in BELIEVED[kind])


@for_each(
    ("what", "words"),
    [
        (
            {"relation": "sum"},
            "is a sum: the loss of two parts of the batch is the sum of their losses.",
        ),
        ({"relation": "weighted"}, "a mean that is not divided by the number of samples"),
        ({"relation": "root"}, "is a root of a mean or a sum over samples (RMSE, a norm)"),
        ({"relation": "dependent", "ordered": True}, "if samples of the batch are permuted"),
        ({"relation": "dependent", "ordered": True, "dim": 1}, "depends on the other samples of"),
        (
            {"relation": "dependent", "ordered": True, "second": 16},
            "all tensors of the batch have 16 in their second dimension",
        ),
        (
            {"relation": "dependent", "ordered": True, "time_first": ["lstm"]},
            "cut along time: lstm",
        ),
        ({}, "unknown (the losses differ; the loss returned a scalar). Check what the loss"),
        ({"loss_difference": 0.0}, "unknown (the losses agree but the gradients do not;"),
        ({"trouble": "in forward: KeyError"}, " A closer look failed in forward: KeyError. Check"),
    ],
)
def test_without_a_finding_the_numbers_say_the_cause(what: dict[str, Any], words: str) -> None:
    (text,) = texts(seen(**what))
    assert words in text
