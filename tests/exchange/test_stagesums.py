from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from onefold.core.fold import fold_shards
from onefold.exchange.stagefold import StageSum, StageSums
from onefold.system import heap
from onefold.system.heap import ORDINARY, DiskHeap, Heap

Tensors = list[torch.Tensor | None]


@pytest.fixture(params=["memory", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heap:
    monkeypatch.setattr(heap, "LEAST_BYTES", 1)
    return DiskHeap(tmp_path) if request.param == "disk" else ORDINARY


def plus(left: Tensors, right: Tensors) -> Tensors:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def same(left: Tensors, right: Tensors) -> bool:
    return all(
        (a is None) == (b is None)
        and (a is None or b is None or a.numpy().tobytes() == b.numpy().tobytes())
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("lent", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("there", list(itertools.product([False, True], repeat=2)))
def test_what_is_lent_is_not_written_to(
    lent: tuple[bool, bool], there: tuple[bool, bool], home: Heap
) -> None:
    numbers = [torch.tensor([0.1, -0.0]), torch.tensor([0.3, -0.0])]
    values = [n.clone() if here else None for n, here in zip(numbers, there, strict=True)]
    expected = plus(*([n if here else None] for n, here in zip(numbers, there, strict=True)))
    left, right = (
        StageSum([value], {0} if is_lent else set())
        for value, is_lent in zip(values, lent, strict=True)
    )
    found = left.plus(right, home)
    assert same(found.tensors, expected)
    for value, number, is_lent in zip(values, numbers, lent, strict=True):
        assert value is None or not is_lent or torch.equal(value, number)
    found.settle(home)
    assert not found.lent
    for value, is_lent in zip(values, lent, strict=True):
        assert value is None or not is_lent or found.tensors[0] is not value
    assert same(found.tensors, expected)


def test_what_is_lent_is_copied_when_it_is_kept(home: Heap) -> None:
    tensor = torch.ones(2)
    found = StageSum([tensor, None], {0, 1})
    found.settle(home)
    tensor.fill_(5.0)
    assert found.tensors[0] is not None
    assert found.tensors[0].tolist() == [1.0, 1.0]
    assert found.tensors[1] is None


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_and_pieces_of_shards_add_up_to_the_fold(
    order: tuple[int, ...], lent: bool, home: Heap
) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = {
        shard: [[torch.randn(5, generator=generator), None] for _ in range(1 + shard % 2)]
        for shard in range(4)
    }
    parts[3][0][1] = torch.full((2,), -0.0)
    shards: list[Tensors] = [
        parts[s][0] if len(parts[s]) == 1 else plus(*parts[s]) for s in range(4)
    ]
    expected = fold_shards(shards, plus)
    sums = StageSums(4, home)
    for shard in order:
        for number, part in enumerate(parts[shard]):
            # In memory that is written again as soon as it may be.
            given = [None if tensor is None else tensor.clone() for tensor in part]
            last = number == len(parts[shard]) - 1
            sums.put(shard, StageSum(list(given), {0, 1} if lent else set()), last=last)
            sums.settle()
            for tensor in given if lent else ():
                if tensor is not None:
                    tensor.fill_(torch.nan)
    assert same(list(sums.totals), expected)
    sums.clear()
    with pytest.raises(KeyError, match="shard 0 has not come"):
        sums.totals  # noqa: B018
