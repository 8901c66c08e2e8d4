"""What a loss may return beside itself, and what the whole batch's values are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from onefold.core.mean import Mean, Sum
from onefold.core.values import (
    MOST,
    ShardValues,
    StepValues,
    detached,
    names_of,
    read_values,
    split,
)
from onefold.errors import DisagreementError, LossError
from tests.tables import for_each

HERE = "step 7, shard 3"


def read(values: dict[str, Any], samples: int = 2) -> ShardValues:
    found = read_values(values, {}, samples, HERE)
    assert found is not None
    return found


def test_a_loss_alone_has_no_values() -> None:
    loss = torch.ones(3)
    assert split(loss, "the loss")[0] is loss
    assert split(loss, "the loss")[1] == {}
    term = Sum(torch.ones(()))
    assert split(term, "the loss") == (term, {}, {})
    assert read_values({}, {}, 3, HERE) is None


def test_a_loss_and_its_values_are_told_apart() -> None:
    loss, values = torch.ones(3), {"accuracy": torch.ones(3)}
    assert split((loss, values), "the loss") == (loss, values, {})
    outputs = {"rows": torch.ones(3, 2)}
    assert split((loss, values, outputs), "the loss") == (loss, values, outputs)


@for_each(
    ("result", "words"),
    [
        (
            (torch.ones(2), torch.ones(2)),
            r"\(loss, \{\"accuracy\": ...\}\).* got a tuple of \(Tensor, Tensor\)",
        ),
        ((torch.ones(2),), r"got a tuple of \(Tensor\)"),
        ((torch.ones(2), {}, {}, {}), r"got a tuple of \(Tensor, dict, dict, dict\)"),
        ({"loss": torch.ones(2)}, r"got a dict of \['loss'\] alone"),
    ],
)
def test_any_other_tuple_is_refused(result: object, words: str) -> None:
    with pytest.raises(LossError, match=f"^the loss of {HERE}: expected a loss, or .*{words}"):
        split(result, f"the loss of {HERE}")


def test_values_are_read_as_losses_are() -> None:
    found = read(
        {
            "each": torch.tensor([1.0, 2.0]),
            "right": torch.tensor([True, False]),
            "mean": torch.tensor(0.5),
            "tokens": Mean(torch.tensor(6.0), torch.tensor(3)),
            "count": Sum(torch.tensor(4)),
            "both": Mean(torch.tensor(1.0), 2) + Sum(torch.tensor(3.0)),
        }
    )
    assert found.numbers.dtype == torch.float64
    assert found.numbers.tolist() == [[3, 2], [1, 2], [1, 2], [6, 3], [4, 1], [1, 2], [3, 1]]
    assert names_of(found.lines) == ["each", "right", "mean", "tokens", "count", "both"]
    assert len(found.lines) == 7


def test_nothing_is_kept_of_the_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = read({"each": weight * 2, "by": Mean((weight * 3).sum(), weight.sum())})
    assert not found.numbers.requires_grad
    assert found.numbers.tolist() == [[4, 2], [6, 2]]


@for_each(
    ("values", "words"),
    [
        ({"": torch.ones(2)}, "expected names of one line for values, got ''"),
        ({"a\nb": torch.ones(2)}, r"expected names of one line for values, got 'a\\nb'"),
        ({3: torch.ones(2)}, "expected names of one line for values, got 3"),
        ({"a": 0.5}, f"the value 'a' of {HERE}: expected a tensor .* got float"),
        ({"a": torch.ones(5)}, f"the value 'a' of {HERE}: expected shape \\(2,\\)"),
        ({"a": Mean(torch.ones(()), -1)}, f"the value 'a' of {HERE}: the weight .* got -1"),
        (
            {str(n): torch.ones(2) for n in range(MOST + 1)},
            "expected at most 32 numbers beside the loss, got 33 .0, 1, 2, ....*trainer.evaluate",
        ),
    ],
)
def test_what_is_no_value_is_named(values: dict[Any, Any], words: str) -> None:
    with pytest.raises(LossError, match=words):
        read_values(values, {}, 2, HERE)


def test_pieces_add_up() -> None:
    first, second = read({"a": torch.ones(2)}), read({"a": torch.ones(3)}, 3)
    assert first.plus(second, HERE).numbers.tolist() == [[5, 5]]
    other = read({"b": torch.ones(2)})
    with pytest.raises(DisagreementError, match=rf"{HERE}: .*\['a'\] .* and \['b'\] for another"):
        first.plus(other, HERE)
    with pytest.raises(DisagreementError, match=r"\['a'\] .* and \[\] for another"):
        first.plus(None, HERE)


def test_names_and_kinds_have_a_number() -> None:
    mean, again = read({"a": torch.ones(2)}), read({"a": torch.zeros(())})
    assert mean.kind == again.kind > 0
    others = [read({"b": torch.ones(2)}), read({"a": Sum(torch.ones(()))})]
    assert len({mean.kind, *(other.kind for other in others)}) == 3


def of_batch(*shards: dict[str, Any]) -> dict[str, float]:
    found = [read(shard) for shard in shards]
    table = torch.stack([each.numbers for each in found])
    done = StepValues(found[0].lines, table).finished()
    assert all(value.dtype == torch.float64 and value.shape == () for value in done.values())
    return {name: float(value) for name, value in done.items()}


def test_a_batch_has_the_sum_of_totals_over_the_sum_of_weights() -> None:
    assert of_batch(
        {"tokens": Mean(torch.tensor(6.0), 1), "n": Sum(torch.tensor(2.0))},
        {"tokens": Mean(torch.tensor(0.0), 3), "n": Sum(torch.tensor(5.0))},
    ) == {"tokens": 1.5, "n": 7.0}


def test_terms_are_divided_each_by_its_own_and_left_out_without_weight() -> None:
    def both(weight: float) -> Any:
        return Mean(torch.tensor(6.0), 2) + Mean(torch.tensor(5.0), weight)

    assert of_batch({"a": both(5)}, {"a": both(0)}) == {"a": 3 + 2}
    assert of_batch({"a": both(0)}, {"a": both(0)}) == {"a": 3}


def test_without_any_weight_a_value_is_not_a_number() -> None:
    nothing = {"a": Mean(torch.tensor(0.0), 0)}
    assert math.isnan(of_batch(nothing, nothing)["a"])


def test_compiled_code_leaves_values_out_of_its_graph() -> None:
    value = torch.ones(2, requires_grad=True) * 2
    loss, values = detached((value, {"a": value, "b": Mean(value.sum(), 2), "c": 3}))  # type: ignore[misc]
    assert loss is value
    assert not values["a"].requires_grad
    assert not values["b"].total.requires_grad
    assert values["c"] == 3
    terms = detached((value, {"d": Sum(value.sum()) + Mean(value.sum(), 2)}))[1]["d"]  # type: ignore[index]
    assert [term.total.requires_grad for term in terms.terms] == [False, False]
    assert detached(value) is value
