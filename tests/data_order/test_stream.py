"""A stream is read in one order, and each device keeps the samples of its shards."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from onefold.core.batch import ShardedBatch
from onefold.core.shard import Shares
from onefold.data_order.loader import Loader
from onefold.data_order.position import Position, SavedPass, SavedPasses, StreamState
from onefold.errors import CheckpointError, SampleError
from tests.bits.loaders import KnowingFlow
from tests.data_order.test_loader import (
    Augmented,
    make_loader,
    noisy_collate,
    processes,
    samples_in,
)
from tests.tables import for_each

with_worker = pytest.mark.parametrize("workers", [0, pytest.param(1, marks=processes)])


class Noisy(IterableDataset[tuple[int, float]]):
    """Draws from every generator, before the first sample and with each."""

    def __init__(self, samples: int = 20) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[tuple[int, float]]:
        start = torch.rand(()).item() + random.random() + np.random.randn()
        for index in range(self._samples):
            noise = torch.randn(()).item() + random.gauss(0, 1) + np.random.randn()
            yield index, start + noise


class Plain:
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._samples))


def stream_loader(stream: Any, shares: Any, own: Any = (0,), **choices: Any) -> Loader:
    return make_loader(stream, shares, own, **{"shuffle": False, **choices})


@with_worker
def test_what_a_stream_draws_depends_on_seed_and_pass_alone(workers: int) -> None:
    def read(shares: Shares, workers: int, **choices: Any) -> list[Any]:
        loader = stream_loader(Noisy(), shares, range(shares.devices), workers=workers, **choices)
        found = []
        for batch in (batch for _ in range(2) for batch in loader):
            found += samples_in([batch])
            torch.rand(3), random.random(), np.random.rand()  # the script's own
        return found

    first = read(Shares((1,)), 0)
    assert read(Shares((2, 1)), workers) == first == read(Shares((3,)), workers, batch_size=4)
    assert first[:20] != first[20:]
    assert read(Shares((1,)), workers, seed=9) != first
    digests = [
        [batch.data_digest for batch in stream_loader(data, Shares((1, 3)), [own])]
        for data, own in ((Noisy(), 0), (Noisy(), 1), (Noisy(19), 1))
    ]
    assert digests[0] == digests[1] != digests[2]
    assert len(set(digests[0])) == 4


@with_worker
@for_each("stream", [True, False])
def test_the_callers_generators_are_left_alone(workers: int, stream: bool) -> None:
    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    data = Noisy() if stream else Augmented()
    for _ in stream_loader(data, Shares((2,)), workers=workers, collate=noisy_collate):
        assert states() == before
    assert states() == before


def test_a_stream_may_know_its_length_and_leave_out_a_short_batch() -> None:
    class Known(Plain):
        def __len__(self) -> int:
            return 20

    assert len(stream_loader(Known(20), Shares((1,)))) == 4
    for stream in (Known(20), Plain(20)):
        loader = stream_loader(stream, Shares((1,)), drop_last=True)
        assert samples_in(list(loader)) == list(range(18))
    assert len(stream_loader(Known(20), Shares((1,)), drop_last=True)) == 3
    with pytest.raises(TypeError, match="has no len"):
        len(loader)


@with_worker
def test_shares_hold_from_the_next_batch(workers: int) -> None:
    counts = [(1, 3), (2, 2), (0, 4), (4, 0), (4, 0), (1, 3), (2, 2), (3, 1)]
    now = [Shares(counts[0])]
    choices: Any = {"batch_size": 4, "collate": noisy_collate}
    loader = stream_loader(Noisy(40), lambda: now[0], [1], workers=workers, **choices)
    read: list[ShardedBatch] = []
    for _ in range(2):
        for batch in loader:
            read.append(batch)
            now[0] = Shares(counts[len(read) % len(counts)])
    whole_loader = stream_loader(Noisy(40), Shares((4,)), **choices)
    plain = [batch for _ in range(2) for batch in whole_loader]
    assert [b.shares.counts for b in read] == [counts[n % len(counts)] for n in range(20)]
    for batch, whole in zip(read, plain, strict=True):
        shards = batch.shares.shards_of(1)
        assert dict(batch.shards) == {shard: whole.shards[shard] for shard in shards}


def used_until(loader: Loader, stop: int) -> SavedPasses:
    """What a checkpoint says after the steps up to a place; one batch more was handed out."""
    loader.track.position = Position()
    for batch in loader:
        assert batch.data_pass is not None
        if batch.stop > stop:
            break
        batch.data_pass.used = batch.stop
    text = msgspec.json.encode(loader.track.saved(epoch_done=False))
    return msgspec.json.decode(text, type=SavedPasses)


@with_worker
@for_each("batch_size", [4, 5])
def test_a_stream_goes_on_with_the_first_unused_sample(workers: int, batch_size: int) -> None:
    whole = samples_in(list(stream_loader(Noisy(), Shares((2,)))))
    saved = used_until(stream_loader(Noisy(), Shares((2,)), workers=workers, batch_size=4), 8)
    assert saved.begun == [SavedPass(0, 8)]
    again = stream_loader(Noisy(), Shares((1, 1)), (0, 1), workers=workers, batch_size=batch_size)
    again.track.go_to(saved)
    assert samples_in(list(again)) == whole[8:]
    assert len(samples_in(list(again))) == 20


@with_worker
def test_a_stream_with_a_state_goes_on_by_itself(workers: int) -> None:
    def same(one: Any, other: Any) -> bool:
        pairs = zip(sum(one, ()), sum(other, ()), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    whole = samples_in(list(stream_loader(KnowingFlow(), Shares((2,)), workers=workers)))
    saved = used_until(stream_loader(KnowingFlow(), Shares((2,)), workers=workers), 12)
    assert saved.begun[0].state is not None
    flow = KnowingFlow()
    again = stream_loader(flow, Shares((2,)), workers=workers)
    again.track.go_to(saved)
    # Saved once more before a batch is used, it is the same.
    assert used_until(again, 0) == saved
    again.track.go_to(saved)
    assert same(samples_in(list(again)), whole[12:])
    if not workers:
        assert min(flow.read) >= 12


class Resettable(IterableDataset[int]):
    """Begins anew at its end, or where its state was loaded there, as torchdata's loaders do."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.at %= 20
        while self.at < 20:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


@with_worker
@for_each("batch_size", [4, 6])
def test_a_run_saved_after_a_streams_last_batch_does_not_repeat_the_pass(
    workers: int, batch_size: int
) -> None:
    """Also if a short batch has brought the stream back to its beginning."""

    def begun() -> Loader:
        return stream_loader(Resettable(), Shares((2,)), workers=workers, batch_size=batch_size)

    first = begun()
    first.track.position = Position()
    for batch in first:
        assert batch.data_pass is not None
        batch.data_pass.used = batch.stop
        again = begun()
        again.track.go_to(first.track.saved(epoch_done=False))
        assert samples_in(list(again)) == [*range(batch.stop + 1, 21)]
        assert samples_in(list(again)) == [*range(1, 21)]


class Buffered(Resettable):
    """Shuffles in a buffer that its state lacks."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 5:
                yield buffer.pop(int(torch.randint(5, ())))
        yield from buffer


class InWorkers(Plain):
    """Has another order in a worker, as a Hugging Face dataset that is shuffled."""

    def __iter__(self) -> Iterator[int]:
        yield from range(20) if get_worker_info() is None else reversed(range(20))


@with_worker
def test_a_stream_does_not_know_that_a_worker_reads_it(workers: int) -> None:
    loader = stream_loader(InWorkers(20), Shares((1,)), workers=workers)
    assert samples_in(list(loader)) == [*range(20)]


@with_worker
def test_a_state_that_loses_samples_is_not_used(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def begun() -> Loader:
        loader = stream_loader(Buffered(), Shares((1,)), workers=workers, batch_size=4)
        loader.source.starts_twice = True  # type: ignore[union-attr]
        return loader

    whole = samples_in(list(begun()))
    saved = used_until(begun(), 8)
    assert saved.begun[0].state is None
    if not workers:
        assert "after load_state_dict(state_dict()), the stream Buffered yields" in caplog.text
    again = begun()
    again.track.go_to(saved)
    assert samples_in(list(again)) == whole[8:]
    # Nor is it used in later passes, which are not tried.
    for loader in (begun(), again):
        loader.track.position = Position()
        for batch in (batch for _ in range(2) for batch in loader):
            assert batch.data_pass is not None
            loader.track.position.note_step(batch)
            state = batch.data_pass.states.get(batch.stop)
            assert isinstance(state, StreamState)
            assert state.own is None


@with_worker
@for_each(
    ("stream", "batch_size"), itertools.product([Noisy, Resettable, lambda: Plain(20)], [4, 6])
)
def test_a_loop_over_a_stream_that_was_left_continues(
    workers: int, stream: Callable[[], Any], batch_size: int
) -> None:
    def run(*stops: int) -> list[Any]:
        loader = stream_loader(stream(), Shares((2,)), workers=workers, batch_size=batch_size)
        position, used = Position(), list[Any]()
        position.add(loader.track)
        for stop in (*stops, -1):
            for batch in (batch for _ in position.epochs(2) for batch in loader):
                position.note_step(batch)
                used += samples_in([batch])
                if position.step == stop:
                    break
        return used

    whole = run()
    assert len(whole) == 40
    assert run(2) == run(4, 5) == whole


def test_a_state_that_no_checkpoint_can_hold_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Noisy):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    saved = used_until(stream_loader(Odd(), Shares((2,))), 12)
    assert saved.begun[0].state is None
    assert caplog.text.count("which cannot be saved in a checkpoint") == 1
    again = stream_loader(Odd(), Shares((2,)))
    again.track.go_to(saved)
    assert samples_in(list(again)) == samples_in(list(stream_loader(Odd(), Shares((2,)))))[12:]


@with_worker
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    class Broken(Noisy):
        def __iter__(self) -> Iterator[Any]:
            yield from range(8)
            raise OSError("no such shard: 3.tar")

    batches = iter(stream_loader(Broken(), Shares((1,)), workers=workers))
    next(batches)
    with pytest.raises(SampleError, match=r"reading sample 8 in epoch 0 failed: OSError: no such"):
        next(batches)


@with_worker
def test_a_sample_that_cannot_be_read_ahead_is_named_in_its_batch(workers: int) -> None:
    class Broken(Resettable):
        def __iter__(self) -> Iterator[int]:
            for sample in super().__iter__():
                if sample == 9:
                    raise OSError("no such shard: 3.tar")
                yield sample

    loader = stream_loader(Broken(), Shares((1,)), workers=workers, batch_size=4)
    loader.track.position = Position()
    batches = iter(loader)
    assert samples_in([next(batches), next(batches)]) == [*range(1, 9)]
    with pytest.raises(SampleError, match=r"reading sample 8 in epoch 0 failed: OSError: no such"):
        next(batches)


class Holding(IterableDataset[float]):
    def __init__(self) -> None:
        self.one, self.other = torch.Generator(), torch.Generator()
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def __iter__(self) -> Iterator[float]:
        for _ in range(20):
            yield from (torch.rand((), generator=g).item() for g in (self.one, self.other))
            yield from (self.python.random(), self.numpy.normal())


@with_worker
def test_a_stream_with_generators_of_its_own_goes_on(workers: int) -> None:
    def begun() -> Loader:
        return stream_loader(Holding(), Shares((2,)), workers=workers, batch_size=4)

    first, second = (samples_in(list(loader)) for loader in [begun()] * 2)
    assert len({*first, *second}) == 160  # each has a seed of its own in a pass
    again = begun()
    again.track.go_to(used_until(begun(), 8))
    assert samples_in(list(again)) == first[8:]
    assert samples_in(list(again)) == second


class Once:
    """Its own iterator, which does not begin anew unless it is to."""

    def __init__(self, anew: bool = False) -> None:
        self._left, self._anew = iter(range(8)), anew

    def __iter__(self) -> Once:
        if self._anew:
            self._left = iter(range(8))
        return self

    def __next__(self) -> int:
        return next(self._left)


@with_worker
def test_a_stream_that_is_used_up_is_an_error(workers: int) -> None:
    loader = stream_loader(Once(), Shares((1,)), workers=workers, batch_size=4)
    assert len(list(loader)) == 2
    if workers:  # which reads a copy of it, made at the beginning of each pass
        assert len(list(loader)) == 2
        return
    with pytest.raises(SampleError, match="the stream Once yielded no samples in epoch 1, but did"):
        list(loader)


def test_an_iterator_that_begins_anew_is_a_stream() -> None:
    """Also where a second iter() in the middle of a pass would begin anew."""
    loader = stream_loader(Once(anew=True), Shares((1,)), batch_size=3)
    assert [samples_in(list(loader)) for _ in range(3)] == [[*range(8)]] * 3


def test_a_pass_of_another_length_on_other_devices_is_refused() -> None:
    """Of each pass that ends; the stream yields another part on each number of devices."""
    loader = stream_loader(Plain(20), Shares((2,)))
    list(loader)
    saved = loader.track.saved(epoch_done=True)
    assert saved.ended == (20, 1)
    same = stream_loader(Plain(12), Shares((2,)))
    same.track.go_to(saved)
    assert len(samples_in(list(same))) == 12  # on as many devices it may have changed
    other = stream_loader(Plain(12), Shares((1, 1)), (0, 1))
    other.track.go_to(saved, ["dataset"])
    assert len(samples_in(list(other))) == 12
    words = "passes of the stream Plain in which each device read .* 20, but this run has 12"
    for compare in (other.track.go_to, other.track.expect):
        compare(saved)
        with pytest.raises(CheckpointError, match=words):
            list(other)


PASSES = 0
HISTORY: list[int] = []
ENDLESS = iter(range(1000))


class Shuffled(IterableDataset[int]):
    """Its order comes from a number that it determines at the start of a pass."""

    passes = 0

    def __init__(self, number: Callable[[Shuffled], object]) -> None:
        self.number, self.memory = number, [0]

    def __iter__(self) -> Iterator[int]:
        order = [*range(40)]
        random.Random(self.number(self)).shuffle(order)  # type: ignore[arg-type]
        return iter(order)


def by_clock(stream: Shuffled) -> object:
    return time.time_ns()


def by_attribute(stream: Shuffled) -> object:
    stream.passes += 1
    stream.memory.append(0)
    return stream.passes + len(stream.memory)


def by_class(stream: Shuffled) -> object:
    Shuffled.passes += 1
    return Shuffled.passes


def by_global(stream: Shuffled) -> object:
    global PASSES
    PASSES += 1
    return PASSES


def by_history(stream: Shuffled) -> object:
    HISTORY.append(0)
    return len(HISTORY)


def by_iterator(stream: Shuffled) -> object:
    return next(ENDLESS)


def by_draw(stream: Shuffled) -> object:
    return random.random()


@with_worker
@for_each(
    ("number", "differs"),
    [
        (by_clock, True),
        (lambda stream: random.Random().random(), True),
        (by_attribute, False),
        (by_draw, False),
        (by_class, True),
        (by_global, True),
        (by_history, True),
        (by_iterator, False),
    ],
)
def test_a_first_pass_is_started_twice_without_moving_the_stream(
    workers: int, number: Any, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if workers and number not in (by_attribute, by_global):
        return  # each pass has a worker of its own, which takes time to start

    def read(*, twice: bool) -> list[int]:
        global PASSES, ENDLESS
        PASSES, Shuffled.passes, ENDLESS = 0, 0, iter(range(1000))
        HISTORY.clear()
        loader = stream_loader(Shuffled(number), Shares((2,)), workers=workers)
        loader.source.starts_twice = twice  # type: ignore[union-attr]
        return [each for _ in range(3) for each in samples_in(list(loader))]

    caplog.clear()
    found = read(twice=True)
    if not workers:  # whose messages come from another process
        assert len(caplog.messages) == differs
        assert all("yields other samples when pass 0" in each for each in caplog.messages)
    if number is not by_clock and "lambda" not in number.__qualname__:
        assert found == read(twice=False)


def slowly(stream: Shuffled) -> object:
    time.sleep(1.1)
    return by_clock(stream)


@for_each(
    ("held", "number"),
    [
        (threading.Lock(), by_clock),
        (multiprocessing.Array("i", 2), by_clock),
        ((index for index in range(3)), by_clock),
        (torch.zeros(1 << 22), by_clock),
        ("x" * (1 << 24), by_clock),
        ([None] * 3_000_000, by_clock),
        (None, slowly),
    ],
)
def test_a_stream_that_cannot_be_copied_or_takes_long_is_started_once(
    held: Any, number: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Shuffled(number)
    stream.memory = held
    loader = stream_loader(stream, Shares((2,)))
    loader.source.starts_twice = True  # type: ignore[union-attr]
    assert len(samples_in(list(loader))) == 40
    assert not caplog.messages
