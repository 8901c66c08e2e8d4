"""What many shards cost: the same work in every block, and a table of it."""

from __future__ import annotations

import pytest

import shards
from measure import Spread
from shards import accumulated, measured, show, show_accumulation
from workloads import WORKLOADS

pytestmark = pytest.mark.full


def test_a_short_trial(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shards, "BLOCK_S", 0.001)
    found = measured("mlp", [1, 3], rounds=2)
    assert list(found["step_s"]) == ["onefold 1", "bare 1", "onefold 3", "bare 3"]
    assert found["to_one"]["1"] == Spread(median=1.0, low=1.0, high=1.0)
    show([found])
    assert WORKLOADS["mlp"].title in capsys.readouterr().out


def test_accumulation_gives_every_block_as_many_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "ACCUMULATED", "mlp")
    seen: list[int] = []

    def counted(trainer: object, batches: list[tuple[object, object]], steps: int) -> object:
        seen.append(steps * len(batches[0][0]))
        return block(trainer, batches, steps)

    block = shards.block_of
    monkeypatch.setattr(shards, "block_of", counted)
    taken = accumulated(1, [1, 2, 4], samples=2, rounds=1)
    assert list(taken) == ["1", "2", "4"]
    assert set(seen) == {8}
    one = Spread(median=0.001, low=0.001, high=0.001)
    show_accumulation([{"shards_a_device": 1, "samples_per_s": one, "exchange_s": one}], 1)
    assert "1.0 (1.0-1.0)" in capsys.readouterr().out
