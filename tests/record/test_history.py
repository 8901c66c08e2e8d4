"""The rule by which a step stands out: what has left its own history, and nothing else."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from onefold.record import FILE, Record
from onefold.record.entries import FailureEntry, FrameWriter, StepEntry, encode
from onefold.record.findings import Departure, first_departure
from tests.tables import for_each

STEPS, SHARDS = 80, 4


def written(
    folder: Path, losses: np.ndarray, norms: Sequence[float], *ends: FailureEntry, short: int = 0
) -> Record:
    """The record of steps with these losses (steps, V); few samples in step ``short``."""
    writer = FrameWriter(folder / FILE)
    for number, (own, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        entry = StepEntry(
            step=number, epoch=0, samples=SHARDS * (1 if number == short else 16),
            loss=float(own.mean()), weight=SHARDS, norm=norm,
            rates=[0.1], totals=own.astype("<f8").tobytes(), weights=np.ones(SHARDS).tobytes(),
        )  # fmt: skip
        writer.append(encode(entry))
    for end in ends:
        writer.append(encode(end))
    writer.close()
    return Record(folder)


@pytest.fixture
def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Losses that fall, and norms, both with noise."""
    random = np.random.default_rng(0)
    falling = 2.0 * np.exp(-np.arange(STEPS) / 40)[:, None]
    return falling * random.uniform(0.8, 1.2, (STEPS, SHARDS)), random.uniform(0.5, 1.5, STEPS)


def found(
    folder: Path, losses: np.ndarray, norms: np.ndarray, *ends: FailureEntry
) -> Departure | None:
    return first_departure(written(folder, losses, norms.tolist(), *ends))


def test_a_short_batch_comes_behind_whole_ones_unless_its_numbers_are_not_finite(
    tmp_path: Path, numbers: tuple[np.ndarray, np.ndarray]
) -> None:
    losses, norms = numbers
    norms[[29, 59]] = 1000.0
    for norm, expected in ((1000.0, 60), (math.nan, 30)):
        folder = tmp_path / str(expected)
        folder.mkdir()
        norms[29] = norm
        departure = first_departure(written(folder, losses, norms.tolist(), short=30))
        assert departure
        assert (departure.step, departure.what) == (expected, "norm")
    norms[[29, 59]] = 1000.0, 1.0
    departure = first_departure(written(tmp_path, losses, norms.tolist(), short=30))
    assert departure
    assert departure.step == 30


def test_a_run_that_learns_does_not_stand_out(
    tmp_path: Path, numbers: tuple[np.ndarray, np.ndarray]
) -> None:
    assert found(tmp_path, *numbers) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_stand_out(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    losses = 1.0 + 0.1 * random.standard_normal((STEPS, SHARDS))
    assert found(tmp_path, losses, 1.0 + 0.1 * random.standard_normal(STEPS)) is None


@for_each(
    ("losses", "norms", "step", "what"),
    [
        *(({(step, 2): 40.0}, {}, step, "loss of shard 2") for step in (3, 11, 80)),
        ({}, {51: 30.0}, 51, "norm"),
        *(({(1, 1): value}, {}, 1, "loss") for value in (math.nan, math.inf)),
    ],
)
def test_what_leaves_its_history_stands_out(
    tmp_path: Path,
    numbers: tuple[np.ndarray, np.ndarray],
    losses: dict[tuple[int, int], float],
    norms: dict[int, float],
    step: int,
    what: str,
) -> None:
    """The loss of a shard with a bad sample, a norm alone, and what is not finite."""
    changed = [each.copy() for each in numbers]
    for (number, shard), value in losses.items():
        changed[0][number - 1, shard] = value
    for number, value in norms.items():
        changed[1][number - 1] = value
    losses_of, norms_of = changed
    departure = found(tmp_path, losses_of, norms_of)
    assert departure is not None
    assert departure.step == step
    assert departure.what in {what, what.partition(" of ")[0]}
    assert math.isnan(departure.usual) or departure.usual < 2.5
    assert departure.value == norms[step] if norms else math.isfinite(departure.value) == (step > 1)


def test_a_step_that_failed_stands_out(
    tmp_path: Path, numbers: tuple[np.ndarray, np.ndarray]
) -> None:
    end = FailureEntry(step=STEPS, line="train.py:3", error="LossError", text="the loss is nan")
    departure = found(tmp_path, *numbers, end)
    assert departure is not None
    assert departure.step == STEPS + 1
    assert departure.text == "LossError: the loss is nan"


def test_a_batch_without_weight_and_a_scale_that_is_lowered_are_no_departure(
    tmp_path: Path, numbers: tuple[np.ndarray, np.ndarray]
) -> None:
    losses, norms = numbers
    writer = FrameWriter(tmp_path / FILE)
    for number, (own, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        nothing, overflows = number == 20, number == 30
        entry = StepEntry(
            step=number, epoch=0, samples=SHARDS, rates=[0.1],
            loss=math.nan if nothing else float(own.mean()), weight=0.0 if nothing else SHARDS,
            norm=math.inf if overflows else float(norm),
            skipped="a gradient overflowed with losses scaled by 65536" if overflows else "",
            totals=(0.0 * own if nothing else own).astype("<f8").tobytes(),
            weights=np.full(SHARDS, 0.0 if nothing else 1.0).tobytes(),
        )  # fmt: skip
        writer.append(encode(entry))
    writer.close()
    assert first_departure(Record(tmp_path)) is None


def test_a_step_of_100_000_values_takes_no_time(tmp_path: Path) -> None:
    """Nor do steps before it that have none of them."""
    writer, numbers = FrameWriter(tmp_path / FILE), bytes(16)
    for step in range(1, 61):
        values = {f"v{n}": 1.0 for n in range(100_000)} if step == 60 else {}
        entry = StepEntry(
            step=step, epoch=0, samples=8, loss=1.0, weight=1.0, norm=1.0, rates=[0.1],
            values=values, totals=numbers, weights=numbers,
        )  # fmt: skip
        writer.append(encode(entry))
    writer.close()
    record, begun = Record(tmp_path), time.process_time()
    assert first_departure(record) is None
    assert time.process_time() - begun < 3
