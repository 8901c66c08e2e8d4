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


def classes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


FEWER: dict[str, Any] = {
    "a tensor": rows(K, F),
    "an array": np.zeros((K, F)),
    "a list of fields": [rows(K, F), classes(K)],
    "a field alone": [rows(K, F)],
    "a tuple in a list": [[rows(K, F), rows(K, 2)], classes(K)],
    "a dict": {"x": rows(K, F), "y": rows(K, F)},
    "a dict in a dict": {"x": {"a": rows(K, F), "b": rows(K)}, "y": classes(K)},
    "a dataclass": Item(rows(K, F), classes(K)),
    "a field left out": Item(rows(K, F)),
    "a number beside": {"x": rows(K, F), "scale": torch.tensor(2.0), "name": "train"},
    "texts": (rows(K, F), ["text"] * K),
    "none at all": [rows(0, F), classes(0)],
    "one": rows(1, F),
}
ALL: dict[str, Any] = {
    "a tensor": rows(N, F),
    "more rows": rows(2 * N, F),
    "packed": rows(100),
    "a field of all": {"x": rows(N, F), "weights": rows(3)},
    "time first, targets not": [rows(T, N, F), classes(N)],
    "lists of samples": ([rows(3, 4, 4)] * N, [{"boxes": rows(2, 4)}] * N),
    "a list of samples": [rows(3, 4, 4)] * N,
    "samples as they are": [(rows(3, 4, 4), 1)] * N,
    "samples as dicts": [{"x": rows(3, 4), "y": rows(2)}] * N,
    "texts": ["text"] * N,
    "a number": torch.tensor(1.0),
    "an object": object(),
    "nothing": {},
}
UNSURE: dict[str, Any] = {
    "time first": [rows(T, N, F), rows(T, N)],
    "features as many as samples": rows(K, N),
    "a list of samples that may be fields": [rows(3, 4, 4)] * K,
    "lists of samples": ([rows(3, 4, 4)] * K, [{"boxes": rows(2, 4)}] * K),
    "samples as they are": [(rows(3, 4, 4), 1)] * K,
    "one sample as it is": [(rows(3, 4, 4), 1)],
    "texts": ["text"] * K,
    "fields that may be samples": [rows(K, F), rows(K, F)],
    "ragged": {"points": rows(T, 3), "sizes": rows(K)},
    "a table beside": {"x": rows(K, F), "weights": rows(100)},
}


@for_each("payload", FEWER.values(), ids=FEWER.keys())
def test_samples_that_are_left_out_are_seen(payload: Any) -> None:
    count, sure = count_of(payload, N)
    assert sure
    assert count in (0, 1, K)


@for_each("payload", ALL.values(), ids=ALL.keys())
def test_what_may_be_all_samples_counts_as_all(payload: Any) -> None:
    assert count_of(payload, N) == Count(N)


@for_each("payload", UNSURE.values(), ids=UNSURE.keys())
def test_what_cannot_be_told_counts_as_all_and_says_so(payload: Any) -> None:
    assert count_of(payload, N) == Count(N, sure=False)


def test_the_dimension_of_the_samples_is_the_scripts() -> None:
    assert count_of([rows(T, N, F), rows(T, N)], N, dim=1) == Count(N)
    assert count_of([rows(T, K, F), rows(T, K)], N, dim=1) == Count(K)
    assert count_of(rows(K), N, dim=1) == Count(N)


@for_each("fields", [[rows(1, F), classes(1)], rows(1, F)], ids=["fields", "one"])
def test_one_of_two_is_left(fields: Any) -> None:
    """A list of two fields is not one of two samples."""
    assert count_of(fields, 2) == Count(1)


def test_two_samples_as_they_are() -> None:
    assert count_of([(rows(1, 4, 4), rows(1))] * 2, 2) == Count(2)


def test_sequences_of_several_lengths() -> None:
    nested = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)
    assert count_of({"x": nested, "y": classes(2)}, 4) == Count(2)
    assert count_of(nested, 2) == Count(2)
