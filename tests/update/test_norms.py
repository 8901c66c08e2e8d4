"""Norms of gradients, computed as PyTorch computes them."""

import torch

from onefold.core.flat import same_bits
from onefold.update.norms import plain_norm
from tests.tables import for_each


@for_each(
    "dtypes",
    [
        [torch.float32] * 7,
        [torch.float64] * 3,
        [torch.bfloat16] * 5,
        [torch.complex64] * 2,
        [torch.float32, torch.bfloat16, torch.float32],
        [],
    ],
)
def test_a_plain_norm_has_the_bits_of_pytorch(dtypes: list[torch.dtype]) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        sizes = [(3 * number + 1, 5 * seed + 1) for number in range(len(dtypes))]
        pairs = zip(sizes, dtypes, strict=True)
        given = [torch.randn(size, dtype=dtype) for size, dtype in pairs]
        given[1:2] = [each.t().contiguous().t() for each in given[1:2]]
        assert same_bits(plain_norm(given), torch.nn.utils.get_total_norm(given))
