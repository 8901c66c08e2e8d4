"""Batches: containers of any kind, cut into shards, moved, and known by their digests."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.core.batch import as_if_copied, cut_batch, move
from onefold.core.shard import Shares
from onefold.core.structure import Count, count_of, parts_of
from tests.tables import for_each

META = torch.device("meta")
HALVES = Shares((2,))


class Pair(NamedTuple):
    left: object
    right: object


@dataclass(frozen=True, slots=True)
class Fields:
    x: object
    y: object = None


class Encoding(UserDict[str, object]):
    def __init__(self, data: dict[str, object], *, kept: str) -> None:
        super().__init__(data)
        self.kept = kept


@given(samples=st.integers(1, 20), shards=st.integers(1, 25), dim=st.integers(0, 1))
def test_the_shards_together_are_the_batch(samples: int, shards: int, dim: int) -> None:
    x = torch.arange(6 * samples).view((samples, 3, 2) if dim == 0 else (3, samples, 2))
    batch = {"x": [x, (x.numpy()[..., 0],)], "y": Pair(x + 1, x)}
    cut = cut_batch(batch, Shares((shards,)), range(shards), dim=dim)
    assert (cut.samples, cut.dim) == (samples, dim)
    assert sorted(cut.shards) == list(range(min(samples, shards)))
    parts: list[Any] = [cut.shards[shard] for shard in sorted(cut.shards)]
    assert [part["y"].right.shape[dim] for part in parts] == [*map(cut.size_of, sorted(cut.shards))]
    assert torch.equal(torch.cat([part["x"][0] for part in parts], dim), x)
    assert torch.equal(torch.cat([part["x"][1][0] for part in parts], dim), x[..., 0])
    assert torch.equal(torch.cat([part["y"].left for part in parts], dim), x + 1)
    assert -(2**63) <= batch_digest(batch) < 2**63


NUMBERS = torch.arange(5)


def test_containers_of_any_kind_keep_their_type() -> None:
    for container in (
        [NUMBERS, NUMBERS],
        {"a": NUMBERS, "b": NUMBERS},
        Pair(NUMBERS, NUMBERS.numpy()),
        Fields(NUMBERS, NUMBERS),
        OrderedDict(b=NUMBERS, a=NUMBERS),
        defaultdict[str, Any](list, a=NUMBERS, b=NUMBERS),
        Encoding({"a": NUMBERS, "b": NUMBERS}, kept="more"),
        MappingProxyType({"a": NUMBERS, "b": NUMBERS}),
    ):
        before = [part is NUMBERS for _, part in parts_of(container) or ()]
        part: Any = cut_batch([container], HALVES, [1]).shards[1][0]  # type: ignore[index]
        moved = move(container, META)
        assert type(part) is type(moved) is type(container)
        assert getattr(part, "kept", "more") == "more"
        assert [values.tolist() for _, values in parts_of(part) or ()] == [[3, 4]] * 2
        inside = [*(parts_of(moved) or ())]
        assert [path for path, _ in parts_of(part) or ()] == [path for path, _ in inside]
        assert {values.device for _, values in inside if torch.is_tensor(values)} == {META}
        assert [part is NUMBERS for _, part in parts_of(container) or ()] == before


def test_only_the_shards_asked_for_are_kept_and_nothing_is_copied() -> None:
    batch = torch.arange(7)
    cut = cut_batch(batch, Shares((1, 2)), [1, 2], epoch=4)
    shards: Mapping[int, Any] = cut.shards
    assert {shard: list(part) for shard, part in shards.items()} == {1: [3, 4], 2: [5, 6]}
    assert (cut.samples, cut.epoch, cut.loader, cut.digest) == (7, 4, -1, 0)
    assert cut.shards[1].data_ptr() == batch[3:].data_ptr()  # type: ignore[attr-defined]


ONES = torch.ones(2)


def test_a_batch_that_cannot_be_cut_is_explained() -> None:
    for batch, words in (
        ((torch.ones(3), ONES), r"batch\[0\] has 3, batch\[1\] has 2"),
        ({"x": [np.ones(3)], "y": torch.ones(4)}, r"batch\['x'\]\[0\] has 3, batch\['y'\] has 4"),
        (torch.tensor(1.0), "batch is a scalar tensor, but it needs a first dimension of"),
        ([np.ones(2), np.ones(())], r"batch\[1\] is a scalar tensor"),
        ({"x": ()}, "the batch contains no tensor"),
        (np.float32(3), "batch must be a tensor or NumPy array.* got float32"),
        ((ONES, 5), r"batch\[1\] must be a tensor .* got int"),
        ({"a": Fields(ONES, "text")}, r"batch\['a'\].y must be .* got str"),
        ([ONES, None], r"batch\[1\] must be .* got NoneType. For anything else use trainer.loader"),
        (
            [ONES, np.array(["a", "b"])],
            r"batch\[1\] is an array of <U1, but PyTorch has no such dtype",
        ),
        ([np.array([{}, None])], r"batch\[0\] is an array of object, .* or use trainer.loader"),
        ([np.zeros(2, np.longdouble)], "is an array of float128"),
        ([np.ma.masked_equal([1, 2], 2)], r"batch\[0\] is a masked array"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            cut_batch(batch, HALVES, range(2))


@for_each("dtype", [*"?bBhHiIlLefdFD"])
def test_arrays_of_every_dtype_that_tensors_have(dtype: str) -> None:
    for order in ("<", ">"):
        array = np.arange(6).astype(dtype).astype(np.dtype(dtype).newbyteorder(order))
        part: Any = cut_batch(array, HALVES, [1]).shards[1]
        assert part.numpy().dtype == np.dtype(dtype)
        assert part.tolist() == array[3:].tolist()


BETWEEN_OTHERS = np.array([(1, n) for n in range(6)], dtype=[("a", "i1"), ("b", "<f4")])["b"]
SQUARE = np.arange(24.0).reshape(6, 4)


def test_arrays_are_copied_only_where_pytorch_cannot_use_them() -> None:
    for array, copied in (
        *((array, False) for array in (SQUARE, SQUARE[::2], SQUARE.T, SQUARE[:, 1:3])),
        (np.frombuffer(np.arange(6.0).tobytes()), True),  # which nobody may write to
        (np.arange(6.0)[::-1], True),
        (SQUARE[:, ::-1], True),
        (np.broadcast_to(np.arange(6.0), (6, 6)), True),
        (BETWEEN_OTHERS, True),
    ):
        cut = cut_batch(array, HALVES, range(2))
        parts: list[Any] = [cut.shards[shard].numpy() for shard in range(2)]  # type: ignore[attr-defined]
        assert np.array_equal(np.concatenate(parts), array)
        assert [np.shares_memory(part, array) for part in parts] == [not copied] * 2


def batch_digest(batch: object) -> int:
    return cut_batch(batch, Shares((1,)), (), digest=True).digest


@given(n=st.integers(1, 300))
def test_up_to_64_elements_count_the_first_and_last_among_them(n: int) -> None:
    batch = torch.arange(float(n))
    one = batch_digest(batch)
    seen = [i for i in range(n) if batch_digest(batch + torch.eye(n)[i]) != one]
    assert (seen[0], seen[-1]) == (0, n - 1)
    assert min(n, 32) <= len(seen) <= 64
    assert n > 62 or len(seen) == n


X, Y = torch.ones(3), torch.zeros(3)


def test_batches_have_one_digest_if_they_are_alike() -> None:
    different: list[object] = [
        *(X, Y, Y.int(), [X], {"x": X}, {"y": X}, [X, Y], [Y, X], Fields(X, Y), Fields(Y, X)),
        *({"x": X, "y": Y}, torch.zeros(2, 3), torch.zeros(3, 2)),
        *(torch.zeros(0, 2), torch.zeros(0, 3), torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
        *(torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
    ]
    assert len({batch_digest(batch) for batch in different}) == len(different)
    alike: list[tuple[object, object]] = [
        ({"x": X, "y": Y}, {"y": Y, "x": X}),
        (torch.ones(3, requires_grad=True), X),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        (np.arange(6)[::-1], np.arange(6)[::-1].copy()),
    ]
    assert all(batch_digest(one) == batch_digest(other) for one, other in alike)


def test_a_digest_is_that_of_the_whole_batch_on_every_device_and_process() -> None:
    batch = {"x": torch.arange(300.0).view(100, 3), "y": torch.arange(100)}
    assert batch_digest(batch) == -2772223197249777164
    for own in (0, 1):
        assert cut_batch(batch, Shares((1, 1)), [own], digest=True).digest == batch_digest(batch)
    with pytest.raises(TypeError, match=r"batch\[1\] must be a tensor .* got int"):
        batch_digest((X, 5))


class Moved:
    def __init__(self, *, way: str) -> None:
        self.way, self.at = way, torch.ones(2)

    def to(self, device: torch.device) -> Moved | None:
        moved = Moved(way=self.way) if self.way == "a new one" else self
        moved.at = self.at.to(device)
        return None if self.way == "nothing" else moved


@for_each("way", ["a new one", "itself", "nothing"])
def test_an_object_is_moved_by_its_own_method(way: str) -> None:
    moved: Any = move({"a": [Moved(way=way)]}, META)
    assert isinstance(moved["a"][0], Moved)
    assert moved["a"][0].at.device == META
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert type(move(packed, torch.device("cpu"))) is type(packed)


def test_on_a_gpu_shards_begin_where_copies_do() -> None:
    room = torch.zeros(4096, dtype=torch.uint8)
    start = -room.data_ptr() % 512
    whole = room[start : start + 1536].view(torch.float32).view(32, 12)
    for other in (whole[1:], whole[:, :8]):
        copied = as_if_copied(other)
        assert copied.data_ptr() != other.data_ptr()
        assert copied.stride() == torch.empty_like(other).stride()
    assert as_if_copied(whole) is whole


@for_each("use", [len, lambda b: b[0], lambda b: [*b], lambda b: b.to("cpu"), lambda b: b.shape])
def test_a_batch_that_is_used_as_that_of_a_plain_loop_is_explained(
    use: Callable[[Any], object],
) -> None:
    batch = cut_batch((NUMBERS, NUMBERS), HALVES, [0])
    assert batch
    with pytest.raises((TypeError, AttributeError), match=r"Pass it to trainer\.step\(batch\) as"):
        use(batch)


# How many samples a payload holds


N, K, T, F = 8, 5, 3, 4
ALL, UNSURE = Count(N), Count(N, sure=False)


@dataclass
class Item:
    x: torch.Tensor
    y: torch.Tensor | None = None


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.zeros(count, *shape)


PICTURE, BOXES = rows(3, 4, 4), {"boxes": rows(2, 4)}
NESTED = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)


def test_samples_are_counted_where_that_is_possible() -> None:
    for payload, count in (
        # Some samples are left out.
        *((payload, Count(K)) for payload in (rows(K, F), np.zeros((K, F)), [rows(K, F)])),
        *((payload, Count(K)) for payload in ([rows(K, F), rows(K)], Item(rows(K, F)))),
        ([[rows(K, F), rows(K, 2)], rows(K)], Count(K)),
        ({"x": {"a": rows(K, F), "b": rows(K)}, "y": rows(K)}, Count(K)),
        ({"x": rows(K, F), "scale": torch.tensor(2.0), "name": "train"}, Count(K)),
        ([rows(0, F), rows(0)], Count(0)),
        (rows(1, F), Count(1)),
        ({"x": NESTED, "y": rows(2)}, Count(2)),
        # These may be all samples: packed, time first, a field of all, lists of samples.
        *((payload, ALL) for payload in (rows(N, F), rows(2 * N, F), rows(100))),
        *((payload, ALL) for payload in ([rows(T, N, F), rows(N)], {"x": rows(N), "w": rows(3)})),
        *((payload, ALL) for payload in (([PICTURE] * N, [BOXES] * N), [PICTURE] * N)),
        *((payload, ALL) for payload in ([(PICTURE, 1)] * N, [BOXES] * N, ["text"] * N)),
        # It cannot be told: time first, as many features, fields or samples.
        *((payload, UNSURE) for payload in ([rows(T, N, F), rows(T, N)], rows(K, N))),
        *((payload, UNSURE) for payload in ([PICTURE] * K, ([PICTURE] * K, [BOXES] * K))),
        *((payload, UNSURE) for payload in ([(PICTURE, 1)] * K, [(PICTURE, 1)], ["text"] * K)),
        *(
            (payload, UNSURE)
            for payload in ([rows(K, F), rows(K, F)], {"x": rows(T), "n": rows(K)})
        ),
    ):
        assert count_of(payload, N) == count


def test_the_dimension_of_samples_and_small_numbers_of_them() -> None:
    assert count_of([rows(T, N, F), rows(T, N)], N, dim=1) == ALL
    assert count_of([rows(T, K, F), rows(T, K)], N, dim=1) == Count(K)
    assert count_of([rows(1, F), rows(1)], 2) == Count(1)  # two fields are not two samples
    assert count_of([(PICTURE, rows(1))] * 2, 2) == count_of(NESTED, 2) == Count(2)
