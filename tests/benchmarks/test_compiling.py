"""What compiling gains: ratios are taken block by block, and starts are put back as they were."""

from __future__ import annotations

import os

import pytest

import compiling
from compiling import FOLDER, cold_and_warm, gain, label, show, summary
from measure import Spread

pytestmark = pytest.mark.full

TAKEN = {
    label(1, compiled=False): [2.0, 9.0, 8.0],
    label(1, compiled=True): [1.0, 3.0, 2.0],
    label(8, compiled=False): [4.0, 4.0, 4.0],
    label(8, compiled=True): [4.0, 4.0, 4.0],
}


def test_ratios_are_those_of_neighbours() -> None:
    assert gain(TAKEN, 1) == Spread(median=3.0, low=2.5, high=3.5)


def test_a_summary_has_all_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(summary("lenet", TAKEN, block=1, others_cores=0.5))
    shown = capsys.readouterr().out
    assert "compiled, 8 shards" in shown
    assert "3.00 (2.50-3.50)" in shown
    assert "Disturbed: other programs kept 0.50 cores busy during LeNet" in shown


def test_a_cold_start_begins_with_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def first_step_s(name: str, devices: int, *, compiled: bool) -> float:
        seen.append(len(os.listdir(os.environ[FOLDER])))
        (os.mkdir if not seen[-1] else os.rmdir)(f"{os.environ[FOLDER]}/code")
        return 1.0

    monkeypatch.setattr(compiling, "first_step_s", first_step_s)
    monkeypatch.setenv(FOLDER, "before")
    found = cold_and_warm("lenet", 2)
    assert list(found) == ["compiled, 2 devices, cold", "compiled, 2 devices, warm"]
    assert seen == [0, 1]
    assert os.environ[FOLDER] == "before"
