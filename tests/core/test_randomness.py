import random
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

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


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@for_each("fails", [False, True])
def test_the_callers_generators_are_given_back(fails: bool) -> None:
    seed_all(5)
    expected = [(draw(), np.random.randn()) for _ in range(3)]
    seed_all(5)
    assert (draw(), np.random.randn()) == expected[0]
    with suppress(KeyError), kept_generators():
        seed_generators(99)
        draw()
        np.random.randn()  # NumPy keeps the second of two normal numbers
        if fails:
            raise KeyError("inside")
    assert [(draw(), np.random.randn()) for _ in range(2)] == expected[1:]


SEEDS, EPOCHS = st.integers(0, 2**63 - 1), st.integers(0, 1000)
LENGTHS = st.lists(st.integers(0, 20), max_size=300).map(torch.LongTensor)


@given(lengths=LENGTHS, batch_size=st.integers(1, 310), seed=SEEDS, epoch=EPOCHS)
def test_an_order_visits_every_sample_once(
    lengths: torch.Tensor, batch_size: int, seed: int, epoch: int
) -> None:
    """With lengths the short last batch is what it would be without: to leave it out favors
    none. No length lies between those of a batch that it is not in, and batches are sorted."""
    count = len(lengths)
    plain = sample_order(count, seed=seed, epoch=epoch)
    order = order_by_length(lengths, batch_size=batch_size, seed=seed, epoch=epoch)
    assert sorted(plain.tolist()) == sorted(order.tolist()) == list(range(count))
    whole = count - count % batch_size
    assert sorted(order[whole:].tolist()) == sorted(plain[whole:].tolist())
    if count > 30 * batch_size:  # sorted within parts of so many batches alone
        return
    batches = sorted(lengths[order[:whole]].view(-1, batch_size).tolist())
    assert all(batch == sorted(batch) for batch in batches)
    assert all(one[-1] <= next_one[0] for one, next_one in pairwise(batches))


def test_the_longest_samples_come_at_no_fixed_time() -> None:
    """Or a rate that falls over an epoch would favor some lengths."""
    orders = [order_by_length(torch.arange(60), batch_size=10, seed=0, epoch=e) for e in range(50)]
    assert {int(order[0]) // 10 for order in orders} == set(range(6))


def test_an_order_depends_on_seed_epoch_loader_batch_size_and_lengths_alone() -> None:
    lengths = torch.arange(50) % 7
    state = torch.get_rng_state()

    def orders(*, batch_size: int = 8, seed: int = 1, epoch: int = 2, loader: int = 0) -> Any:
        given: dict[str, int] = {"seed": seed, "epoch": epoch, "loader": loader}
        plain = sample_order(50, **given)
        return plain.tolist(), order_by_length(lengths, batch_size=batch_size, **given).tolist()

    first = orders()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert orders() == first
    others = [orders(seed=2), orders(epoch=3), orders(loader=1), orders(loader=2)]
    assert len({tuple(order) for pair in (first, *others) for order in pair}) == 10
    assert orders(batch_size=9)[1] != first[1]
    assert torch.equal(lengths, torch.arange(50) % 7)
    # With lengths all alike and batches of one sample, loaders still differ.
    lengths = torch.ones(50, dtype=torch.int64)
    assert orders(batch_size=1)[1] != orders(batch_size=1, loader=1)[1]
