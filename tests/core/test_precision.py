"""What each precision stands for."""

from __future__ import annotations

import pytest
import torch

from onefold.core.precision import AS_GIVEN, PRECISIONS, Precision, added_up_in
from tests.tables import for_each

MEANINGS = {
    "fp32": (None, None, False),
    "bf16": (torch.bfloat16, None, False),
    "fp16": (torch.float16, None, True),
    "bf16-params": (torch.bfloat16, torch.bfloat16, False),
    "fp16-params": (torch.float16, torch.float16, True),
}


def test_every_name_has_its_meaning() -> None:
    assert tuple(MEANINGS) == PRECISIONS
    for name in PRECISIONS:
        precision = Precision(name)
        found = precision.compute, precision.parameters, precision.is_scaled
        assert found == MEANINGS[name]


def test_without_a_name_everything_is_as_the_model_has_it() -> None:
    assert (AS_GIVEN.compute, AS_GIVEN.parameters, AS_GIVEN.is_scaled) == (None, None, False)


@for_each("name", ["", "float16", "fp16-", "-params", "BF16"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match='expected precision to be one of "fp32", "bf16"'):
        Precision(name)  # type: ignore[arg-type]


@for_each(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
)
def test_low_precision_alone_is_added_up_in_another(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert added_up_in(dtype) is wide
