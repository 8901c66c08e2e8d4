"""How many steps are taken, on what data, and what is shown of it."""

from __future__ import annotations

import pytest
import torch

from _side import part
from measure import spread
from training import RATIOS, show, steps_for
from workloads import WORKLOADS


@pytest.mark.parametrize(
    ("seconds", "step_times", "expected"),
    [(4.0, [1.0, 0.5], 8), (1.0, [0.3], 4), (0.1, [5.0, 9.0], 1)],
)
def test_steps_keep_the_fastest_side_busy(
    seconds: float, step_times: list[float], expected: int
) -> None:
    assert steps_for(seconds, step_times) == expected


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


def test_parts_make_up_the_batch() -> None:
    inputs, labels = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    parts = [part((inputs, labels), rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([one for one, _ in parts]), inputs)
    assert torch.equal(torch.cat([one for _, one in parts]), labels)


@pytest.mark.parametrize("others_cores", [0.0, 0.7])
def test_a_busy_machine_is_told_of(others_cores: float, capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {name: spread([1.0]) for name in ("plain", "onefold-1", "ddp-2", "onefold-2")}
    result = {
        "workload": "lenet",
        "samples_per_s": speeds,
        "ratios": {f"{a}/{b}": spread([0.5]) for a, b in RATIOS},
        "others_cores": spread([others_cores]),
    }
    show([result])
    shown = capsys.readouterr().out
    assert WORKLOADS["lenet"].title in shown
    assert ("0.70 cores busy" in shown) == bool(others_cores)
