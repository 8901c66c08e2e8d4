from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onefold.core.flat import fingerprint_of, named_tensors, tensor_digests
from tests.tables import for_each

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int64,
]


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with these buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def fingerprint(module: nn.Module) -> str:
    return fingerprint_of(tensor_digests(named_tensors(module)))


def test_a_fingerprint_stays_what_it_is() -> None:
    """Fingerprints are written down by users, in logs and checkpoints."""
    module = nn.Linear(2, 1)
    module.load_state_dict({"weight": torch.tensor([[1.0, -2.0]]), "bias": torch.tensor([0.5])})
    assert fingerprint(module) == "f91159ea91d038b3"


@for_each("dtype", DTYPES, ids=str)
@for_each("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_the_same_bits_have_the_same_fingerprint(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    one, other = (holding(x=torch.ones(shape).to(dtype)) for _ in range(2))
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 16
    assert int(fingerprint(one), 16) >= 0


@for_each("dtype", DTYPES, ids=str)
def test_one_other_element_gives_another_fingerprint(dtype: torch.dtype) -> None:
    values = torch.zeros(5)
    one = fingerprint(holding(x=values.to(dtype)))
    values[4] = 1
    assert fingerprint(holding(x=values.to(dtype))) != one


@for_each(
    ("one", "other"),
    [
        pytest.param({"x": torch.tensor(0.0)}, {"x": torch.tensor(-0.0)}, id="the sign of zero"),
        pytest.param(
            {"x": torch.tensor(1.0)},
            {"x": torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))},
            id="the last bit",
        ),
        pytest.param({"x": torch.zeros(2)}, {"x": torch.zeros(2).int()}, id="dtype"),
        pytest.param({"x": torch.zeros(2).half()}, {"x": torch.zeros(2).bfloat16()}, id="dtype16"),
        pytest.param({"x": torch.zeros(0).int()}, {"x": torch.zeros(0)}, id="dtype of nothing"),
        pytest.param({"x": torch.zeros(2, 3)}, {"x": torch.zeros(3, 2)}, id="shape"),
        pytest.param({"x": torch.zeros(1)}, {"x": torch.zeros(())}, id="shape of one"),
        pytest.param({"x": torch.zeros(0, 2)}, {"x": torch.zeros(0)}, id="shape of nothing"),
        pytest.param({"x": torch.zeros(1)}, {"y": torch.zeros(1)}, id="name"),
        pytest.param(
            {"x": torch.zeros(1), "y": torch.ones(1)},
            {"x": torch.ones(1), "y": torch.zeros(1)},
            id="which is which",
        ),
        pytest.param({"x": torch.zeros(1)}, {"x": torch.zeros(1), "y": torch.zeros(0)}, id="more"),
    ],
)
def test_what_is_not_the_same_has_another_fingerprint(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> None:
    assert fingerprint(holding(**one)) != fingerprint(holding(**other))


def test_numbers_that_are_not_equal_to_themselves_still_have_the_same_bits() -> None:
    one, other = (holding(x=torch.tensor([math.nan, math.inf])) for _ in range(2))
    assert fingerprint(one) == fingerprint(other)


@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4), order=st.permutations([0, 1, 2, 3])
)
def test_how_the_elements_lie_in_memory_does_not_matter(shape: list[int], order: list[int]) -> None:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    inverse = [order.index(i) for i in range(4)]
    elsewhere = values.permute(order).contiguous().permute(inverse)
    assert torch.equal(elsewhere, values)
    assert fingerprint(holding(x=elsewhere)) == fingerprint(holding(x=values))


def test_views_into_larger_memory_count_for_what_they_show() -> None:
    wide = torch.arange(12.0).view(3, 4)
    assert fingerprint(holding(x=wide[:, 1])) == fingerprint(holding(x=wide[:, 1].clone()))
    assert fingerprint(holding(x=wide[:1].expand(5, 4))) == fingerprint(
        holding(x=wide[:1].repeat(5, 1))
    )


def test_a_conjugate_view_counts_for_what_it_shows() -> None:
    values = torch.tensor([1 + 1j, 2 - 3j])
    resolved = fingerprint(holding(x=values.conj().resolve_conj()))
    assert fingerprint(holding(x=values.conj())) == resolved


def test_parameters_and_buffers_count_under_their_own_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    assert list(tensor_digests(named_tensors(module))) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "passing",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_tied_weights_count_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert list(tensor_digests(named_tensors(module))) == ["0.weight"]
