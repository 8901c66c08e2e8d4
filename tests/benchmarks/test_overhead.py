"""The engine's own time: what is subtracted from what, and that both do the same."""

from __future__ import annotations

import pytest
import torch

from measure import Spread
from overhead import bare, check_bits, difference, measured, new_pair, ours, parts_step, show
from workloads import WORKLOADS

pytestmark = pytest.mark.full


def test_differences_are_taken_block_by_block() -> None:
    assert difference([5.0, 105.0, 6.0], [1.0, 100.0, 3.0]) == Spread(median=4.0, low=3.5, high=4.5)


def test_a_bare_step_in_parts_is_a_step_of_the_whole() -> None:
    workload = WORKLOADS["mlp"]
    batch = workload.batches()[0]
    (whole, whole_optimizer), (halves, halves_optimizer) = workload.build(), workload.build()
    parts_step(whole, whole_optimizer, 1)(batch)
    parts_step(halves, halves_optimizer, 2)(batch)
    for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_left_out_is_found() -> None:
    pair = new_pair(WORKLOADS["mlp"], 1)
    check_bits(pair)
    pair.bare(WORKLOADS["mlp"].batches()[0])
    with pytest.raises(RuntimeError, match="came to different bits"):
        check_bits(pair)


def test_a_short_trial(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("mlp", WORKLOADS["mlp"], 0.05)
    labels = [label for shards in (1, 2) for label in (ours(shards), bare(shards))]
    assert list(found["step_us"]) == labels
    assert list(found["own_us"]) == [ours(1), ours(2)]
    assert found["rounds"] >= 2
    show([found])
    shown = capsys.readouterr().out
    assert WORKLOADS["mlp"].title in shown
    assert all(label in shown for label in labels)
