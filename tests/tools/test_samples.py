"""Data sets that differ between hosts, and those that are the same and look different."""

import re
import socket
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import onefold
from onefold.core.options import LaunchContext
from onefold.launcher.environment import current_context
from onefold.testing import outcomes, simulate
from tests.small import Batch, make_trainer, points
from tests.tables import for_each


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each simulated device is on a host of its own."""
    monkeypatch.setattr("onefold.testing.LaunchContext", partial(LaunchContext, one_host=False))
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{current_context().rank}")


class Numbers(Dataset[Batch]):
    """Rows and a target; on device 1 some differ. Counts what is read; may add noise, or fail."""

    def __init__(self, samples: int, differs: Any = lambda index: False, **ways: Any) -> None:
        self._rows, self._targets = points(samples)
        self._differs, self._noise = differs, ways.get("noise", 0.0)
        self._fails = ways.get("fails", ())
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        self.read[index] += 1
        if index in self._fails:
            raise OSError(f"cannot read /disk{current_context().rank}/{index}.png")
        other = current_context().rank == 1 and self._differs(index)
        noise = self._noise * torch.rand(3)
        return self._rows[index] + noise, self._targets[index] + other


def train(data: Any, seed: int = 0, epochs: int = 1, steps: int = 1_000, **options: Any) -> str:
    trainer = make_trainer(devices=None, seed=seed)
    options = {"batch_size": 40, "shuffle": True, **options}
    loader = trainer.loader(data, **options)
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
            if trainer.steps == steps:
                break
    return trainer.fingerprint()


def few(index: int) -> bool:
    """About three of a hundred, and none of those that every pass compares."""
    return index % 33 == 20


@pytest.mark.usefixtures("hosts")
@for_each("options", [{}, {"workers": 1}, {"shuffle": False}])
def test_a_data_set_that_differs_on_one_host_is_found(options: Any) -> None:
    ended = outcomes(lambda: train(Numbers(10_000, few), seed=1, steps=64, **options), 3)
    said = {str(each.error) for each in ended}
    (text,) = said
    found = re.fullmatch(
        r"step (\d+), trainer.step: sample (\d+) of loader 0 differs between hosts: on device 0 "
        r"\(node0\) it is float32 \(3,\), from (.*), (.*) \(digest (\w{8})\), but on device 1 "
        r"\(node1\) it is float32 \(3,\), from (.*), (.*) \(digest (\w{8})\). Copy the same data "
        r"to every host",
        text,
    )
    assert found, text
    step, index, row, target, digest, its_row, its_target, its_digest = found.groups()
    assert 1 <= int(step) <= 64
    assert few(int(index))
    assert row == its_row
    assert float(its_target) == pytest.approx(float(target) + 1, abs=1e-4)
    assert digest != its_digest


def test_one_host_compares_three_samples_alone() -> None:
    data = Numbers(10_000)
    simulate(lambda: train(data, steps=10), 2)
    assert sum(data.read.values()) <= 10 * 40 + 2 * (10 + 3)


@pytest.mark.usefixtures("hosts")
@for_each("noise", [0.0, 1.0])
def test_the_same_data_has_the_same_bits(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    several = simulate(lambda: train(Numbers(400, noise=noise), epochs=2), 2)
    monkeypatch.undo()
    (alone,) = simulate(lambda: train(Numbers(400, noise=noise), epochs=2), 1)
    assert {*several} == {alone}


@pytest.mark.usefixtures("hosts")
@for_each(
    ("samples", "batch_size", "each"),
    [(1_000, 10, 1), (400, 40, 7), (70, 70, 16), (10, 2, 2)],
)
def test_samples_are_read_once_and_a_few_at_a_time(
    samples: int, batch_size: int, each: int
) -> None:
    now: list[int] = []

    class Noted(Numbers):
        def __getitem__(self, index: int) -> Batch:
            now.append(index)
            return super().__getitem__(index)

    def run() -> list[int]:
        trainer = make_trainer(devices=None, shards=1)
        loader = trainer.loader(Noted(samples), batch_size=batch_size)
        mine = []
        for batch in chain(loader, loader):
            mine.append(len(now))
            now.clear()
            trainer.step(batch)
        return mine

    (counts,) = simulate(run, 1)
    batches = -(-samples // batch_size)
    first = min(3, samples)
    drawn = min(64, samples, 16 * batches)
    assert counts[0] == 2 * min(batch_size, samples) + first + min(each, drawn)
    assert sum(counts[:batches]) == samples + min(batch_size, samples) + first + drawn
    assert sum(counts[batches:]) == samples + first


@pytest.mark.usefixtures("hosts")
def test_a_sample_that_is_missing_on_one_host_is_named() -> None:
    def run() -> str:
        lost = range(2_000, 4_000) if current_context().rank == 1 else ()
        return train(Numbers(10_000, fails=lost), shuffle=False, steps=40)

    first, _ = outcomes(run, 2)
    assert re.search(
        r"sample \d+ .* on device 1 \(node1\) it is OSError: .*/disk1/", str(first.error)
    )


@pytest.mark.usefixtures("hosts")
def test_a_sample_that_no_host_can_read_ends_no_run() -> None:
    """Their errors differ in what they say, as they do between hosts."""
    sampler = [index for index in range(400) if index % 10 != 1]
    data = partial(Numbers, 400, fails=range(11, 400, 10))
    simulate(lambda: train(data(), sampler=sampler, shuffle=False), 2)


class Rows(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(zip(*points(40), strict=True))


@pytest.mark.usefixtures("hosts")
@for_each("kind", ["stream", "items", "function"])
def test_other_data_is_compared_as_before(kind: str) -> None:
    def run() -> str:
        if kind == "stream":
            return train(Rows(), batch_size=8, shuffle=False)
        trainer = make_trainer(devices=None)
        batches = [points(8), points(16)]
        loader: Any = trainer.batches(lambda step, generator: batches[step % 2], per_epoch=2)
        if kind == "items":
            loader = trainer.loader(DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        for batch in loader:
            trainer.step(batch)
        return trainer.fingerprint()

    assert len({*simulate(run, 2)}) == 1


@pytest.mark.usefixtures("hosts")
def test_a_resumed_run_compares_no_more(tmp_path: Any) -> None:
    def run() -> int:
        trainer, data = make_trainer(devices=None, shards=1), Numbers(4_000)
        loader = trainer.loader(data, batch_size=40)
        trainer.load(tmp_path, if_any=True)
        for number, batch in enumerate(loader):
            trainer.step(batch)
            if number == 9:
                break
        trainer.save(tmp_path)
        return sum(data.read.values())

    (first,), (second,) = simulate(run, 1), simulate(run, 1)
    assert (first, second) == (400 + 40 + 3 + 10, 400 + 40 + 3)


@pytest.mark.usefixtures("hosts")
def test_a_combined_batch_names_the_sample() -> None:
    def run() -> None:
        trainer = make_trainer(devices=None, loss=lambda m, b: m(b[0][0]).square())
        for batch in trainer.loader(Numbers(400, few), batch_size=8):
            trainer.step((batch, onefold.Broadcast(torch.ones(1))))

    for each in outcomes(run, 2):
        assert "of loader 0 differs between hosts" in str(each.error)
