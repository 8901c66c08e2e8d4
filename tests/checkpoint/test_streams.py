"""A stream whose order another start of the script does not give is refused where a run resumes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from onefold.errors import CheckpointError
from onefold.record import FILE
from tests.checkpoint.inprocess import Life, Runs, Script
from tests.small import points, square
from tests.tables import some

DATA = points(21)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path / "run", monkeypatch)


class Seeded(IterableDataset[Any]):
    """Draws its order from PyTorch's generator, as it should."""

    def start(self) -> int:
        return int(torch.randint(1 << 30, ()))

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = DATA
        order = torch.randperm(21, generator=torch.Generator().manual_seed(self.start()))
        yield from ((inputs[place], targets[place]) for place in order)


class Told(Seeded):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def start(self) -> int:
        return self.epoch


class Counting(Seeded):
    """As mosaicml-streaming, and webdataset with ``detshuffle=True``."""

    passes = -1

    def start(self) -> int:
        self.passes += 1
        return self.passes


class Clocked(Seeded):
    """As webdataset's ``shuffle`` without a seed."""

    def start(self) -> int:
        return time.time_ns() % (1 << 30)


def script_of(stream: type[Seeded], *, workers: int = 0) -> Script:
    def script(life: Life) -> str:
        torch.manual_seed(0)
        trainer = life.trainer(torch.nn.Linear(3, 1), square)
        loader = trainer.loader(stream(), batch_size=5, workers=workers)
        for _ in trainer.epochs(4):
            for batch in loader:
                life.tick()
                trainer.step(batch)
                life.tick()
        return trainer.fingerprint()

    return script


MOMENTS = (4, 10, 11, 15, 23, 32)
"""Calls of `Life.tick`: 10 a pass of 5 steps, the last of which is of one sample."""


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stream", [Seeded, Told])
def test_an_order_that_follows_from_the_seed_is_resumed(
    runs: Runs, stream: type[Seeded], kept: bool
) -> None:
    script = script_of(stream)
    whole = runs.whole(script)
    for dies in some(MOMENTS, 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies) is None
        if not kept and dies > 2:
            (again.folder / FILE).unlink()
        assert again.start(script, 2, dies=3) is None
        assert again.start(script, 3) == whole


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stream", [Counting, Clocked])
def test_another_order_is_equal_or_refused(runs: Runs, stream: type[Seeded], kept: bool) -> None:
    script = script_of(stream)
    whole = runs.whole(script)
    refused = []
    for dies in some(MOMENTS, 3):
        again = runs.below(dies)
        assert again.start(script, dies=dies) is None
        if not kept:
            (again.folder / FILE).unlink()
        try:
            assert again.start(script, 2) == whole
        except CheckpointError as error:
            refused.append(str(error))
    # In the first pass, the stream that counts its passes yields what it did.
    assert len(refused) == sum(stream is Clocked or dies > 11 for dies in some(MOMENTS, 3))
    words = f"the stream {stream.__name__} yields other samples than in the saved run"
    assert all(words in text and "--allow-changed dataset" in text for text in refused)
    assert again.start(script, allow_changed=("dataset",)) is not None


@pytest.mark.processes
def test_a_worker_refuses_it_as_well(runs: Runs) -> None:
    script = script_of(Clocked, workers=1)
    assert runs.start(script, dies=15) is None
    with pytest.raises(CheckpointError, match="the first 5 of pass 1 differ"):
        runs.start(script)


@pytest.mark.parametrize("stream", [Clocked, Counting])
def test_an_order_by_the_clock_is_reported_in_the_first_start(
    runs: Runs, stream: type[Seeded], caplog: pytest.LogCaptureFixture
) -> None:
    def reported() -> int:
        return sum("when pass 0 is started a second time" in text for text in caplog.messages)

    script = script_of(stream)
    whole = runs.whole(script)
    assert not reported()  # nothing resumes a run without a record
    found = runs.start(script)
    assert reported() == (stream is Clocked)
    assert stream is Clocked or found == whole
