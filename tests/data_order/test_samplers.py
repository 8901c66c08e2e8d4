"""The order of a pass comes from the script's sampler, alike wherever and whenever it is drawn."""

import random
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from onefold.core.shard import Shares
from onefold.errors import CheckpointError
from tests.data_order.test_loader import Augmented, make_loader, samples_in, united
from tests.data_order.test_position import Script
from tests.small import make_trainer
from tests.tables import for_each


class Drawing(Sampler[int]):
    """Draws from generators of every kind, the process's and its own."""

    def __init__(self, length: int = 12) -> None:
        self._length = length
        self.torch = torch.Generator()
        self.python = random.Random(4)
        self.numpy = np.random.default_rng(4)
        self.older = np.random.RandomState(4)

    def __len__(self) -> int:
        return self._length

    def own(self) -> int:
        return self.python.randrange(12) + int(self.numpy.integers(12)) + self.older.randint(12)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._length):
            drawn = int(torch.randint(12, ())) + random.randrange(12) + np.random.randint(12)
            yield (drawn + int(torch.randint(12, (), generator=self.torch)) + self.own()) % 12


def orders(sampler: Any, passes: int = 2, **choices: Any) -> list[list[Any]]:
    choices = {"shuffle": False, "sampler": sampler, "batch_size": 5, **choices}
    loader = make_loader(range(12), Shares((2,)), **choices)
    return [samples_in(list(loader)) for _ in range(passes)]


def test_an_order_depends_on_seed_and_pass_alone() -> None:
    """And generators are put back; those of a sampler within are seeded too."""
    sampler, fresh = Drawing(), Drawing()
    first = orders(sampler)
    torch.rand(3), random.random(), np.random.rand()
    states = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    assert orders(sampler) == first == orders(fresh)
    assert states == (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    assert sampler.own() == Drawing().own()
    assert first[0] != first[1]
    assert orders(sampler, seed=4) != first
    sampler.torch.manual_seed(99)
    batches = (BatchSampler(each, 5, False) for each in (sampler, Drawing()))
    one, other = (orders(None, batch_sampler=each, batch_size=None) for each in batches)
    assert one == other


def test_samples_that_come_twice_have_two_augmentations() -> None:
    sampler = WeightedRandomSampler([1.0] * 4, 40)
    devices = [
        make_loader(Augmented(4), Shares((1, 2)), [own], shuffle=False, sampler=sampler)
        for own in range(2)
    ]
    read = samples_in(united([list(loader) for loader in devices]))
    assert len(read) == 40
    assert len({noise for _, noise in read}) == 40
    alone = make_loader(Augmented(4), Shares((5,)), shuffle=False, sampler=sampler, batch_size=9)
    assert samples_in(list(alone)) == read
    assert (len(devices[0]), len(alone)) == (7, 5)


class Epochs(Sampler[int]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return repeat(self.epochs[-1])  # without end


def test_a_sampler_is_given_the_number_of_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    assert orders(Epochs(), first_epoch=4) == [[4] * 3, [5] * 3]
    assert "the sampler yields more samples than its length, 3" in caplog.text


DEALT: Any = DistributedSampler(range(9), 2, 0)  # type: ignore[arg-type]


@for_each(
    ("choices", "words"),
    [
        ({"sampler": iter([1])}, "the sampler list_iterator has no length"),
        ({"sampler": 5}, "expected sampler to be iterable, but got int"),
        ({"sampler": DEALT}, "contains a DistributedSampler, which splits samples"),
        ({"batch_sampler": BatchSampler(DEALT, 3, False)}, "contains a DistributedSampler, which"),
        ({"sampler": range(9), "lengths": [1] * 9}, "sampler determines what lengths would"),
        *(
            ({"batch_sampler": [[1]], name: 1}, f"batch_sampler determines what {name} would")
            for name in ("batch_size", "drop_last", "sampler", "shuffle")
        ),
        ({"sampler": ["a"]}, "expected sampler to yield integer sample .* got 'a'"),
        ({"batch_sampler": [3]}, "a list of sample indices for each batch, but got 3"),
        ({"batch_sampler": [[3], []]}, "batch 1 of batch_sampler is empty"),
    ],
)
def test_a_sampler_that_cannot_be_followed_is_refused(choices: Any, words: str) -> None:
    size = {} if "batch_sampler" in choices else {"batch_size": 2}
    with pytest.raises((TypeError, ValueError), match=words):
        list(make_trainer().loader(range(9), **{**size, **choices}))


class Moving(Sampler[int]):
    """Has an order of its own in every pass, which depends on those before."""

    def __init__(self, passes: int = 0) -> None:
        self.passes = passes

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(self.passes * n) % 10 for n in range(10)])


def test_an_order_that_does_not_repeat_is_noticed_when_a_run_goes_on() -> None:
    def begun(script: Script, passes: int) -> Any:
        loader = script.loader(shuffle=False, sampler=Moving(passes))
        script.position.epochs(1)
        return loader

    script = Script()
    script.step(next(iter(begun(script, 2))))
    saved = script.position.to_json()
    for answered in (False, True):

        def resumed(answered: bool = answered) -> Script:
            script = Script(None if answered else saved)
            if answered:  # by a record, up to where the run was saved
                script.position.expect(saved)
            return script

        list(begun(resumed(), 2))
        with pytest.raises(
            CheckpointError, match=r"the sampler's order in pass 0 differs .* used a part"
        ):
            list(begun(resumed(), 5))


@pytest.fixture
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHOLE_MOST": 20, "_PART": 7, "_PART_BATCHES": 1}.items():
        monkeypatch.setattr(f"onefold.data_order.from_pytorch.{name}", value)


def drawn(sampler: Any, batches: int) -> list[Any]:
    loader = make_loader(range(12), Shares((2,)), shuffle=False, sampler=sampler, batch_size=5)
    found = []
    for batch in islice(loader, batches):
        found.append(samples_in([batch]))
        torch.rand(3), random.random(), np.random.rand()  # the script's own
    return found


def test_a_sampler_drawn_in_parts_gives_what_it_would_give_at_once(in_small_parts: None) -> None:
    whole = drawn(Drawing(20), 4)
    assert drawn(Drawing(10**10), 4) == whole
    long = drawn(Drawing(10**10), 12)
    assert drawn(Drawing(60), 12) == long
    assert long[:4] == whole


def test_a_run_goes_on_in_a_sampler_that_is_drawn_in_parts(in_small_parts: None) -> None:
    def steps(script: Script, number: int) -> list[Any]:
        loader = script.loader(12, 5, sampler=Drawing(10**10), shuffle=False)
        for batch in islice(loader, number):
            script.step(batch)
        return script.used

    straight, first = steps(Script(), 12), Script()
    assert steps(first, 5) + steps(Script(first.position.to_json()), 7) == straight


def test_the_first_batch_of_any_number_of_samples_comes_at_once(in_small_parts: None) -> None:
    data: Any = range(10**12)
    sampler = RandomSampler(data, replacement=True, num_samples=10**10)
    for chosen in (sampler, None):
        choices: Any = {"sampler": chosen} if chosen else {}
        loader = make_loader(data, Shares((2,)), shuffle=False, batch_size=64, **choices)
        assert len(loader) >= 10**10 // 64
        assert next(iter(loader)).samples == 64
    for given, words in (
        ({"shuffle": True}, "1,000,000,000,000 shuffled samples would take 8000 GB"),
        ({"batch_size": None, "batch_sampler": range(10**10)}, "10,000,000,000 batches in a pass"),
    ):
        choices = {"shuffle": False, **given}
        with pytest.raises(ValueError, match=words):
            next(iter(make_loader(data, Shares((2,)), **choices)))
