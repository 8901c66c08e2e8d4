"""The tables in which a module of PyTorch holds what is its own: parameters, buffers and modules.

They are private names, as those of ``compat.py``: ``tests/system/test_tables.py`` says what would
break without them.
"""

from __future__ import annotations

import torch

__all__ = ["buffers_of", "children_of", "parameters_of"]


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The table in which a module holds its own parameters."""
    # `named_parameters()` walks the whole tree, skips None, and leaves out the second name of a
    # tied parameter; whoever replaces parameters needs every place.
    return module._parameters


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The table in which a module holds the modules that are its own."""
    table: dict[str, torch.nn.Module | None] = module._modules
    return table


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The table in which a module holds its own buffers."""
    return module._buffers
