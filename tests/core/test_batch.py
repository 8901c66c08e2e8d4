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


@for_each(
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


@for_each(
    ("batch", "words"),
    [
        (np.float32(3), "batch: expected a tensor or NumPy array.* got float32"),
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


def test_moving_leaves_arrays_as_they_are() -> None:
    payload = [np.ones(3), torch.ones(3)]
    moved = move(payload, torch.device("meta"))
    assert isinstance(moved, list)
    assert moved[0] is payload[0]


def test_arrays_are_cut_like_tensors() -> None:
    x, y = np.arange(14, dtype=np.float32).reshape(7, 2), torch.arange(7)
    cut = cut_batch({"x": x, "more": Pair(y, [x[:, 0] > 5])}, Plan((3,)), range(3))
    tensors = cut_batch(
        {"x": torch.tensor(x), "more": Pair(y, [torch.tensor(x[:, 0] > 5)])}, Plan((3,)), range(3)
    )

    def check(pair: list[torch.Tensor]) -> None:
        assert torch.equal(*pair)
        assert pair[0].dtype == pair[1].dtype

    assert cut.samples == 7
    for shard in range(3):
        zipped(check, cut.shards[shard], tensors.shards[shard])


@for_each(
    "dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
)
@for_each("order", ["<", ">"])
def test_arrays_of_every_dtype_that_tensors_have(dtype: str, order: str) -> None:
    array = np.arange(6).astype(dtype).astype(np.dtype(dtype).newbyteorder(order))
    part = cut_batch(array, Plan((2,)), [1]).shards[1]
    assert isinstance(part, torch.Tensor)
    assert part.tolist() == array[3:].tolist()


def test_arrays_are_not_copied_where_pytorch_can_use_them() -> None:
    array = np.arange(24.0).reshape(6, 4)
    for each in (array, array[::2], array.T, array[:, 1:3]):
        part = cut_batch(each, Plan((1,)), [0]).shards[0]
        assert isinstance(part, torch.Tensor)
        assert np.shares_memory(part.numpy(), each)
        assert np.array_equal(part.numpy(), each)


def test_a_step_takes_arrays() -> None:
    inputs, targets = points(10)
    trainers = [make_trainer(), make_trainer()]
    for _ in range(3):
        trainers[0].step((inputs, targets))
        trainers[1].step((inputs.numpy(), targets))
    assert bits(trainers[0].model) == bits(trainers[1].model)


def read_only() -> Any:
    array = np.arange(6.0)
    array.flags.writeable = False
    return array


def between_others() -> Any:
    """Numbers of which not a whole number of them lies between one and the next."""
    return np.array([(1, n) for n in range(6)], dtype=[("a", "i1"), ("b", "<f4")])["b"]


@for_each(
    "array",
    [
        read_only(),
        np.arange(6.0)[::-1],
        np.arange(12).reshape(6, 2)[:, ::-1],
        np.broadcast_to(np.arange(6.0), (6, 6)),
        between_others(),
    ],
    ids=["read-only", "backwards", "columns backwards", "broadcast", "between others"],
)
def test_arrays_that_pytorch_cannot_use_are_copied(array: Any) -> None:
    cut = cut_batch(array, Plan((2,)), range(2))
    parts = [cut.shards[shard] for shard in range(2)]
    assert all(isinstance(part, torch.Tensor) for part in parts)
    assert np.array_equal(np.concatenate([part.numpy() for part in parts]), array)  # type: ignore[attr-defined]
    assert not any(np.shares_memory(part.numpy(), array) for part in parts)  # type: ignore[attr-defined]


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
    ids=["text", "objects", "dates", "fields", "long", "masked"],
)
def test_arrays_of_what_no_tensor_holds_are_refused(array: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        cut_batch({"x": (torch.ones(2), array)}, Plan((2,)), range(2))


@for_each(
    ("batch", "words"),
    [
        ((np.ones(3), torch.ones(2)), r"batch\[0\] has 3, batch\[1\] has 2"),
        ({"x": np.ones(())}, r"batch\['x'\] is a scalar tensor"),
    ],
)
def test_arrays_must_agree_as_tensors_must(batch: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut_batch(batch, Plan((2,)), range(2))


def test_a_batch_of_ones_own_belongs_to_no_loader() -> None:
    cut = cut_batch(torch.ones(3), Plan((1,)), [0])
    assert (cut.loader, cut.pass_number, cut.data_digest, cut.digest) == (-1, -1, 0, 0)


def test_a_batch_is_cut_with_its_digest_where_it_is_wanted() -> None:
    batch = {"x": torch.randn(5, 2), "y": np.arange(5)}
    digests = {cut_batch(batch, Plan((1, 1)), [own], digest=True).digest for own in (0, 1)}
    assert digests == {batch_digest(batch)} != {0}


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
    assert seen[0] == 0
    assert seen[-1] == n - 1
    assert min(n, 32) <= len(seen) <= 64
    assert n > 62 or len(seen) == n


@for_each("width", [3, 28, 31, 62, 63, 64, 93, 224, 256])
def test_the_elements_that_count_lie_in_many_columns(width: int) -> None:
    """A picture's margin is alike in most pictures."""
    for rows in (62, 63, 64, 93, 124, 128):
        batch = torch.zeros(rows, width)
        changed = [batch.index_fill(1, torch.tensor([c]), 1.0) for c in range(width)]
        digests = {batch_digest(each) for each in changed}
        assert len(digests) > min(width, 64) / 3


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


@for_each(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        ([torch.zeros(2)], {"x": torch.zeros(2)}),
        ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
        ([torch.zeros(2), torch.ones(2)], [torch.ones(2), torch.zeros(2)]),
        (torch.zeros(0, 2), torch.zeros(0, 3)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
        (np.zeros(2), np.ones(2)),
    ],
)
def test_batches_that_differ_have_other_digests(one: object, other: object) -> None:
    assert batch_digest(one) != batch_digest(other)


@for_each(
    ("one", "other"),
    [
        ({"x": torch.zeros(2), "y": torch.ones(2)}, {"y": torch.ones(2), "x": torch.zeros(2)}),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        (np.arange(6)[::-1], np.arange(6)[::-1].copy()),
    ],
    ids=["keys", "gradient", "elsewhere", "sparse", "strides"],
)
def test_batches_that_are_alike_have_one_digest(one: object, other: object) -> None:
    assert batch_digest(one) == batch_digest(other)


@given(samples=st.integers(0, 20), data=st.data())
def test_a_digest_is_a_number_of_64_bits(samples: int, data: st.DataObject) -> None:
    assert -(2**63) <= batch_digest(data.draw(nested(samples))) < 2**63


def test_a_batch_of_something_else_has_no_digest() -> None:
    with pytest.raises(TypeError, match=r"batch\[1\]: expected a tensor .* got int"):
        batch_digest((torch.ones(3), 5))


def test_a_digest_does_not_depend_on_the_process() -> None:
    batch = {"x": torch.arange(300.0).view(100, 3), "y": torch.arange(100)}
    assert batch_digest(batch) == -2772223197249777164


def test_on_a_gpu_shards_begin_where_copies_do() -> None:
    room = torch.zeros(4096, dtype=torch.uint8)
    start = -room.data_ptr() % 512
    whole = room[start : start + 1536].view(torch.float32).view(32, 12)
    assert as_if_copied(whole) is whole
    for other in (whole[1:], whole[:, :8], whole[:3, 1:]):
        copied = as_if_copied(other)
        assert copied.data_ptr() != other.data_ptr()
        assert torch.equal(copied, other)
        assert copied.stride() == torch.empty_like(other).stride()
    assert as_if_copied(whole[:8]).data_ptr() == whole.data_ptr()
    empty, sparse = whole[:0], whole.to_sparse()
    assert as_if_copied(empty) is empty
    assert as_if_copied(sparse) is sparse


# Containers of other kinds, and other dimensions


@dataclass(frozen=True, slots=True)
class Fields:
    x: object
    y: object = None


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


def test_other_containers_are_cut_and_keep_their_type() -> None:
    batch = OrderedDict(a=Fields(torch.arange(5)), b=Pair(torch.arange(5), np.arange(5)))
    part: Any = cut_batch(batch, Plan((2,)), [1]).shards[1]
    assert type(part) is OrderedDict
    assert isinstance(part["a"], Fields)
    assert part["a"].x.tolist() == part["b"].left.tolist() == part["b"].right.tolist() == [3, 4]
    assert part["a"].y is None


def test_a_field_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(TypeError, match=r"batch\['a'\].y: expected a tensor .* got str"):
        cut_batch({"a": Fields(torch.ones(2), "text")}, Plan((2,)), range(2))


def test_the_digest_sees_fields() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    digests = [batch_digest(b) for b in (Fields(x, y), Fields(y, x), Fields(x), {"x": x, "y": y})]
    assert len(set(digests)) == 4


def test_moving_keeps_types_and_leaves_the_first_as_it_is() -> None:
    meta = torch.device("meta")
    batch = OrderedDict(a=Fields(torch.ones(2), "text"), b=[{"c": torch.ones(1)}])
    moved: Any = move(batch, meta)
    assert type(moved) is OrderedDict
    assert moved["a"].x.device == moved["b"][0]["c"].device == meta
    assert moved["a"].y == "text"
    assert batch["a"].x.device.type == "cpu"  # type: ignore[attr-defined]


@for_each("way", ["a new one", "itself", "nothing"])
def test_an_object_is_moved_by_its_own_method(way: str) -> None:
    moved: Any = move({"a": [Moved(way=way)]}, torch.device("meta"))
    assert isinstance(moved["a"][0], Moved)
    assert moved["a"][0].at.device.type == "meta"


def test_a_tuple_with_a_method_of_its_own_is_moved_by_it() -> None:
    moved: Any = move(Own(torch.ones(2), torch.ones(2)), torch.device("meta"))
    assert (moved.values.device.type, moved.lengths.device.type) == ("meta", "cpu")
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert type(move(packed, torch.device("cpu"))) is type(packed)


@dataclass(frozen=True)
class Edges:
    """Of a graph."""

    of: torch.Tensor
    to: torch.Tensor | None = None


def test_a_field_of_that_name_is_no_method() -> None:
    moved: Any = move([Edges(torch.ones(2), torch.ones(2)), Edges], torch.device("meta"))
    assert moved[0].of.device.type == moved[0].to.device.type == "meta"
    assert moved[1] is Edges


@given(samples=st.integers(1, 20), shards=st.integers(1, 25))
def test_another_dimension_is_cut_like_the_first(samples: int, shards: int) -> None:
    x = torch.arange(3 * samples * 2).view(3, samples, 2)
    batch = {"x": x, "y": x.numpy()[..., 0]}
    cut = cut_batch(batch, Plan((shards,)), range(shards), dim=1)
    assert (cut.samples, cut.dim) == (samples, 1)
    parts: list[Any] = [cut.shards[shard] for shard in sorted(cut.shards)]
    assert torch.equal(torch.cat([part["x"] for part in parts], 1), x)
    assert torch.equal(torch.cat([part["y"] for part in parts], 1), x[..., 0])
