"""The loops of the sides: their parts, their arithmetic, and that those of others run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import _side
from catalog import PEERS, SIDES, Precision, left_out
from loops import LOOPS, Loop, part
from sides import Side
from training import command_of
from workloads import WORKLOADS

pytestmark = pytest.mark.full


def trained(side: str, *, steps: int, precision: Precision = "fp32") -> tuple[Loop, list[float]]:
    """A loop of one process, and the losses of its first steps."""
    workload = replace(WORKLOADS["mlp"], precision=precision)
    loop = LOOPS[SIDES[side].loop](workload, SIDES[side], "cpu")
    batches = itertools.islice(itertools.cycle(loop.batches), steps)
    return loop, [loop.step(batch)() for batch in batches]


def test_parts_make_up_the_batch() -> None:
    inputs, labels = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    parts = [part((inputs, labels), rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([one for one, _ in parts]), inputs)
    assert torch.equal(torch.cat([one for _, one in parts]), labels)


@pytest.mark.parametrize("side", ["onefold-1", "onefold-1-two-shards", "onefold-2-one-process"])
@pytest.mark.parametrize(("precision", "off"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_onefold_trains_what_the_plain_loop_trains(
    side: str, precision: Precision, off: float
) -> None:
    loop, losses = trained(side, steps=6, precision=precision)
    plain = trained("plain-1", steps=6, precision=precision)[1]
    assert losses == pytest.approx(plain, rel=off)
    assert (plain == trained("plain-1", steps=6)[1]) == (precision == "fp32")
    assert len(loop.devices) == SIDES[side].devices


def test_a_measurement_tells_seconds_and_loss() -> None:
    loop, losses = trained("plain-1", steps=4)
    found = _side.train(loop, 8)
    assert found["seconds"] > 0
    assert found["peak_bytes"] > 1e6
    assert found["loss"] < losses[-1]


@pytest.mark.processes
@pytest.mark.parametrize("name", [*PEERS, "onefold-2-collective"])
def test_sides_of_two_processes_train(name: str, tmp_path: Path) -> None:
    if reason := left_out([name], "cpu").get(name):
        pytest.skip(reason)
    with side(name, tmp_path) as running:
        assert running.train(3).seconds > 0


def side(name: str, folder: Path) -> Side:
    """The processes of a side, on the smallest workload."""
    return Side(
        name,
        command_of(name, "mlp", precision="bf16"),
        processes=SIDES[name].processes,
        folder=folder,
        environment={},
    )
