"""What onefold needs of the private tables of PyTorch's modules."""

from __future__ import annotations

import torch
from torch import nn

from onefold.system import tables


def test_tables_of_a_module_are_its_own() -> None:
    """Or a parameter or buffer that was replaced would not be seen, and trained by nobody."""
    layer = nn.BatchNorm1d(2)
    assert tables.parameters_of(layer)["weight"] is layer.weight
    assert tables.children_of(nn.Sequential(layer))["0"] is layer
    tables.buffers_of(layer)["running_mean"] = torch.ones(2)
    assert layer.running_mean.tolist() == [1, 1]
