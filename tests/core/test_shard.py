"""Which samples a shard has, which shards a device has, and how shards become microbatches."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.shard import Shares, cut_bounds, microbatch_bounds, rows_of
from onefold.system.words import counted

SIZES = st.integers(1, 300)
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any).map(tuple)


@given(samples=st.integers(0, 500), shards=st.integers(1, 70))
def test_shards_are_cut_as_tensor_split_does(samples: int, shards: int) -> None:
    parts = torch.tensor_split(torch.arange(samples), shards)
    bounds = cut_bounds(samples, shards)
    assert [list(range(*each)) for each in bounds] == [part.tolist() for part in parts]


@given(shards=st.integers(1, 70), devices=st.integers(1, 70))
def test_an_even_plan_gives_each_device_a_share(shards: int, devices: int) -> None:
    if devices > shards:
        with pytest.raises(ValueError, match=f"cannot share {counted(shards, 'shard')}: "):
            Shares.even(shards=shards, devices=devices)
        return
    shares = Shares.even(shards=shards, devices=devices)
    assert max(shares.counts) - min(shares.counts) <= 1
    assert [s for d in range(devices) for s in shares.shards_of(d)] == list(range(shards))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    for counts in ((), (0, 0), (2, -1)):
        with pytest.raises(ValueError, match="zero or more shards"):
            Shares(counts)
    with pytest.raises(ValueError, match="this run has 2 devices and 5 shards"):
        Shares.given((2, 2), shards=5, devices=2)
    assert Shares.given([0, 5], shards=5, devices=2).shards_of(1) == range(5)


@given(counts=COUNTS, in_rounds=st.booleans())
def test_rounds_hold_every_shard_once(counts: tuple[int, ...], in_rounds: bool) -> None:
    shares = Shares(counts, in_rounds=in_rounds)
    rows = shares.rounds()
    assert len(rows) == max(counts)
    for device in range(shares.devices):
        own = [row[device] for row in rows if device in row]
        assert own == list(shares.shards_of(device)) == sorted(own)
        assert len(own) == counts[device]
    order = [s for row in rows for s in row.values()]
    assert (order if in_rounds else sorted(order)) == list(range(shares.shards))
    assert shares.in_a_row() == Shares(counts)


@given(SIZES, st.none() | SIZES)
def test_microbatches_are_all_samples_in_their_order(samples: int, size: int | None) -> None:
    microbatches = microbatch_bounds(samples, size)
    assert [number for microbatch in microbatches for number in range(*microbatch)] == list(
        range(samples)
    )
    lengths = [stop - start for start, stop in microbatches]
    assert 1 <= min(lengths) <= max(lengths) <= (size or samples)
    assert max(lengths) - min(lengths) <= 1
    assert len(microbatches) == -(-samples // (size or samples))


@dataclass(frozen=True)
class Boxes:
    boxes: torch.Tensor
    name: str = "all"


def test_every_kind_of_payload_is_cut_alike() -> None:
    inputs = torch.arange(10).view(5, 2)
    payload = {
        "x": inputs,
        "array": inputs.numpy(),
        "several": [inputs, (inputs, "all of them", 3, None)],
        "scale": torch.tensor(2.0),
        "boxes": Boxes(torch.arange(5)),
        "words": list("abcde"),
    }
    rows: Any = rows_of(payload, (1, 3), 5)
    assert torch.equal(rows["x"], inputs[1:3])
    assert rows["x"].data_ptr() == inputs[1:].data_ptr()  # nothing is copied for a microbatch
    assert np.array_equal(rows["array"], inputs.numpy()[1:3])
    assert torch.equal(rows["several"][1][0], inputs[1:3])
    assert rows["several"][1][1:] == ("all of them", 3, None)
    assert (float(rows["scale"]), rows["words"]) == (2.0, ["b", "c"])
    assert (rows["boxes"].boxes.tolist(), rows["boxes"].name) == ([1, 2], "all")
    x = torch.arange(30).view(2, 5, 3)
    assert torch.equal(rows_of([x], (1, 3), 5, dim=1)[0], x[:, 1:3])


def test_what_cannot_be_cut_is_named() -> None:
    fives = torch.ones(5)
    for payload, dim, error, words in (
        ({"x": torch.ones(4, 2)}, 0, ValueError, r"batch\['x'\]: expected a first dimension of 5"),
        ((fives, np.ones(3)), 0, ValueError, r"batch\[1\]: expected a first dimension of 5"),
        ([torch.ones(2, 5), fives], 1, ValueError, r"size in dimension 1 of 5, .* \(5,\)"),
        ([fives, {1, 2}], 0, TypeError, r"batch\[1\]: microbatch can cut tensors, .* but got set"),
        ([fives, [3, 1, 2, 2, 5]], 0, TypeError, r"batch\[1\]: .* got 5 numbers in a list"),
        ([fives, (0.5, 2.0)], 0, TypeError, r"batch\[1\]: .* got 2 numbers in a tuple"),
    ):
        with pytest.raises(error, match=words):
            rows_of(payload, (0, 2), 5, dim=dim)


def test_a_list_of_samples_is_cut_by_sample() -> None:
    for rows in (
        [{"boxes": torch.ones(n, 4)} for n in range(5)],
        [{"boxes": torch.ones(5, 4)} for _ in range(5)],
        [Boxes(torch.ones(n, 4)) for n in range(5)],
        [object() for _ in range(5)],
        [torch.ones(3, n, 6) for n in range(5)],
        tuple(np.ones((3, n)) for n in range(5)),
    ):
        cut = rows_of({"rows": rows}, (1, 3), 5)["rows"]
        assert (type(cut), len(cut)) == (type(rows), 2)
        assert all(one is other for one, other in zip(cut, rows[1:3], strict=True))


def test_lists_that_may_be_of_samples_or_of_fields() -> None:
    pictures = [torch.full((3, 2), float(n)) for n in range(3)]
    boxes = [{"boxes": torch.ones(3, 4)} for _ in range(3)]
    cut, _ = rows_of((pictures, boxes), (1, 3), 3)
    assert [part.shape for part in cut] == [(3, 2)] * 2
    # Alone they may as well be three tensors of three rows each.
    assert [part.shape for part in rows_of(pictures, (1, 3), 3)] == [(2, 2)] * 3
    x, y = rows_of([torch.ones(2, 3), torch.arange(2)], (1, 2), 2)
    assert (x.shape, y.tolist()) == ((1, 3), [1])
    _, scale = rows_of((torch.ones(2, 3), torch.tensor(0.5)), (0, 1), 2)
    assert float(scale) == 0.5
