"""What one shard gave, as a value."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onefold.core.values import ChangedBuffers, ShardResult
from tests.tables import for_each


def result(*gradients: torch.Tensor | None) -> ShardResult:
    return ShardResult(list(gradients), torch.zeros((), dtype=torch.float64), 3.0, None)


def test_which_parameters_got_a_gradient() -> None:
    """One of zeros is a gradient: the optimizer updates with it."""
    assert result(torch.ones(2), None, torch.zeros(3)).gave == [True, False, True]
    assert result(None, None).gave == [False, False]
    assert result().gave == []


def test_gradients_without_elements_count() -> None:
    assert result(torch.zeros(0)).gave == [True]


@for_each("name", ["gradients", "total", "weight", "buffers"])
def test_a_result_is_final(name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=name):
        setattr(result(), name, None)


def test_changed_buffers_are_final() -> None:
    changed = ChangedBuffers([1], [torch.zeros(2)])
    with pytest.raises(dataclasses.FrozenInstanceError, match="indices"):
        changed.indices = [2]  # type: ignore[misc]
