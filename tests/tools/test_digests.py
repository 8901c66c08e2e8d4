"""Digests of gradients see which values there are, and where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.tools.digests import LONGEST, GradientDigest, digest_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def digest(values: torch.Tensor) -> int:
    return int(digest_of(values, 0, values.numel()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swaps_single_flips_and_paired_flips_show(dtype: torch.dtype) -> None:
    values = torch.randn(LONGEST, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = digest(values)
    bits = values.element_size() * 8
    words = values.clone().view(torch.uint8)
    for byte in (0, 1, len(words) // 2, len(words) - 1):
        for bit in range(8):
            one = words.clone()
            one[byte] ^= 1 << bit
            both = one.clone()
            both[(byte + bits) % len(words)] ^= 1 << bit
            assert before not in (digest(one.view(dtype)), digest(both.view(dtype)))
    swapped = values.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert digest(swapped) != before
    assert digest(values.clone()) == before


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.integers(0, 10_000))
def test_a_sample_lies_in_one_parameter(sizes: list[int], step: int) -> None:
    sample = GradientDigest(sizes, seed=3).sample_of(step)
    assert 0 <= sample.start < sample.stop <= sizes[sample.parameter]
    assert sample.stop - sample.start <= LONGEST


def test_samples_come_to_all_of_a_model() -> None:
    sizes = [100, 4096, 1, 2000]
    seen = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    digests = GradientDigest(sizes, seed=0)
    for step in range(1, 400):
        parameter, start, stop = digests.sample_of(step)
        seen[parameter][start:stop] = True
    assert all(each.all() for each in seen[:2] + seen[3:])
