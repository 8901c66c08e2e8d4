"""Where a run goes on, for every way in which a script may go through its data."""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice, repeat
from typing import Any

import pytest

from onefold.core.batch import ShardedBatch
from onefold.core.randomness import sample_order
from onefold.core.shard import Shares
from onefold.data_order.loader import Loader
from onefold.data_order.order import WHOLE
from onefold.data_order.position import Position
from onefold.errors import CheckpointError
from tests.data_order.test_loader import make_loader
from tests.tables import for_each


class Script:
    """A trainer without a model: a position, its loaders, and what was used in which step."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.position = Position()
        if saved is not None:
            self.position.check_fits(saved, ())
            self.position.go_to(saved, ())
        self.used: list[tuple[int, int, tuple[int, ...]]] = []

    def loader(self, samples: int = 10, batch_size: int = 3, **choices: Any) -> Loader:
        choices = {"batch_size": batch_size, "first_epoch": self.position.epoch, **choices}
        loader = make_loader(range(samples), Shares((1,)), **choices)
        self.position.add(loader.track)
        return loader

    def step(self, batch: ShardedBatch) -> None:
        self.position.check(batch)
        self.position.note_step(batch)
        self.used.append((self.position.step, batch.epoch, tuple(batch.shards[0])))  # type: ignore[arg-type]


Body = Callable[[Script], Iterator[None]]


def through(script: Script, loader: Loader) -> Iterator[None]:
    """A pass; the script may save after each step."""
    for batch in loader:
        script.step(batch)
        yield


def simple(script: Script, samples: int = 10, **choices: Any) -> Iterator[None]:
    train = script.loader(samples, **choices)
    for _ in script.position.epochs(3):
        yield from through(script, train)
        yield


def two_in_turn(script: Script) -> Iterator[None]:
    first, second = script.loader(), script.loader(samples=7, batch_size=2)
    for _ in script.position.epochs(3):
        yield from through(script, first)
        yield from through(script, second)
        yield


def with_others_that_are_only_read(script: Script) -> Iterator[None]:
    """What is only read in an epoch that goes on is read again, as it was."""
    for _ in script.loader(samples=5):
        pass  # read once, and gone
    train, test = script.loader(), script.loader(samples=4)
    for epoch in script.position.epochs(3):
        seen = [sample for batch in test for sample in batch.shards[0]]  # type: ignore[attr-defined]
        assert seen == sample_order(4, seed=3, epoch=epoch, loader=2).tolist()
        yield from through(script, train)
        yield


def cycling(script: Script) -> Iterator[None]:
    """Small batches beside the large ones, from passes that have nothing to do with epochs."""
    train, other = script.loader(batch_size=4), script.loader(samples=5, batch_size=2)
    more = chain.from_iterable(repeat(other))
    for _ in script.position.epochs(3):
        for batch in train:
            script.step(next(more))
            script.step(batch)
            yield
        yield


def reading_ahead(script: Script) -> Iterator[None]:
    train = script.loader()
    for _ in script.position.epochs(3):
        batches = iter(train)
        waiting = [*islice(batches, 2)]
        while waiting:
            script.step(waiting.pop(0))
            waiting += islice(batches, 1)
            yield
        del batches
        yield


def warming_up(script: Script) -> Iterator[None]:
    """Steps before the first epoch, from a loader that is gone afterwards."""
    yield from through(script, script.loader(samples=7))
    yield from simple(script)


def numbered(script: Script) -> Iterator[None]:
    """Four loaders of one data set, of which every one must find its own order again."""
    first, second = script.loader(), script.loader()
    for _ in script.position.epochs(3):
        third, fourth = script.loader(), script.loader()
        for batches in zip(first, second, third, fourth, strict=True):
            assert len({tuple(batch.shards[0]) for batch in batches}) > 1  # type: ignore[arg-type]
            assert [batch.loader for batch in batches] == [0, 1, 2, 3]
            for batch in batches:
                script.step(batch)
            yield
        yield


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
by_length = functools.partial(simple, lengths=LENGTHS)
SCRIPTS: list[Body] = [
    *(simple, by_length, functools.partial(simple, drop_last=True), two_in_turn, numbered),
    *(with_others_that_are_only_read, cycling, warming_up),
]


def saves_of(body: Body) -> tuple[Script, list[dict[str, Any]]]:
    """A whole run, and what was saved at each point where the script may save."""
    script = Script()
    return script, [script.position.to_json() for _ in body(script)]


def check_goes_on(saved: dict[str, Any], whole: Script, body: Body = simple) -> None:
    again = Script(saved)
    for _ in body(again):
        pass
    assert again.used == whole.used[saved["step"] :], saved


@for_each("body", SCRIPTS)
def test_a_run_goes_on_with_the_samples_that_were_to_come(body: Body) -> None:
    """Wherever it was stopped, and if it is stopped again and again."""
    whole, saves = saves_of(body)
    assert len(saves) > 8
    for each in saves:
        check_goes_on(each, whole, body)
    saved: dict[str, Any] | None = None
    used: list[object] = []
    for stop in range(2, whole.position.step + 3, 2):
        script = Script(saved)
        made = (script.position.to_json() for _ in body(script))
        saved = next((save for save in made if save["step"] >= stop), saved)
        used += script.used
    assert used == whole.used


def used_of(saved: dict[str, Any]) -> int:
    """Samples of the pass that the first loader is in."""
    passes = saved["position"][0]["passes"]["begun"]
    return int(passes[-1][1]) if passes else 0


def test_what_was_read_ahead_is_read_again() -> None:
    whole, saves = saves_of(reading_ahead)
    within = [save for save in saves if used_of(save) not in (0, 10)]
    assert within
    for saved in within:
        check_goes_on(saved, whole)


def test_an_epoch_with_nothing_left_is_gone_through_once_more() -> None:
    """A save after an epoch's last step: what the script does at its end has not been done."""
    _, saves = saves_of(simple)
    script = Script(next(save for save in saves if used_of(save) == 10))
    train = script.loader()
    seen = [(epoch, sum(1 for _ in train)) for epoch in script.position.epochs(3)]
    assert seen == [(0, 0), (1, 4), (2, 4)]


def test_a_save_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    script = Script()
    train = script.loader()
    for epoch in script.position.epochs(2):
        for batch in train:
            script.step(batch)
        assert script.position.to_json()["epoch"] == epoch + 1


def test_with_batches_of_ones_own_an_epoch_is_done_once_a_step_was() -> None:
    position = Position()
    for epoch in position.epochs(2):
        assert position.to_json()["epoch"] == epoch
        position.note_step(ShardedBatch(3, Shares((1,)), {}))
        assert position.to_json()["epoch"] == epoch + 1


def test_a_run_may_go_back_within_its_epochs() -> None:
    script = Script()
    train = script.loader()
    saved, seen = None, []
    for epoch in script.position.epochs(3):
        seen.append(epoch)
        for batch in train:
            script.step(batch)
            if script.position.step == 6 and saved is None:
                saved = script.position.to_json()
            if script.position.step == 10 and len(seen) == 3:
                assert saved is not None
                script.position.go_to(saved, ())
                with pytest.raises(ValueError, match=r"a pass that started before trainer.load"):
                    script.step(batch)
                break
    assert seen == [0, 1, 2, 1, 2]
    whole, _ = saves_of(simple)
    assert script.used == whole.used[:10] + whole.used[6:]


DIGEST = "lengths of samples, as a digest"


@for_each(
    ("body", "choices", "changed", "what"),
    [
        (simple, {"samples": 11}, "dataset", "a data set of length 10, but this run has 11"),
        (simple, {"batch_size": 4}, "batch_size", "batch_size 3, but this run has 4"),
        (simple, {"drop_last": True}, "batch_size", "drop_last False, but this run has True"),
        (simple, {"shuffle": False}, "dataset", "shuffle True, but this run has False"),
        (simple, {"lengths": LENGTHS}, "dataset", f"{DIGEST} , but this run has"),
        (by_length, {}, "dataset", f"{DIGEST} [0-9a-f]{{16}}, but this run has"),
        (by_length, {"lengths": LENGTHS[::-1]}, "dataset", f"{DIGEST} [0-9a-f]{{16}}, but"),
    ],
)
def test_another_loader_is_refused_by_name(
    body: Body, choices: dict[str, Any], changed: str, what: str
) -> None:
    """Whether it is made before or after the run goes on; and taken if that is asked for."""
    saved, words = saves_of(body)[1][1], f"was saved with {what}.*Then "
    early = Script()
    made = early.loader(**choices)
    with pytest.raises(CheckpointError, match=words):
        early.position.check_fits(saved, ())
    with pytest.raises(CheckpointError, match=words):
        Script(saved).loader(**choices)
    early.position.check_fits(saved, (changed,))
    early.position.go_to(saved, (changed,))
    next_pass = made.track.start_pass()
    assert (next_pass.number, next_pass.used) == (0, 6)


def test_a_loader_with_another_number_is_refused_by_name() -> None:
    saved = saves_of(two_in_turn)[1][1]
    for each in saved["position"]:
        each["loader"] = 0
    script = Script(saved)
    script.loader()
    words = "with the order and random numbers of loader 0, but this run has 1\\. .*allow_changed="
    with pytest.raises(CheckpointError, match=words):
        script.loader(samples=7, batch_size=2)


class Notebook(Script):
    """A script whose loop can run again, with the loaders that were created before it."""

    def __init__(self) -> None:
        super().__init__()
        self._loaders: list[Loader] = []
        self._requested = 0

    def loader(self, samples: int = 10, batch_size: int = 3, **choices: Any) -> Loader:
        if self.position.here is not None:
            return super().loader(samples, batch_size, **choices)
        if self._requested == len(self._loaders):
            self._loaders.append(super().loader(samples, batch_size, **choices))
        self._requested += 1
        return self._loaders[self._requested - 1]

    def run(self, body: Body, until: int = WHOLE) -> None:
        """Run the loop, and leave it after a step."""
        self._requested = 0
        for _ in body(self):
            if self.position.step >= until:
                break


LOOPS = [body for body in SCRIPTS if body not in (cycling, warming_up)]
"""Scripts that use passes in epochs only: other passes begin anew in a loop that runs again."""


@for_each("body", [*LOOPS, reading_ahead])
def test_a_loop_that_was_left_continues_as_after_a_save_and_a_load(body: Body) -> None:
    whole, _ = saves_of(body)
    for stop in range(1, whole.position.step + 1):
        script = Notebook()
        script.run(body, stop)
        done, loaded = len(script.used), Script(script.position.to_json())
        deque(body(loaded), maxlen=0)
        script.run(body)
        assert script.used[done:] == loaded.used, stop


@for_each("body", LOOPS)
def test_a_loop_that_is_left_again_and_again_repeats_and_loses_nothing(body: Body) -> None:
    whole, _ = saves_of(body)
    script = Notebook()
    for stop in (1, 3, 6, 7, whole.position.step):
        script.run(body, stop)
    assert script.used == whole.used


def test_a_loop_that_an_exception_in_the_data_left_continues(caplog: Any) -> None:
    class Samples(list[int]):
        fails = True

        def __getitem__(self, index: Any) -> Any:
            if self.fails and len(script.used) == 5:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    whole, _ = saves_of(simple)
    script, samples = Script(), Samples(range(10))
    loader = make_loader(samples, Shares((1,)), batch_size=3, first_epoch=0)
    script.position.add(loader.track)
    with suppress(KeyboardInterrupt):
        for _ in script.position.epochs(3):
            deque(through(script, loader), maxlen=0)
    assert len(script.used) == 5
    samples.fails = False
    for _ in script.position.epochs(3):
        deque(through(script, loader), maxlen=0)
    assert script.used == whole.used
    (record,) = caplog.records
    assert "continues with the batch after step 5," in record.getMessage()


@for_each(("size", "first"), [(3, 3), (4, 0)])
def test_a_loader_that_the_next_loop_creates_otherwise_begins_a_new_pass(
    size: int, first: int
) -> None:
    script = Script()
    for _ in script.position.epochs(1):
        script.step(next(iter(script.loader())))
        break
    order = sample_order(10, seed=3, epoch=0, loader=0).tolist()
    for _ in script.position.epochs(1):
        deque(through(script, script.loader(batch_size=size)), maxlen=0)
    assert [sample for step in script.used[1:] for sample in step[2]] == order[first:]


def test_a_batch_of_a_loop_that_was_left_is_refused_once_another_runs() -> None:
    script = Script()
    train = script.loader()
    for _ in script.position.epochs(1):
        batches = iter(train)
        script.step(next(batches))
        break
    late, epochs = next(batches), script.position.epochs(1)
    assert next(epochs) == 0
    with pytest.raises(ValueError, match=r"or in a loop over trainer.epochs that was left"):
        script.step(late)


def test_a_loop_without_an_epoch_left_says_so(caplog: Any) -> None:
    """Unless the run was loaded, where this is usual."""
    script = Script()
    assert [*script.position.epochs(0)] == []
    assert [*script.position.epochs(2)] == [0, 1]
    assert not caplog.records
    assert [*script.position.epochs(2)] == []
    assert "trainer.epochs(2) has nothing to do: the run has finished 2." in caplog.text
    caplog.clear()
    loaded = Script(script.position.to_json())
    assert [*loaded.position.epochs(2)] == []
    assert not caplog.records


@for_each("at", range(1, 12))
def test_a_run_that_is_saved_after_an_exception_loses_no_sample(at: int) -> None:
    script = Script()
    with suppress(KeyboardInterrupt):
        for _ in simple(script):
            if script.position.step == at:
                raise KeyboardInterrupt
    check_goes_on(script.position.to_json(), saves_of(simple)[0])


def test_an_iterator_of_an_epoch_before_ends_nothing() -> None:
    """A part of each pass, from iterators that are let go of in the next epoch."""
    script = Script()
    train = script.loader()
    for epoch in script.position.epochs(3):
        assert script.position.to_json()["epoch"] == epoch
        batches = iter(train)
        assert script.position.to_json()["epoch"] == epoch, "nothing of it was used"
        for _ in range(2):
            script.step(next(batches))
    assert [epoch for _, epoch, _ in script.used] == [0, 0, 1, 1, 2, 2]
