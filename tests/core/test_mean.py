"""What a loss may return, and how the parts of a batch are weighed."""

import math
import operator
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.mean import LossTerms, Mean, Sum, weigh
from onefold.errors import LossError
from tests.tables import for_each

NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20)
SIX = torch.tensor(6.0)


@given(numbers=NUMBERS)
def test_the_ways_to_say_a_mean_agree(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    for way in (values, values[:, None], values.mean(), Mean(values.sum(), len(numbers))):
        part = weigh(way, len(numbers), "the loss")
        assert (part.weight, part.kind) == (float(len(numbers)), "mean")
        assert part.total().item() == pytest.approx(math.fsum(numbers), rel=1e-12, abs=1e-9)


def test_totals_are_added_in_float64() -> None:
    for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16):
        values = torch.tensor([0.1, 0, 1]).to(dtype)
        part = weigh(values, 3, "the accuracy")
        assert (part.total().dtype, part.weight) == (torch.float64, 3.0)
        assert part.total().item() == values.double().sum().item()


@for_each(
    "weight",
    [3, 3.0, torch.tensor(3), torch.tensor([3.0]), np.int64(3), np.float32(3), np.uint8(3)],
)
def test_a_weight_may_be_a_number_or_a_tensor(weight: float | torch.Tensor) -> None:
    part = weigh(Mean(SIX, weight), 5, "the loss")
    assert (part.total().item(), part.weight) == (6.0, 3.0)
    assert weigh(Mean(SIX, weight * 0), 5, "the loss").weight == 0.0


LEARNED = torch.tensor(3.0, requires_grad=True)
RIGHT = Mean(torch.tensor(1.0), 1)
NO_NUMBERS = ("3", None, torch.ones(2), True, np.bool_(True), torch.tensor(True), torch.tensor(1j))


def test_anything_else_is_refused_and_named() -> None:
    for result, words in (
        *(
            (torch.ones(shape), rf": .*\(3,\).* got shape {re.escape(str(shape))}")
            for shape in ((2,), (4,), (4, 1), (1, 3), (3, 3), (3, 1, 1), (0,))
        ),
        *(
            (result, rf": .* got {type(result).__name__}\. Return")
            for result in (0.5, None, [1.0, 2.0, 3.0], {"loss": torch.ones(3)})
        ),
        (Mean(torch.ones(1), 1), r": the total .* a scalar tensor, got \(1,\)"),
        (Mean(3.0, 1), ": the total .* a scalar tensor, got 3.0"),  # type: ignore[arg-type]
        *(
            (Mean(SIX, weight), rf": .* must be finite and >= 0, got {float(weight)}")
            for weight in (-1, -0.5, math.inf, math.nan, torch.tensor(-2.0))
        ),
        *((Mean(SIX, weight), r": the weight of onefold\.Mean must be") for weight in NO_NUMBERS),  # type: ignore[arg-type]
        (Mean(SIX, LEARNED), r".*requires grad, but onefold .* weight\.detach\(\)"),
        (RIGHT + Mean(SIX, -1), r", term 2: .* finite and >= 0, got -1\.0"),
        (RIGHT + Sum(torch.ones(2)), r", term 2: the total of onefold\.Sum must be"),
        (
            LossTerms((torch.ones(()),)),  # type: ignore[arg-type]
            r".*requires a tuple of onefold\.Mean or onefold\.Sum, but got \(tensor",
        ),
        (LossTerms(()), r".*onefold\.LossTerms requires a tuple of onefold\.Mean or"),
        (LossTerms([RIGHT]), r".*onefold\.LossTerms requires a tuple of onefold\.Mean or"),  # type: ignore[arg-type]
    ):
        with pytest.raises(LossError, match=f"^the loss of shard 3{words}"):
            weigh(result, 3, "the loss of shard 3")


@for_each("factor", [3, 0.5, -2, np.float64(1.5), np.float32(1.5), np.int64(2), torch.tensor(0.25)])
def test_factors_scale_totals_and_leave_weights(factor: float) -> None:
    number = float(factor)
    assert factor * Mean(SIX, 5) == Mean(SIX, 5) * factor == Mean(SIX * number, 5)
    assert Mean(SIX, 5) / factor == Mean(SIX / number, 5)
    both = factor * (Mean(SIX, 5) + Sum(torch.tensor(8.0)))
    assert both == LossTerms((Mean(SIX * number, 5), Sum(torch.tensor(8.0 * number))))


def test_terms_are_added_subtracted_and_divided() -> None:
    a, b, c = Mean(torch.tensor(1.0), 2), Mean(torch.tensor(3.0), 4), Sum(torch.tensor(5.0))
    minus_b = Mean(torch.tensor(-3.0), 4)
    assert (a + b + c).terms == (a + (b + c)).terms == (a, b, c)
    assert sum([a, b, c]) == a + b + c
    assert (a - b).terms == (a, minus_b) == (a, -b)
    assert (a - (b - c)).terms == (a, minus_b, c)
    # A division is one, and no multiplication by an inverse.
    total = torch.tensor(49.0, dtype=torch.float64)
    assert (Mean(total, 1) / 49).total.item() == 1.0 != 49.0 * (1 / 49)


@for_each("term", [Mean(SIX, 3), Sum(SIX), Mean(SIX, 3) + Sum(SIX)])
def test_what_has_no_divisor_is_not_added_to_a_term(term: Mean) -> None:
    words = r"^expected onefold\.Mean or onefold\.Sum .* got {}, which .*onefold\.Mean\(pen"
    for other in (torch.tensor(1.0), torch.ones(3), 1, 0.5, np.float32(1), None):
        came = f"a tensor of shape {tuple(other.shape)}" if torch.is_tensor(other) else repr(other)
        for add in (operator.add, operator.sub):
            for pair in ((term, other), (other, term)):
                with pytest.raises(TypeError, match=words.format(re.escape(came))):
                    add(*pair)
    for factor in (torch.ones(3), term, "2", None):
        for scale in (operator.mul, operator.truediv):
            with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
                scale(term, factor)


@for_each("nothing", [0.0, math.nan, math.inf])
def test_a_term_without_weight_anywhere_is_left_out(nothing: float) -> None:
    values = torch.ones(2, requires_grad=True)
    part = weigh(Mean(values.sum() * nothing, 0) + Sum(values.sum()), 2, "the loss")
    finished = part.combine([0.0, 1.0])
    finished.backward(1.0)
    assert finished.total().item() == 2.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0]
    alone = weigh(Mean(values.sum() * nothing, 0) + Mean(values.sum(), 0), 2, "the loss")
    finished = alone.combine([0.0, 0.0])
    assert finished.total().item() == 0.0
    assert not finished.root.requires_grad


def test_several_terms_have_no_total_and_no_gradient_before_they_are_combined() -> None:
    part = weigh(Mean(LEARNED * 1, 1) + Sum(torch.tensor(1.0)), 1, "the loss")
    with pytest.raises(
        TypeError, match=r"^total\(\) requires a single denominator, but got 2 terms.*combine"
    ):
        part.total()
    with pytest.raises(
        TypeError, match=r"^backward\(\) requires a single denominator, but got 2 terms.*combine"
    ):
        part.backward(1.0)
    with pytest.raises(ValueError, match="expected 2 denominators, but got 1"):
        part.combine([1.0])
