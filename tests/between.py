"""Values that devices report to each other between steps."""

import math
from typing import Any

import numpy as np
import torch

NAN = float(np.uint64(0x7FF8DEADBEEF0001).view(np.float64))


def mine(rank: int) -> dict[str, Any]:
    """A value of every kind, other ones on every device."""
    return {
        "none": None,
        "truth": rank % 2 == 1,
        "whole": 2 ** (70 + rank),
        "float": [NAN, -0.0, math.inf, 0.1 * rank],
        "text": "é\n" * rank + "\0\ud800",
        "bytes": bytes(range(256)) * rank,
        "tuple": ((), [rank, (rank,)], {}),
        "tensor": torch.arange(50_000 * rank, dtype=torch.bfloat16).view(-1, 5).t(),
        "scalar": torch.tensor(1.5 + rank, requires_grad=True),
        "array": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::-1],
        "number": np.float32(0.1),
    }


def shown(value: Any) -> str:
    """With every bit and every type."""
    if isinstance(value, dict):
        return str({key: shown(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[shown(each) for each in value]}"
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {plain.hex()} {value.device}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{type(value).__name__} {value.dtype.str} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, float):
        return np.float64(value).tobytes().hex()
    return f"{type(value).__name__} {value!r}"
