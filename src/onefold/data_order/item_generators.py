"""Random generators among the attributes of an object: a sampler, a stream, an optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from onefold.core.randomness import comparable_state, derive_seed

__all__ = [
    "GENERATORS",
    "MOST",
    "held_states",
    "holders_in",
    "kept_apart",
    "put_back",
    "seed_held",
    "state_of",
    "states_of",
    "within",
]

GENERATORS = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
"""The kinds of random generators."""

MOST = 20
"""Objects within another one that are looked at."""


def within(owner: object, inner: Callable[[str, Any], list[object]]) -> list[object]:
    """Return an object and those that it is made of, each once, the outer ones first.

    Args:
        owner: the object.
        inner: which parts there are in an attribute, by its name and value.
    """
    found: list[object] = []
    waiting = [owner]
    while waiting and len(found) < MOST:
        each = waiting.pop(0)
        if any(each is known for known in found):
            continue
        found.append(each)
        for name, value in getattr(each, "__dict__", {}).items():
            waiting += inner(name, value)
    return found


def holders_in(dataset: object) -> list[object]:
    """Those that hold a generator of a data set and what it is made of: data sets, transforms."""

    def inner(_name: str, value: Any) -> list[object]:
        parts = value if isinstance(value, list | tuple) else (value,)
        return [
            part
            for part in parts[:MOST]
            if isinstance(part, Dataset)
            or (callable(part) and not isinstance(part, type | FunctionType | torch.nn.Module))
        ]

    return [each for each in within(dataset, inner) if _held_by([each])]


def seed_held(owners: Iterable[object], seed: int, domain: str) -> None:
    """Seed all generators among the attributes of some objects, each with a seed of its own.

    Args:
        owners: the objects; a generator that several of them share is seeded once.
        seed: of the pass.
        domain: what kind of thing holds them, so that two kinds never draw alike.
    """
    for number, generator in enumerate(_held_by(owners)):
        # Each has a seed of its own: what two of them draw must not be the same.
        _seed(generator, derive_seed(domain, seed & (2**63 - 1), number))


def held_states(owners: Iterable[object]) -> list[Any]:
    """Where the generators among the attributes of some objects stand; compare with `==`."""
    return [comparable_state(state_of(generator)) for generator in _held_by(owners)]


@contextmanager
def kept_apart(owners: Iterable[object]) -> Iterator[None]:
    """Put the generators among the attributes of some objects back to where they were."""
    before = states_of(owners)
    try:
        yield
    finally:
        put_back(before)


def states_of(owners: Iterable[object]) -> list[tuple[Any, Any]]:
    """Return each generator among the attributes of some objects, with its state."""
    return [(generator, state_of(generator)) for generator in _held_by(owners)]


def put_back(states: Iterable[tuple[Any, Any]]) -> None:
    """Put generators back to where they were when `states_of` was called."""
    for generator, state in states:
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _held_by(owners: Iterable[object]) -> list[Any]:
    held: list[Any] = []
    for each in owners:
        for _, value in sorted(getattr(each, "__dict__", {}).items()):
            if isinstance(value, GENERATORS) and not any(value is known for known in held):
                held.append(value)
    return held


def state_of(generator: Any) -> Any:
    """The state of one of `GENERATORS`, in the form of its library."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        # A bit generator cannot be seeded again, but takes the state of another of its kind.
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        # NumPy's older kind takes 32 bits and no more.
        generator.seed(seed & 0xFFFFFFFF)
