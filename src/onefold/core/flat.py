"""Packs many tensors into a few flat ones, and names the exact bits of a model.

Segments and chunks are views of the flat tensors. `fingerprint_of` makes a short name for the exact
bits of a model.

Note: where a tensor begins
---------------------------
Every tensor starts at a multiple of 256 bytes, whatever lies before it: a vectorized kernel may
treat the elements up to the first aligned address separately, and libraries for GPUs choose kernels
of matrix products by how far addresses are aligned, up to 256 bytes.

Note: who owns the memory
-------------------------
A section is a view of memory that somebody else allocated, perhaps shared with other processes. A
view of an entry, a segment or a chunk aliases its section: writing to one writes to all of them,
and in-place additions rely on that. The layout is computed from names, shapes, dtypes and strides
alone, so that every process finds a tensor at the same offset without asking the others.

Note: what is checked
---------------------
All parameters must be finite: a single one that is not spoils every step that follows. Buffers may
hold infinities on purpose (a mask), and a NaN that was there when the run began (a value that is
not known yet); a NaN that appears later is refused, because a running mean never gets rid of one.
The optimizer's state is not checked: a NaN in it reaches the parameters in the same step, and
infinities are legitimate there.

A sum is not finite if one of its terms is not, so a single pass of additions, without a mask the
size of the model, proves that all is well. Only where the sum itself is not finite, which may be an
overflow of finite terms, are the terms looked at one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from onefold.system.compat import copy_each

__all__ = [
    "Chunk",
    "FlatTensors",
    "Layout",
    "Segment",
    "aligned",
    "all_finite",
    "bits_of",
    "dense_stride",
    "extent",
    "fingerprint_of",
    "first_not_finite",
    "is_dense",
    "laid_out",
    "lay_out",
    "named_tensors",
    "names_with_nan",
    "own_name",
    "same_bits",
    "storage_order",
    "tensor_digests",
]


# Whatever kernels are chosen by: see the note on where a tensor begins.
_ALIGNMENT_BYTES = 256
# From this size on a tensor is added where it lies: copying it would cost as much as adding it.
_LARGE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    name: str
    section: int
    """Number of the flat tensor that it lies in; there is one for each dtype."""
    offset: int
    """Its first element, counted from the start of the section."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """The tensor's own strides, so that channels_last stays channels_last."""
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a set lies; the same on every device."""

    entries: tuple[Entry, ...]
    dtypes: tuple[torch.dtype, ...]
    """The dtype of each section."""
    numels: tuple[int, ...]
    """Number of elements in each section, padding included."""

    @property
    def section_bytes(self) -> tuple[int, ...]:
        """Bytes of each section, rounded up to the alignment."""
        pairs = zip(self.numels, self.dtypes, strict=True)
        return tuple(aligned(n * dtype.itemsize) for n, dtype in pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(self.section_bytes)

    def converted(self, convert: Callable[[torch.dtype], torch.dtype]) -> Layout:
        """The same entries at the same elements, in other dtypes that are not narrower."""
        # Offsets count elements: aligned for a narrow dtype, they are so for any wider one.
        dtypes = tuple(map(convert, self.dtypes))
        if dtypes == self.dtypes:
            return self
        if any(new.itemsize < old.itemsize for new, old in zip(dtypes, self.dtypes, strict=True)):
            raise ValueError(f"expected dtypes as wide as {self.dtypes} or wider, got {dtypes}")
        return replace(self, dtypes=dtypes)

    def dtype_of(self, number: int) -> torch.dtype:
        """The dtype of an entry."""
        return self.dtypes[self.entries[number].section]

    def is_large(self, number: int) -> bool:
        """Whether an entry is large enough to be treated alone rather than with its neighbors."""
        return self.entries[number].numel * self.dtype_of(number).itemsize >= _LARGE_BYTES


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop - 1`` of one entry, in storage order."""

    entry: int
    start: int
    stop: int
    whole: bool
    """Whether it is the entire entry, which is then updated in the entry's own shape."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Chunk(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of a section, which are moved or added at a time."""

    section: int
    start: int
    stop: int
    entry: int | None
    """Number of the large entry that it lies in; None if it lies among small ones."""


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Find a place for each tensor, in the order given, one section for each dtype."""
    # In the order of first appearance, which is the model's and so the same in every process; a set
    # would have an order of its own in each.
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    filled = dict.fromkeys(dtypes, 0)
    entries = []
    for name, tensor in tensors.items():
        entries.append(
            Entry(
                name=name,
                section=dtypes.index(tensor.dtype),
                offset=filled[tensor.dtype],
                shape=tuple(tensor.shape),
                stride=dense_stride(tensor),
                numel=tensor.numel(),
            )
        )
        filled[tensor.dtype] += aligned(tensor.nbytes) // tensor.itemsize
    return Layout(tuple(entries), dtypes, tuple(filled.values()))


class FlatTensors:
    """The sections of a layout in one stretch of memory, and a view of every entry.

    Args:
        layout: where each tensor lies.
        memory: (layout.nbytes,) uint8, starting at a multiple of 64 bytes on the host; if absent,
            zeros are allocated on ``device``.
        device: where to allocate them.
        there: whether there is memory from the beginning; see `get_back`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        memory: torch.Tensor | None = None,
        device: torch.device | None = None,
        there: bool = True,
    ) -> None:
        if memory is None:
            memory = torch.zeros(layout.nbytes * there, dtype=torch.uint8, device=device)
        self.layout = layout
        self.device = memory.device
        if there:
            self._fill(memory)
        else:
            self.let_go()

    def _fill(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """(layout.nbytes,) uint8, if it is there."""
        # One flat tensor for each dtype, (numel,): views of `memory`, which they keep alive.
        self.sections: list[torch.Tensor] = []
        layout = self.layout
        rooms = torch.split(memory, list(layout.section_bytes))
        for room, numel, dtype in zip(rooms, layout.numels, layout.dtypes, strict=True):
            # `view(dtype)` needs a start that is a multiple of the element size: section_bytes are
            # multiples of the alignment.
            # A section without elements may begin anywhere, and such memory cannot be viewed.
            stretch = room[: numel * dtype.itemsize] if numel else memory.new_empty(0)
            self.sections.append(stretch.view(dtype))
        self._views: list[torch.Tensor] | None = None
        self.is_there = True
        """Whether there is memory; without it there are neither sections nor views."""

    @property
    def views(self) -> list[torch.Tensor]:
        """One view of each entry, in its own shape and strides."""
        if self._views is None:
            # Whoever asks first: what is made in inference mode may not be written to outside.
            with torch.inference_mode(mode=False):
                self._views = [self._view(entry) for entry in self.layout.entries]
        return self._views

    def clone(self) -> FlatTensors:
        """Another one with the same values."""
        return FlatTensors(self.layout, memory=self.memory.clone())

    def copy_(self, other: FlatTensors, *, non_blocking: bool = False) -> None:
        """Take the values of another one, perhaps of other dtypes."""
        if self.layout.dtypes == other.layout.dtypes:
            # One kernel for all sections.
            self.memory.copy_(other.memory, non_blocking=non_blocking)
            return
        for section, values in zip(self.sections, other.sections, strict=True):
            section.copy_(values, non_blocking=non_blocking)

    def let_go(self) -> None:
        """Do without memory until `get_back`; it is freed unless somebody else has views of it."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.sections, self._views, self.is_there = [], [], False

    def get_back(self) -> None:
        """Allocate memory anew, of any content."""
        self._fill(torch.empty(self.layout.nbytes, dtype=torch.uint8, device=self.device))

    def write(self, values: Sequence[torch.Tensor | None], *, skip: Collection[int] = ()) -> None:
        """Copy one tensor into each entry, zeros for None; leave the entries in ``skip`` alone."""
        views, sources = [], []
        for number, (view, value) in enumerate(zip(self.views, values, strict=True)):
            if number in skip:
                continue
            # Zeroed, not skipped: the memory still holds the values of the step before.
            if value is None:
                view.zero_()
            else:
                views.append(view)
                sources.append(value)
        if views:
            copy_each(views, sources)

    def segment(self, segment: Segment) -> torch.Tensor:
        """A view of one segment: in the entry's shape if it is whole, else (numel,)."""
        if segment.whole:
            return self.views[segment.entry]
        entry = self.layout.entries[segment.entry]
        section = self.sections[entry.section]
        return section[entry.offset + segment.start : entry.offset + segment.stop]

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """(stop - start,) view of a stretch of one section."""
        return self.sections[chunk.section][chunk.start : chunk.stop]

    def _view(self, entry: Entry) -> torch.Tensor:
        section = self.sections[entry.section]
        stretch = section[entry.offset : entry.offset + entry.numel]
        # Going through DLPack gives the view a storage of its own size. An ordinary view would
        # share the section's storage, and saving or deep-copying one parameter would take the whole
        # section along. By a capsule: handed over itself, a tensor on a GPU that is not the current
        # one would be refused.
        return from_dlpack(to_dlpack(stretch)).as_strided(entry.shape, entry.stride)


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """(numel,) view of a dense tensor's elements in the order in which they lie in memory."""
    # `reshape(-1)` would give their logical order, and copy a channels_last tensor to do so.
    return tensor.as_strided((tensor.numel(),), (1,))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As what the elements of a dtype are read, by their size in bytes."""


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements, in the order of memory, read as whole numbers.

    All bits count, NaN is like NaN, and NumPy need not know the dtype. A complex128 is two words.
    """
    return storage_order(tensor).view(_WORDS[min(8, tensor.element_size())])


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same values with the given dense strides: in the same memory if they lie there so."""
    if tensor.stride() == stride:
        return tensor
    # The stride of a dimension of length 1 says nothing about memory, and PyTorch sets it freely.
    sides = zip(tensor.shape, tensor.stride(), stride, strict=True)
    if all(ours == theirs for size, ours, theirs in sides if size > 1):
        return tensor.as_strided(tensor.shape, stride)
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """(nbytes,) uint8: the bytes of a tensor's values, of which the last index changes fastest.

    Strides, and conjugation or negation that PyTorch has put off, are no part of the values. A view
    of the tensor's memory where the values lie there so.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may have been expanded: contiguous, and yet of stride 0, which has no bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last address that a non-empty tensor may touch."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits; a NaN equals itself.

    They may be on different devices.
    """
    # Compared as bytes: `==` finds 0.0 equal to -0.0, and no NaN equal to any.
    first = bits_of(one)
    return torch.equal(first, bits_of(other).to(first.device))


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill one stretch of memory, else contiguous ones."""
    if is_dense(tensor.shape, tensor.stride()):
        return tuple(tensor.stride())
    # On the meta device nothing is allocated, and the rules for strides are PyTorch's own.
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor with these strides fill one stretch of memory."""
    # From the fastest dimension to the slowest, each stride must be the size of what lies below it.
    # Dimensions of length 1 are exempt: PyTorch leaves arbitrary strides there.
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def aligned(nbytes: int) -> int:
    """Round up to a multiple of 256 bytes, where a tensor of any dtype may begin."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under its own name, in the module's order; tied ones once."""
    # A compiled model has the same fingerprint as the plain one: `own_name` drops what the compiler
    # adds to the names.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {own_name(name): tensor for name, tensor in tensors.items()}


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest every tensor: 32 hexadecimal digits each, over dtype, shape and bits."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """Combine names and digests, in their order, into 16 hexadecimal digits."""
    lines = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    # Hashed as raw bytes: -0.0 and 0.0 differ, NaN equals itself, and dtypes that NumPy lacks work.
    text = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    text.update(bits_of(tensor.cpu()).numpy().data)
    return text.hexdigest()


_COMPILED = "_orig_mod"
"""The name under which torch.compile holds the module that it wraps."""


def own_name(name: str) -> str:
    """The name that a parameter or buffer would have if nothing were compiled.

    >>> own_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    # The last word is the tensor's own name, which a user is free to choose: only modules are
    # wrapped.
    *path, last = name.split(".")
    return ".".join([*(word for word in path if word != _COMPILED), last])


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; whole numbers are always finite."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex) or not values.numel():
        return True
    # The second look is only taken if the sum fails: see the note on what is checked.
    return bool(torch.isfinite(_sum(values))) or bool(torch.isfinite(_wide(values)).all())


def first_not_finite(
    sections: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """The name of the first tensor that is not finite.

    Args:
        sections: flat tensors in which all values lie.
        tensors: the same values by name; searched only if a section is not finite.
    """
    # A few large sections are checked in far fewer kernels than thousands of small parameters.
    if all(map(all_finite, sections)):
        return None
    return next((name for name, value in tensors.items() if not all_finite(value)), None)


def names_with_nan(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that hold a NaN; infinities do not count."""
    # Nearly always the cheap sum settles it, and no mask of a whole tensor is allocated.
    return {
        name
        for name, value in tensors.items()
        if not all_finite(value) and bool(torch.isnan(_wide(value)).any())
    }


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Add up all values, () in a dtype that small types do not overflow."""
    # `sum(dtype=)` widens while it adds; `.float()` would first copy the tensor at twice its size.
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.detach().sum(dtype=torch.float32)
    return _wide(values).sum()


def _wide(values: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that has all the kernels used here, which float8 has not."""
    values = values.detach()
    return values.float() if values.dtype.is_floating_point and values.itemsize < 4 else values
