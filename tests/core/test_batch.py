from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.batch import as_if_copied, batch_digest, cut_batch, move
from onefold.core.shard import Plan
from tests.small import bits, make_trainer, points
from tests.tables import for_each

META = torch.device("meta")


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True, slots=True)
class Fields:
    x: object
    y: object = None


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


# Shards of a batch


@given(samples=st.integers(1, 20), shards=st.integers(1, 25), data=st.data())
def test_the_shards_together_are_the_batch(samples: int, shards: int, data: st.DataObject) -> None:
    batch = data.draw(nested(samples))
    cut = cut_batch(batch, Plan((shards,)), range(shards))
    assert cut.samples == samples
    assert sorted(cut.shards) == list(range(min(samples, shards)))
    parts = [cut.shards[shard] for shard in sorted(cut.shards)]

    def check(tensors: list[torch.Tensor]) -> None:
        assert torch.equal(torch.cat(tensors[1:]), tensors[0])
        assert [len(part) for part in tensors[1:]] == [cut.size_of(s) for s in sorted(cut.shards)]

    zipped(check, batch, *parts)
    assert -(2**63) <= batch_digest(batch) < 2**63


@given(samples=st.integers(1, 20), shards=st.integers(1, 25))
def test_another_dimension_is_cut_like_the_first(samples: int, shards: int) -> None:
    x = torch.arange(3 * samples * 2).view(3, samples, 2)
    batch = {"x": x, "y": x.numpy()[..., 0]}
    cut = cut_batch(batch, Plan((shards,)), range(shards), dim=1)
    assert (cut.samples, cut.dim) == (samples, 1)
    parts: list[Any] = [cut.shards[shard] for shard in sorted(cut.shards)]
    assert torch.equal(torch.cat([part["x"] for part in parts], 1), x)
    assert torch.equal(torch.cat([part["y"] for part in parts], 1), x[..., 0])


def test_only_the_shards_asked_for_are_kept_and_nothing_is_copied() -> None:
    batch = torch.arange(7)
    cut = cut_batch(batch, Plan((1, 2)), [1, 2], epoch=4)
    assert {shard: list(part) for shard, part in cut.shards.items()} == {1: [3, 4], 2: [5, 6]}
    assert (cut.samples, cut.epoch, cut.plan) == (7, 4, Plan((1, 2)))
    assert cut.shards[1].data_ptr() == batch[3:].data_ptr()  # type: ignore[attr-defined]
    # It belongs to no loader.
    assert (cut.loader, cut.pass_number, cut.data_digest, cut.digest) == (-1, -1, 0, 0)


def test_containers_of_any_kind_keep_their_type() -> None:
    batch = OrderedDict(a=Fields(torch.arange(5)), b=Pair(torch.arange(5), np.arange(5)))
    part: Any = cut_batch(batch, Plan((2,)), [1]).shards[1]
    assert type(part) is OrderedDict
    assert isinstance(part["a"], Fields)
    assert part["a"].x.tolist() == part["b"].left.tolist() == part["b"].right.tolist() == [3, 4]
    assert part["a"].y is None


@for_each(
    ("batch", "error", "words"),
    [
        ((torch.ones(3), torch.ones(2)), ValueError, r"batch\[0\] has 3, batch\[1\] has 2"),
        (
            {"x": [np.ones(3), torch.ones(3)], "y": torch.ones(4)},
            ValueError,
            r"batch\['x'\]\[0\] has 3, batch\['x'\]\[1\] has 3, batch\['y'\] has 4",
        ),
        (Pair(torch.ones(1), (torch.ones(2),)), ValueError, r"\[0\] has 1, batch\[1\]\[0\] has 2"),
        (torch.tensor(1.0), ValueError, "batch is a scalar tensor: expected a first dimension of"),
        ([np.ones(2), np.ones(())], ValueError, r"batch\[1\] is a scalar tensor"),
        ({"x": ()}, ValueError, "holds no tensor"),
        (np.float32(3), TypeError, "batch: expected a tensor or NumPy array.* got float32"),
        ((torch.ones(3), 5), TypeError, r"batch\[1\]: expected a tensor .* got int"),
        ({"a": Fields(torch.ones(2), "text")}, TypeError, r"batch\['a'\].y: expected .* got str"),
        ([torch.ones(3), None], TypeError, r"batch\[1\]: .* got NoneType. Use trainer.loader"),
        ({1, 2}, TypeError, "batch: .* got set"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_explained(
    batch: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        cut_batch(batch, Plan((2,)), range(2))


# Arrays


def test_a_step_takes_arrays() -> None:
    inputs, targets = points(10)
    trainers = [make_trainer(), make_trainer()]
    for _ in range(3):
        trainers[0].step((inputs, targets))
        trainers[1].step((inputs.numpy(), targets))
    assert bits(trainers[0].model) == bits(trainers[1].model)


@for_each(
    "dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
)
@for_each("order", ["<", ">"])
def test_arrays_of_every_dtype_that_tensors_have(dtype: str, order: str) -> None:
    array = np.arange(6).astype(dtype).astype(np.dtype(dtype).newbyteorder(order))
    part = cut_batch(array, Plan((2,)), [1]).shards[1]
    assert isinstance(part, torch.Tensor)
    assert part.numpy().dtype == np.dtype(dtype)
    assert part.tolist() == array[3:].tolist()


def read_only() -> Any:
    array = np.arange(6.0)
    array.flags.writeable = False
    return array


BETWEEN_OTHERS = np.array([(1, n) for n in range(6)], dtype=[("a", "i1"), ("b", "<f4")])["b"]
SQUARE = np.arange(24.0).reshape(6, 4)


@for_each(
    ("array", "copied"),
    [
        *((array, False) for array in (SQUARE, SQUARE[::2], SQUARE.T, SQUARE[:, 1:3])),
        (read_only(), True),
        (np.arange(6.0)[::-1], True),
        (SQUARE[:, ::-1], True),
        (np.broadcast_to(np.arange(6.0), (6, 6)), True),
        (BETWEEN_OTHERS, True),
    ],
)
def test_arrays_are_copied_only_where_pytorch_cannot_use_them(array: Any, copied: bool) -> None:
    cut = cut_batch(array, Plan((2,)), range(2))
    parts: list[Any] = [cut.shards[shard].numpy() for shard in range(2)]  # type: ignore[attr-defined]
    assert np.array_equal(np.concatenate(parts), array)
    assert [np.shares_memory(part, array) for part in parts] == [not copied] * 2


@for_each(
    ("array", "words"),
    [
        (np.array(["a", "b"]), r"batch\['x'\]\[1\] is an array of <U1: expected numbers"),
        (np.array([{}, None]), r"batch\['x'\]\[1\] is an array of object: .* Use trainer.loader"),
        (np.zeros(2, "M8[s]"), r"is an array of datetime64\[s\]"),
        (np.zeros(2, [("a", "f4")]), r"is an array of \[\('a', '<f4'\)\]"),
        (np.zeros(2, np.longdouble), "is an array of float128"),
        (np.ma.masked_equal([1, 2], 2), r"batch\['x'\]\[1\] is a masked array"),
    ],
)
def test_arrays_of_what_no_tensor_holds_are_refused(array: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        cut_batch({"x": (torch.ones(2), array)}, Plan((2,)), range(2))


# Digests


def with_element(batch: torch.Tensor, index: int) -> torch.Tensor:
    """A copy in which one element is another."""
    copy = batch.clone()
    copy.view(-1)[index] += 1
    return copy


@given(n=st.integers(1, 300))
def test_up_to_64_elements_count_the_first_and_last_among_them(n: int) -> None:
    batch = torch.arange(float(n))
    one = batch_digest(batch)
    seen = [index for index in range(n) if batch_digest(with_element(batch, index)) != one]
    assert (seen[0], seen[-1]) == (0, n - 1)
    assert min(n, 32) <= len(seen) <= 64
    assert n > 62 or len(seen) == n


@for_each("width", [3, 28, 31, 62, 64, 224])
def test_the_elements_that_count_lie_in_many_columns(width: int) -> None:
    """A picture's margin is alike in most pictures."""
    for rows in (62, 64, 93, 128):
        batch = torch.zeros(rows, width)
        changed = [batch.index_fill(1, torch.tensor([c]), 1.0) for c in range(width)]
        assert len({batch_digest(each) for each in changed}) > min(width, 64) / 3


@for_each(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float8_e4m3fn),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    ],
)
def test_batches_of_every_dtype_have_digests(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(4, 2).to(dtype), torch.zeros(4, 2).to(dtype)
    assert batch_digest(ones) == batch_digest(ones.clone()) != batch_digest(zeros)
    assert batch_digest(ones.t()) == batch_digest(ones.t().contiguous())


X, Y = torch.ones(3), torch.zeros(3)


@for_each(
    ("one", "other", "same"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        ([X], {"x": X}, False),
        ({"x": X}, {"y": X}, False),
        ([X, Y], [Y, X], False),
        (Fields(X, Y), Fields(Y, X), False),
        (Fields(X, Y), {"x": X, "y": Y}, False),
        (torch.zeros(0, 2), torch.zeros(0, 3), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), False),
        (torch.zeros(2, device="meta"), torch.zeros(3, device="meta"), False),
        (np.zeros(2), np.ones(2), False),
        ({"x": X, "y": Y}, {"y": Y, "x": X}, True),
        (torch.ones(3, requires_grad=True), X, True),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta"), True),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), True),
        (np.arange(6)[::-1], np.arange(6)[::-1].copy(), True),
    ],
)
def test_batches_have_one_digest_if_they_are_alike(one: object, other: object, same: bool) -> None:
    assert (batch_digest(one) == batch_digest(other)) is same


def test_a_digest_is_that_of_the_whole_batch_on_every_device_and_process() -> None:
    batch = {"x": torch.arange(300.0).view(100, 3), "y": torch.arange(100)}
    assert batch_digest(batch) == -2772223197249777164
    for own in (0, 1):
        assert cut_batch(batch, Plan((1, 1)), [own], digest=True).digest == batch_digest(batch)
    with pytest.raises(TypeError, match=r"batch\[1\]: expected a tensor .* got int"):
        batch_digest((X, 5))


# Moving


class Moved:
    """Moves itself, in one of the ways in which libraries do."""

    def __init__(self, *, way: str) -> None:
        self.way, self.at = way, torch.ones(2)

    def to(self, device: torch.device) -> Moved | None:
        if self.way == "a new one":
            new = Moved(way=self.way)
            new.at = self.at.to(device)
            return new
        self.at = self.at.to(device)
        return self if self.way == "itself" else None


class Own(NamedTuple):
    """A named tuple that knows what must stay on the host."""

    values: torch.Tensor
    lengths: torch.Tensor

    def to(self, device: torch.device) -> Own:
        return Own(self.values.to(device), self.lengths)


@dataclass(frozen=True)
class Edges:
    """Of a graph: a field, and no method, is called ``to``."""

    of: torch.Tensor
    to: torch.Tensor | None = None


def test_moving_takes_tensors_along_and_leaves_the_rest() -> None:
    array = np.ones(3)
    batch = OrderedDict(
        a=Fields(torch.ones(2), "text"),
        b=[{"c": torch.ones(1)}, array],
        c=Pair(Edges(torch.ones(2), torch.ones(2)), Edges),
    )
    moved: Any = move(batch, META)
    assert (type(moved), type(moved["c"])) == (OrderedDict, Pair)
    edges = moved["c"].left
    tensors = (moved["a"].x, moved["b"][0]["c"], edges.of, edges.to)
    assert {tensor.device for tensor in tensors} == {META}
    assert (moved["a"].y, moved["b"][1], moved["c"].right) == ("text", array, Edges)
    assert batch["a"].x.device.type == "cpu"  # type: ignore[union-attr]


@for_each("way", ["a new one", "itself", "nothing"])
def test_an_object_is_moved_by_its_own_method(way: str) -> None:
    moved: Any = move({"a": [Moved(way=way)]}, META)
    assert isinstance(moved["a"][0], Moved)
    assert moved["a"][0].at.device == META


def test_a_tuple_with_a_method_of_its_own_is_moved_by_it() -> None:
    moved: Any = move(Own(torch.ones(2), torch.ones(2)), META)
    assert (moved.values.device.type, moved.lengths.device.type) == ("meta", "cpu")
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert type(move(packed, torch.device("cpu"))) is type(packed)


def test_on_a_gpu_shards_begin_where_copies_do() -> None:
    room = torch.zeros(4096, dtype=torch.uint8)
    start = -room.data_ptr() % 512
    whole = room[start : start + 1536].view(torch.float32).view(32, 12)
    for other in (whole[1:], whole[:, :8], whole[:3, 1:]):
        copied = as_if_copied(other)
        assert copied.data_ptr() != other.data_ptr()
        assert torch.equal(copied, other)
        assert copied.stride() == torch.empty_like(other).stride()
    assert as_if_copied(whole[:8]).data_ptr() == whole.data_ptr()
    for same in (whole, whole[:0], whole.to_sparse()):
        assert as_if_copied(same) is same
