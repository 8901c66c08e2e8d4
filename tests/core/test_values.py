"""What a loss may return beside itself, and what the whole batch's values are."""

from typing import Any

import pytest
import torch

from onefold.core.mean import Mean, Sum
from onefold.core.results import split
from onefold.core.storage import MOST
from onefold.core.values import ShardValues, names_of, read_values, with_values_detached
from onefold.errors import DisagreementError, LossError

HERE = "step 7, shard 3"
LOSS = torch.ones(2)


def read(values: dict[str, Any], samples: int = 2) -> ShardValues:
    found = read_values(values, {}, samples, HERE)
    assert found is not None
    return found


def test_a_loss_and_its_values_are_told_apart() -> None:
    values, outputs, term = {"accuracy": LOSS}, {"rows": torch.ones(2, 2)}, Sum(torch.ones(()))
    assert split(LOSS, "the loss") == (LOSS, {}, {})
    assert split(term, "the loss") == (term, {}, {})
    assert split((LOSS, values), "the loss") == (LOSS, values, {})
    assert split((LOSS, values, outputs), "the loss") == (LOSS, values, outputs)
    assert read_values({}, {}, 3, HERE) is None
    for result, words in (
        ((LOSS, LOSS), r"\(loss, \{\"accuracy\": ...\}\).* got a tuple of \(Tensor, Tensor\)"),
        ((LOSS,), r"got a tuple of \(Tensor\)"),
        ((LOSS, {}, {}, {}), r"got a tuple of \(Tensor, dict, dict, dict\)"),
        ({"loss": LOSS}, r"got only a dict of \['loss'\]"),
    ):
        with pytest.raises(LossError, match=f"^the loss: expected a loss, or .*{words}"):
            split(result, "the loss")


def test_values_are_read_as_losses_are_and_nothing_is_kept_of_the_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = read(
        {
            "each": weight * torch.tensor([1.0, 2.0]),
            "right": torch.tensor([True, False]),
            "mean": torch.tensor(0.5),
            "tokens": Mean((weight * 3).sum(), torch.tensor(3)),
            "count": Sum(torch.tensor(4)),
            "both": Mean(torch.tensor(1.0), 2) + Sum(torch.tensor(3.0)),
        }
    )
    assert found.numbers.dtype == torch.float64
    assert not found.numbers.requires_grad
    assert found.numbers.tolist() == [[3, 2], [1, 2], [1, 2], [6, 3], [4, 1], [1, 2], [3, 1]]
    assert names_of(found.lines) == ["each", "right", "mean", "tokens", "count", "both"]
    assert len(found.lines) == 7


def test_what_is_no_value_is_named() -> None:
    of_none: Any
    for of_none, words in (
        ({"": LOSS}, "metric names must be single lines, but got ''"),
        ({"a\nb": LOSS}, r"metric names must be single lines, but got 'a\\nb'"),
        ({3: LOSS}, "metric names must be single lines, but got 3"),
        ({"a": 0.5}, f"the value 'a' of {HERE}: expected a tensor .* got float"),
        ({"a": torch.ones(5)}, f"the value 'a' of {HERE}: expected shape \\(2,\\)"),
        ({str(n): LOSS for n in range(MOST + 1)}, "can have at most 32 numbers, but got 33 .0,"),
    ):
        with pytest.raises(LossError, match=words):
            read_values(of_none, {}, 2, HERE)


def test_microbatches_add_up_and_their_names_must_agree() -> None:
    first, second = read({"a": LOSS}), read({"a": torch.ones(3)}, 3)
    assert first.plus(second, HERE).numbers.tolist() == [[5, 5]]
    with pytest.raises(
        DisagreementError, match=rf"{HERE}: .* one returned \['a'\] and another one \['b'\]"
    ):
        first.plus(read({"b": LOSS}), HERE)
    with pytest.raises(DisagreementError, match=r"one returned \['a'\] and another one \[\]"):
        first.plus(None, HERE)
    # Devices compare a number.
    kinds = [read(v).kind for v in ({"a": torch.zeros(())}, {"b": LOSS}, {"a": Sum(LOSS.sum())})]
    assert first.kind == kinds[0] > 0
    assert len(set(kinds)) == 3


def test_compiled_code_leaves_values_out_of_its_graph() -> None:
    value = torch.ones(2, requires_grad=True) * 2
    given = {"a": value, "b": Mean(value.sum(), 2), "c": 3, "d": Sum(value.sum()) + Sum(value[0])}
    both: Any = with_values_detached((value, given))
    loss, values = both
    assert loss is value is with_values_detached(value)
    totals = [values["a"], values["b"].total, *(term.total for term in values["d"].terms)]
    assert not any(total.requires_grad for total in totals)
