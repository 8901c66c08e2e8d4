"""From what a step showed to the likely causes, in words."""

from __future__ import annotations

import math
from typing import Any

from onefold.engine.losscheck import FindingKind, LossFinding
from onefold.verifying.causes import causes_of
from onefold.verifying.mathematics import Comparison
from tests.tables import for_each

TOLERANCE = 1e-9
ALIKE = {"loss_difference": 0.0, "gradient_difference": 1e-12, "worst_difference": 1e-10}
DIFFERENT = {"loss_difference": 0.3, "gradient_difference": 0.2, "worst_difference": 0.4}


def seen(**what: Any) -> Comparison:
    """A step whose loss and gradient differ, unless said otherwise."""
    fields = {"returned": "a scalar", "relation": "unclear", **DIFFERENT, **what}
    return Comparison(4, 16, own_batch=True, skipped=False, **fields)


def finding(kind: FindingKind) -> LossFinding:
    return LossFinding(kind, f"a finding of kind {kind}", "it is read so", "write this instead")


def texts(
    found: Comparison, attributes: tuple[str, ...] = (), generators: tuple[str, ...] = ()
) -> list[str]:
    causes = causes_of(found, attributes, generators, TOLERANCE)
    assert all(cause.kind == "error" for cause in causes)
    return [cause.text for cause in causes]


def only(found: Comparison, *words: str, **state: Any) -> None:
    """One error, in these words."""
    (text,) = texts(found, **state)
    assert all(word in text for word in words), text


# Whether anything differs.


def test_where_nothing_differs_nothing_is_the_cause() -> None:
    everything = {"repeats": False, "relation": "sum", "finding": finding("sum")}
    assert causes_of(seen(**everything, **ALIKE), ["a"], ["b"], TOLERANCE) == []


@for_each("name", ALIKE)
def test_any_of_the_three_differences_is_enough(name: str) -> None:
    assert texts(seen(**{**ALIKE, name: 1e-8}))
    assert not texts(seen(**{**ALIKE, name: TOLERANCE}))


def test_what_is_not_known_is_no_difference() -> None:
    """As after a step that was skipped; a number on one side alone is infinitely different."""
    assert not texts(seen(**dict.fromkeys(ALIKE, math.nan)))
    assert texts(seen(**{**dict.fromkeys(ALIKE, math.nan), "loss_difference": math.inf}))


# What the graph of the loss said.

BELIEVED: dict[FindingKind, set[str]] = {
    "sum": {"mean", "sum", "weighted", "dependent", "unclear"},
    "weights": {"mean", "sum", "weighted", "dependent", "unclear"},
    "ignored": {"mean", "sum", "weighted", "dependent", "unclear"},
    "tokens": {"mean", "weighted", "unclear"},
    "maybe-sum": {"sum"},
}


@for_each("relation", ["mean", "sum", "weighted", "dependent", "unclear"])
@for_each("kind", BELIEVED)
def test_a_finding_is_believed_with_the_numbers_that_go_with_it(
    kind: FindingKind, relation: str
) -> None:
    found = texts(seen(finding=finding(kind), relation=relation))
    said = f"the loss is a finding of kind {kind}. it is read so. write this instead"
    assert (said in found) is (relation in BELIEVED[kind])


@for_each("kind", ["weights-none", "ignored-none"])
@for_each("differences", [ALIKE, DIFFERENT])
def test_what_numbers_cannot_show_is_always_said(
    kind: FindingKind, differences: dict[str, float]
) -> None:
    only(seen(finding=finding(kind), **differences), f"the loss is a finding of kind {kind}.")


# What the numbers of parts of the batch said.


@for_each(
    ("relation", "words"),
    [
        ("sum", "the loss is a sum: that of two parts of the batch is the sum of theirs."),
        ("weighted", "the loss is a mean that is not divided by the number of samples"),
        ("dependent", "a sample's loss depends on the other samples of its batch"),
    ],
)
def test_the_kind_of_number_is_the_cause_without_a_finding(relation: str, words: str) -> None:
    only(seen(relation=relation), words)


def test_a_loss_that_minds_the_order_of_samples_may_be_cut_along_time() -> None:
    found = seen(relation="dependent", ordered=True)
    only(found, "the loss changes when the samples of the batch change places")
    found.second = 16
    only(found, "all tensors of the batch have 16 in their second dimension")


def test_modules_that_were_cut_along_time_are_named_and_explain_the_dependence() -> None:
    found = seen(relation="dependent", ordered=True, time_first=["lstm (LSTM)"])
    only(found, "the batch was cut along time: lstm (LSTM) takes time in the first dimension")


# What changes from call to call.


def test_a_loss_that_does_not_repeat_names_what_it_keeps() -> None:
    found = seen(repeats=False)
    only(found, "the same samples give another loss when it is computed again")
    only(found, "model.count: changed while the loss is computed", attributes=("model.count",))
    only(found, "rng, other: a generator of its own", generators=("rng", "other"))
    generators, attributes = texts(found, attributes=("a",), generators=("b",))
    assert generators.startswith("b: ")
    assert attributes.startswith("a: ")


def test_what_is_kept_matters_only_where_the_loss_does_not_repeat() -> None:
    """A counter of calls is no cause by itself."""
    only(seen(), "unknown", attributes=("model.count",), generators=("rng",))


# What could not be compared.


def test_draws_without_counterpart_are_a_note() -> None:
    for relation in ("unclear", "dependent"):
        (note,) = causes_of(seen(relation=relation, unmatched=["randperm"]), [], [], TOLERANCE)
        assert note.kind == "note"
        assert "no counterpart for a part of the batch (randperm, such as a" in note.text


def test_norms_without_statistics_are_a_note() -> None:
    found = seen(norms=["0 (BatchNorm1d)"], relation="dependent")
    (note,) = causes_of(found, [], [], TOLERANCE)
    assert note.kind == "note"
    assert note.text.startswith("0 (BatchNorm1d) keeps no running statistics")


@for_each("excuse", [{"unmatched": ["randperm"]}, {"norms": ["0 (BatchNorm1d)"]}])
def test_an_excuse_hides_nothing_that_was_found(excuse: dict[str, Any]) -> None:
    only(seen(relation="sum", **excuse), "the loss is a sum")
    only(seen(repeats=False, **excuse), "the same samples give another loss")


def test_what_nothing_explains_is_said_to_be_unknown() -> None:
    only(seen(), "unknown (the losses differ; the loss returned a scalar). Look for what the loss")
    only(seen(loss_difference=0.0), "unknown (the losses agree and the gradients do not;")
    only(seen(trouble="in forward: KeyError"), " A closer look failed in forward: KeyError. Look")


def test_buffers_come_last_and_by_themselves() -> None:
    found = seen(relation="sum", buffers={"count": "4 with the shards, 16 with one", "other": "x"})
    *_, count, other = texts(found)
    assert (count, other) == ("buffer count is 4 with the shards, 16 with one", "buffer other is x")
    assert texts(seen(buffers={"count": "off"}, **ALIKE)) == ["buffer count is off"]
