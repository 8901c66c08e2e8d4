"""How many samples a payload holds, and what cannot be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onefold.core.counting import Count, count_of
from tests.tables import for_each

N, K, T, F = 8, 5, 3, 4


@dataclass
class Item:
    x: torch.Tensor
    y: torch.Tensor | None = None


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.zeros(count, *shape)


CLASSES = torch.zeros(K, dtype=torch.int64)
NESTED = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)
BOXES = {"boxes": rows(2, 4)}


@for_each(
    ("payload", "count"),
    [
        (rows(K, F), K),
        (np.zeros((K, F)), K),
        ([rows(K, F), CLASSES], K),
        ([rows(K, F)], K),
        ([[rows(K, F), rows(K, 2)], CLASSES], K),
        ({"x": {"a": rows(K, F), "b": rows(K)}, "y": CLASSES}, K),
        (Item(rows(K, F), CLASSES), K),
        (Item(rows(K, F)), K),
        ({"x": rows(K, F), "scale": torch.tensor(2.0), "name": "train"}, K),
        ((rows(K, F), ["text"] * K), K),
        ([rows(0, F), rows(0)], 0),
        (rows(1, F), 1),
        ({"x": NESTED, "y": rows(2)}, 2),
    ],
)
def test_samples_that_are_left_out_are_seen(payload: Any, count: int) -> None:
    assert count_of(payload, N) == Count(count)


@for_each(
    "payload",
    [
        rows(N, F),
        rows(2 * N, F),
        rows(100),  # packed
        {"x": rows(N, F), "weights": rows(3)},
        [rows(T, N, F), rows(N)],  # time first
        ([rows(3, 4, 4)] * N, [BOXES] * N),
        [rows(3, 4, 4)] * N,
        [(rows(3, 4, 4), 1)] * N,
        [{"x": rows(3, 4), "y": rows(2)}] * N,
        ["text"] * N,
        torch.tensor(1.0),
        object(),
        {},
    ],
)
def test_what_may_be_all_samples_counts_as_all(payload: Any) -> None:
    assert count_of(payload, N) == Count(N)


@for_each(
    "payload",
    [
        [rows(T, N, F), rows(T, N)],  # time first
        rows(K, N),  # as many features as samples
        [rows(3, 4, 4)] * K,  # samples, or fields
        ([rows(3, 4, 4)] * K, [BOXES] * K),
        [(rows(3, 4, 4), 1)] * K,
        [(rows(3, 4, 4), 1)],
        ["text"] * K,
        [rows(K, F), rows(K, F)],  # fields, or samples
        {"points": rows(T, 3), "sizes": rows(K)},
        {"x": rows(K, F), "weights": rows(100)},
    ],
)
def test_what_cannot_be_told_counts_as_all_and_says_so(payload: Any) -> None:
    assert count_of(payload, N) == Count(N, sure=False)


@for_each(
    ("payload", "samples", "dim", "count"),
    [
        ([rows(T, N, F), rows(T, N)], N, 1, N),
        ([rows(T, K, F), rows(T, K)], N, 1, K),
        (rows(K), N, 1, N),
        # A list of two fields is not one of two samples.
        ([rows(1, F), rows(1)], 2, 0, 1),
        (rows(1, F), 2, 0, 1),
        ([(rows(1, 4, 4), rows(1))] * 2, 2, 0, 2),
        (NESTED, 2, 0, 2),
    ],
)
def test_the_dimension_of_samples_and_small_numbers_of_them(
    payload: Any, samples: int, dim: int, count: int
) -> None:
    assert count_of(payload, samples, dim=dim) == Count(count)
