from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as BaseIterator

from onefold.core.batch import ShardedBatch
from onefold.core.randomness import order_by_length, sample_order
from onefold.core.shard import Plan, cut_bounds
from onefold.errors import SampleError
from onefold.reading.loader import Loader
from onefold.reading.position import LoaderTrack
from tests.small import make_trainer
from tests.tables import for_each

processes = pytest.mark.processes
with_workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=processes)])


def make_loader(
    dataset: Any, plan: Plan | Callable[[], Plan], own: Sequence[int] = (0,), **choices: Any
) -> Loader:
    """As a trainer of this plan would make it."""
    usual: dict[str, Any] = {
        "batch_size": 6,
        "shuffle": True,
        "workers": 0,
        "drop_last": False,
        "collate": list,
        "seed": 3,
        "plan": plan if callable(plan) else lambda: plan,
        "first_epoch": 0,
        "pin_memory": False,
        "timeout_s": 60.0,
    }
    return Loader(dataset, own=own, **{**usual, **choices})


class Augmented(Dataset[tuple[int, float]]):
    """Draws from every generator that a data set may draw from."""

    def __init__(self, samples: int = 20) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        noise = torch.rand(()).item() + random.random() + np.random.rand() + np.random.randn()
        return index, noise + torch.randn(3).sum().item()


class Broken(Augmented):
    """One item cannot be read."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 13:
            raise OSError("no such image: 13.png")
        return super().__getitem__(index)


class Unsendable(Augmented):
    """Its items cannot go from one process to another."""

    def __getitem__(self, index: int) -> Any:
        return lambda: index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class CountedStream(Stream):
    def __len__(self) -> int:
        return 9


def noisy_collate(samples: list[Any]) -> list[Any]:
    return [*samples, torch.rand(()).item(), random.random(), np.random.rand()]


def samples_in(batches: Sequence[ShardedBatch]) -> list[Any]:
    """All samples of a pass, in the order of batches and shards."""
    return [
        sample
        for batch in batches
        for shard in sorted(batch.shards)
        for sample in batch.shards[shard]  # type: ignore[attr-defined]
    ]


def united(passes: Sequence[Sequence[ShardedBatch]]) -> list[ShardedBatch]:
    """What all devices together have read."""
    return [
        ShardedBatch(
            samples=parts[0].samples,
            plan=parts[0].plan,
            shards={shard: p for part in parts for shard, p in part.shards.items()},
        )
        for parts in zip(*passes, strict=True)
    ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    return Plan(tuple(counts))


@given(
    plan=plans(),
    samples=st.integers(1, 70),
    batch_size=st.integers(1, 80),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_devices_together_read_every_sample_once_and_in_order(
    plan: Plan, samples: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int
) -> None:
    drop_last = drop_last and batch_size <= samples  # or it is refused
    choices = {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle, "seed": seed}
    loaders = [
        make_loader(list(range(samples)), plan, [device], **choices)
        for device in range(plan.devices)
    ]
    order = list(range(samples))
    for epoch in range(2):
        if shuffle:
            order = sample_order(samples, seed=seed, epoch=epoch).tolist()
        whole = samples - samples % batch_size if drop_last else samples
        batches = united([list(loader) for loader in loaders])
        assert samples_in(batches) == order[:whole]
        assert [batch.samples for batch in batches] == [
            min(batch_size, whole - start) for start in range(0, whole, batch_size)
        ]
        assert {len(loader) for loader in loaders} == {len(batches)}
        for batch in batches:
            sizes = [stop - start for start, stop in cut_bounds(batch.samples, plan.shards)]
            read = [len(batch.shards.get(s, ())) for s in range(plan.shards)]  # type: ignore[arg-type]
            assert read == sizes


LENGTHS = [3 * n % 11 for n in range(30)]


@given(plan=plans(), batch_size=st.integers(1, 40), drop_last=st.booleans(), seed=st.integers(0, 9))
def test_batches_by_length_are_the_same_on_any_number_of_devices(
    plan: Plan, batch_size: int, drop_last: bool, seed: int
) -> None:
    drop_last = drop_last and batch_size <= 30  # or it is refused
    choices = {"batch_size": batch_size, "drop_last": drop_last, "seed": seed, "lengths": LENGTHS}
    loaders = [make_loader(range(30), plan, [device], **choices) for device in range(plan.devices)]
    whole = 30 - 30 % batch_size if drop_last else 30
    orders = []
    for epoch in range(2):
        order = order_by_length(
            torch.tensor(LENGTHS), batch_size=batch_size, seed=seed, epoch=epoch
        )
        found = samples_in(united([list(loader) for loader in loaders]))
        assert found == order[:whole].tolist()
        orders.append(found)
    assert orders[0] != orders[1]


@with_workers
def test_batches_by_length_are_the_same_with_workers(workers: int) -> None:
    loader = make_loader(range(30), Plan((2,)), lengths=LENGTHS, workers=workers)
    for epoch in range(2):
        order = order_by_length(torch.tensor(LENGTHS), batch_size=6, seed=3, epoch=epoch)
        assert samples_in(list(loader)) == order.tolist()


def test_within_a_batch_lengths_are_near() -> None:
    loader = make_loader(range(30), Plan((2,)), lengths=LENGTHS)
    spans = sorted(
        sorted(LENGTHS[sample] for shard in batch.shards.values() for sample in shard)  # type: ignore[attr-defined]
        for batch in loader
    )
    assert [length for batch in spans for length in batch] == sorted(LENGTHS)


@for_each("lengths", [tuple(LENGTHS), np.array(LENGTHS)])
def test_lengths_may_be_any_row_of_numbers(lengths: Any) -> None:
    loaders = [make_loader(range(30), Plan((2,)), lengths=each) for each in (LENGTHS, lengths)]
    assert samples_in(list(loaders[0])) == samples_in(list(loaders[1]))
    assert loaders[0].track.size == loaders[1].track.size


@for_each(
    ("choices", "words"),
    [
        ({"lengths": LENGTHS[1:]}, "one length for each of the 30 samples, got 29 lengths"),
        ({"lengths": []}, "one length for each of the 30 samples, got 0 lengths"),
        ({"lengths": LENGTHS, "shuffle": False}, "expected shuffle=True"),
    ],
)
def test_lengths_that_cannot_be_used_are_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_trainer().loader(range(30), **{"batch_size": 4, "shuffle": True, **choices})


def test_a_device_reads_its_own_shards_alone() -> None:
    plan = Plan((1, 0, 2))
    read = [set(next(iter(make_loader(range(20), plan, own))).shards) for own in ([0], [1], [2])]
    assert read == [{0}, set(), {1, 2}]
    assert set(next(iter(make_loader(range(20), plan, [0, 2]))).shards) == {0, 1, 2}


def test_the_order_depends_on_seed_and_pass_alone() -> None:
    def order(shards: int, batch_size: int, seed: int, passes: int) -> list[list[int]]:
        loader = make_loader(range(30), Plan((shards,)), batch_size=batch_size, seed=seed)
        return [samples_in(list(loader)) for _ in range(passes)]

    first = order(2, 6, seed=3, passes=3)
    assert first == order(5, 11, seed=3, passes=3)
    assert len({tuple(one_pass) for one_pass in first}) == 3
    assert order(2, 6, seed=4, passes=1) != first[:1]


def test_without_shuffling_every_pass_is_in_order() -> None:
    loader = make_loader(range(15), Plan((2,)), shuffle=False)
    assert [samples_in(list(loader)) for _ in range(2)] == [list(range(15))] * 2


@with_workers
def test_every_pass_is_the_next_epoch(workers: int) -> None:
    loader = make_loader(range(15), Plan((2,)), workers=workers, first_epoch=4)
    epochs = [{batch.epoch for batch in loader} for _ in range(2)]
    assert epochs == [{4}, {5}]


@pytest.mark.processes
def test_workers_read_the_same_samples_with_the_same_augmentation() -> None:
    def read(workers: int, plan: Plan, collate: Callable[[list[Any]], Any]) -> list[Any]:
        own = range(plan.devices)
        loader = make_loader(Augmented(), plan, own, workers=workers, collate=collate)
        return [dict(batch.shards) for _ in range(2) for batch in loader]

    plan = Plan((2, 1))
    assert read(0, plan, noisy_collate) == read(2, plan, noisy_collate)


def test_augmentation_does_not_depend_on_shards_devices_or_batches() -> None:
    def read(plan: Plan, batch_size: int) -> list[tuple[int, float]]:
        own = range(plan.devices)
        loader = make_loader(Augmented(), plan, own, batch_size=batch_size)
        return [sample for _ in range(2) for sample in samples_in(list(loader))]

    expected = read(Plan((1,)), 20)
    assert read(Plan((2, 3)), 7) == expected
    assert read(Plan((0, 4)), 1) == expected


def test_collating_is_seeded_on_its_own() -> None:
    """What an item draws has no influence on what collating draws."""

    class Greedy(Augmented):
        def __getitem__(self, index: int) -> tuple[int, float]:
            return super().__getitem__(index)[0], torch.rand(9).sum().item()

    def drawn(data: Augmented) -> list[list[float]]:
        batches = make_loader(data, Plan((2,)), collate=noisy_collate)
        return [samples[-3:] for batch in batches for samples in batch.shards.values()]  # type: ignore[index]

    assert drawn(Augmented()) == drawn(Greedy())


def test_augmentation_is_another_in_every_pass() -> None:
    loader = make_loader(Augmented(), Plan((2,)), shuffle=False)
    noise = [noise for _ in range(2) for _, noise in samples_in(list(loader))]
    assert len(set(noise)) == 40


@with_workers
def test_the_item_that_cannot_be_read_is_named(workers: int) -> None:
    loader = make_loader(Broken(), Plan((2,)), shuffle=False, workers=workers, first_epoch=2)
    batches = iter(loader)
    assert [next(batches).samples for _ in range(2)] == [6, 6]
    words = "^reading sample 13 in epoch 2 failed: OSError: no such image: 13.png"
    with pytest.raises(SampleError, match=words):
        next(batches)


def test_where_an_item_failed_is_told() -> None:
    with pytest.raises(SampleError, match="reading sample 13") as caught:
        list(make_loader(Broken(), Plan((2,))))
    assert "in __getitem__" in "".join(caught.value.__notes__)


@with_workers
def test_a_pass_may_be_left_in_the_middle(workers: int) -> None:
    def choices() -> dict[str, Any]:
        return {"workers": workers, "batch_size": 3, "collate": noisy_collate}

    left, whole = (make_loader(Augmented(), Plan((2,)), **choices()) for _ in range(2))
    for number, _ in enumerate(left):
        if number == 1:
            break
    list(whole)
    second, expected = ([dict(b.shards) for b in loader] for loader in (left, whole))
    assert second == expected


@with_workers
def test_the_callers_generators_are_left_alone(workers: int) -> None:
    def states() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            {k: str(v) for k, v in np.random.get_state(legacy=False).items()},
        ]

    loader = make_loader(Augmented(), Plan((2,)), workers=workers)
    before = states()
    for _ in loader:
        assert states() == before
    assert states() == before


def read_with_plans(
    plans: Sequence[tuple[int, ...]], workers: int, own: Sequence[int] = (0, 1)
) -> tuple[list[ShardedBatch], LoaderTrack]:
    """Three passes of 5 batches; before the batch of a number, the plan of that number is set."""
    now = [Plan(plans[0])]
    loader = make_loader(Augmented(), lambda: now[0], own, batch_size=4, workers=workers)
    read: list[ShardedBatch] = []
    for _ in range(3):
        for batch in loader:
            read.append(batch)
            now[0] = Plan(plans[len(read) % len(plans)])
    return read, loader.track


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=processes) for n in (1, 2))])
@pytest.mark.parametrize(
    "plans",
    [
        [(1, 3), (2, 2), (0, 4)],
        [(1, 3), (1, 3), (4, 0)],
        [*[(2, 2)] * 4, (3, 1)],
        [*[(2, 2)] * 5, (3, 1)],
        [(4, 0), (4, 0), (0, 4), (0, 4), (0, 4), (4, 0), (3, 1)],
    ],
    ids=["each-batch", "there-and-back", "last-batch", "next-pass", "now-and-then"],
)
def test_a_plan_holds_from_the_next_batch_that_is_handed_out(
    plans: list[tuple[int, ...]], workers: int
) -> None:
    read, track = read_with_plans(plans, workers)
    plain, _ = read_with_plans([(2, 2)], workers=0)
    assert [b.plan.counts for b in read] == [plans[n % len(plans)] for n in range(15)]
    assert [dict(b.shards) for b in read] == [dict(b.shards) for b in plain]
    assert [(b.epoch, b.stop) for b in read] == [(n, 4 * k) for n in range(3) for k in range(1, 6)]
    assert track.begin().number == 3


@pytest.mark.processes
def test_with_any_workers_a_device_reads_what_the_plan_gives_it() -> None:
    plans = [(1, 3), (4, 0), (2, 2), (0, 4), (0, 4), (3, 1), (3, 1)]
    whole, _ = read_with_plans(plans, workers=0)
    devices = [read_with_plans(plans, workers, [own])[0] for own, workers in enumerate((0, 2))]
    for number, batch in enumerate(united(devices)):
        counts = plans[number % len(plans)]
        assert [len(each[number].shards) for each in devices] == list(counts)
        assert (batch.plan.counts, batch.shards) == (counts, dict(whole[number].shards))


@with_workers
def test_a_sample_that_another_device_now_reads_is_no_error_here(workers: int) -> None:
    """Although this one may have tried to read it already."""
    now = [Plan((1, 0))]
    loader = make_loader(Broken(), lambda: now[0], shuffle=False, batch_size=5, workers=workers)
    read = []
    for batch in loader:
        read.append(len(batch.shards))
        now[0] = Plan((1, 0) if len(read) == 3 else (0, 1))
    assert read == [1, 0, 0, 1]


@with_workers
def test_a_changed_plan_leaves_the_place_in_the_data_as_it_is(workers: int) -> None:
    now = [Plan((1, 1))]
    loader = make_loader(range(20), lambda: now[0], [0, 1], batch_size=4, workers=workers)
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]
    now[0] = Plan((2, 0))
    third = next(batches)
    assert third.data_pass is not None
    assert (third.stop, third.data_pass.given, third.data_pass.used) == (12, 12, 0)
    third.data_pass.used = first[1].stop  # as by a step with each of the first two
    del batches
    saved = loader.track.to_json(epoch_done=False)
    again = make_loader(range(20), Plan((2,)), batch_size=4)
    again.track.go_to(saved)
    order = sample_order(20, seed=3, epoch=0).tolist()
    assert samples_in([*first, *again]) == order


def test_a_short_last_batch_may_leave_shards_empty() -> None:
    *_, last = make_loader(range(8), Plan((4,)), batch_size=6, shuffle=False)
    assert (last.samples, dict(last.shards)) == (2, {0: [6], 1: [7]})


def test_a_tensor_data_set_is_read_as_pytorch_would() -> None:
    data = TensorDataset(torch.randn(20, 3), torch.arange(20))
    plain, slow = (
        make_loader(data, Plan((3,)), collate=collate) for collate in (None, default_collate)
    )
    for one, other in zip(plain, slow, strict=True):
        assert one.shards.keys() == other.shards.keys()
        for shard, payload in one.shards.items():
            expected = other.shards[shard]
            assert type(payload) is type(expected) is list
            assert all(torch.equal(a, b) for a, b in zip(payload, expected, strict=True))


def test_the_usual_collate_is_that_of_pytorch() -> None:
    data = [{"x": torch.full((2,), float(i)), "name": str(i)} for i in range(4)]
    (batch,) = make_loader(data, Plan((1,)), collate=None, shuffle=False)
    (payload,) = batch.shards.values()
    assert payload["x"].shape == (4, 2)  # type: ignore[index]
    assert payload["name"] == list("0123")  # type: ignore[index]


@for_each(
    "data",
    [iter(range(3)), (n for n in range(3)), 5, None, {1, 2}],
    ids=["iterator", "generator", "number", "none", "set"],
)
def test_what_has_no_items_by_number_is_refused(data: object) -> None:
    with pytest.raises(TypeError, match=f"a length and an item for .* {type(data).__name__}"):
        make_loader(data, Plan((1,)))


def test_a_stream_of_known_length_is_no_data_set_with_an_index() -> None:
    with pytest.raises(ValueError, match=r"CountedStream is a stream.* shuffle cannot be followed"):
        make_loader(CountedStream(), Plan((1,)))


@for_each("data", [[], (), TensorDataset(torch.zeros(0, 3))])
def test_an_empty_data_set_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="the data set is empty: expected at least one sample"):
        make_loader(data, Plan((1,)))


@for_each(
    ("choice", "kind", "words"),
    [
        ({"batch_size": 0}, ValueError, "expected batch_size of at least 1, got 0"),
        ({"batch_size": -3}, ValueError, "expected batch_size of at least 1, got -3"),
        ({"workers": -1}, ValueError, "expected workers of at least 0, got -1"),
        ({"batch_size": 2.0}, TypeError, "expected batch_size to be a whole number, got 2.0"),
        ({"batch_size": "8"}, TypeError, "expected batch_size to be a whole number, got '8'"),
        ({"batch_size": True}, TypeError, "expected batch_size to be a whole number, got True"),
        ({"workers": None}, TypeError, "expected workers to be a whole number, got None"),
    ],
)
def test_a_wrong_number_is_refused(
    choice: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make_trainer().loader(range(9), **{"batch_size": 4, **choice})


def test_a_collate_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="expected collate to be a function"):
        make_loader(range(9), Plan((1,)), collate=3)


def test_a_loader_of_a_trainer_begins_with_the_trainers_epoch() -> None:
    trainer = make_trainer()
    for _ in trainer.epochs(3):
        pass
    assert {batch.epoch for batch in trainer.loader(range(9), batch_size=4)} == {3}


def test_a_trainers_loader_follows_its_plan() -> None:
    trainer = make_trainer(devices=2)
    loader = trainer.loader(range(24), batch_size=8)
    counts = []
    for batch in loader:
        counts.append(batch.plan.counts)
        trainer.plan = (1, 3)
    assert counts == [(2, 2), (1, 3), (1, 3)]


def test_two_loaders_of_one_data_set_have_two_orders_and_two_augmentations() -> None:
    """Or a script that mixes the batches of two loaders would mix each sample with itself."""
    trainer = make_trainer()
    choices: dict[str, Any] = {"batch_size": 20, "collate": noisy_collate}
    loaders = [
        trainer.loader(Augmented(), shuffle=shuffle, **choices) for shuffle in (True, True, False)
    ]
    read = [samples_in(list(loader)) for loader in loaders]
    rows = [[sample for sample in each if isinstance(sample, tuple)] for each in read]
    orders = [[index for index, _ in each] for each in rows]
    assert orders[0] != orders[1]
    assert orders[2] == list(range(20))
    noises = [noise for each in rows for _, noise in each]
    noises += [noise for each in read for noise in each if isinstance(noise, float)]  # of collate
    assert len(set(noises)) == len(noises) == 3 * 20 + 3 * 4 * 3


class Deadly(Augmented):
    """One item kills whoever reads it."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 7:
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.processes
def test_a_worker_that_dies_is_noticed() -> None:
    loader = make_loader(Deadly(), Plan((1,)), shuffle=False, workers=1)
    with pytest.raises(RuntimeError, match=r"worker .*exited unexpectedly"):
        list(loader)


class Staged(Augmented):
    """Its items depend on what the script has set."""

    stage = 0

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.stage


@with_workers
def test_a_data_set_that_is_changed_between_passes_is_read_as_it_is_then(workers: int) -> None:
    data = Staged()
    loader = make_loader(data, Plan((2,)), workers=workers)
    stages = []
    for data.stage in range(3):
        stages.append({stage for _, stage in samples_in(list(loader))})
    assert stages == [{0}, {1}, {2}]


@pytest.mark.processes
def test_two_passes_may_be_under_way_at_a_time() -> None:
    loader = make_loader(range(12), Plan((1,)), shuffle=False, workers=1, batch_size=4)
    pairs = [(one.shards, other.shards) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [({0: [*range(n, n + 4)]},) * 2 for n in (0, 4, 8)]


@pytest.mark.processes
@pytest.mark.parametrize("how", ["to its end", "broken off", "failed", "empty"])
def test_workers_end_with_their_pass(how: str) -> None:
    data = Broken() if how == "failed" else Augmented()
    loader = make_loader(data, Plan((1,)), shuffle=False, workers=2)
    failure = None
    if how == "empty":
        loader.track.go_to({"first_pass": 0, "empty_passes": 1, "passes": []})
    try:
        for number, _ in enumerate(loader):
            assert len(active_children()) == 2
            if how == "broken off" and number == 1:
                break
    except SampleError as error:
        failure = error  # kept, with all that its traceback holds
    assert (failure is not None) == (how == "failed")
    assert active_children() == []


@pytest.mark.processes
def test_ctrl_c_is_not_lost_while_workers_begin_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = make_loader(range(6), Plan((1,)), workers=1)
    begin, end = DataLoader.__iter__, BaseIterator._shutdown_workers

    def begin_interrupted(self: Any) -> Any:
        answers = begin(self)
        signal.raise_signal(signal.SIGINT)
        begun.append("the workers")
        return answers

    def end_interrupted(self: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        end(self)
        ended.append("the workers")

    begun: list[str] = []
    ended: list[str] = []
    with monkeypatch.context() as changed:
        changed.setattr(DataLoader, "__iter__", begin_interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    with monkeypatch.context() as changed:
        changed.setattr(BaseIterator, "_shutdown_workers", end_interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    signal.signal(signal.SIGINT, before)
    assert (begun, ended) == (["the workers"],) * 2


@pytest.mark.processes
def test_ctrl_c_ends_a_worker() -> None:
    def handler(samples: list[Any]) -> str:
        return str(signal.getsignal(signal.SIGINT))

    (batch,) = make_loader(range(6), Plan((1,)), workers=1, collate=handler)
    assert batch.shards[0] == str(signal.getsignal(signal.SIGINT))


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Threaded(Augmented):
    """Its items depend on the threads that read them, as the bits of every large sum do."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return torch.get_num_threads()


def threads_to_collate(samples: list[Any]) -> list[Any]:
    return [*samples, torch.get_num_threads()]


@with_workers
def test_reading_and_collating_have_one_thread(workers: int, two_threads: None) -> None:
    loader = make_loader(Threaded(), Plan((2,)), workers=workers, collate=threads_to_collate)
    for batch in loader:
        assert {n for payload in batch.shards.values() for n in payload} == {1}  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 2


@pytest.mark.processes
def test_sums_have_the_same_bits_with_and_without_workers(two_threads: None) -> None:
    values = torch.randn(20, 300_001, generator=torch.Generator().manual_seed(1))
    data = [(row,) for row in values]

    def sums(workers: int) -> list[float]:
        def collate(samples: list[Any]) -> list[float]:
            return [row.sum().item() for (row,) in samples]

        return samples_in(list(make_loader(data, Plan((1,)), workers=workers, collate=collate)))

    assert sums(0) == sums(1)


def test_the_threads_come_back_after_a_failure(two_threads: None) -> None:
    def collate(samples: list[Any]) -> None:
        raise KeyError("no such key")

    for data, how, kind in [(Broken(), None, SampleError), (Augmented(), collate, KeyError)]:
        with pytest.raises(kind, match="no such"):
            list(make_loader(data, Plan((1,)), collate=how))
        assert torch.get_num_threads() == 2


class Noted(Augmented):
    """Notes who reads what."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read.append(index)
        return super().__getitem__(index)


def digests(data: Any, **choices: Any) -> list[int]:
    """Of each batch of two passes."""
    loader = make_loader(data, Plan((1, 3)), digest=True, **choices)
    return [batch.data_digest for _ in range(2) for batch in loader]


def test_three_samples_are_read_for_a_digest_in_each_pass() -> None:
    data = Noted()
    loader = make_loader(data, Plan((1,)), shuffle=False, digest=True)
    batches = iter(loader)
    next(batches)
    assert data.read == [0, 10, 19, *range(6)]
    data.read.clear()
    list(batches)
    list(loader)
    assert data.read == [*range(6, 20), 0, 10, 19, *range(20)]


@with_workers
def test_every_batch_has_the_digest_of_the_data(workers: int) -> None:
    found = {
        digest
        for own in ([0], [1], [0, 1])
        for digest in digests(Augmented(), own=own, workers=workers)
    }
    assert len(found) == 1
    assert found == set(digests(Augmented(), batch_size=20, collate=None))
    (digest,) = found
    assert digest != 0
    assert -(2**63) <= digest < 2**63
    for other in (Augmented(21), Staged(), list(range(20))):
        assert set(digests(other)) != found


def test_without_being_asked_nothing_more_is_read() -> None:
    data = Noted()
    loader = make_loader(data, Plan((1,)), shuffle=False)
    assert {batch.data_digest for batch in loader} == {0}
    assert data.read == list(range(20))


def test_what_is_read_for_a_digest_leaves_the_augmentation_as_it_is() -> None:
    def read(digest: bool) -> list[Any]:
        loader = make_loader(Augmented(), Plan((2,)), digest=digest, collate=noisy_collate)
        return samples_in(list(loader))

    assert read(True) == read(False)


def test_tensors_that_every_process_drew_for_itself_differ() -> None:
    def data() -> TensorDataset:
        return TensorDataset(torch.randn(9, 2), torch.arange(9))

    one, other = data(), data()
    alike = TensorDataset(*[tensor.clone() for tensor in one.tensors])
    assert set(digests(one)) == set(digests(alike))
    assert set(digests(one)) != set(digests(other))


@pytest.mark.processes
def test_a_digest_is_read_where_the_samples_are_read() -> None:
    """What opens its file when first used must not do so before the workers are there."""
    data = Noted()
    assert len(set(digests(data, workers=1))) == 1
    assert data.read == []


@with_workers
@pytest.mark.parametrize("shards", [(1, 0), (0, 1)])
def test_a_sample_that_cannot_be_read_for_a_digest_is_named(
    workers: int, shards: tuple[int, ...]
) -> None:
    class Short(Augmented):
        """Is not as long as it says; the pass would not come to that."""

        def __getitem__(self, index: int) -> tuple[int, float]:
            if index == 19:
                raise OSError("no such image: 19.png")
            return super().__getitem__(index)

    loader = make_loader(
        Short(), Plan(shards), shuffle=False, drop_last=True, digest=True, workers=workers
    )
    with pytest.raises(SampleError, match="reading sample 19 in epoch 0 failed"):
        list(loader)


@with_workers
def test_an_empty_first_pass_leaves_the_digest_to_the_next(workers: int) -> None:
    loader = make_loader(Augmented(), Plan((1,)), workers=workers, digest=True)
    loader.track.go_to({"first_pass": 0, "empty_passes": 1, "passes": []})
    assert list(loader) == []
    assert {batch.data_digest for batch in loader} == set(digests(Augmented()))


def test_a_batch_knows_its_loader_and_its_pass() -> None:
    loader = make_trainer().loader(range(9), batch_size=5)
    places = [(batch.loader, batch.pass_number) for _ in range(2) for batch in loader]
    assert places == [(0, 0), (0, 0), (0, 1), (0, 1)]


def test_a_process_that_has_all_devices_reads_nothing_for_a_digest() -> None:
    data = Noted()
    trainer = make_trainer(devices=2)
    assert {batch.data_digest for batch in trainer.loader(data, batch_size=6)} == {0}
    assert data.read == list(range(20))


MAKES_WORKERS = """
import multiprocessing, sys, threading, time
import torch
from torch.utils.data import TensorDataset
from onefold.reading.loader import Loader
from onefold.core.shard import Plan

class Noise:
    "New tensors are of the dtype that the script has chosen."

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(3)

def numbers(workers):
    loader = Loader(
        Noise(), batch_size=2, workers=workers, seed=0, plan=lambda: Plan((1,)), own=[0],
        first_epoch=0, pin_memory=False, timeout_s=300,
    )
    return [value.hex() for batch in loader for value in batch.shards[0].flatten().tolist()]

def read(passes):
    for batch in loader:
        passes.append([shard[0].tolist() for shard in batch.shards.values()])
        time.sleep(0.2)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    data = TensorDataset(torch.arange(12.0))
    loader = Loader(
        data, batch_size=4, workers=1, seed=0, plan=lambda: Plan((2,)), own=[0], first_epoch=0,
        pin_memory=False, timeout_s=300,
    )
    if sys.argv[2] == "thread":
        begun = []
        passing = iter(loader)
        thread = threading.Thread(target=lambda: begun.append(next(passing)))
        thread.start()
        thread.join()
        time.sleep(0.5)
        print(len(begun) + len(list(passing)))
    elif sys.argv[2] == "noise":
        torch.set_default_dtype(torch.float64)
        print(numbers(0) == numbers(1))
    else:
        passes = []
        read(passes)
        print(passes)
"""
"""A script of its own: how processes are made is settled once in a program."""


def makes_workers(
    folder: Path, method: str, what: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script.

    Args:
        folder: for the script.
        method: how Python makes processes.
        what: ``process``, ``thread`` or ``noise``.
        variables: of its environment, beside the usual ones.
    """
    script = folder / "read.py"
    script.write_text(MAKES_WORKERS)
    return subprocess.run(
        [sys.executable, str(script), method, what],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **variables},
    )


@processes
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_are_made_in_any_way_that_python_has(method: str, tmp_path: Path) -> None:
    done = makes_workers(tmp_path, method, "process")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


@processes
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_draw_in_the_default_dtype_of_the_script(method: str, tmp_path: Path) -> None:
    done = makes_workers(tmp_path, method, "noise")
    assert done.stdout == "True\n", done.stderr


@processes
def test_workers_that_give_nothing_are_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    loader = make_loader(Unsendable(), Plan((1,)), workers=1, timeout_s=2.0)
    with pytest.raises(SampleError, match=r"workers gave nothing within 2 s.* reported above"):
        next(iter(loader))
    assert "pickle" in capfd.readouterr().err


def temporary_folder(length: int) -> str:
    """A new folder whose path has this many bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as free:
        path = free + "x" * (length - len(free))
    os.mkdir(path)
    return path


@processes
@pytest.mark.parametrize("bytes_too_many", [0, 1])
def test_workers_need_a_temporary_folder_of_a_short_path(
    tmp_path: Path, bytes_too_many: int
) -> None:
    temporary = temporary_folder(75 + bytes_too_many)
    try:
        done = makes_workers(tmp_path, "fork", "process", TMPDIR=temporary)
    finally:
        shutil.rmtree(temporary)
    if not bytes_too_many:
        assert len(json.loads(done.stdout)) == 3, done.stderr
    else:
        words = f"expected its path to have at most 75 bytes, got 76: {temporary}; set TMPDIR to a"
        assert words in done.stderr


@processes
def test_workers_outlive_the_thread_that_began_the_pass(tmp_path: Path) -> None:
    done = makes_workers(tmp_path, "fork", "thread")
    assert done.stdout == "3\n", done.stderr


@processes
def test_a_forked_child_does_not_end_the_workers_of_its_parent() -> None:
    loader = make_loader(range(40), Plan((2,)), batch_size=2, workers=1)
    passing = iter(loader)
    next(passing)
    child = os.fork()
    if child == 0:
        passing.close()  # as where the child ends in the middle of the pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(passing)) == 19


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=processes)])
def test_a_collate_that_returns_nothing_is_named(workers: int) -> None:
    loader = make_loader(range(8), Plan((1, 1)), (0,), collate=lambda some: None, workers=workers)
    with pytest.raises(TypeError, match=r"collate returned None for the samples of shard 0"):
        next(iter(loader))


@for_each(
    ("choices", "words"),
    [
        ({"drop_last": True}, "at least batch_size=6 samples in a pass, got 5"),
        ({"drop_last": True, "shuffle": False, "sampler": range(3)}, "samples in a pass, got 3"),
        ({"shuffle": False, "sampler": []}, "the sampler list has the length 0"),
        (
            {"shuffle": False, "batch_size": None, "batch_sampler": []},
            "the batch_sampler list has the length 0",
        ),
    ],
)
def test_a_loader_whose_passes_would_all_be_empty_is_refused(choices: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_loader(range(5), Plan((2,)), **choices)


def test_a_pytorch_loader_that_drops_its_only_batch_is_refused() -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match="at least batch_size=8 samples in a pass, got 5"):
        trainer.loader(DataLoader(TensorDataset(torch.zeros(5, 2)), 8, drop_last=True))
    trainer.close()


class NothingAtFirst:
    """A sampler that has samples from its second epoch on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class Few(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@for_each(
    ("data", "choices", "words"),
    [
        (Few(), {"drop_last": True}, "of the stream Few had no batch of 6 samples, with drop_last"),
        (range(9), {"sampler": NothingAtFirst()}, "samples by NothingAtFirst had no batch, so"),
    ],
)
def test_a_pass_without_a_batch_is_told_once(
    data: Any, choices: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(data, Plan((2,)), shuffle=False, **choices)
    assert list(loader) == []
    list(loader)
    list(make_loader(data, Plan((1, 1)), own=(1,), shuffle=False, **choices))
    (warning,) = caplog.messages
    assert "pass 0 of a loader of" in warning
    assert words in warning
