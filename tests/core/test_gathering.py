"""Tensors as bits, and which gatherer is asked."""

from __future__ import annotations

import torch

from onefold.core.gathering import (
    packed_bytes,
    unpacked_bytes,
)
from tests.tables import for_each

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


@for_each("dtype", DTYPES)
def test_bits_come_out_as_they_went_in(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (0, 5), (1, 5)]
    tensors = []
    for shape in shapes:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator)
        raw = raw % 2 if dtype == torch.bool else raw
        tensors.append(raw.to(torch.uint8).view(dtype).squeeze(-1))
    row = packed_bytes(tensors, 500)
    assert (row.dtype, row.numel()) == (torch.float64, 64)
    # As it travels: stacked, and through the memory of the host.
    there = torch.frombuffer(bytearray(torch.stack([row])[0].numpy().tobytes()), dtype=row.dtype)
    for tensor, found in zip(tensors, unpacked_bytes(there, dtype, shapes), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))
