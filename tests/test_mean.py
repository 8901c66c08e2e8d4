from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.errors import LossError
from onefold.mean import Mean, weigh

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


@pytest.mark.parametrize("kind", ["per sample", "scalar"])
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_scores_may_be_of_any_type(dtype: torch.dtype) -> None:
    part = weigh(torch.tensor([1, 0, 1]).to(dtype), 3, "the accuracy")
    assert (part.total().item(), part.weight) == (2.0, 3.0)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_a_weight_may_be_a_number_or_a_tensor(weight: float | torch.Tensor) -> None:
    part = weigh(Mean(torch.tensor(6.0), weight), 5, "the loss")
    assert (part.total().item(), part.weight) == (6.0, 3.0)


def test_a_weight_of_zero_is_allowed() -> None:
    assert weigh(Mean(torch.tensor(0.0), 0), 5, "the loss").weight == 0.0


@pytest.mark.parametrize(
    "shape", [(2,), (4,), (3, 1), (1, 3), (3, 3), (0,)], ids=lambda shape: str(shape)
)
def test_another_shape_is_refused_and_told(shape: tuple[int, ...]) -> None:
    came = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(LossError, match=rf"^the loss of shard 3: .*\(3,\).* got shape {came}"):
        weigh(torch.ones(shape), 3, "the loss of shard 3")


@pytest.mark.parametrize("result", [0.5, None, [1.0, 2.0, 3.0], {"loss": torch.ones(3)}])
def test_another_type_is_refused_and_told(result: object) -> None:
    with pytest.raises(LossError, match=rf"^the loss: .* got {type(result).__name__}\. Return"):
        weigh(result, 3, "the loss")


@pytest.mark.parametrize(
    ("total", "words"),
    [(torch.ones(2), r"got \(2,\)"), (torch.ones(1), r"got \(1,\)"), (3.0, "got 3.0")],
)
def test_the_total_of_a_mean_must_be_a_scalar(total: torch.Tensor, words: str) -> None:
    with pytest.raises(LossError, match=f"^the loss: the total .* a scalar tensor, {words}"):
        weigh(Mean(total, 1), 2, "the loss")


@pytest.mark.parametrize("weight", [-1, -0.5, math.inf, math.nan, torch.tensor(-2.0)])
def test_a_weight_below_zero_or_not_finite_is_refused(weight: float | torch.Tensor) -> None:
    came = str(float(weight))
    with pytest.raises(LossError, match=f"^the loss: .* must be finite and >= 0, got {came}"):
        weigh(Mean(torch.tensor(1.0), weight), 2, "the loss")


@pytest.mark.parametrize("weight", ["3", None, torch.ones(2)], ids=["text", "none", "vector"])
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    with pytest.raises(LossError, match=r"^the loss: the weight of onefold\.Mean must be"):
        weigh(Mean(torch.tensor(1.0), weight), 2, "the loss")


def test_no_gradient_goes_through_a_weight() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    assert weigh(Mean(torch.tensor(6.0), weight), 5, "the loss").weight == 3.0
