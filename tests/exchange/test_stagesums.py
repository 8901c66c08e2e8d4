"""Sums of one stage, whose shards come in any order and in pieces."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from onefold.exchange.stagefold import StageSum
from onefold.system.heap import ORDINARY, DiskHeap
from tests.tables import for_each

Tensors = list[torch.Tensor | None]
LONG = 1100
"""Large enough for a file."""


def plus(left: Tensors, right: Tensors) -> Tensors:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def bits(tensors: Tensors) -> list[bytes | None]:
    return [None if t is None else t.numpy().tobytes() for t in tensors]


@for_each("on_disk", [False, True])
def test_what_is_lent_is_not_written_to_and_copied_when_it_is_kept(
    on_disk: bool, tmp_path: Path
) -> None:
    home = DiskHeap(tmp_path) if on_disk else ORDINARY
    numbers = [torch.tensor([0.1, -0.0] * LONG), torch.tensor([0.3, -0.0] * LONG)]
    for there in itertools.product([False, True], repeat=2):
        for lent in itertools.product([False, True], repeat=2):
            given = [n.clone() if here else None for n, here in zip(numbers, there, strict=True)]
            expected = bits(plus(*([None if v is None else v.clone()] for v in given)))
            left, right = (
                StageSum([value], {0} if is_lent else set())
                for value, is_lent in zip(given, lent, strict=True)
            )
            found = left.plus(right, home)
            assert bits(found.tensors) == expected
            found.settle(home)
            assert (found.lent, bits(found.tensors)) == (set(), expected)
            for value, number, is_lent in zip(given, numbers, lent, strict=True):
                if value is not None and is_lent:
                    assert value.equal(number)
                    value.fill_(5.0)
            assert bits(found.tensors) == expected
