"""A small run of each job, and devices that need no process of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onefold
from tests.jobs.tiny import WRITERS, direct, run_here
from tests.masked import on_cpu

SMALL: dict[str, dict[str, Any]] = {
    "classify": {"model": "lenet", "augment": "none", "epochs": 2, "lr": 0.02, "batch_size": 4},
    "segment": {"pos_weight": "auto"},
    "text": {"layers": 1},
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data of each job, which tests only read."""
    root = tmp_path_factory.mktemp("data")
    return {job: write(root / job) for job, write in WRITERS.items()}


@pytest.fixture(scope="session")
def runs(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each job on its data, which tests only read."""
    folder = tmp_path_factory.mktemp("runs")
    return {job: run_here(job, data[job], folder, name=job, **SMALL[job])[0] for job in WRITERS}


@pytest.fixture
def here() -> Iterator[None]:
    """Commands compute in this process, on the CPU."""
    with on_cpu() as patch:
        patch.setattr(onefold, "launch", direct)
        yield
