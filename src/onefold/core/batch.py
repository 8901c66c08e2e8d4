"""A global batch, cut into shards.

A batch that the script makes may hold NumPy arrays in addition to tensors. Shards of an array are
tensors that share its memory if PyTorch can use that memory as is.

Note: the digest of a batch
---------------------------
Devices compare the script's batches before each step, so the digest must be far cheaper than a
step: it reads at most 64 elements of each tensor. Its purpose is to catch a batch that was drawn
differently (another seed, one random number too many on the lead), so that nearly every element
differs; it need not catch a single wrong value. The positions that it reads depend on the shape
alone, so devices with equal tensors read equal elements.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, Any, NoReturn, cast
from zlib import adler32, crc32

import numpy as np
import torch

from onefold.core.numbers import check_whole
from onefold.core.shard import Shares, cut_bounds
from onefold.core.structure import (
    Broadcast,
    Count,
    Scatter,
    count_of,
    has_fields,
    parts_of,
    with_parts,
)

__all__ = ["DataPass", "ShardedBatch", "checked_dim", "cut_batch", "map_parts", "move"]

_Leaf = torch.Tensor | np.ndarray[Any, Any]

_MARK = (
    "Pass parts that every shard needs whole as onefold.Broadcast(value), and parts with another "
    "number of samples, cut separately, as onefold.Scatter(value, dim=0)"
)
_SPREAD = 62
"""Maximum number of strides between the first and the last element that a digest reads."""
_NAMED = 8
"""Maximum number of samples, or tensors, that an error lists."""
_FRESH_BYTES = 512
"""Alignment of PyTorch's own allocations on a GPU, in bytes."""
_LEAST_PINNED_BYTES = 1 << 16
"""Smaller copies are sent to a GPU within the copy command, without pinned memory."""
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Dtypes by element size that NumPy can read instead of a dtype that it lacks."""


@dataclass(slots=True)
class DataPass:
    """State of a loader's pass over its data set."""

    number: int
    """Number of the pass among those of its loader."""
    used: int
    """Number of its samples that steps have used so far; of its batches, if it yields ready-made
    batches. The positions below have the same unit."""
    epoch: int | None
    """Epoch in which it started; None outside an epoch."""
    end: int
    """Number of its samples that will have been used after all of its batches."""
    given: int = 0
    """Number of its samples that have been yielded."""
    over: bool = False
    """Whether it has ended, so that it yields no more batches."""
    broken_off: bool = False
    """Whether it ended before its last batch."""
    joint: bool = False
    """Whether steps have used its batches together with those of other loaders."""
    abandoned: bool = False
    """Whether the run has moved to another position since, so that its batches must not be used."""
    order: str = ""
    """Digest of the order that a sampler gave; empty if the order follows from the seed alone."""
    note_used: Callable[[ShardedBatch], None] | None = None
    """Called with each of its batches after a step has used it."""
    states: dict[int, object] = field(default_factory=dict)
    """States of a stream by position in the pass, from the last used position on, if it has
    them."""


_NO_PARTS = (
    "a loader's batch is divided among the devices, and cannot be indexed, unpacked, counted or "
    "moved. Pass it to trainer.step(batch) as is, which moves each shard to its device, and unpack "
    "the shard in the loss. batch.samples is the number of samples, batch.whole() the whole payload"
)


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The shards of one batch that this process runs; loaders yield it, and ``step`` accepts it."""

    samples: int
    """Number of samples in the whole batch, over all devices."""
    shares: Shares
    """The shards of this batch that each device runs."""
    shards: Mapping[int, object] = field(repr=False)
    """Collated samples of each shard, by shard number, without empty shards."""
    epoch: int = 0
    """Number of the epoch that it belongs to."""
    waited: tuple[float, float] | None = field(default=None, repr=False, compare=False)
    """Start and end of the wait for a loader, in seconds on the host's clock."""
    data_pass: DataPass | None = field(default=None, repr=False, compare=False)
    """The loader's pass that it belongs to, if a loader made it."""
    stop: int = 0
    """Number of samples of that pass that will have been used after this batch."""
    loader: int = -1
    """Number of the loader that made it; -1 for a batch that the script made."""
    data_digest: int = 0
    """Digest of the data set, equal if the data are equal; 0 if no loader computed one."""
    numbers: Mapping[int, Sequence[int]] = field(default_factory=dict, repr=False, compare=False)
    """Sample numbers in the data set, for each shard that this process has read."""
    digest: int = 0
    """Digest of a batch that the script made, if requested; see the note on digests."""
    dim: int = 0
    """Sample dimension of its tensors."""
    others: tuple[int, ...] = ()
    """Sample counts of parts that are cut separately; -1 for a broadcast part."""
    parts: tuple[ShardedBatch, ...] = field(default=(), repr=False, compare=False)
    """Loaders' batches inside it, if the script combined several, or one with tensors."""
    unread: Callable[[], ShardedBatch] | None = field(default=None, repr=False, compare=False)
    """Reads the batch if its samples are not loaded; None if they are."""
    gather: Callable[[ShardedBatch], Any] | None = field(default=None, repr=False, compare=False)
    """Gathers the payloads of all shards on every device; None if no loader made the batch."""

    def __getitem__(self, place: object) -> NoReturn:
        """Raise an error, for unpacking too, which calls this method."""
        raise TypeError(_NO_PARTS)

    def __len__(self) -> int:
        raise TypeError(_NO_PARTS)

    if not TYPE_CHECKING:  # a type checker reports a missing attribute itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"a batch has no attribute {name!r}: {_NO_PARTS}")

    def __bool__(self) -> bool:
        return True

    def whole(self) -> Any:
        """Return the payload of all samples of a loader's batch; called on every device.

        Tensors of all shards are concatenated along their samples, in order, and so are lists with
        one item per sample; they are copies on the host. Every device needs memory for the whole
        batch, but reading stays divided.

        Raises:
            ValueError: the shards' payloads cannot be concatenated, for example because each is
                padded to its own length.
            TypeError: a payload holds a value that cannot be sent; see `Trainer.gather`.
            DisagreementError: another device makes another call, or has another batch.

        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0))
        >>> next(iter(trainer.loader(data, batch_size=4))).whole()
        [tensor([0., 1., 2., 3.])]
        """
        if self.gather is None or self.others:
            raise ValueError(
                "whole() requires a batch that trainer.loader or trainer.batches made, whose parts "
                "all have the same number of samples"
            )
        return self.gather(self)

    @property
    def read(self) -> tuple[ShardedBatch, ...]:
        """Batches that loaders made: the parts, or this batch itself."""
        return self.parts or (self,)

    @property
    def uneven(self) -> int | None:
        """Sample count of a part that is cut in other proportions than the samples, if any."""
        for other in self.others:
            theirs = replace(self, samples=max(other, 0)).sizes
            shares = zip(theirs, self.sizes, strict=True)
            if any(a * self.samples != b * other for a, b in shares if other >= 0):
                return other
        return None

    @property
    def pass_number(self) -> int:
        """Number of the loader's pass that the batch belongs to; -1 if no loader made the batch."""
        return -1 if self.data_pass is None else self.data_pass.number

    @property
    def sizes(self) -> list[int]:
        """Number of samples in each shard, (V,)."""
        return [stop - start for start, stop in cut_bounds(self.samples, self.shares.shards)]

    def describe(self, shard: int) -> str:
        """Return a description of a shard's samples, for errors."""
        start, stop = cut_bounds(self.samples, self.shares.shards)[shard]
        words = f"samples {start} to {stop - 1} of the batch"
        numbers = list(map(str, self.numbers.get(shard, ())))
        if numbers:
            more = ", ..." if len(numbers) > _NAMED else ""
            words += f", which are {', '.join(numbers[:_NAMED])}{more} of the data set"
        return words

    def size_of(self, shard: int) -> int:
        """Return the number of samples in one shard."""
        # The same sizes as in `cut_bounds`, without building a tuple of all V bounds.
        size, longer = divmod(self.samples, self.shares.shards)
        return size + (shard < longer)

    def count_of(self, shard: int) -> Count:
        """Return the number of samples that ``collate`` kept, if this process read the shard."""
        size = self.size_of(shard)
        # A batch that the script made was cut by these sizes.
        if self.data_pass is None or shard not in self.shards:
            return Count(size)
        return count_of(self.shards[shard], size, self.dim)


_MARKED = (Broadcast, Scatter, ShardedBatch)
"""Types of parts that are not cut like a tensor."""


def checked_dim(dim: object) -> int:
    """Check that a value is a sample dimension.

    Raises:
            TypeError, ValueError: ``dim`` is not an integer, or is negative.
    """
    # Dimensions are not counted from the last, because tensors of a batch may differ in their
    # number.
    return check_whole("dim, counted from the first dimension,", dim, least=0)


def cut_batch(
    batch: object,
    shares: Shares,
    shards_run: Iterable[int],
    epoch: int = 0,
    *,
    digest: bool = False,
    dim: int = 0,
) -> ShardedBatch:
    """Cut a whole batch along one dimension of its tensors.

    Args:
        batch: a tensor or NumPy array (n, ...), `Broadcast`, `Scatter`, a loader's batch, or
            tuples, lists, mappings and dataclasses of them, which keep their type.
        shares: the shards that each device runs; shares of loaders' batches take precedence.
        shards_run: shards that this process keeps.
        epoch: number of the epoch that the batch belongs to.
        digest: whether to also compute the batch's digest.
        dim: sample dimension.

    Raises:
        ValueError: the tensors differ in length, lack the dimension, or there are none;
            loaders' batches have other shares; or a shard would have samples of only some
            parts.
        TypeError: the batch holds a value that is neither a tensor nor one of these containers,
            or an array of a dtype that PyTorch lacks.
    """
    # The usual batch: tensors of one length. The code after this checks and cuts all others.
    kind, tensors = type(batch), cast("Sequence[torch.Tensor]", batch)
    if kind in (tuple, list) and all(type(t) is torch.Tensor and t.ndim > dim for t in tensors):
        lengths = {tensor.shape[dim] for tensor in tensors}
        if len(lengths) == 1:
            (samples,) = lengths
            bounds = cut_bounds(samples, shares.shards)
            kept = [shard for shard in shards_run if bounds[shard][0] < bounds[shard][1]]
            cutters = [_slicer(*bounds[shard], dim) for shard in kept]
            found = {s: kind(map(cut, tensors)) for s, cut in zip(kept, cutters, strict=True)}
            known = _digest_of(_leaves(batch, "batch")) if digest else 0
            return ShardedBatch(samples, shares, found, epoch, digest=known, dim=dim)
    # Check every leaf and the common length before anything is cut, so that an error leaves no
    # partial result. The digest uses the same list, so the batch is walked once.
    leaves = list(_leaves(batch, "batch"))
    parts = tuple(leaf for _, leaf in leaves if isinstance(leaf, ShardedBatch))
    shares = _shares_of(parts) if parts else shares
    samples, others = _lengths(leaves, dim, shares.shards)
    bounds = cut_bounds(samples, shares.shards)
    # Never run a shard without samples: a forward pass on zero rows would give NaN means.
    run = parts[0].shards if parts else shards_run
    kept = [shard for shard in run if bounds[shard][0] < bounds[shard][1]]
    cut: dict[str, Any] = {
        "shards": {shard: map_parts(batch, _cutter(bounds, shard, dim)) for shard in kept},
        "digest": _digest_of(leaves) if digest else 0,
        "dim": dim,
        "others": others,
        "parts": parts,
    }
    if not parts:
        return ShardedBatch(samples=samples, shares=shares, epoch=epoch, **cut)
    # Take the position in the data from the first part; the digest covers the others.
    waits = [part.waited for part in parts if part.waited]
    waited = (min(wait[0] for wait in waits), max(wait[1] for wait in waits)) if waits else None
    return replace(parts[0], waited=waited, gather=None, **cut)


def _shares_of(parts: Sequence[ShardedBatch]) -> Shares:
    if any(part.shares != parts[0].shares for part in parts):
        shares = ", ".join(str(part.shares.counts) for part in parts)
        raise ValueError(
            f"the loaders' batches of one step were cut for different shares: {shares}. Set "
            f"trainer.shares before reading the first of them"
        )
    return parts[0].shares


def move(payload: object, device: torch.device) -> object:
    """Move every tensor of a structure to ``device``, and return anything else unchanged.

    Containers keep their type. An object with its own method ``to`` is moved by it, unless it is a
    mapping.
    """
    # non_blocking only affects pinned memory, and kernels on the same stream wait for the copy, so
    # no kernel can read the tensor too early.
    return map_parts(
        payload,
        lambda leaf: _moved(leaf, device),
        strict=False,
        alone=lambda value: _moved_by_itself(value, device),
    )


def as_if_copied(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the layout of its copy on another GPU: the same tensor if it has it.

    cuBLAS and cuDNN choose kernels by the alignment of memory, and other libraries by strides. A
    slice of a batch on a GPU starts at any address; its copy on another GPU starts at an aligned
    one.
    """
    if leaf.layout is not torch.strided or not leaf.numel():
        return leaf
    strides = torch.empty_like(leaf, device="meta").stride()
    alike = leaf.data_ptr() % _FRESH_BYTES == 0 and strides == leaf.stride()
    return leaf if alike else leaf.clone()


def _moved(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    leaves_host = leaf.device.type == "cpu" != device.type
    if leaves_host and leaf.layout is torch.strided and leaf.nbytes >= _LEAST_PINNED_BYTES:
        # The host would block on a copy from unpinned memory, and on all work queued before it.
        leaf = leaf.pin_memory()
    moved = leaf.to(device, non_blocking=True)
    return as_if_copied(leaf) if moved is leaf and device.type != "cpu" else moved


def _moved_by_itself(value: Any, device: torch.device) -> object:
    """Move an object by its own method, which may change it in place and return None."""
    moved = value.to(device)
    moved = value if moved is None else moved
    # A tensor that was already on the device may still be a slice of a whole batch.
    return moved if device.type == "cpu" else map_parts(moved, _laid_out, strict=False)


def _laid_out(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.device.type == "cpu" else as_if_copied(leaf)


def _digest_of(leaves: Iterable[tuple[str, Any]]) -> int:
    parts = [part for path, leaf in leaves for part in _digest_parts(path, leaf)]
    # Sort, because equal dicts may order their keys differently on different devices.
    parts.sort()
    text = b"".join(parts)
    # Two different 32-bit checksums: batches are not forged, and both are faster than any
    # cryptographic hash. The offset makes the number fit the signed fields of a step head.
    return (crc32(text) << 32 | adler32(text)) - 2**63


def _digest_parts(path: str, leaf: Any) -> list[bytes]:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return [_kind(path, leaf.dtype, leaf.shape) + _spread(leaf)]
    if isinstance(leaf, ShardedBatch):
        place = leaf.loader, leaf.pass_number, leaf.stop, leaf.samples, leaf.data_digest
        return [path.encode() + struct.pack("<5q", *place)]
    if isinstance(leaf, Scatter | Broadcast):
        return _digest_parts(path, leaf.value)
    found = parts_of(leaf)
    if found is not None:
        return [each for name, part in found for each in _digest_parts(path + name, part)]
    # Other shared values: numbers and strings. For any other object hash only the type, because its
    # repr may contain an address.
    plain = isinstance(leaf, int | float | complex | str | bytes)
    return [f"{path} {leaf!r}".encode() if plain else f"{path} {type(leaf).__name__}".encode()]


@functools.lru_cache(maxsize=256)
def _kind(path: str, dtype: torch.dtype | np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    name = dtype if isinstance(dtype, torch.dtype) else dtype.str
    return f"{path} {name} {shape!s}".encode()


def _spread(leaf: _Leaf) -> bytes:
    """Return the bytes of a few elements; none if the tensor is not on the host."""
    # Reading an element on a GPU would block on all work queued there.
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_cpu or leaf.layout != torch.strided:
            return b""
        leaf = _as_array(leaf)
    if not leaf.size:
        return b""
    places = _places(leaf.size, leaf.shape[-1] if leaf.ndim > 1 else 1)
    if leaf.flags.c_contiguous:
        return leaf.take(places).tobytes()
    # `take` would first copy a non-contiguous array; `flat` fetches single elements.
    return leaf.flat[places].tobytes()


@functools.lru_cache(maxsize=256)
def _places(size: int, columns: int) -> np.ndarray[Any, Any]:
    """Return the flat indices of the elements to read, (at most 64,) int64."""
    step = (size - 1) // _SPREAD + 1
    # A step that shares a factor with the row length would visit only a few columns, such as the
    # black margin of an image, where all batches are equal.
    while gcd(step, columns) > 1:
        step += 1
    return np.array([*range(0, size, step), size - 1])


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor on the host as an array in the same memory if possible."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):
        # The tensor requires grad, is lazily conjugated or negated, or has a dtype that NumPy
        # lacks. Trying first costs nothing for an ordinary tensor.
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.view(_WIDTHS.get(plain.element_size(), plain.dtype)).numpy()


def _slicer(start: int, stop: int, dim: int) -> Callable[[_Leaf], torch.Tensor]:
    place = (*[slice(None)] * dim, slice(start, stop))
    return lambda leaf: _as_tensor(leaf[place])


def _cutter(bounds: Sequence[tuple[int, int]], shard: int, dim: int) -> Callable[[Any], object]:
    """Return a function that cuts one shard's part out of a tensor, array or marked part."""
    cut = _slicer(*bounds[shard], dim)

    def part_of(leaf: Any) -> object:
        if isinstance(leaf, Broadcast):
            return map_parts(leaf.value, _as_tensor)
        if isinstance(leaf, Scatter):
            length = _common_length(_leaves(leaf.value, "batch"), leaf.dim)
            return map_parts(leaf.value, _slicer(*cut_bounds(length, len(bounds))[shard], leaf.dim))
        return leaf.shards[shard] if isinstance(leaf, ShardedBatch) else cut(leaf)

    return part_of


def _as_tensor(leaf: _Leaf) -> torch.Tensor:
    """Return a tensor in the same memory, or a copy if PyTorch cannot use that memory."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    # `from_numpy` warns about read-only arrays, and rejects foreign byte orders, negative strides,
    # and strides that are not a multiple of the element size (a field of a structured array).
    usable = leaf.flags.writeable and leaf.dtype.isnative
    if usable and all(stride >= 0 and stride % leaf.itemsize == 0 for stride in leaf.strides):
        return torch.from_numpy(leaf)
    return torch.from_numpy(np.array(leaf, leaf.dtype.newbyteorder("="), order="C"))


def _checked_array(array: np.ndarray[Any, Any], path: str) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{path} is a masked array, but a tensor has no mask. Pass its data and mask separately"
        )
    if not _is_known(array.dtype.newbyteorder("=")):
        raise TypeError(
            f"{path} is an array of {array.dtype}, but PyTorch has no such dtype. Pass numbers or "
            f"booleans, or use trainer.loader"
        )
    return array


@functools.lru_cache(maxsize=256)
def _is_known(dtype: np.dtype[Any]) -> bool:
    """Return whether PyTorch has a dtype for the elements of such an array."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError:
        return False
    return True


def _lengths(
    leaves: Sequence[tuple[str, Any]], dim: int, shards: int
) -> tuple[int, tuple[int, ...]]:
    """Return the number of samples in a batch, and the numbers of parts that differ from it."""
    plain = [(p, leaf) for p, leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
    read = [leaf.samples for _, leaf in leaves if isinstance(leaf, ShardedBatch)]
    marked = {p: _scatter_length(p, leaf) for p, leaf in leaves if isinstance(leaf, _MARKED)}
    own = [length for length in marked.values() if length >= 0]
    # `_common_length` rejects a batch without any tensor.
    samples = own[0] if own and not plain else _common_length(plain, dim)
    if read and plain and samples != read[0]:
        raise ValueError(
            f"{plain[0][0]} has {samples} samples, but the loader's batch next to it has "
            f"{read[0]}. {_MARK}"
        )
    samples = read[0] if read else samples
    for path, length in marked.items():
        if length >= 0 and min(length, shards) != min(samples, shards):
            raise ValueError(
                f"{path} has {length} samples and the batch {samples}, so some of the {shards} "
                f"shards would have samples of only one of them. Pass at least {shards} samples of "
                f"each"
            )
    # Parts that are cut like the samples need no further handling.
    return samples, tuple(length for length in marked.values() if length != samples)


def _scatter_length(path: str, leaf: Any) -> int:
    if isinstance(leaf, Scatter):
        return _common_length(_leaves(leaf.value, path), checked_dim(leaf.dim))
    return leaf.samples if isinstance(leaf, ShardedBatch) else -1


def _common_length(leaves: Iterable[tuple[str, Any]], dim: int) -> int:
    where = f"dimension {dim}" if dim else "first dimension"
    lengths: dict[str, int] = {}
    for path, leaf in leaves:
        if isinstance(leaf, _MARKED):
            raise TypeError(
                f"{path} is a {type(leaf).__name__} inside onefold.Scatter, which accepts only "
                f"tensors"
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"{path} is a scalar tensor, but it needs a {where} of samples. Pass a value that "
                f"all shards share as onefold.Broadcast(value)"
            )
        if leaf.ndim <= dim:
            raise ValueError(
                f"{path} has shape {tuple(leaf.shape)}, but dim={dim} requires a sample dimension "
                f"{dim}, counted from 0, in every tensor of the batch. Add that dimension (for a "
                f"flattened time-major target: target.view(time, n))"
            )
        lengths[path] = leaf.shape[dim]
    if not lengths:
        raise ValueError("the batch contains no tensor. Pass a tensor, or containers of tensors")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {lengths[path]}" for path in list(lengths)[:_NAMED])
        more = ", ..." if len(lengths) > _NAMED else ""
        raise ValueError(
            f"the tensors of a batch must have the same size in their {where}, but {listed}{more}. "
            f"{_MARK}. If each sample has its own tensor, such as boxes, use trainer.loader and "
            f"its collate"
        )
    return next(iter(lengths.values()))


def _leaves(batch: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, (torch.Tensor, *_MARKED)):
        yield path, batch
        return
    if isinstance(batch, np.ndarray):
        yield path, _checked_array(batch, path)
        return
    parts = parts_of(batch)
    if parts is None:
        raise TypeError(
            f"{path} must be a tensor or NumPy array, or a tuple, list, dict, other mapping or "
            f"dataclass of these, but got {type(batch).__name__}. For anything else use "
            f"trainer.loader, whose collate makes each shard's part. Text labels must become "
            f"numbers in a tensor, as by classes.index(label)"
        )
    for name, part in parts:
        # A dataclass has all its fields; optional ones may be None.
        if part is not None or not has_fields(batch):
            yield from _leaves(part, path + name)


def map_parts(
    batch: Any,
    change: Callable[[Any], object],
    *,
    strict: bool = True,
    alone: Callable[[Any], object] | None = None,
) -> Any:
    """Replace every tensor in a batch.

    Args:
        batch: as for `cut_batch`.
        change: function that returns the replacement of a tensor.
        strict: whether to also replace arrays, `Broadcast`, `Scatter` and loaders' batches.
        alone: function that replaces a whole object with a method ``to``.
    """
    if isinstance(batch, torch.Tensor) or (strict and isinstance(batch, (np.ndarray, *_MARKED))):
        return change(batch)
    kind = type(batch)
    # The common cases; lists of strings may be long, and their paths are not needed here.
    if kind is tuple or kind is list:
        return kind([map_parts(part, change, strict=strict, alone=alone) for part in batch])
    # Look up ``to`` on the class: a field of the object may have the same name.
    itself = not isinstance(batch, Mapping) and callable(getattr(kind, "to", None))
    if alone is not None and itself:
        return alone(batch)
    parts = parts_of(batch)
    if parts is None:
        return batch
    return with_parts(
        batch, [map_parts(part, change, strict=strict, alone=alone) for _, part in parts]
    )
