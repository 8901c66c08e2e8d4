"""Pieces of a shard: which samples, and how large they may be."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.shard import Search, pieces_of, rows_of
from tests.tables import for_each

sizes = st.integers(1, 300)


@given(sizes, st.none() | sizes)
def test_pieces_are_all_samples_in_their_order(samples: int, size: int | None) -> None:
    pieces = pieces_of(samples, size)
    assert [number for piece in pieces for number in range(*piece)] == list(range(samples))
    lengths = [stop - start for start, stop in pieces]
    assert 1 <= min(lengths) <= max(lengths) <= (size or samples)
    assert max(lengths) - min(lengths) <= 1
    assert len(pieces) == -(-samples // (size or samples))


class Pair(NamedTuple):
    tokens: torch.Tensor
    words: list[str]


def test_every_kind_of_payload_is_cut_alike() -> None:
    inputs = torch.arange(10).view(5, 2)
    payload = {
        "x": inputs,
        "array": inputs.numpy(),
        "pair": Pair(inputs[:, 0], list("abcde")),
        "several": [inputs, (inputs, "all of them", 3, None)],
        "scale": torch.tensor(2.0),
    }
    rows: Any = rows_of(payload, (1, 3), 5)
    assert torch.equal(rows["x"], inputs[1:3])
    assert np.array_equal(rows["array"], inputs.numpy()[1:3])
    assert isinstance(rows["pair"], Pair)
    assert rows["pair"].tokens.tolist() == [2, 4]
    assert rows["pair"].words == ["b", "c"]
    assert torch.equal(rows["several"][1][0], inputs[1:3])
    assert rows["several"][1][1:] == ("all of them", 3, None)
    assert float(rows["scale"]) == 2.0
    # Views: nothing is copied for a piece.
    assert rows["x"].data_ptr() == inputs[1:].data_ptr()


@for_each(
    ("payload", "error", "words"),
    [
        ({"x": torch.ones(4, 2)}, ValueError, r"batch\['x'\]: expected a first dimension of 5"),
        ((torch.ones(5), np.ones(3)), ValueError, r"batch\[1\]: expected a first dimension of 5"),
        ([torch.ones(5), {1, 2}], TypeError, r"batch\[1\]: expected tensors, .* got set"),
        ([torch.ones(5), [3, 1, 2, 2, 5]], TypeError, r"batch\[1\]: .* got 5 numbers in a list"),
        ([torch.ones(5), (0.5, 2.0)], TypeError, r"batch\[1\]: .* got 2 numbers in a tuple"),
    ],
)
def test_what_cannot_be_cut_is_named(payload: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rows_of(payload, (0, 2), 5)


@dataclass(frozen=True)
class Boxes:
    boxes: torch.Tensor
    name: str = "all"


class Graph:
    """No container."""


def test_dataclasses_and_other_mappings_keep_their_type() -> None:
    cut = rows_of(OrderedDict(a=Boxes(torch.arange(5))), (1, 3), 5)
    assert type(cut) is OrderedDict
    assert cut["a"].boxes.tolist() == [1, 2]
    assert cut["a"].name == "all"


@for_each(
    "rows",
    [
        [{"boxes": torch.ones(n, 4)} for n in range(5)],
        [{"boxes": torch.ones(5, 4)} for _ in range(5)],
        [Boxes(torch.ones(n, 4)) for n in range(5)],
        [Graph() for _ in range(5)],
        [torch.ones(3, n, 6) for n in range(5)],
        tuple(np.ones((3, n)) for n in range(5)),
        list("abcde"),
    ],
)
def test_a_list_of_samples_is_cut_by_sample(rows: Any) -> None:
    cut = rows_of({"rows": rows}, (1, 3), 5)["rows"]
    assert type(cut) is type(rows)
    assert len(cut) == 2
    assert cut[0] is rows[1]
    assert cut[1] is rows[2]


def test_pictures_with_as_many_channels_as_samples_are_samples_beside_dicts() -> None:
    pictures = [torch.full((3, 2), float(n)) for n in range(3)]
    boxes = [{"boxes": torch.ones(3, 4)} for _ in range(3)]
    cut, _ = rows_of((pictures, boxes), (1, 3), 3)
    assert [part.shape for part in cut] == [(3, 2)] * 2
    # Alone they may as well be three tensors of three rows each.
    assert [part.shape for part in rows_of(pictures, (1, 3), 3)] == [(2, 2)] * 3


def test_inputs_and_targets_of_two_samples_are_no_samples() -> None:
    x, y = rows_of([torch.ones(2, 3), torch.arange(2)], (1, 2), 2)
    assert (x.shape, y.tolist()) == ((1, 3), [1])
    _, scale = rows_of((torch.ones(2, 3), torch.tensor(0.5)), (0, 1), 2)
    assert float(scale) == 0.5


def test_pieces_follow_the_dimension_of_samples() -> None:
    x = torch.arange(30).view(2, 5, 3)
    cut = rows_of({"x": x, "n": x.numpy()[..., 0]}, (1, 3), 5, dim=1)
    assert torch.equal(cut["x"], x[:, 1:3])
    assert np.array_equal(cut["n"], x.numpy()[:, 1:3, 0])
    with pytest.raises(ValueError, match=r"expected a size in dimension 1 of 5, .* shape \(5,\)"):
        rows_of({"x": x, "y": torch.ones(5)}, (1, 3), 5, dim=1)


@given(sizes, st.integers(0, 300))
def test_the_search_finds_the_largest_that_makes_no_more_pieces_than_needed(
    samples: int, limit: int
) -> None:
    search, trials = Search(samples), 0
    tried = set()
    while not search.is_over:
        assert search.size not in tried
        tried.add(search.size)
        search = search.tried(fits=search.size <= limit)
        trials += 1
    assert trials <= 2 * math.log2(samples) + 2
    if not limit:
        assert search.found == 0
        return
    assert 1 <= search.found <= limit
    assert -(-samples // search.found) == -(-samples // min(limit, samples))
