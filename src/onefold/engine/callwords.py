"""What a stage is called with, in words that devices of a line can compare.

Tensors travel. All else that a stage is called with (numbers, text, containers) each device makes
for itself, as it runs the loss; it must be the same as on the device before, which says in words
what it was there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from onefold.core.structure import parts_of

__all__ = ["call_in_words", "is_plain", "numbers_in", "unlike", "words_of"]

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, Enum, torch.dtype)


def is_plain(value: object) -> bool:
    """Whether a value is nothing but what its text tells."""
    return value is None or isinstance(value, _PLAIN)


def words_of(value: object, path: str) -> Iterator[str]:
    """Say what something is made of, but for the values of tensors and the insides of objects.

    Args:
        value: anything.
        path: what it is called.

    >>> list(words_of({"x": torch.ones(2, 3), "rest": (None, 0.5)}, "y"))
    ["y['x'] is a tensor of shape (2, 3)", "y['rest'][0] is None", "y['rest'][1] is 0.5"]
    """
    if isinstance(value, torch.Tensor):
        yield f"{path} is a tensor of shape {tuple(value.shape)}"
    elif is_plain(value):
        yield f"{path} is {value!r}"
    elif (parts := parts_of(value)) is None:
        yield f"{path} is of type {type(value).__qualname__}"
    else:
        for name, part in parts:
            yield from words_of(part, path + name)


def call_in_words(args: Any, kwargs: Any) -> list[str]:
    """Say what a stage is called with.

    >>> call_in_words((torch.ones(3), 1), {"causal": True})
    ['argument [0] is a tensor of shape (3,)', 'argument [1] is 1', "argument ['causal'] is True"]
    """
    return [*words_of(args, "argument "), *words_of(kwargs, "argument ")]


def unlike(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """The first words in which two things differ; None if they are alike.

    >>> unlike(["[0] is 1"], ["[0] is 1", "[1] is 2"])
    ('nothing', '[1] is 2')
    """
    for first, second in zip_longest(one, other, fillvalue="nothing"):
        if first != second:
            return first, second
    return None


def numbers_in(value: object) -> list[int | float | complex | np.generic]:
    """The numbers and truth values in nested containers."""
    if isinstance(value, bool | int | float | complex | np.generic):
        return [value]
    if isinstance(value, torch.Tensor):
        return []
    return [number for _, part in parts_of(value) or () for number in numbers_in(part)]
