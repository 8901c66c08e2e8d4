"""The first values of a parameter, as its owners are given them."""

from __future__ import annotations

import torch

from onefold.core.flat import lay_out
from onefold.engine.assembly import values_of_entry
from tests.tables import for_each

STRIDED = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)


class Counted:
    """Values that are drawn when they are needed."""

    def write_to(self, view: torch.Tensor) -> None:
        view.copy_(STRIDED)


@for_each("value", [STRIDED, STRIDED.contiguous(), Counted()])
def test_they_lie_in_the_order_of_the_layout(value: torch.Tensor | Counted) -> None:
    layout = lay_out({"before": torch.zeros(3), "it": STRIDED})
    found = values_of_entry(value, layout, 1)
    assert found.shape == (24,)
    expected = STRIDED.as_strided((24,), (1,))
    assert torch.equal(found, expected)
