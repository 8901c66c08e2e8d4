import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from onefold.core.batch import ShardedBatch
from onefold.core.randomness import order_by_length, sample_order
from onefold.core.shard import Shares, cut_bounds
from onefold.data_order.loader import Loader
from onefold.data_order.position import SavedPasses
from onefold.errors import SampleError
from tests.conftest import ROOT
from tests.small import make_trainer
from tests.tables import for_each

processes = pytest.mark.processes
with_workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=processes)])


def make_loader(
    dataset: Any, shares: Shares | Callable[[], Shares], own: Sequence[int] = (0,), **choices: Any
) -> Loader:
    """As a trainer of these shares would make it."""
    usual: dict[str, Any] = {
        "batch_size": 6,
        "shuffle": True,
        "workers": 0,
        "drop_last": False,
        "collate": list,
        "seed": 3,
        "shares": shares if callable(shares) else lambda: shares,
        "first_epoch": 0,
        "pin_memory": False,
        "timeout_s": 60.0,
    }
    return Loader(dataset, own=lambda: own, **{**usual, **choices})


class Shaken:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __call__(self, value: float) -> float:
        return value + torch.rand((), generator=self.generator).item()


class Augmented(Dataset[tuple[int, float]]):
    """Draws from every generator that a data set may draw from, and those that it holds."""

    def __init__(self, samples: int = 20) -> None:
        self._samples = samples
        self.rng, self.transforms = np.random.default_rng(4), [Shaken()]

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        noise = torch.rand(()).item() + random.random() + np.random.rand() + np.random.randn()
        return index, self.transforms[0](noise + torch.randn(3).sum().item() + self.rng.random())


class Items(Augmented):
    def __init__(self, item: Callable[[int], Any]) -> None:
        super().__init__()
        self._item = item

    def __getitem__(self, index: int) -> Any:
        return self._item(index)


def broken(index: int, at: int = 13) -> int:
    if index == at:
        raise OSError(f"no such image: {index}.png")
    return index


class CountedStream(IterableDataset[int]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


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
    return [
        ShardedBatch(
            samples=parts[0].samples,
            shares=parts[0].shares,
            shards={shard: p for part in parts for shard, p in part.shards.items()},
        )
        for parts in zip(*passes, strict=True)
    ]


@st.composite
def shares(draw: st.DrawFn) -> Shares:
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    return Shares(tuple(counts))


@given(
    shares=shares(),
    samples=st.integers(1, 70),
    batch_size=st.integers(1, 80),
    drop_last=st.booleans(),
    how=st.sampled_from(["in order", "shuffled", "by length"]),
    seed=st.integers(0, 9),
)
def test_the_devices_together_read_every_sample_once_and_in_order(
    shares: Shares, samples: int, batch_size: int, drop_last: bool, how: str, seed: int
) -> None:
    drop_last = drop_last and batch_size <= samples  # or it is refused
    lengths = [3 * n % 11 for n in range(samples)] if how == "by length" else None
    choices = {"batch_size": batch_size, "drop_last": drop_last, "seed": seed, "lengths": lengths}
    choices["shuffle"] = how != "in order"
    loaders = [
        make_loader(range(samples), shares, [own], **choices) for own in range(shares.devices)
    ]
    whole = samples - samples % batch_size if drop_last else samples
    for epoch in range(2):
        order, at = torch.arange(samples), {"seed": seed, "epoch": epoch}
        if how == "shuffled":
            order = sample_order(samples, **at)
        if lengths is not None:
            order = order_by_length(torch.tensor(lengths), batch_size=batch_size, **at)
        read = [list(loader) for loader in loaders]
        for device, own in enumerate(read):
            assert {n for batch in own for n in batch.shards} <= {*shares.shards_of(device)}
        batches = united(read)
        assert samples_in(batches) == order.tolist()[:whole]
        sizes = [min(batch_size, whole - start) for start in range(0, whole, batch_size)]
        assert [batch.samples for batch in batches] == sizes
        assert {len(loader) for loader in loaders} == {len(batches)}
        for batch in batches:
            sizes = [stop - start for start, stop in cut_bounds(batch.samples, shares.shards)]
            found = [len(batch.shards.get(s, ())) for s in range(shares.shards)]  # type: ignore[arg-type]
            assert found == sizes


@processes
def test_workers_read_the_same_samples_with_the_same_augmentation() -> None:
    def read(workers: int, **choices: Any) -> list[Any]:
        choices = {"workers": workers, "collate": noisy_collate, **choices}
        loader = make_loader(Augmented(), Shares((2, 1)), (0, 1), **choices)
        return [dict(batch.shards) for _ in range(2) for batch in loader]

    assert read(0) == read(2)
    lengths = np.array([3 * n % 11 for n in range(20)])
    assert read(0, lengths=lengths.tolist()) == read(2, lengths=lengths)


class Owned:
    """What no other process may end, such as an event of a GPU, referred to in a circle."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.owner, self.circle = mark, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            self.mark.write_text("ended by another process")


@processes
@processes
def test_workers_may_be_started_in_the_middle_of_a_pass() -> None:
    """And ended with the next one; samples and augmentation stay the same."""

    def read(*changes: int) -> list[list[Any]]:
        loader = make_loader(Augmented(), Shares((2,)), batch_size=2, collate=noisy_collate)
        passes = []
        for change in changes:
            batches = []
            for number, batch in enumerate(loader):
                batches.append(samples_in([batch]))
                if number == 1:
                    loader.workers = change
                    assert loader.workers == change
                    before = len(active_children())
                if number == 2:
                    # Workers that have read ahead stay until the end of their pass.
                    assert len(active_children()) == max(before, change)
            passes.append(batches)
        return passes

    assert read(2, 0, 0) == read(0, 0, 0)


def test_a_stream_is_read_by_one_process_at_most() -> None:
    loader = make_loader(CountedStream(), Shares((1,)), shuffle=False)
    with pytest.raises(ValueError, match="workers must be 0 or 1, but got 2"):
        loader.workers = 2
    loader.workers = 0
    with pytest.raises(ValueError, match="workers must be at least 0, but got -1"):
        loader.workers = -1


def test_workers_do_not_collect_garbage_that_they_inherit(tmp_path: Path) -> None:
    def collecting(index: int) -> tuple[int, bool]:
        return (gc.collect(), index)[1], gc.isenabled()

    mark = tmp_path / "mark"
    owned = Owned(mark)
    gc.collect()  # an old object by now, which a young generation's collection leaves alone
    del owned
    found = samples_in(list(make_loader(Items(collecting), Shares((1,)), workers=2)))
    assert all(enabled for _, enabled in found)
    assert not mark.exists()
    assert gc.isenabled()


def test_augmentation_depends_on_seed_pass_and_sample_alone() -> None:
    def read(shares: Shares, batch_size: int, **choices: Any) -> list[tuple[int, float]]:
        own = range(shares.devices)
        loader = make_loader(Augmented(), shares, own, batch_size=batch_size, **choices)
        return [sample for _ in range(2) for sample in samples_in(list(loader))]

    expected = read(Shares((1,)), 20)
    assert len({noise for _, noise in expected}) == 40
    assert read(Shares((2, 3)), 7) == expected
    assert read(Shares((0, 4)), 1) == expected
    assert not set(read(Shares((1,)), 20, seed=4)) & set(expected)


@with_workers
def test_the_item_that_cannot_be_read_is_named(workers: int) -> None:
    loader = make_loader(Items(broken), Shares((2,)), shuffle=False, workers=workers, first_epoch=2)
    batches = iter(loader)
    assert [next(batches).samples for _ in range(2)] == [6, 6]
    words = "^reading sample 13 in epoch 2 failed: OSError: no such image: 13.png"
    with pytest.raises(SampleError, match=words) as caught:
        next(batches)
    assert "in broken" in "".join(caught.value.__notes__)


@with_workers
def test_a_pass_may_be_left_in_the_middle(workers: int) -> None:
    choices: dict[str, Any] = {"workers": workers, "batch_size": 3, "collate": noisy_collate}
    left, whole = (make_loader(Augmented(), Shares((2,)), **choices) for _ in range(2))
    for number, _ in enumerate(left):
        if number == 1:
            break
    list(whole)
    second, expected = ([dict(b.shards) for b in loader] for loader in (left, whole))
    assert second == expected


def read_with_shares(
    shares: Sequence[tuple[int, ...]], workers: int, own: Sequence[int] = (0, 1)
) -> list[ShardedBatch]:
    """Three passes of 5 batches; before batch n, the shares with number n are set."""
    now = [Shares(shares[0])]
    loader = make_loader(Augmented(), lambda: now[0], own, batch_size=4, workers=workers)
    read: list[ShardedBatch] = []
    for _ in range(3):
        for batch in loader:
            read.append(batch)
            now[0] = Shares(shares[len(read) % len(shares)])
    return read


@with_workers
@for_each(
    "shares",
    [
        [(1, 3), (2, 2), (0, 4)],
        [*[(2, 2)] * 5, (3, 1)],
        [(4, 0), (4, 0), (0, 4), (0, 4), (0, 4), (4, 0), (3, 1)],
    ],
)
def test_shares_hold_from_the_next_batch(workers: int, shares: list[tuple[int, ...]]) -> None:
    """On devices with any number of workers, which have read ahead."""
    read = united([read_with_shares(shares, n, [own]) for own, n in enumerate((0, workers))])
    plain = read_with_shares([(2, 2)], workers=0)
    assert [b.shares.counts for b in read] == [shares[n % len(shares)] for n in range(15)]
    assert [dict(b.shards) for b in read] == [dict(b.shards) for b in plain]
    alone = read_with_shares(shares, workers)
    assert [dict(b.shards) for b in alone] == [dict(b.shards) for b in plain]
    assert [(b.epoch, b.stop) for b in alone] == [(n, 4 * k) for n in range(3) for k in range(1, 6)]


@with_workers
def test_a_sample_that_another_device_now_reads_is_no_error_here(workers: int) -> None:
    """Although this one may have tried to read it already."""
    now = [Shares((1, 0))]
    choices: dict[str, Any] = {"shuffle": False, "batch_size": 5, "workers": workers}
    loader = make_loader(Items(broken), lambda: now[0], **choices)
    read = []
    for batch in loader:
        read.append(len(batch.shards))
        now[0] = Shares((1, 0) if len(read) == 3 else (0, 1))
    assert read == [1, 0, 0, 1]


@for_each(
    ("data", "choices", "words"),
    [
        (iter(range(3)), {}, "a length and an item for .* range_iterator"),
        (5, {}, "a length and an item for .* int"),
        (TensorDataset(torch.zeros(0, 3)), {}, "the data set is empty: expected at least one sam"),
        (CountedStream(), {"shuffle": True}, "CountedStream is a stream.* not support shuffle. Sh"),
        (CountedStream(), {"sampler": [1]}, "does not support sampler. Shuf"),
        (CountedStream(), {"lengths": [1], "shuffle": True}, "not support shuffle and lengths. Sh"),
        (CountedStream(), {"workers": 2}, "workers must be 0 or 1, but got 2"),
        (range(9), {"batch_size": 0}, "batch_size must be at least 1, but got 0"),
        (range(9), {"batch_size": 2.0}, "batch_size must be an integer, but got 2.0"),
        (range(9), {"workers": -1}, "workers must be at least 0, but got -1"),
        (range(9), {"collate": 3}, "expected collate to be a function"),
        (range(9), {"collate": lambda s: None}, "collate returned None for the samples of shard 0"),
        (range(9), {"lengths": [1] * 8, "shuffle": True}, "each of the 9 samples, but got 8 len"),
        (range(9), {"lengths": [1] * 9}, "lengths requires shuffle=True"),
        (range(3), {"drop_last": True}, "a pass has 3 samples, but a .* has batch_size=4"),
        (range(9), {"drop_last": True, "sampler": range(3)}, "a pass has 3 samples, bu"),
        (range(9), {"sampler": []}, "the sampler list has length 0, so"),
        (range(9), {"batch_size": None, "batch_sampler": []}, "batch_sampler list has length 0, "),
    ],
)
def test_what_cannot_be_read_is_refused(data: Any, choices: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        list(make_trainer().loader(data, **{"batch_size": 4, **choices}))


@for_each("data", [range(9), CountedStream()])
def test_a_number_may_stand_for_no(data: Any, tmp_path: Path) -> None:
    """As scripts read it from their arguments: also a checkpoint knows what it means."""
    trainer = make_trainer()
    loader = trainer.loader(data, batch_size=4, shuffle=0, drop_last=1)  # type: ignore[arg-type]
    trainer.save(tmp_path)
    size = loader.track.size
    assert (size.shuffle, size.drop_last) == (False, True)
    assert type(size.shuffle) is type(size.drop_last) is bool


def test_two_loaders_of_one_data_set_have_two_orders_and_two_augmentations() -> None:
    """Or a script that mixes the batches of two loaders would mix each sample with itself."""
    trainer = make_trainer()
    choices: dict[str, Any] = {"batch_size": 20, "collate": noisy_collate, "shuffle": True}
    read = [samples_in(list(trainer.loader(Augmented(), **choices))) for _ in range(2)]
    rows = [[sample for sample in each if isinstance(sample, tuple)] for each in read]
    assert [index for index, _ in rows[0]] != [index for index, _ in rows[1]]
    noises = [noise for each in rows for _, noise in each]
    noises += [noise for each in read for noise in each if isinstance(noise, float)]  # of collate
    assert len(set(noises)) == len(noises) == 2 * 20 + 2 * 4 * 3


@processes
def test_a_worker_that_dies_is_noticed() -> None:
    data = Items(lambda index: os._exit(3) if index == 7 else index)
    loader = make_loader(data, Shares((1,)), shuffle=False, workers=1)
    with pytest.raises(RuntimeError, match=r"worker .*exited unexpectedly"):
        list(loader)


@with_workers
def test_a_data_set_that_is_changed_between_passes_is_read_as_it_is_then(workers: int) -> None:
    data = Augmented()
    loader = make_loader(data, Shares((2,)), workers=workers)
    stages = []
    for stage in range(3):
        data.__class__ = type("Staged", (Augmented,), {"__getitem__": lambda self, i, s=stage: s})
        stages.append(set(samples_in(list(loader))))
    assert stages == [{0}, {1}, {2}]


@processes
@for_each("how", ["to its end", "broken off", "failed", "empty"])
def test_workers_end_with_their_pass(how: str) -> None:
    data = Items(broken) if how == "failed" else Augmented()
    loader = make_loader(data, Shares((1,)), shuffle=False, workers=2)
    if how == "empty":
        loader.track.go_to(SavedPasses(0, 1, []))
    with pytest.raises(SampleError) if how == "failed" else nullcontext() as failure:
        for number, _ in enumerate(loader):
            assert len(active_children()) == 2
            if how == "broken off" and number == 1:
                break
    assert active_children() == [], failure  # which holds all of its traceback


@processes
def test_ctrl_c_ends_a_worker_and_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return begin(self)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    choices: Any = {"collate": lambda samples: str(signal.getsignal(signal.SIGINT))}
    loader = make_loader(range(6), Shares((1,)), workers=1, **choices)
    (batch,) = loader
    assert batch.shards[0] == str(signal.default_int_handler)
    begin = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    signal.signal(signal.SIGINT, before)
    assert active_children() == []


@with_workers
def test_reading_and_collating_have_one_thread(workers: int) -> None:
    """As the bits of every large sum depend on it; the threads come back after a failure too."""
    torch.set_num_threads(2)

    def collate(samples: list[Any]) -> list[Any]:
        return [*samples, torch.get_num_threads()]

    data = Items(lambda index: torch.get_num_threads())
    for batch in make_loader(data, Shares((2,)), workers=workers, collate=collate):
        assert {n for payload in batch.shards.values() for n in payload} == {1}  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 2
    failing: dict[str, Any] = {"collate": lambda samples: 1 / 0}
    for choices in ({}, failing):
        with pytest.raises((SampleError, ZeroDivisionError)):
            list(make_loader(Items(broken), Shares((1,)), workers=workers, **choices))
        assert torch.get_num_threads() == 2


def digests(data: Any, **choices: Any) -> list[int]:
    """Of each batch of the second pass; those of the first also have the bytes of a shard."""
    loader = make_loader(data, Shares((1, 3)), **choices)
    _, second = ([batch.data_digest for batch in loader] for _ in range(2))
    return second


@with_workers
def test_every_batch_of_the_first_pass_has_the_digest_of_a_shard_as_well(workers: int) -> None:
    def first(**choices: Any) -> set[int]:
        loader = make_loader(Augmented(), Shares((1, 3)), workers=workers, **choices)
        return {batch.data_digest for batch in loader}

    assert len(first(own=[0]) | first(own=[1]) | first(own=[0, 1])) == 1
    # As where each process collates in a way of its own.
    assert first(collate=lambda samples: samples[0]) != first(collate=lambda samples: samples[-1])


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
    drawn = [TensorDataset(torch.randn(9, 2)) for _ in range(2)]  # as each process for itself
    for other in (Augmented(21), list(range(20)), *drawn):
        assert set(digests(other)) != found
    assert set(digests(drawn[0])) != set(digests(drawn[1]))
    assert set(digests(drawn[0])) == set(digests(TensorDataset(drawn[0].tensors[0].clone())))


@processes
def test_a_digest_is_read_where_the_samples_are_read() -> None:
    """What opens its file when first used must not do so before the workers are there."""
    read: list[int] = []
    data = Items(lambda index: read.append(index) or index)  # type: ignore[func-returns-value]
    assert len(set(digests(data, workers=1))) == 1
    assert read == []


@with_workers
@for_each("shards", [(1, 0), (0, 1)])
def test_a_sample_unreadable_for_a_digest_is_named(workers: int, shards: tuple[int, ...]) -> None:
    """Though the pass would not come to it."""
    choices: dict[str, Any] = {"shuffle": False, "drop_last": True, "digest": True}
    loader = make_loader(Items(partial(broken, at=19)), Shares(shards), workers=workers, **choices)
    with pytest.raises(SampleError, match="reading sample 19 in epoch 0 failed"):
        list(loader)


@processes
@pytest.mark.parametrize(
    "method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.full)]
)
def test_workers_are_made_in_any_way_that_python_has(method: str) -> None:
    """In a script of its own: that is settled once in a program."""
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "reads.py"), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == "True\n", done.stderr


def test_workers_need_a_temporary_folder_of_a_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(75, "x"))
    make_loader(range(6), Shares((1,)), workers=1)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/".ljust(76, "x"))
    with pytest.raises(
        ValueError, match=r"at most 75 bytes, but has 76: /tmp/x+\. Set TMPDIR to a"
    ):
        make_loader(range(6), Shares((1,)), workers=1)


@processes
def test_workers_that_give_nothing_are_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    unsendable = Items(lambda index: lambda: index)
    loader = make_loader(unsendable, Shares((1,)), workers=1, timeout_s=2.0)
    with pytest.raises(
        SampleError, match=r"workers sent no batch within 2 s.* reported the reason above"
    ):
        next(iter(loader))
    assert "pickle" in capfd.readouterr().err


@processes
def test_workers_outlive_the_thread_that_began_the_pass_and_a_forked_child() -> None:
    passing = iter(make_loader(range(40), Shares((2,)), batch_size=2, workers=1))
    thread = threading.Thread(target=lambda: next(passing))
    thread.start()
    thread.join()
    if (child := os.fork()) == 0:
        passing.close()  # as where the child ends in the middle of the pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(passing)) == 19


def test_a_pass_without_a_batch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    choices: dict[str, Any] = {"drop_last": True, "shuffle": False}
    loader = make_loader(CountedStream(), Shares((2,)), **choices)
    assert list(loader) == []
    list(loader)
    list(make_loader(CountedStream(), Shares((1, 1)), own=(1,), **choices))
    (warning,) = caplog.messages
    assert "pass 0 of a loader of" in warning
    assert "had no batch of 6 samples, with drop_last" in warning


def test_generators_that_a_data_set_holds_stay_where_they_were() -> None:
    """The script may draw from them as well."""
    data = Augmented()
    before = data.rng.bit_generator.state, data.transforms[0].generator.get_state().tolist()
    list(make_loader(data, Shares((2,))))
    found = data.rng.bit_generator.state, data.transforms[0].generator.get_state().tolist()
    assert found == before
