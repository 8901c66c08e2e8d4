from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.mean import Mean, Means, Sum, weigh
from onefold.errors import LossError
from tests.tables import for_each

WEIGHTS = [3, 3.0, torch.tensor(3), torch.tensor([3.0]), np.int64(3), np.float32(3), np.uint8(3)]
NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20)


@given(numbers=NUMBERS)
def test_the_three_ways_to_say_a_mean_agree(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    ways = values, values.mean(), Mean(values.sum(), len(numbers))
    parts = [weigh(way, len(numbers), "the loss") for way in ways]
    assert {part.weight for part in parts} == {float(len(numbers))}
    for part in parts:
        assert part.total().item() == pytest.approx(math.fsum(numbers), rel=1e-12, abs=1e-9)


def test_totals_are_added_in_float64() -> None:
    values = torch.full((3,), 0.1, dtype=torch.float32)
    total = weigh(values, 3, "the loss").total()
    assert total.dtype == torch.float64
    assert total.item() == values.double().sum().item()


@for_each("kind", ["per sample", "scalar"])
def test_one_shard_seeds_backward_as_a_plain_mean_does(kind: str) -> None:
    ours, theirs = (torch.linspace(-1, 1, 7).requires_grad_() for _ in range(2))
    values = ours.sin() * 3
    weigh(values if kind == "per sample" else values.mean(), 7, "the loss").backward(7.0)
    (theirs.sin() * 3).mean().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_a_share_of_the_batch_is_divided_by_the_whole() -> None:
    values = torch.ones(2, requires_grad=True)
    weigh(values, 2, "the loss").backward(10.0)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.1, 0.1])


def test_one_sample_may_come_as_a_vector_or_as_a_scalar() -> None:
    for value in (torch.tensor([2.0]), torch.tensor(2.0)):
        part = weigh(value, 1, "the loss")
        assert (part.total().item(), part.weight) == (2.0, 1.0)


@for_each("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_scores_may_be_of_any_type(dtype: torch.dtype) -> None:
    part = weigh(torch.tensor([1, 0, 1]).to(dtype), 3, "the accuracy")
    assert (part.total().item(), part.weight) == (2.0, 3.0)


@for_each("weight", WEIGHTS)
def test_a_weight_may_be_a_number_or_a_tensor(weight: float | torch.Tensor) -> None:
    part = weigh(Mean(torch.tensor(6.0), weight), 5, "the loss")
    assert (part.total().item(), part.weight) == (6.0, 3.0)


def test_a_weight_of_zero_is_allowed() -> None:
    assert weigh(Mean(torch.tensor(0.0), 0), 5, "the loss").weight == 0.0


@for_each(
    "shape",
    [(2,), (4,), (4, 1), (1, 3), (3, 3), (3, 1, 1), (0,)],
    ids=lambda shape: str(shape),
)
def test_another_shape_is_refused_and_told(shape: tuple[int, ...]) -> None:
    came = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(LossError, match=rf"^the loss of shard 3: .*\(3,\).* got shape {came}"):
        weigh(torch.ones(shape), 3, "the loss of shard 3")


@for_each("result", [0.5, None, [1.0, 2.0, 3.0], {"loss": torch.ones(3)}])
def test_another_type_is_refused_and_told(result: object) -> None:
    with pytest.raises(LossError, match=rf"^the loss: .* got {type(result).__name__}\. Return"):
        weigh(result, 3, "the loss")


@for_each(
    ("total", "words"),
    [(torch.ones(2), r"got \(2,\)"), (torch.ones(1), r"got \(1,\)"), (3.0, "got 3.0")],
)
def test_the_total_of_a_mean_must_be_a_scalar(total: torch.Tensor, words: str) -> None:
    with pytest.raises(LossError, match=f"^the loss: the total .* a scalar tensor, {words}"):
        weigh(Mean(total, 1), 2, "the loss")


@for_each("weight", [-1, -0.5, math.inf, math.nan, torch.tensor(-2.0)])
def test_a_weight_below_zero_or_not_finite_is_refused(weight: float | torch.Tensor) -> None:
    came = str(float(weight))
    with pytest.raises(LossError, match=f"^the loss: .* must be finite and >= 0, got {came}"):
        weigh(Mean(torch.tensor(1.0), weight), 2, "the loss")


NO_WEIGHTS = {
    "text": "3",
    "none": None,
    "vector": torch.ones(2),
    "bool": True,
    "numpy bool": np.bool_(True),
    "mask": torch.tensor(True),
    "complex": torch.tensor(1j),
}


@for_each("weight", NO_WEIGHTS.values(), ids=NO_WEIGHTS.keys())
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    with pytest.raises(LossError, match=r"^the loss: the weight of onefold\.Mean must be"):
        weigh(Mean(torch.tensor(1.0), weight), 2, "the loss")


def test_a_weight_that_is_learned_is_refused() -> None:
    """A plain loop would have its gradient as well; without it the result is another one."""
    weight = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(LossError, match=r"depends on parameters.* weight\.detach\(\)"):
        weigh(Mean(torch.tensor(6.0), weight), 5, "the loss")
    assert weigh(Mean(torch.tensor(6.0), weight.detach()), 5, "the loss").weight == 3.0


def test_one_loss_a_sample_may_come_as_a_column() -> None:
    columns, rows = (torch.linspace(-1, 1, 5).requires_grad_() for _ in range(2))
    part = weigh(columns.unsqueeze(1).sin(), 5, "the loss")
    other = weigh(rows.sin(), 5, "the loss")
    assert part.root.shape == (5,)
    assert torch.equal(part.total(), other.total())
    part.backward(5.0)
    other.backward(5.0)
    assert columns.grad is not None
    assert rows.grad is not None
    assert torch.equal(columns.grad, rows.grad)


def test_a_contribution_says_how_it_is_divided() -> None:
    mean, total = Mean(torch.tensor(6.0), 3), Sum(torch.tensor(5.0))
    for result in (torch.ones(4), torch.tensor(1.0), mean):
        part = weigh(result, 4, "the loss")
        assert (part.kind, part.terms, part.parts) == ("mean", (), (part,))
    part = weigh(total, 4, "the loss")
    assert (part.kind, part.weight, part.total().item()) == ("sum", 1.0, 5.0)
    part = weigh(mean + total, 4, "the loss")
    assert part.kind == "means"
    assert math.isnan(part.weight)
    said = [(term.kind, term.weight, term.total().item()) for term in part.parts]
    assert said == [("mean", 3.0, 6.0), ("sum", 1.0, 5.0)]


def test_the_sum_of_a_loss_is_divided_by_nothing() -> None:
    values = torch.ones(3, requires_grad=True)
    weigh(Sum(values.sum()), 3, "the loss").backward(1.0)
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 1.0]


FACTORS = [3, 0.5, -2, np.float64(1.5), np.float32(1.5), np.int64(2), torch.tensor(0.25)]


@for_each("factor", FACTORS, ids=lambda factor: f"{type(factor).__name__} {factor}")
def test_factors_scale_totals_and_leave_weights(factor: float) -> None:
    number = float(factor)
    for scaled in (factor * Mean(torch.tensor(6.0), 5), Mean(torch.tensor(6.0), 5) * factor):
        assert scaled == Mean(torch.tensor(6.0 * number), 5)
    assert Mean(torch.tensor(6.0), 5) / factor == Mean(torch.tensor(6.0 / number), 5)
    assert factor * Sum(torch.tensor(6.0)) == Sum(torch.tensor(6.0 * number))
    both = factor * (Mean(torch.tensor(6.0), 5) + Sum(torch.tensor(8.0)))
    assert both == Means((Mean(torch.tensor(6.0 * number), 5), Sum(torch.tensor(8.0 * number))))


def test_terms_are_added_subtracted_and_negated() -> None:
    a, b, c = Mean(torch.tensor(1.0), 2), Mean(torch.tensor(3.0), 4), Sum(torch.tensor(5.0))
    assert (a + b).terms == (a, b)
    assert (a + b + c).terms == (a + (b + c)).terms == (a, b, c)
    assert sum([a, b, c]) == a + b + c
    assert -a == Mean(torch.tensor(-1.0), 2)
    assert (a - b).terms == (a, Mean(torch.tensor(-3.0), 4))
    assert (a - (b - c)).terms == (a, Mean(torch.tensor(-3.0), 4), Sum(torch.tensor(5.0)))


def test_a_division_is_one_and_no_multiplication_by_an_inverse() -> None:
    total = torch.tensor(49.0, dtype=torch.float64)
    assert (Mean(total, 1) / 49).total.item() == 1.0 != 49.0 * (1 / 49)


def test_a_learned_factor_gets_its_gradient() -> None:
    factor = torch.tensor(2.0, requires_grad=True)
    weigh(factor * Mean(torch.tensor(6.0), 3), 3, "the loss").backward(3.0)
    assert factor.grad == 2.0


TERMS = {
    "mean": Mean(torch.tensor(6.0), 3),
    "sum": Sum(torch.tensor(6.0)),
    "means": Mean(torch.tensor(6.0), 3) + Sum(torch.tensor(6.0)),
}


@for_each("term", TERMS.values(), ids=TERMS.keys())
@for_each("other", [torch.tensor(1.0), torch.ones(3), 1, 0.5, np.float32(1), None])
def test_what_has_no_divisor_is_not_added_to_a_term(term: Mean, other: object) -> None:
    came = f"a tensor of shape .{tuple(other.shape)}." if torch.is_tensor(other) else repr(other)
    came = (
        came.replace("(", "[(]").replace(")", "[)]").replace(".[(]", "[(]").replace("[)].", "[)]")
    )
    words = rf"^expected onefold\.Mean or onefold\.Sum .* got {came}, which .*onefold\.Mean\(pen"
    sums = [
        lambda: term + other,
        lambda: other + term,
        lambda: term - other,
        lambda: other - term,
    ]
    for add in sums:
        with pytest.raises(TypeError, match=words):
            add()


def test_what_is_no_number_does_not_scale() -> None:
    mean = Mean(torch.tensor(6.0), 3)
    for factor in (torch.ones(3), mean, "2", None):
        with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
            mean * factor
        with pytest.raises(TypeError, match="unsupported operand"):
            mean / factor


@for_each("weights", [(3, 4), (1, 7)])
def test_several_terms_over_a_cut_batch_are_those_of_the_whole(weights: tuple[int, int]) -> None:
    """Every shard's gradient is added up, as the fold does, with the weights of all shards."""
    ours, theirs = (torch.linspace(-2, 3, 8, dtype=torch.float64).requires_grad_() for _ in "ab")
    marked = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool)

    def loss(values: torch.Tensor, marked: torch.Tensor) -> Means:
        chosen = Mean((values.exp() * marked).sum(), marked.sum())
        return Mean(values.square().sum(), len(values)) - 0.5 * chosen + Sum(values.sin().sum())

    shards = zip(ours.tensor_split((3,)), marked.tensor_split((3,)), strict=True)
    parts = [weigh(loss(x, m), len(x), "the loss") for x, m in shards]
    divisors = [sum(part.parts[k].weight for part in parts) for k in range(2)] + [1.0]
    finished = [part.combine(divisors) for part in parts]
    for part in finished:
        assert part.kind == "sum"
        part.backward(1.0)
    whole = theirs.square().mean() - 0.5 * theirs[marked].exp().mean() + theirs.sin().sum()
    whole.backward()
    value = sum(part.total() for part in finished)
    torch.testing.assert_close(value, whole.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-15)


def test_one_shard_of_several_terms_has_the_bits_of_the_plain_loop() -> None:
    ours, theirs = (torch.linspace(-2, 3, 7).requires_grad_() for _ in range(2))
    marked = ours.detach() > 0
    terms = Mean(ours.exp().sum(), 7) + Mean((ours.sin() * marked).sum(), marked.sum())
    part = weigh(terms, 7, "the loss")
    part.combine([term.weight for term in part.parts]).backward(1.0)
    (theirs.exp().sum() / 7 + (theirs.sin() * marked).sum() / marked.sum()).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@for_each("nothing", [0.0, math.nan, math.inf])
def test_a_term_without_weight_anywhere_is_left_out(nothing: float) -> None:
    values = torch.ones(2, requires_grad=True)
    part = weigh(Mean(values.sum() * nothing, 0) + Sum(values.sum()), 2, "the loss")
    finished = part.combine([0.0, 1.0])
    finished.backward(1.0)
    assert finished.total().item() == 2.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0]


def test_terms_without_any_weight_are_nothing() -> None:
    values = torch.ones(2, requires_grad=True)
    part = weigh(Mean(values.sum() * math.nan, 0) + Mean(values.sum(), 0), 2, "the loss")
    finished = part.combine([0.0, 0.0])
    assert finished.total().item() == 0.0
    assert not finished.root.requires_grad


def test_several_terms_have_no_total_and_no_gradient_before_they_are_combined() -> None:
    part = weigh(
        Mean(torch.ones((), requires_grad=True), 1) + Sum(torch.tensor(1.0)), 1, "the loss"
    )
    with pytest.raises(TypeError, match=r"one divisor for total\(\), got 2 terms.*combine"):
        part.total()
    with pytest.raises(TypeError, match=r"one divisor for backward\(\), got 2 terms.*combine"):
        part.backward(1.0)
    with pytest.raises(ValueError, match="expected 2 divisors, got 1"):
        part.combine([1.0])


def test_what_is_wrong_with_one_of_several_terms_is_told() -> None:
    right = Mean(torch.tensor(1.0), 1)
    with pytest.raises(LossError, match=r"^the loss, term 2: .* finite and >= 0, got -1\.0"):
        weigh(right + Mean(torch.tensor(1.0), -1), 1, "the loss")
    with pytest.raises(LossError, match=r"^the loss, term 2: the total of onefold\.Sum must be"):
        weigh(right + Sum(torch.ones(2)), 1, "the loss")
    with pytest.raises(LossError, match=r"the terms of onefold\.Means must be .*, got Tensor"):
        weigh(Means((torch.ones(()),)), 1, "the loss")  # type: ignore[arg-type]
    for terms in ((), [right]):
        with pytest.raises(LossError, match=r"expected a tuple of terms in onefold\.Means, got"):
            weigh(Means(terms), 1, "the loss")  # type: ignore[arg-type]
