"""Tensors in flat memory, and their fingerprints."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onefold.core.flat import (
    FlatTensors,
    all_finite,
    fingerprint_of,
    lay_out,
    named_tensors,
    names_with_nan,
    tensor_digests,
)
from tests.tables import for_each

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.bool, torch.uint8, torch.int64),
]


def fingerprint(**tensors: torch.Tensor) -> str:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return fingerprint_of(tensor_digests(named_tensors(module)))


def test_a_fingerprint_stays_what_it_is() -> None:
    """Fingerprints are written down by users, in logs and checkpoints."""
    module = nn.Linear(2, 1)
    module.load_state_dict({"weight": torch.tensor([[1.0, -2.0]]), "bias": torch.tensor([0.5])})
    assert fingerprint_of(tensor_digests(named_tensors(module))) == "f91159ea91d038b3"


@for_each("dtype", DTYPES)
def test_the_bits_decide(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3)):
        one, other = (fingerprint(x=torch.ones(shape).to(dtype)) for _ in range(2))
        assert one == other
        assert len(one) == 16
        assert int(one, 16) >= 0
    values = torch.zeros(5)
    one = fingerprint(x=values.to(dtype))
    values[4] = 1
    assert fingerprint(x=values.to(dtype)) != one


ZERO, ONE = torch.zeros(1), torch.ones(1)


def test_what_is_not_the_same_has_another_fingerprint() -> None:
    sets: list[dict[str, torch.Tensor]] = [
        *({"x": x} for x in (ONE, torch.nextafter(ONE, 2 * ONE), torch.tensor(-0.0))),
        *({"x": torch.zeros(shape)} for shape in ((), (0,), (1,), (2,), (2, 3), (3, 2), (0, 2))),
        *({"x": torch.zeros(2).to(dtype)} for dtype in (torch.int32, torch.half, torch.bfloat16)),
        *({"x": torch.zeros(0).to(dtype)} for dtype in (torch.int32, torch.half)),
        *({"y": ZERO}, {"x": ZERO, "y": ONE}, {"x": ONE, "y": ZERO}),
        {"x": ZERO, "y": torch.zeros(0)},
    ]
    assert len({fingerprint(**tensors) for tensors in sets}) == len(sets)


@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4), order=st.permutations([0, 1, 2, 3])
)
def test_how_the_elements_lie_in_memory_does_not_matter(shape: list[int], order: list[int]) -> None:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    inverse = [order.index(i) for i in range(4)]
    elsewhere = values.permute(order).contiguous().permute(inverse)
    assert torch.equal(elsewhere, values)
    assert fingerprint(x=elsewhere) == fingerprint(x=values)


WIDE = torch.arange(12.0).view(3, 4)


def test_views_count_for_what_they_show() -> None:
    for view, values in (
        (WIDE[:, 1], WIDE[:, 1].clone()),
        (WIDE[:1].expand(5, 4), WIDE[:1].repeat(5, 1)),
        (torch.tensor([1 + 1j, 2 - 3j]).conj(), torch.tensor([1 - 1j, 2 + 3j])),
        (torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf])),
    ):
        assert fingerprint(x=view) == fingerprint(x=values)


def test_tensors_count_under_their_own_names_and_tied_ones_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    module[2].weight = module[0].weight
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias"]
    buffers = ["passing", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(tensor_digests(named_tensors(module))) == parameters + buffers


def test_a_copy_goes_from_dtype_to_dtype() -> None:
    tensors = {"a": torch.tensor([1.5, -2.0]), "n": torch.tensor(7), "none": torch.zeros(0, 3)}
    flat = FlatTensors(lay_out(tensors), device=torch.device("cpu"))
    flat.write([*tensors.values()])
    wide = FlatTensors(flat.layout.converted(lambda _: torch.float64), device=flat.device)
    wide.copy_(flat)
    assert [view.tolist() for view in wide.views] == [[1.5, -2.0], 7.0, []]
    same = flat.clone()
    flat.views[0].zero_()
    flat.copy_(same)
    assert [view.tolist() for view in flat.views] == [[1.5, -2.0], 7, []]


def test_views_may_be_asked_for_in_inference_mode() -> None:
    flat = FlatTensors(lay_out({"a": torch.zeros(2)}), device=torch.device("cpu"))
    with torch.inference_mode():
        assert flat.views
    flat.views[0].add_(1.0)
    assert flat.views[0].tolist() == [1.0, 1.0]


# What is found among values that ought to be finite


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
WHOLE = [torch.int64, torch.uint8, torch.bool, torch.uint64]
NAN, INF = math.nan, math.inf


@for_each("dtype", [*FLOATS, torch.complex64])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    assert all_finite(torch.empty((0, 3), dtype=dtype))
    for place in (0, 1, 999):
        for value in (NAN, INF, -INF):
            values = torch.ones(1000)
            values[place] = value
            assert not all_finite(values.to(dtype))
    assert not all_finite(torch.tensor([INF, -INF]).to(dtype))
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=torch.float64)
    assert all_finite(largest.to(dtype))  # though their sum is not
    assert all(all_finite(torch.ones(5).to(whole)) for whole in WHOLE)
    assert not all_finite(torch.tensor([1, complex(0, NAN)]))


@for_each("dtype", FLOATS)
def test_infinities_are_no_nan(dtype: torch.dtype) -> None:
    values = {"mask": [1.0, -INF], "spoilt": [INF, NAN], "fine": [1.0], "none": []}
    tensors = {name: torch.tensor(each).to(dtype) for name, each in values.items()}
    assert names_with_nan({**tensors, "count": torch.ones(2, dtype=torch.int64)}) == {"spoilt"}
