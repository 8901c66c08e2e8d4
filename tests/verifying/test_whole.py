"""All samples of a batch as one shard, from shards or from the script's own tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from onefold.core.randomness import kept_generators, same_in_all_shards, seed_generators
from onefold.verifying.whole import (
    KeepingCollate,
    cast_floats,
    second_dimension,
    whole_of,
    whole_tensors,
)
from tests.tables import for_each

Sample = tuple[torch.Tensor, int]
Collate = Callable[[list[Any]], object]
SAMPLES: list[Sample] = [(torch.full((2,), float(number)), number) for number in range(6)]
SHARDS = {0: SAMPLES[:3], 2: SAMPLES[3:5], 3: SAMPLES[5:]}


class Pair(NamedTuple):
    first: Any
    second: Any


def made(
    collate: Collate | None = None, dtype: torch.dtype | None = torch.float64
) -> tuple[KeepingCollate, Mapping[int, object]]:
    """What a loader would have made of each shard."""
    keeping = KeepingCollate(collate, dtype, keeps=True)
    return keeping, {shard: keeping(samples) for shard, samples in SHARDS.items()}


def targets_of(payload: Any) -> list[int]:
    found: list[int] = payload[1].tolist()
    return found


# Of a loader.


def test_shards_get_what_they_would_have_and_the_whole_has_all_samples() -> None:
    keeping, shards = made()
    whole, payloads = whole_of(shards, {7: keeping}, 7)
    assert {shard: targets_of(payload) for shard, payload in payloads.items()} == {
        0: [0, 1, 2],
        2: [3, 4],
        3: [5],
    }
    assert targets_of(whole.payload(range(6))) == list(range(6))
    assert targets_of(whole.payload([4, 0, 4])) == [4, 0, 4]
    inputs, _ = whole.payload([5])  # type: ignore[misc]
    assert inputs.dtype == torch.float64


def test_shards_may_come_in_any_order() -> None:
    keeping, shards = made()
    whole, _ = whole_of(dict(reversed(shards.items())), {0: keeping}, 0)
    assert targets_of(whole.payload(range(6))) == list(range(6))


def test_the_users_own_collate_makes_any_part() -> None:
    """Padding depends on which samples come together."""

    def padded(samples: list[Sample]) -> object:
        longest = max(number for _, number in samples)
        return torch.stack([torch.ones(longest + 1) for _ in samples]), longest

    keeping, shards = made(padded)
    whole, _ = whole_of(shards, {0: keeping}, 0)
    inputs, longest = whole.payload([1, 3])  # type: ignore[misc]
    assert (inputs.shape, longest) == ((2, 4), 3)


def drawing(draw: Callable[[], float]) -> Collate:
    def collate(samples: list[Sample]) -> object:
        noise = torch.tensor([draw() for _ in samples], dtype=torch.float64)
        return {"noise": noise, "pair": [noise, torch.tensor([n for _, n in samples])]}

    return collate


@for_each(
    "draw",
    [lambda: float(torch.rand(())), random.random, lambda: float(np.random.rand())],
    ids=["torch", "random", "numpy"],
)
def test_draws_of_the_shards_are_those_of_the_whole(draw: Callable[[], float]) -> None:
    keeping, shards = made(drawing(draw))
    whole, payloads = whole_of(shards, {0: keeping}, 0)
    found: Any = whole.payload(range(6))
    expected = torch.cat([payload["noise"] for payload in payloads.values()])  # type: ignore[index]
    assert torch.equal(found["noise"], expected)
    assert torch.equal(found["pair"][0], expected)
    again: Any = whole.payload([5, 1])
    assert torch.equal(again["noise"], expected[[5, 1]])


def test_where_draws_cannot_be_joined_the_whole_has_its_own() -> None:
    def collate(samples: list[Sample]) -> object:
        return torch.rand(len(samples), len(samples))

    keeping, shards = made(collate)
    whole, payloads = whole_of(shards, {0: keeping}, 0)
    assert payloads[0].shape == (3, 3)  # type: ignore[attr-defined]
    assert whole.payload(range(6)).shape == (6, 6)  # type: ignore[attr-defined]


def test_without_keeping_a_payload_is_the_payload() -> None:
    keeping = KeepingCollate(None, torch.float64, keeps=False)
    inputs, targets = keeping(SAMPLES[:2])  # type: ignore[misc]
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)


# Of the script's own tensors.


def test_any_rows_of_tensors_and_arrays() -> None:
    batch = {"x": torch.arange(6.0), "y": (np.arange(6), [torch.arange(6) * 10])}
    whole = whole_tensors(batch)
    found: Any = whole.payload([4, 1])
    assert found["x"].tolist() == [4.0, 1.0]
    assert found["y"][0].tolist() == [4, 1]
    assert found["y"][1][0].tolist() == [40, 10]
    assert isinstance(found["y"], tuple)


# Containers.


@for_each("dtype", [torch.float64, torch.float16])
def test_floating_point_is_cast_and_nothing_else(dtype: torch.dtype) -> None:
    payload = {
        "x": torch.ones(2),
        "y": [torch.ones(2, dtype=torch.int64), Pair(torch.ones(1).bool(), torch.ones(1))],
        "z": np.ones(2, dtype=">f4"),
        "name": ("word", None, 3.5),
    }
    found = cast_floats(payload, dtype)
    assert found["x"].dtype == found["y"][1].second.dtype == found["z"].dtype == dtype
    assert found["y"][0].dtype == torch.int64
    assert found["y"][1].first.dtype == torch.bool
    assert isinstance(found["y"][1], Pair)
    assert found["name"] == ("word", None, 3.5)
    assert payload["x"].dtype == torch.float32  # type: ignore[union-attr]


def test_without_a_type_nothing_is_touched() -> None:
    payload = [torch.ones(2), np.ones(2)]
    assert cast_floats(payload, None) is payload


def test_arrays_of_anything_but_numbers_are_left_alone() -> None:
    words = np.array(["one", "two"])
    assert cast_floats({"words": words}, torch.float64)["words"] is words


@for_each(
    ("payload", "expected"),
    [
        (torch.zeros(4, 7), 7),
        ([torch.zeros(4, 7), {"y": torch.zeros(4, 7, 2)}], 7),
        ((torch.zeros(4, 7), torch.zeros(4, 6)), None),
        ((torch.zeros(4, 7), torch.zeros(4)), None),
        (torch.zeros(4), None),
        ("no tensors", None),
    ],
)
def test_the_second_dimension_is_one_where_all_agree(payload: object, expected: int | None) -> None:
    assert second_dimension(payload) == expected


def test_what_shards_draw_alike_in_collating_is_that_of_the_whole_batch() -> None:
    def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
        with same_in_all_shards():
            return torch.stack(samples) * torch.rand(())

    collate = KeepingCollate(mixed, None, keeps=True)
    samples = list(torch.arange(1.0, 5.0))
    shards = {}
    with kept_generators():
        for shard in (0, 1):
            seed_generators(shard, common=("batch", (0, 7)))
            shards[shard] = collate(samples[2 * shard : 2 * shard + 2])
    whole, payloads = whole_of(shards, {0: collate}, 0)
    before = torch.get_rng_state()
    assert torch.equal(whole.payload(range(4)), torch.cat([payloads[0], payloads[1]]))
    assert torch.equal(torch.get_rng_state(), before)
