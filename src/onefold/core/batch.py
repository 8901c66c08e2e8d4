"""A global batch, cut into shards.

A batch of the script's own may hold NumPy arrays beside tensors. Their shards are tensors that
share the arrays' memory wherever PyTorch can use that memory as it is.

Note: the digest of a batch
---------------------------
Devices compare the batches of a script before each step, so the digest has to be far cheaper than a
step: it reads at most 64 elements of each tensor. It exists to catch a batch that was drawn
differently (another seed, one random number too many on the lead), where nearly every element
differs, and not a single wrong value. The places that it reads are a function of the shape alone,
so devices that hold equal tensors read equal elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any
from zlib import adler32, crc32

import numpy as np
import torch

from onefold.core.counting import Count, count_of
from onefold.core.shard import Plan, cut_bounds
from onefold.core.structure import has_fields, parts_of, with_parts

__all__ = [
    "DataPass",
    "ShardedBatch",
    "as_if_copied",
    "batch_digest",
    "checked_dim",
    "cut_batch",
    "move",
]

_Leaf = torch.Tensor | np.ndarray[Any, Any]

_SPREAD = 62
"""The most steps between the first and the last element that a digest reads."""
_NAMED = 8
"""The most samples, or tensors, that an error lists."""
_FRESH_BYTES = 512
"""On a GPU PyTorch begins every tensor of its own at a multiple of it."""
_SAME_WIDTH = {
    torch.bfloat16: torch.int16,
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""For each dtype that NumPy lacks, one of the same width that it can read instead."""
_TENSOR_KINDS = frozenset(
    np.dtype(name)
    for name in (
        "bool",
        "u1",
        "u2",
        "u4",
        "u8",
        "i1",
        "i2",
        "i4",
        "i8",
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
    )
)
"""The array dtypes that `torch.from_numpy` accepts."""


@dataclass(slots=True)
class DataPass:
    """One pass of a loader over its data set."""

    number: int
    """Number of the pass among those of its loader."""
    used: int
    """How many of its samples have been used by steps so far; or of its batches, if it has whole
    batches alone. The places below are counted alike."""
    epoch: int | None
    """The epoch in which it was begun; None outside of any epoch."""
    end: int
    """How many of its samples will have been used once all of its batches are."""
    given: int = 0
    """How many of its samples have been handed out."""
    over: bool = False
    """Whether it has ended, so that no more batches come from it."""
    broken_off: bool = False
    """Whether it ended before its last batch."""
    abandoned: bool = False
    """Whether the run was moved elsewhere meanwhile, so that its batches must not be used."""
    order: str = ""
    """Digest of the order that a sampler gave; empty if the order follows from the seed alone."""
    states: dict[int, object] = field(default_factory=dict)
    """Where a stream stood at places of the pass, from the last used one on, if it says so."""


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The shards of one batch that this process runs; what a loader yields and ``step`` takes."""

    samples: int
    """Number of samples in the whole batch, over all devices."""
    plan: Plan
    """Who runs which shard of this batch."""
    shards: Mapping[int, object] = field(repr=False)
    """The collated samples of each shard, by shard number; empty shards are left out."""
    epoch: int = 0
    """Number of the pass over the data that it belongs to."""
    waited: tuple[float, float] | None = field(default=None, repr=False, compare=False)
    """When the wait for a loader began and ended, in seconds on the host's clock."""
    data_pass: DataPass | None = field(default=None, repr=False, compare=False)
    """The loader's pass that it belongs to, if a loader made it."""
    stop: int = 0
    """How many samples of that pass will have been used after this batch."""
    loader: int = -1
    """Number of the loader that made it; -1 for a batch of the script's own."""
    data_digest: int = 0
    """Digest of the data set, equal where the data are equal; 0 where no loader computed one."""
    numbers: Mapping[int, Sequence[int]] = field(default_factory=dict, repr=False, compare=False)
    """The numbers of the samples in the data set, for each shard that this process has read."""
    digest: int = 0
    """`batch_digest` of a batch of the script's own, where that was asked for."""
    dim: int = 0
    """The dimension of its tensors in which the samples lie."""

    @property
    def pass_number(self) -> int:
        """Number of the loader's pass that the batch belongs to; -1 if no loader made it."""
        return -1 if self.data_pass is None else self.data_pass.number

    @property
    def sizes(self) -> list[int]:
        """Number of samples in each shard, (V,)."""
        return [stop - start for start, stop in cut_bounds(self.samples, self.plan.shards)]

    def describe(self, shard: int) -> str:
        """Name a shard's samples, for errors."""
        start, stop = cut_bounds(self.samples, self.plan.shards)[shard]
        words = f"samples {start} to {stop - 1} of the batch"
        numbers = list(map(str, self.numbers.get(shard, ())))
        if numbers:
            more = ", ..." if len(numbers) > _NAMED else ""
            words += f", which are {', '.join(numbers[:_NAMED])}{more} of the data set"
        return words

    def size_of(self, shard: int) -> int:
        """Number of samples in one shard."""
        # The sizes of `cut_bounds`, without a tuple of all V bounds for one of them.
        size, longer = divmod(self.samples, self.plan.shards)
        return size + (shard < longer)

    def count_of(self, shard: int) -> Count:
        """How many samples of a shard ``collate`` has left, if this process has read it."""
        size = self.size_of(shard)
        # A batch of the script's own was cut by these sizes.
        if self.data_pass is None or shard not in self.shards:
            return Count(size)
        return count_of(self.shards[shard], size, self.dim)


def checked_dim(dim: object) -> int:
    """Refuse what is no dimension of samples.

    Raises:
        TypeError, ValueError: it is no number, or below 0.
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"expected dim to be a number, got {dim!r}")
    if dim < 0:
        raise ValueError(
            f"expected dim to be 0 or more, counted from the first dimension, as the tensors of a "
            f"batch may have several numbers of dimensions; got {dim}"
        )
    return dim


def cut_batch(
    batch: object,
    plan: Plan,
    shards_run: Iterable[int],
    epoch: int = 0,
    *,
    digest: bool = False,
    dim: int = 0,
) -> ShardedBatch:
    """Cut a whole batch along one dimension of its tensors.

    Args:
        batch: a tensor or a NumPy array (n, ...), or tuples, lists, mappings and dataclasses of
            them, which keep their type.
        plan: which device runs which shard.
        shards_run: the shards that this process keeps.
        epoch: number of the pass over the data that the batch belongs to.
        digest: whether to compute the batch's digest as well.
        dim: the dimension in which the samples lie.

    Raises:
        ValueError: the tensors disagree in length, lack the dimension, or there are none.
        TypeError: the batch holds something that is neither a tensor nor one of these containers,
            or an array of a dtype that PyTorch lacks.
    """
    # Every leaf is checked, and the length agreed on, before anything is cut: an error leaves
    # nothing half done. The same list serves the digest, so the batch is walked once.
    leaves = list(_leaves(batch, "batch"))
    samples = _common_length(leaves, dim)
    bounds = cut_bounds(samples, plan.shards)
    # A shard without samples is never run: a forward on zero rows would give NaN means.
    kept = {shard: bounds[shard] for shard in shards_run if bounds[shard][0] < bounds[shard][1]}
    shards = {
        shard: _map(batch, _slicer(start, stop, dim)) for shard, (start, stop) in kept.items()
    }
    return ShardedBatch(
        samples=samples,
        plan=plan,
        shards=shards,
        epoch=epoch,
        digest=_digest_of(leaves) if digest else 0,
        dim=dim,
    )


def batch_digest(batch: object) -> int:
    """Digest a batch into a signed 64-bit number, by which devices notice that theirs differ.

    It costs microseconds: it covers the structure, the shapes and dtypes, and of each tensor on the
    host at most 64 elements: the first, the last, and others spread evenly. So it detects a batch
    that was drawn differently, and not a single element that differs.

    Args:
        batch: as for `cut_batch`.

    Raises:
        TypeError: the batch holds something that `cut_batch` refuses.
    """
    return _digest_of(_leaves(batch, "batch"))


def move(payload: object, device: torch.device) -> object:
    """Move every tensor of a structure to ``device``, and leave anything else as it is.

    Containers keep their type. An object with a method ``to`` of its own is moved by it, unless it
    is a mapping.
    """
    # Non-blocking: it only takes effect for pinned memory, and kernels on the same stream wait for
    # the copy, so nobody can read the tensor too early.
    return _map(
        payload,
        lambda leaf: _moved(leaf, device),
        strict=False,
        alone=lambda value: _moved_by_itself(value, device),
    )


def as_if_copied(leaf: torch.Tensor) -> torch.Tensor:
    """Lay a tensor out as its copy on another GPU is: the tensor itself where it lies so already.

    cuBLAS and cuDNN choose their kernels by where memory begins, and others by strides. A slice of
    a batch on a GPU begins anywhere; the copy that another GPU gets of it does not.
    """
    if leaf.layout is not torch.strided or not leaf.numel():
        return leaf
    strides = torch.empty_like(leaf, device="meta").stride()
    alike = leaf.data_ptr() % _FRESH_BYTES == 0 and strides == leaf.stride()
    return leaf if alike else leaf.clone()


def _moved(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = leaf.to(device, non_blocking=True)
    return as_if_copied(leaf) if moved is leaf and device.type == "cuda" else moved


def _moved_by_itself(value: Any, device: torch.device) -> object:
    """Move an object by its own method, which may change it in place and return nothing."""
    moved = value.to(device)
    moved = value if moved is None else moved
    # What was there already may still be a slice of a whole batch.
    return moved if device.type == "cpu" else _map(moved, _laid_out, strict=False)


def _laid_out(leaf: torch.Tensor) -> torch.Tensor:
    return as_if_copied(leaf) if leaf.is_cuda else leaf


def _digest_of(leaves: Iterable[tuple[str, _Leaf]]) -> int:
    parts = [_kind(path, leaf.dtype, leaf.shape) + _spread(leaf) for path, leaf in leaves]
    # Equal dicts may hold their keys in different orders on different devices.
    parts.sort()
    text = b"".join(parts)
    # Two different checksums of 32 bits each: nobody forges a batch, and both are faster than any
    # cryptographic hash. The offset makes the number fit the signed fields of a head.
    return (crc32(text) << 32 | adler32(text)) - 2**63


@functools.lru_cache(maxsize=256)
def _kind(path: str, dtype: torch.dtype | np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    name = dtype if isinstance(dtype, torch.dtype) else dtype.str
    return f"{path} {name} {shape!s}".encode()


def _spread(leaf: _Leaf) -> bytes:
    """The bytes of a few elements; none if they do not lie on the host."""
    # Reading an element on a GPU would wait for all work queued there.
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_cpu or leaf.layout != torch.strided:
            return b""
        leaf = _as_array(leaf)
    if not leaf.size:
        return b""
    places = _places(leaf.size, leaf.shape[-1] if leaf.ndim > 1 else 1)
    if leaf.flags.c_contiguous:
        return leaf.take(places).tobytes()
    # `take` would first copy a whole array that is not contiguous; `flat` fetches single elements.
    return leaf.flat[places].tobytes()


@functools.lru_cache(maxsize=256)
def _places(size: int, columns: int) -> np.ndarray[Any, Any]:
    """The flat indices of the elements that are read, (at most 64,) int64."""
    step = (size - 1) // _SPREAD + 1
    # A step that shares a factor with the row length would visit a few columns only, such as the
    # black margin of a picture, where all batches are equal.
    while gcd(step, columns) > 1:
        step += 1
    return np.array([*range(0, size, step), size - 1])


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor on the host as an array in the same memory, where there is one."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):
        # The tensor requires a gradient, is lazily conjugated or negated, or has a dtype that NumPy
        # lacks. Trying first costs an ordinary tensor nothing.
        plain = tensor.detach().resolve_conj().resolve_neg()
        width = _SAME_WIDTH.get(plain.dtype)
        return plain.numpy() if width is None else plain.view(width).numpy()


def _slicer(start: int, stop: int, dim: int) -> Callable[[_Leaf], torch.Tensor]:
    place = (*[slice(None)] * dim, slice(start, stop))
    return lambda leaf: _as_tensor(leaf[place])


def _as_tensor(leaf: _Leaf) -> torch.Tensor:
    """A tensor in the same memory, or a copy where PyTorch cannot use that memory."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    # `from_numpy` warns about read-only arrays, and refuses foreign byte orders, negative strides,
    # and strides that are no multiple of the element size (a field of a structured array).
    usable = leaf.flags.writeable and leaf.dtype.isnative
    if usable and all(stride >= 0 and stride % leaf.itemsize == 0 for stride in leaf.strides):
        return torch.from_numpy(leaf)
    return torch.from_numpy(np.array(leaf, leaf.dtype.newbyteorder("="), order="C"))


def _checked_array(array: np.ndarray[Any, Any], path: str) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{path} is a masked array, and a tensor has no mask: give its data and mask"
        )
    if array.dtype.newbyteorder("=") not in _TENSOR_KINDS:
        raise TypeError(
            f"{path} is an array of {array.dtype}: expected numbers or booleans of a dtype that "
            f"PyTorch has. Use trainer.loader for anything else"
        )
    return array


def _common_length(leaves: Iterable[tuple[str, _Leaf]], dim: int) -> int:
    where = f"dimension {dim}" if dim else "first dimension"
    lengths: dict[str, int] = {}
    for path, leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(f"{path} is a scalar tensor: expected a {where} of samples")
        if leaf.ndim <= dim:
            raise ValueError(
                f"{path} has shape {tuple(leaf.shape)}: expected a dimension {dim}, counted from "
                f"0, in which the samples lie, as dim={dim} says of every tensor of the batch. "
                f"Give it one (of a time-major target that was flattened: target.view(time, n))"
            )
        lengths[path] = leaf.shape[dim]
    if not lengths:
        raise ValueError("the batch holds no tensor: expected a tensor, or containers of tensors")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {lengths[path]}" for path in list(lengths)[:_NAMED])
        more = ", ..." if len(lengths) > _NAMED else ""
        raise ValueError(
            f"the tensors of a batch must agree in their {where}: {listed}{more}. Tensors that "
            f"belong to one sample each, such as boxes, come from trainer.loader and its collate"
        )
    return next(iter(lengths.values()))


def _leaves(batch: object, path: str) -> Iterator[tuple[str, _Leaf]]:
    if isinstance(batch, torch.Tensor):
        yield path, batch
        return
    if isinstance(batch, np.ndarray):
        yield path, _checked_array(batch, path)
        return
    parts = parts_of(batch)
    if parts is None:
        raise TypeError(
            f"{path}: expected a tensor or NumPy array, or a tuple, list, dict, other mapping or "
            f"dataclass of them, got {type(batch).__name__}. Use trainer.loader for anything else: "
            f"its collate makes each shard's part"
        )
    for name, part in parts:
        # A dataclass has all its fields, and those that may be left out are None.
        if part is not None or not has_fields(batch):
            yield from _leaves(part, path + name)


def _map(
    batch: Any,
    change: Callable[[Any], torch.Tensor],
    *,
    strict: bool = True,
    alone: Callable[[Any], object] | None = None,
) -> object:
    """Change every tensor; ``alone`` changes objects with a method ``to`` as a whole."""
    if isinstance(batch, torch.Tensor) or (strict and isinstance(batch, np.ndarray)):
        return change(batch)
    kind = type(batch)
    # Nearly all are one of these; lists of texts may be long, and nobody asks for their paths.
    if kind is tuple or kind is list:
        return kind([_map(part, change, strict=strict, alone=alone) for part in batch])
    # Of the class: a field may be called so as well.
    itself = not isinstance(batch, Mapping) and callable(getattr(kind, "to", None))
    if alone is not None and itself:
        return alone(batch)
    parts = parts_of(batch)
    if parts is None:
        return batch
    return with_parts(batch, [_map(part, change, strict=strict, alone=alone) for _, part in parts])
