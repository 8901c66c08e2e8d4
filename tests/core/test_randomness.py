from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.random import mtrand

from onefold.core.randomness import (
    derive_seed,
    kept_generators,
    loader_seed,
    order_by_length,
    sample_order,
    seed_generators,
)
from tests.tables import for_each

WORDS = st.tuples(
    st.sampled_from(["shard", "sample", "order"]),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
)


def draw() -> tuple[float, ...]:
    """From each of the global generators."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_seeds_stay_what_they_are() -> None:
    """Another value would change every run that anybody has made."""
    assert derive_seed("shard", 0, 7, 3) == 1163020914672860810
    assert sample_order(8, seed=0, epoch=1).tolist() == [6, 7, 5, 1, 2, 0, 4, 3]
    order = order_by_length(torch.tensor([3, 1, 2, 1, 3, 2, 1, 9]), batch_size=3, seed=0, epoch=1)
    assert order.tolist() == [2, 0, 7, 6, 1, 5, 3, 4]
    assert loader_seed("sample", 0, 7, 3, loader=0) == derive_seed("sample", 0, 7, 3)
    assert loader_seed("sample", 0, 7, 3, loader=2) == derive_seed("sample", 0, 7, 3, 2)


@given(one=WORDS, other=WORDS)
def test_seeds_differ(one: tuple[str, list[int]], other: tuple[str, list[int]]) -> None:
    assume(one != other)
    seeds = [derive_seed(purpose, *numbers) for purpose, numbers in (one, other)]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(seed=st.integers(0, 2**64 - 1))
def test_a_seed_sets_all_generators(seed: int) -> None:
    with kept_generators():
        seed_generators(seed)
        first = draw()
        seed_generators(seed)
        assert draw() == first
        seed_generators(seed ^ 1)
        assert all(a != b for a, b in zip(draw(), first, strict=True))


@for_each("fails", [False, True])
def test_the_callers_generators_are_given_back(fails: bool) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert draw() == expected[0]
    with suppress(KeyError), kept_generators():
        seed_generators(99)
        draw()
        if fails:
            raise KeyError("inside")
    assert [draw() for _ in range(2)] == expected[1:]


def test_the_second_of_numpys_normal_numbers_is_given_back() -> None:
    np.random.seed(5)
    expected = [np.random.randn() for _ in range(4)]
    np.random.seed(5)
    first = np.random.randn()
    with kept_generators():
        seed_generators(99)
        np.random.randn()
    assert [first, *(np.random.randn() for _ in range(3))] == expected


@pytest.fixture
def another_numpy_generator() -> Iterator[np.random.BitGenerator]:
    """NumPy's global generator is one that cannot be seeded the old way."""
    before = mtrand.get_bit_generator()
    generator = np.random.PCG64(5)
    mtrand.set_bit_generator(generator)
    yield generator
    mtrand.set_bit_generator(before)


def test_another_kind_of_numpy_generator_is_given_back(
    another_numpy_generator: np.random.BitGenerator,
) -> None:
    state = another_numpy_generator.state
    with kept_generators():
        seed_generators(99)
        draw()
    assert mtrand.get_bit_generator() is another_numpy_generator
    assert another_numpy_generator.state == state


@given(samples=st.integers(0, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_an_order_visits_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    order = sample_order(samples, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(samples))


def test_an_order_depends_on_seed_and_epoch_alone() -> None:
    first = sample_order(50, seed=1, epoch=2)
    state = torch.get_rng_state()
    torch.rand(3)
    assert torch.equal(sample_order(50, seed=1, epoch=2), first)
    torch.set_rng_state(state)
    sample_order(50, seed=9, epoch=9)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(sample_order(50, seed=1, epoch=3), first)
    assert not torch.equal(sample_order(50, seed=2, epoch=2), first)


def test_every_loader_has_an_order_of_its_own() -> None:
    lengths = torch.arange(50) % 7
    orders = [sample_order(50, seed=1, epoch=2, loader=loader) for loader in range(4)]
    orders += [
        order_by_length(lengths, batch_size=8, seed=1, epoch=2, loader=loader)
        for loader in range(4)
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 8
    assert torch.equal(orders[0], sample_order(50, seed=1, epoch=2))
    assert torch.equal(orders[4], order_by_length(lengths, batch_size=8, seed=1, epoch=2))


def test_only_the_shuffling_of_batches_may_be_what_differs() -> None:
    """With lengths all alike and batches of one sample, the number must still tell orders apart."""
    lengths = torch.ones(50, dtype=torch.int64)
    orders = [
        order_by_length(lengths, batch_size=1, seed=1, epoch=2, loader=loader).tolist()
        for loader in range(2)
    ]
    assert orders[0] != orders[1]


def lengths_of(*, most: int = 20) -> st.SearchStrategy[torch.Tensor]:
    """Of a few hundred samples at most, often alike."""
    one = st.integers(0, most)
    return st.lists(one, max_size=300).map(lambda drawn: torch.tensor(drawn, dtype=torch.int64))


@given(
    lengths=lengths_of(),
    batch_size=st.integers(1, 310),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_an_order_by_length_visits_every_sample_once(
    lengths: torch.Tensor, batch_size: int, seed: int, epoch: int
) -> None:
    order = order_by_length(lengths, batch_size=batch_size, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(lengths)))


@given(lengths=lengths_of(), batch_size=st.integers(10, 40), seed=st.integers(0, 9))
def test_no_length_lies_between_those_of_a_batch_it_is_not_in(
    lengths: torch.Tensor, batch_size: int, seed: int
) -> None:
    """So it is among a few batches; each is sorted, so that its shards are even more alike."""
    order = order_by_length(lengths, batch_size=batch_size, seed=seed, epoch=0)
    whole = len(order) - len(order) % batch_size
    batches = sorted(lengths[order[:whole]].view(-1, batch_size).tolist())
    assert all(batch == sorted(batch) for batch in batches)
    assert all(one[-1] <= next_one[0] for one, next_one in pairwise(batches))


def test_among_many_batches_little_is_padded() -> None:
    lengths = torch.randint(1, 1000, (10_000,), generator=torch.Generator().manual_seed(1))

    def padded(order: torch.Tensor) -> int:
        batches = lengths[order].view(-1, 10)
        return int((batches.amax(dim=1, keepdim=True) - batches).sum())

    by_length = order_by_length(lengths, batch_size=10, seed=0, epoch=0)
    assert padded(by_length) < 0.05 * padded(sample_order(10_000, seed=0, epoch=0))


@given(
    lengths=lengths_of(),
    batch_size=st.integers(1, 310),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_the_short_last_batch_has_the_samples_that_it_would_have_without_lengths(
    lengths: torch.Tensor, batch_size: int, seed: int, epoch: int
) -> None:
    """So to leave it out favours no length."""
    rest = len(lengths) % batch_size
    plain = sample_order(len(lengths), seed=seed, epoch=epoch)[len(lengths) - rest :]
    last = order_by_length(lengths, batch_size=batch_size, seed=seed, epoch=epoch)
    assert sorted(last[len(lengths) - rest :].tolist()) == sorted(plain.tolist())


def test_the_longest_samples_come_at_no_fixed_time() -> None:
    """Or a rate that falls over an epoch would favour some lengths."""
    lengths = torch.arange(60)
    first = {
        int(order_by_length(lengths, batch_size=10, seed=0, epoch=epoch)[0]) // 10
        for epoch in range(50)
    }
    assert first == set(range(6))


def test_an_order_by_length_depends_on_seed_epoch_batch_size_and_lengths_alone() -> None:
    lengths = torch.arange(50) % 7
    state = torch.get_rng_state()

    def order(seed: int = 1, epoch: int = 2, batch_size: int = 8) -> list[int]:
        torch.rand(3)
        found = order_by_length(lengths, batch_size=batch_size, seed=seed, epoch=epoch)
        return found.tolist()

    assert order() == order()
    torch.set_rng_state(state)
    order_by_length(lengths, batch_size=8, seed=1, epoch=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(each) for each in (order(), order(epoch=3), order(seed=2))}) == 3
    assert order(batch_size=9) != order()
    assert torch.equal(lengths, torch.arange(50) % 7)
