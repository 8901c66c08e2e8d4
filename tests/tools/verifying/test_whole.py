"""All samples of a batch as one shard, from shards or from the script's own tensors."""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from onefold.core.randomness import kept_generators, same_rng_for_all_shards, seed_generators
from onefold.tools.verifying.surroundings import KeepingCollate, cast_floats, whole_of
from tests.tables import for_each

Sample = tuple[torch.Tensor, int]
SAMPLES: list[Sample] = [(torch.full((2,), float(number)), number) for number in range(6)]


class Pair(NamedTuple):
    first: Any
    second: Any


def made(collate: Callable[[list[Any]], object]) -> tuple[Any, Mapping[int, Any]]:
    """What a loader would have made: the whole batch, and the payloads of three shards."""
    keeping = KeepingCollate(collate, torch.float64, keeps=True)
    cut = {0: SAMPLES[:3], 2: SAMPLES[3:5], 3: SAMPLES[5:]}
    shards = {shard: keeping(samples) for shard, samples in cut.items()}
    return whole_of(shards, {7: keeping}, 7)


@for_each("draw", [lambda: float(torch.rand(())), random.random, lambda: float(np.random.rand())])
def test_draws_of_the_shards_are_those_of_the_whole(draw: Callable[[], float]) -> None:
    def collate(samples: list[Sample]) -> object:
        noise = torch.tensor([draw() for _ in samples], dtype=torch.float64)
        return {"noise": noise, "pair": [noise, torch.tensor([n for _, n in samples])]}

    whole, payloads = made(collate)
    expected = torch.cat([payloads[shard]["noise"] for shard in (0, 2, 3)])
    for rows in ([0, 1, 2, 3, 4, 5], [5, 1]):
        found = whole(rows)
        assert torch.equal(found["noise"], expected[rows])
        assert torch.equal(found["pair"][0], expected[rows])
        assert found["pair"][1].tolist() == rows


def test_what_shards_draw_alike_in_collating_is_that_of_the_whole_batch() -> None:
    def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
        with same_rng_for_all_shards():
            return torch.stack(samples) * torch.rand(())

    collate = KeepingCollate(mixed, None, keeps=True)
    samples = list(torch.arange(1.0, 5.0))
    shards = {}
    with kept_generators():
        for shard in (0, 1):
            seed_generators(shard, common=("batch", (0, 7)))
            shards[shard] = collate(samples[2 * shard : 2 * shard + 2])
    whole: Any
    payloads: Any
    whole, payloads = whole_of(shards, {0: collate}, 0)
    before = torch.get_rng_state()
    assert torch.equal(whole(range(4)), torch.cat([payloads[0], payloads[1]]))
    assert torch.equal(torch.get_rng_state(), before)


@for_each("dtype", [torch.float64, torch.float16])
def test_floating_point_is_cast_and_nothing_else(dtype: torch.dtype) -> None:
    words = np.array(["one", "two"])
    payload: Any = {
        "x": torch.ones(2),
        "y": [torch.ones(2, dtype=torch.int64), Pair(torch.ones(1).bool(), torch.ones(1))],
        "z": np.ones(2, dtype=">f4"),
        "name": ("word", None, 3.5, words),
    }
    found: Any = cast_floats(payload, dtype)
    assert found["x"].dtype == found["y"][1].second.dtype == found["z"].dtype == dtype
    assert found["y"][0].dtype == torch.int64
    assert found["y"][1].first.dtype == torch.bool
    assert isinstance(found["y"][1], Pair)
    assert found["name"] == ("word", None, 3.5, words)
    assert payload["x"].dtype == torch.float32
    assert cast_floats(payload, None) is payload
