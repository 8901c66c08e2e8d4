"""Pieces of a shard: which samples, and how large they may be."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.pieces import Search, pieces_of, rows_of

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


@pytest.mark.parametrize(
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
