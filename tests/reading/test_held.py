"""Generators that objects hold: all kinds, each with a seed of its own, put back if asked to."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from onefold.reading.held import kept_apart, seed_held


class Holder:
    def __init__(self) -> None:
        self.torch = torch.Generator()
        self.python = random.Random(5)
        self.numpy = np.random.default_rng(5)
        self.older = np.random.RandomState(5)
        self.text = "no generator"

    def draw(self) -> list[float]:
        return [
            float(torch.rand((), generator=self.torch)),
            self.python.random(),
            float(self.numpy.random()),
            float(self.older.random_sample()),
        ]


def drawn(owners: list[Any], seed: int, domain: str = "a test") -> list[list[float]]:
    seed_held(owners, seed, domain)
    return [owner.draw() for owner in owners]


def test_all_kinds_are_seeded_each_by_itself() -> None:
    found = drawn([Holder(), Holder()], 1)
    assert drawn([Holder(), Holder()], 1) == found
    assert len({number for numbers in found for number in numbers}) == 8
    for others in (drawn([Holder(), Holder()], 2), drawn([Holder(), Holder()], 1, "another")):
        for mine, theirs in zip(found, others, strict=True):
            assert not set(mine) & set(theirs)


def test_a_generator_of_two_is_seeded_once() -> None:
    one, other = Holder(), Holder()
    other.python = one.python
    seed_held([one, other], 1, "a test")
    first = one.python.random()
    seed_held([one], 1, "a test")
    assert one.python.random() == first


def test_they_are_put_back() -> None:
    owner, expected = Holder(), Holder().draw()
    with kept_apart([owner, object()]):
        drawn([owner], 3)
    assert owner.draw() == expected
