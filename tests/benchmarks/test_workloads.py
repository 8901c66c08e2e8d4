"""The workloads: the same for every side, each time."""

from __future__ import annotations

import pytest
import torch

from workloads import WORKLOADS

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches_are_the_same_each_time(name: str) -> None:
    first, second = WORKLOADS[name].batches(), WORKLOADS[name].batches()
    for (inputs, labels), (same_inputs, same_labels) in zip(first, second, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(labels, same_labels)
        assert len(inputs) == len(labels) == WORKLOADS[name].batch_size
    assert not torch.equal(first[0][0], first[1][0])


def test_models_start_alike() -> None:
    (one, optimizer), (other, _) = WORKLOADS["lenet"].build(), WORKLOADS["lenet"].build()
    for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)
    assert optimizer.param_groups[0]["params"] == list(one.parameters())


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 64), (0.5, 32), (0.01, 2), (1.05, 68)])
def test_batches_of_another_size_can_be_halved(factor: float, expected: int) -> None:
    scaled = WORKLOADS["mlp"].scaled(factor)
    assert scaled.batch_size == expected
    assert {len(labels) for _, labels in scaled.batches()} == {expected}


def test_a_thousand_parameters_keep_the_signals_size() -> None:
    workload = WORKLOADS["thousand"]
    model, _ = workload.build()
    inputs, _ = workload.batches()[0]
    assert len(list(model.parameters())) == 1000
    assert 0.1 < model(inputs).detach().std() < 10
