"""A global batch, cut into shards.

A batch that a script cuts itself may hold NumPy arrays beside tensors. Their shards are tensors
that share the arrays' memory, where PyTorch can use it as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any
from zlib import adler32, crc32

import numpy as np
import torch

from onefold.core.shard import Plan, cut_bounds

__all__ = ["DataPass", "ShardedBatch", "batch_digest", "cut_batch", "move"]

_Leaf = torch.Tensor | np.ndarray[Any, Any]

_SPREAD = 62
"""At most so many steps lie between the first and the last element that a digest reads."""
_SAME_WIDTH = {
    torch.bfloat16: torch.int16,
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""What NumPy reads the elements of a dtype as that it lacks."""
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
"""Dtypes of arrays that `torch.from_numpy` takes."""


@dataclass(slots=True)
class DataPass:
    """One pass of a loader over its data set."""

    number: int
    """Which pass of the run it is."""
    used: int
    """How many of its samples the steps so far have used."""
    epoch: int | None
    """The epoch that it was begun in; None for outside."""
    end: int
    """How many of its samples will have been used when all batches are."""
    given: int = 0
    """How many of its samples have been handed out."""
    over: bool = False
    """No more batches will come."""
    broken_off: bool = False
    """There would have been more."""
    abandoned: bool = False
    """The run went elsewhere meanwhile: its batches must not be used."""


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The shards of one batch that this process runs; what a loader yields and ``step`` takes."""

    samples: int
    """Samples of the whole batch, over all devices."""
    plan: Plan
    """Who runs which shard of this batch."""
    shards: Mapping[int, object] = field(repr=False)
    """Shard number to its collated samples; empty shards are left out."""
    epoch: int = 0
    """Which pass over the data it belongs to."""
    waited: tuple[float, float] | None = field(default=None, repr=False, compare=False)
    """From when to when a loader was waited for, in seconds on the host's clock."""
    data_pass: DataPass | None = field(default=None, repr=False, compare=False)
    """The loader's pass that it belongs to, if a loader made it."""
    stop: int = 0
    """How many samples of that pass are used once this batch is."""
    loader: int = -1
    """Number of the loader that made it; -1 if a script cut it itself."""
    data_digest: int = 0
    """Of the data set, alike where the data are; 0 where no loader computed it."""
    digest: int = 0
    """`batch_digest` of a batch that a script cut itself, where that was asked for."""

    @property
    def pass_number(self) -> int:
        """Number of the loader's pass that it belongs to; -1 if no loader made it."""
        return -1 if self.data_pass is None else self.data_pass.number

    @property
    def sizes(self) -> list[int]:
        """Samples of each shard."""
        return [stop - start for start, stop in cut_bounds(self.samples, self.plan.shards)]

    def divisor(self, weight: float) -> float:
        """What gradients are divided by in backward, before the whole batch's weight is known.

        Several shards: the samples are known before all forwards are, other weights only after.
        One shard: its ``weight`` is that of the batch.
        """
        return weight if self.plan.shards == 1 else float(self.samples)

    def size_of(self, shard: int) -> int:
        """Samples of one shard."""
        size, longer = divmod(self.samples, self.plan.shards)
        return size + (shard < longer)


def cut_batch(
    batch: object, plan: Plan, shards_run: Iterable[int], epoch: int = 0, *, digest: bool = False
) -> ShardedBatch:
    """Cut a whole batch along the first dimension of its tensors.

    Args:
        batch: a tensor or a NumPy array (n, ...), or tuples, lists and dicts of them.
        plan: who runs what.
        shards_run: the shards that this process keeps.
        epoch: which pass over the data it belongs to.
        digest: compute that of the batch as well.

    Raises:
        ValueError: the tensors disagree in length, or there is nothing to cut.
        TypeError: it holds something that is neither a tensor nor one of these containers, or an
            array of what no tensor holds.
    """
    leaves = list(_leaves(batch, "batch"))
    samples = _common_length(leaves)
    bounds = cut_bounds(samples, plan.shards)
    kept = {shard: bounds[shard] for shard in shards_run if bounds[shard][0] < bounds[shard][1]}
    shards = {shard: _map(batch, _slicer(start, stop)) for shard, (start, stop) in kept.items()}
    return ShardedBatch(
        samples=samples,
        plan=plan,
        shards=shards,
        epoch=epoch,
        digest=_digest_of(leaves) if digest else 0,
    )


def batch_digest(batch: object) -> int:
    """A number of 64 bits with a sign, by which devices can tell whether they have the same batch.

    It costs microseconds: structure, shapes and dtypes count, and of each tensor on the host at
    most 64 elements, the first, the last, and others spread evenly. So it finds a batch that was
    drawn otherwise, and not one element that differs.

    Args:
        batch: as for `cut_batch`.

    Raises:
        TypeError: it holds something else.
    """
    return _digest_of(_leaves(batch, "batch"))


def move(payload: object, device: torch.device) -> object:
    """The same structure with every tensor on ``device``; anything else is left as it is."""
    return _map(payload, lambda leaf: leaf.to(device, non_blocking=True), strict=False)


def _digest_of(leaves: Iterable[tuple[str, _Leaf]]) -> int:
    parts = [_kind(path, leaf.dtype, leaf.shape) + _spread(leaf) for path, leaf in leaves]
    parts.sort()  # dicts that are alike may have their keys in another order
    text = b"".join(parts)
    return (crc32(text) << 32 | adler32(text)) - 2**63


@functools.lru_cache(maxsize=256)
def _kind(path: str, dtype: torch.dtype | np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    name = dtype if isinstance(dtype, torch.dtype) else dtype.str
    return f"{path} {name} {shape!s}".encode()


def _spread(leaf: _Leaf) -> bytes:
    """The bytes of a few elements; none if they lie on another device."""
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_cpu or leaf.layout != torch.strided:
            return b""
        leaf = _as_array(leaf)
    if not leaf.size:
        return b""
    places = _places(leaf.size, leaf.shape[-1] if leaf.ndim > 1 else 1)
    if leaf.flags.c_contiguous:
        return leaf.take(places).tobytes()
    return leaf.flat[places].tobytes()  # without copying all


@functools.lru_cache(maxsize=256)
def _places(size: int, columns: int) -> np.ndarray[Any, Any]:
    """Where among the elements of an array those are that are looked at."""
    step = (size - 1) // _SPREAD + 1
    while gcd(step, columns) > 1:
        step += 1  # or all elements might lie in a few columns, such as a picture's margin
    return np.array([*range(0, size, step), size - 1])


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array in the same memory."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # it has a gradient, or a dtype that NumPy lacks
        plain = tensor.detach().resolve_conj().resolve_neg()
        width = _SAME_WIDTH.get(plain.dtype)
        return plain.numpy() if width is None else plain.view(width).numpy()


def _slicer(start: int, stop: int) -> Callable[[_Leaf], torch.Tensor]:
    return lambda leaf: _as_tensor(leaf[start:stop])


def _as_tensor(leaf: _Leaf) -> torch.Tensor:
    """A tensor in the same memory, or in other memory where PyTorch cannot use that one."""
    if isinstance(leaf, torch.Tensor):
        return leaf
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


def _common_length(leaves: Iterable[tuple[str, _Leaf]]) -> int:
    lengths: dict[str, int] = {}
    for path, leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(f"{path} is a scalar tensor: expected a first dimension of samples")
        lengths[path] = len(leaf)
    if not lengths:
        raise ValueError("the batch holds no tensor: expected a tensor, or containers of tensors")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise ValueError(f"the tensors of a batch must agree in their first dimension: {listed}")
    return next(iter(lengths.values()))


def _leaves(batch: object, path: str) -> Iterator[tuple[str, _Leaf]]:
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, np.ndarray):
        yield path, _checked_array(batch, path)
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    else:
        raise TypeError(
            f"{path}: expected a tensor or NumPy array, or a tuple, list or dict of them, got "
            f"{type(batch).__name__}. Use trainer.loader for anything else"
        )


def _map(batch: object, change: Callable[[Any], torch.Tensor], *, strict: bool = True) -> object:
    if isinstance(batch, torch.Tensor) or (strict and isinstance(batch, np.ndarray)):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        fields: list[Any] = [_map(value, change, strict=strict) for value in batch]
        return type(batch)(*fields)
    if isinstance(batch, list):
        return [_map(value, change, strict=strict) for value in batch]
    if isinstance(batch, tuple):
        return tuple([_map(value, change, strict=strict) for value in batch])
    if isinstance(batch, Mapping):
        return {key: _map(value, change, strict=strict) for key, value in batch.items()}
    if strict:
        raise TypeError(f"expected tensors, got {type(batch).__name__}")
    return batch
