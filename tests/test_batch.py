from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.batch import cut_batch, move
from onefold.shard import Plan


class Pair(NamedTuple):
    left: object
    right: object


def nested(samples: int) -> st.SearchStrategy[Any]:
    """Containers of tensors with ``samples`` rows each, at any depth."""
    tensors = st.lists(st.integers(1, 3), max_size=2).map(
        lambda shape: torch.arange(samples * int(np.prod(shape))).view(samples, *shape)
    )
    return st.recursive(
        tensors,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("xyz"), inner, min_size=1)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=4,
    )


def zipped(check: Callable[[list[torch.Tensor]], None], *trees: Any) -> None:
    """Call ``check`` with the tensors of the same place; the containers must be alike."""
    first = trees[0]
    assert {type(tree) for tree in trees} == {type(first)}
    if isinstance(first, torch.Tensor):
        check(list(trees))
        return
    assert {len(tree) for tree in trees} == {len(first)}
    for key in first if isinstance(first, dict) else range(len(first)):
        zipped(check, *(tree[key] for tree in trees))


@given(samples=st.integers(1, 20), shards=st.integers(1, 25), data=st.data())
def test_the_shards_together_are_the_batch(samples: int, shards: int, data: st.DataObject) -> None:
    batch = data.draw(nested(samples))
    cut = cut_batch(batch, Plan((shards,)), range(shards))
    assert cut.samples == samples
    parts = [cut.shards[shard] for shard in sorted(cut.shards)]

    def check(tensors: list[torch.Tensor]) -> None:
        assert torch.equal(torch.cat(tensors[1:]), tensors[0])
        assert [len(part) for part in tensors[1:]] == [cut.size_of(s) for s in sorted(cut.shards)]

    zipped(check, batch, *parts)


def test_only_the_shards_asked_for_are_kept() -> None:
    cut = cut_batch(torch.arange(7), Plan((1, 2)), [1, 2], epoch=4)
    assert {shard: list(part) for shard, part in cut.shards.items()} == {1: [3, 4], 2: [5, 6]}
    assert (cut.samples, cut.epoch, cut.plan) == (7, 4, Plan((1, 2)))


def test_with_fewer_samples_than_shards_the_last_ones_are_left_out() -> None:
    cut = cut_batch((torch.arange(2),), Plan((5,)), range(5))
    assert sorted(cut.shards) == [0, 1]
    assert [cut.size_of(shard) for shard in range(5)] == [1, 1, 0, 0, 0]


def test_nothing_is_copied() -> None:
    batch = torch.arange(6)
    part = cut_batch(batch, Plan((3,)), [1]).shards[1]
    assert isinstance(part, torch.Tensor)
    assert part.data_ptr() == batch[2:].data_ptr()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(3), torch.ones(2)), r"batch\[0\] has 3, batch\[1\] has 2"),
        (
            {"x": [torch.ones(3), torch.ones(3)], "y": torch.ones(4)},
            r"batch\['x'\]\[0\] has 3, batch\['x'\]\[1\] has 3, batch\['y'\] has 4",
        ),
        (Pair(torch.ones(1), (torch.ones(2),)), r"batch\[0\] has 1, batch\[1\]\[0\] has 2"),
        (torch.tensor(1.0), "batch is a scalar tensor: expected a first dimension of samples"),
        ([torch.ones(2), torch.tensor(1)], r"batch\[1\] is a scalar tensor"),
        ([], "holds no tensor"),
        ({"x": ()}, "holds no tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_explained(batch: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut_batch(batch, Plan((2,)), range(2))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (np.ones(3), "batch: expected a tensor .* got ndarray"),
        ((torch.ones(3), 5), r"batch\[1\]: expected a tensor .* got int"),
        ({"x": torch.ones(3), "id": "abc"}, r"batch\['id'\]: expected a tensor .* got str"),
        ([torch.ones(3), None], r"batch\[1\]: .* got NoneType. Use trainer.loader"),
        ({1, 2}, "batch: .* got set"),
    ],
)
def test_a_batch_of_something_else_is_refused(batch: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        cut_batch(batch, Plan((2,)), range(2))


def test_moving_takes_tensors_along_and_leaves_the_rest() -> None:
    payload = {"x": [torch.ones(2), "a"], "y": Pair(torch.ones(3), None)}
    moved = move(payload, torch.device("meta"))
    assert isinstance(moved, dict)
    tensor, text = moved["x"]
    assert (tensor.device.type, text) == ("meta", "a")
    assert isinstance(moved["y"], Pair)
    assert moved["y"].right is None
    assert isinstance(moved["y"].left, torch.Tensor)
    assert moved["y"].left.device.type == "meta"
