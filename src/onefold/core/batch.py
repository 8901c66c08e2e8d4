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
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, NoReturn
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
    "Mark what every shard is to get whole by onefold.Broadcast(value), and what has another "
    "number of samples and is cut by itself by onefold.Scatter(value, dim=0)"
)
_SPREAD = 62
"""The most steps between the first and the last element that a digest reads."""
_NAMED = 8
"""The most samples, or tensors, that an error lists."""
_FRESH_BYTES = 512
"""On a GPU PyTorch begins every tensor of its own at a multiple of it."""
_LEAST_PINNED_BYTES = 1 << 16
"""What is smaller than this goes to a GPU with the command that copies it."""
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""For each width in bytes a dtype that NumPy can read in place of one that it lacks."""


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
    joint: bool = False
    """Whether steps have used its batches together with those of other loaders."""
    abandoned: bool = False
    """Whether the run was moved elsewhere meanwhile, so that its batches must not be used."""
    order: str = ""
    """Digest of the order that a sampler gave; empty if the order follows from the seed alone."""
    note_used: Callable[[ShardedBatch], None] | None = None
    """Called with each of its batches that a step has used."""
    states: dict[int, object] = field(default_factory=dict)
    """Where a stream stood at places of the pass, from the last used one on, if it says so."""


_NO_PARTS = (
    "a batch of a loader is divided among the devices, and has no parts to index, unpack or count: "
    "give it to trainer.step(batch) as it is, and let the loss unpack its shard. batch.samples is "
    "the number of samples, batch.whole() the whole payload"
)


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The shards of one batch that this process runs; what a loader yields and ``step`` takes."""

    samples: int
    """Number of samples in the whole batch, over all devices."""
    shares: Shares
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
    """Of a batch of the script's own, where that was asked for; see the note on digests."""
    dim: int = 0
    """The dimension of its tensors in which the samples lie."""
    others: tuple[int, ...] = ()
    """The numbers of samples of its parts that are cut by another length; -1 of a shared one."""
    parts: tuple[ShardedBatch, ...] = field(default=(), repr=False, compare=False)
    """The batches of loaders in it, where the script has put them together, or beside tensors."""
    unread: Callable[[], ShardedBatch] | None = field(default=None, repr=False, compare=False)
    """Reads the batch, whose samples are not there; None where they are."""
    gather: Callable[[ShardedBatch], Any] | None = field(default=None, repr=False, compare=False)
    """Brings the payloads of all shards to every device; None of a batch of no loader."""

    def __getitem__(self, place: object) -> NoReturn:
        """Refused, as are unpacking, which comes here too, and ``len``."""
        raise TypeError(_NO_PARTS)

    def __len__(self) -> int:
        raise TypeError(_NO_PARTS)

    def __bool__(self) -> bool:
        return True

    def whole(self) -> Any:
        """The payload of all samples of a batch that a loader yields; called on every device.

        Tensors of all shards are joined along their samples, in their order, and so are lists of
        one part a sample; they are copies on the host. Every device needs memory for the whole
        batch, and reading stays divided.

        Raises:
            ValueError: the shards' payloads cannot be joined, as each is padded to its own length,
                say.
            TypeError: a payload holds something that cannot be sent; see `Trainer.gather`.
            DisagreementError: another device makes another call, or has another batch.

        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0))
        >>> next(iter(trainer.loader(data, batch_size=4))).whole()
        [tensor([0., 1., 2., 3.])]
        """
        if self.gather is None or self.others:
            raise ValueError(
                "whole() is of a batch that trainer.loader or trainer.batches has made, whose "
                "parts all have its number of samples: expected such a batch"
            )
        return self.gather(self)

    @property
    def read(self) -> tuple[ShardedBatch, ...]:
        """The batches that loaders have made: those in it, or itself."""
        return self.parts or (self,)

    @property
    def uneven(self) -> int | None:
        """The length of a part of which some shards have a greater share than of the samples."""
        for other in self.others:
            theirs = replace(self, samples=max(other, 0)).sizes
            shares = zip(theirs, self.sizes, strict=True)
            if any(a * self.samples != b * other for a, b in shares if other >= 0):
                return other
        return None

    @property
    def pass_number(self) -> int:
        """Number of the loader's pass that the batch belongs to; -1 if no loader made it."""
        return -1 if self.data_pass is None else self.data_pass.number

    @property
    def sizes(self) -> list[int]:
        """Number of samples in each shard, (V,)."""
        return [stop - start for start, stop in cut_bounds(self.samples, self.shares.shards)]

    def describe(self, shard: int) -> str:
        """Name a shard's samples, for errors."""
        start, stop = cut_bounds(self.samples, self.shares.shards)[shard]
        words = f"samples {start} to {stop - 1} of the batch"
        numbers = list(map(str, self.numbers.get(shard, ())))
        if numbers:
            more = ", ..." if len(numbers) > _NAMED else ""
            words += f", which are {', '.join(numbers[:_NAMED])}{more} of the data set"
        return words

    def size_of(self, shard: int) -> int:
        """Number of samples in one shard."""
        # The sizes of `cut_bounds`, without a tuple of all V bounds for one of them.
        size, longer = divmod(self.samples, self.shares.shards)
        return size + (shard < longer)

    def count_of(self, shard: int) -> Count:
        """How many samples of a shard ``collate`` has left, if this process has read it."""
        size = self.size_of(shard)
        # A batch of the script's own was cut by these sizes.
        if self.data_pass is None or shard not in self.shards:
            return Count(size)
        return count_of(self.shards[shard], size, self.dim)


_MARKED = (Broadcast, Scatter, ShardedBatch)
"""What is cut in a way of its own."""


def checked_dim(dim: object) -> int:
    """Refuse what is no dimension of samples.

    Raises:
        TypeError, ValueError: it is no number, or below 0.
    """
    # Not from the last one, as the tensors of a batch may have several numbers of dimensions.
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
        batch: a tensor or a NumPy array (n, ...), `Broadcast`, `Scatter`, a batch of a loader, or
            tuples, lists, mappings and dataclasses of them, which keep their type.
        shares: which device runs which shard; with batches of loaders, theirs takes precedence.
        shards_run: the shards that this process keeps.
        epoch: number of the pass over the data that the batch belongs to.
        digest: whether to compute the batch's digest as well.
        dim: the dimension in which the samples lie.

    Raises:
        ValueError: the tensors disagree in length, lack the dimension, or there are none; batches
            of loaders have other shares; or a shard would have samples of some parts alone.
        TypeError: the batch holds something that is neither a tensor nor one of these containers,
            or an array of a dtype that PyTorch lacks.
    """
    # Every leaf is checked, and the length agreed on, before anything is cut: an error leaves
    # nothing half done. The same list serves the digest, so the batch is walked once.
    leaves = list(_leaves(batch, "batch"))
    parts = tuple(leaf for _, leaf in leaves if isinstance(leaf, ShardedBatch))
    shares = _shares_of(parts) if parts else shares
    samples, others = _lengths(leaves, dim, shares.shards)
    bounds = cut_bounds(samples, shares.shards)
    # A shard without samples is never run: a forward on zero rows would give NaN means.
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
    # Where in the data it is, is taken over from the first part; the digest covers the others.
    waits = [part.waited for part in parts if part.waited]
    waited = (min(wait[0] for wait in waits), max(wait[1] for wait in waits)) if waits else None
    return replace(parts[0], waited=waited, gather=None, **cut)


def _shares_of(parts: Sequence[ShardedBatch]) -> Shares:
    if any(part.shares != parts[0].shares for part in parts):
        shares = ", ".join(str(part.shares.counts) for part in parts)
        raise ValueError(
            f"the loaders' batches of one step were cut for different shares, {shares}: set "
            f"trainer.shares before the first of them is read"
        )
    return parts[0].shares


def move(payload: object, device: torch.device) -> object:
    """Move every tensor of a structure to ``device``, and leave anything else as it is.

    Containers keep their type. An object with a method ``to`` of its own is moved by it, unless it
    is a mapping.
    """
    # Non-blocking: it only takes effect for pinned memory, and kernels on the same stream wait for
    # the copy, so nobody can read the tensor too early.
    return map_parts(
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
    leaves_host = leaf.device.type == "cpu" != device.type
    if leaves_host and leaf.layout is torch.strided and leaf.nbytes >= _LEAST_PINNED_BYTES:
        # From other memory the host would wait for the copy, and for what was queued before it.
        leaf = leaf.pin_memory()
    moved = leaf.to(device, non_blocking=True)
    return as_if_copied(leaf) if moved is leaf and device.type != "cpu" else moved


def _moved_by_itself(value: Any, device: torch.device) -> object:
    """Move an object by its own method, which may change it in place and return nothing."""
    moved = value.to(device)
    moved = value if moved is None else moved
    # What was there already may still be a slice of a whole batch.
    return moved if device.type == "cpu" else map_parts(moved, _laid_out, strict=False)


def _laid_out(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.device.type == "cpu" else as_if_copied(leaf)


def _digest_of(leaves: Iterable[tuple[str, Any]]) -> int:
    parts = [part for path, leaf in leaves for part in _digest_parts(path, leaf)]
    # Equal dicts may hold their keys in different orders on different devices.
    parts.sort()
    text = b"".join(parts)
    # Two different checksums of 32 bits each: nobody forges a batch, and both are faster than any
    # cryptographic hash. The offset makes the number fit the signed fields of a head.
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
    # What else is shared: numbers and texts; of other objects the type alone, as repr may hold an
    # address.
    plain = isinstance(leaf, int | float | complex | str | bytes)
    return [f"{path} {leaf!r}".encode() if plain else f"{path} {type(leaf).__name__}".encode()]


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
        return plain.view(_WIDTHS.get(plain.element_size(), plain.dtype)).numpy()


def _slicer(start: int, stop: int, dim: int) -> Callable[[_Leaf], torch.Tensor]:
    place = (*[slice(None)] * dim, slice(start, stop))
    return lambda leaf: _as_tensor(leaf[place])


def _cutter(bounds: Sequence[tuple[int, int]], shard: int, dim: int) -> Callable[[Any], object]:
    """Return what cuts the part of one shard out of each tensor, array or marked part."""
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
    if not _is_known(array.dtype.newbyteorder("=")):
        raise TypeError(
            f"{path} is an array of {array.dtype}: expected numbers or booleans of a dtype that "
            f"PyTorch has. Use trainer.loader for anything else"
        )
    return array


@functools.lru_cache(maxsize=256)
def _is_known(dtype: np.dtype[Any]) -> bool:
    """Whether PyTorch has a dtype for what is in such an array."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError:
        return False
    return True


def _lengths(
    leaves: Sequence[tuple[str, Any]], dim: int, shards: int
) -> tuple[int, tuple[int, ...]]:
    """Return the number of samples of a batch, and those of parts that have their own."""
    plain = [(p, leaf) for p, leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
    read = [leaf.samples for _, leaf in leaves if isinstance(leaf, ShardedBatch)]
    marked = {p: _scatter_length(p, leaf) for p, leaf in leaves if isinstance(leaf, _MARKED)}
    own = [length for length in marked.values() if length >= 0]
    # Without anything at all, that is refused.
    samples = own[0] if own and not plain else _common_length(plain, dim)
    if read and plain and samples != read[0]:
        raise ValueError(
            f"{plain[0][0]} has {samples} samples, and the loader's batch beside it {read[0]}: "
            f"expected as many. {_MARK}"
        )
    samples = read[0] if read else samples
    for path, length in marked.items():
        if length >= 0 and min(length, shards) != min(samples, shards):
            raise ValueError(
                f"{path} has {length} samples and the batch {samples}, so that of {shards} shards "
                f"some would have samples of one of them alone: expected at least {shards} samples "
                f"in each"
            )
    # Those that are cut as the samples are need no more attention.
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
                f"{path} is a {type(leaf).__name__} within onefold.Scatter: expected tensors"
            )
        if leaf.ndim == 0:
            raise ValueError(
                f"{path} is a scalar tensor: expected a {where} of samples. What all shards share "
                f"is onefold.Broadcast(value)"
            )
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
            f"the tensors of a batch must agree in their {where}: {listed}{more}. {_MARK}. "
            f"Tensors of one sample each, such as boxes, come from trainer.loader and its collate"
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
            f"{path}: expected a tensor or NumPy array, or a tuple, list, dict, other mapping or "
            f"dataclass of them, got {type(batch).__name__}. Use trainer.loader for anything else: "
            f"its collate makes each shard's part. Labels are numbers: classes.index(label)"
        )
    for name, part in parts:
        # A dataclass has all its fields, and those that may be left out are None.
        if part is not None or not has_fields(batch):
            yield from _leaves(part, path + name)


def map_parts(
    batch: Any,
    change: Callable[[Any], object],
    *,
    strict: bool = True,
    alone: Callable[[Any], object] | None = None,
) -> Any:
    """Change every tensor in a batch.

    Args:
        batch: as for `cut_batch`.
        change: is given each tensor.
        strict: whether arrays, `Broadcast`, `Scatter` and batches of a loader are changed as well.
        alone: changes objects with a method ``to`` as a whole.
    """
    if isinstance(batch, torch.Tensor) or (strict and isinstance(batch, (np.ndarray, *_MARKED))):
        return change(batch)
    kind = type(batch)
    # Nearly all are one of these; lists of texts may be long, and nobody asks for their paths.
    if kind is tuple or kind is list:
        return kind([map_parts(part, change, strict=strict, alone=alone) for part in batch])
    # Of the class: a field may be called so as well.
    itself = not isinstance(batch, Mapping) and callable(getattr(kind, "to", None))
    if alone is not None and itself:
        return alone(batch)
    parts = parts_of(batch)
    if parts is None:
        return batch
    return with_parts(
        batch, [map_parts(part, change, strict=strict, alone=alone) for _, part in parts]
    )
