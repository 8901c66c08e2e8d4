"""Packs many tensors into a few flat ones, and fingerprints the exact bits of a model.

Segments and chunks are views of the flat tensors.

Note: alignment
---------------
Every tensor starts at a multiple of 256 bytes, whatever precedes it. A vectorized kernel may treat
the elements before the first aligned address separately, and GPU libraries choose kernels of matrix
products by the alignment of addresses, up to 256 bytes.

Note: who owns the memory
-------------------------
A section is a view of memory that the caller allocated, possibly shared with other processes. A
view of an entry, a segment or a chunk aliases its section: writing to one writes to all of them,
and in-place additions rely on that. The layout is computed from names, shapes, dtypes and strides
alone, so that every process finds a tensor at the same offset without communication.

Note: what is checked
---------------------
All parameters must be finite: a single NaN or infinity spoils every later step. Buffers may hold
infinities on purpose (a mask), and a NaN that they held when the run began (a value that is not
known yet). A NaN that appears later raises an error, because a running mean never loses it. The
optimizer's state is not checked: a NaN in it reaches the parameters in the same step, and
infinities are legitimate there.

A sum is not finite if one of its terms is not. So one sum, without a mask the size of the model,
proves that all values are finite. Only if the sum is not finite, possibly because finite terms
overflow, is every term checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from onefold.system.compat import CallModes, copy_each

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


# The largest alignment that affects the choice of kernels: see the note on alignment.
_ALIGNMENT_BYTES = 256
# A tensor of at least this size is added in place: copying one would cost as much as adding it.
_LARGE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of one tensor in its section."""

    name: str
    section: int
    """Number of the flat tensor that holds it; there is one for each dtype."""
    offset: int
    """Index of its first element in the section."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides of the tensor, so that channels_last stays channels_last."""
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Locations of a set of tensors; the same on every device."""

    entries: tuple[Entry, ...]
    dtypes: tuple[torch.dtype, ...]
    """Dtype of each section."""
    numels: tuple[int, ...]
    """Number of elements in each section, padding included."""

    @property
    def section_bytes(self) -> tuple[int, ...]:
        """Size of each section, rounded up to the alignment, in bytes."""
        pairs = zip(self.numels, self.dtypes, strict=True)
        return tuple(aligned(n * dtype.itemsize) for n, dtype in pairs)

    @property
    def nbytes(self) -> int:
        """Size of all sections, in bytes."""
        return sum(self.section_bytes)

    def converted(self, convert: Callable[[torch.dtype], torch.dtype]) -> Layout:
        """Return a layout with the same offsets in other dtypes, which must not be narrower."""
        # Offsets count elements: if they are aligned for a narrow dtype, they are for any wider
        # one.
        dtypes = tuple(map(convert, self.dtypes))
        if dtypes == self.dtypes:
            return self
        if any(new.itemsize < old.itemsize for new, old in zip(dtypes, self.dtypes, strict=True)):
            raise ValueError(f"dtypes must be at least as wide as {self.dtypes}, but got {dtypes}")
        return replace(self, dtypes=dtypes)

    def dtype_of(self, number: int) -> torch.dtype:
        """Return the dtype of an entry."""
        return self.dtypes[self.entries[number].section]

    def is_large(self, number: int) -> bool:
        """Return whether an entry is large enough to be processed apart from its neighbors."""
        return self.entries[number].numel * self.dtype_of(number).itemsize >= _LARGE_BYTES


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop - 1`` of one entry, in storage order."""

    entry: int
    start: int
    stop: int
    whole: bool
    """Whether it covers the entire entry, which is then updated in the entry's own shape."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Chunk(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of a section, which are moved or added in one call."""

    section: int
    start: int
    stop: int
    entry: int | None
    """Number of the large entry that contains it; None if it covers small entries."""


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Compute the offset of each tensor, in the order given, with one section per dtype."""
    # Dtypes in order of first appearance, which is the same in every process; the order of a set
    # could differ.
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
    """The sections of a layout in one block of memory, and a view of every entry.

    Args:
        layout: offsets of the tensors.
        memory: (layout.nbytes,) uint8, starting at a multiple of 64 bytes on the host; if None,
            zeros are allocated on ``device``.
        device: device of the allocation.
        there: whether to allocate memory now; see `get_back`.
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
        """(layout.nbytes,) uint8; empty after `let_go`."""
        # A flat tensor per dtype, (numel,): views of `memory`, which they keep alive.
        self.sections: list[torch.Tensor] = []
        layout = self.layout
        rooms = torch.split(memory, list(layout.section_bytes))
        for room, numel, dtype in zip(rooms, layout.numels, layout.dtypes, strict=True):
            # `view(dtype)` needs a start that is a multiple of the element size: section_bytes are
            # multiples of the alignment. An empty section may start anywhere, and such memory
            # cannot be viewed.
            stretch = room[: numel * dtype.itemsize] if numel else memory.new_empty(0)
            self.sections.append(stretch.view(dtype))
        self._views: list[torch.Tensor] | None = None
        self.is_there = True
        """Whether memory is allocated; without it there are neither sections nor views."""

    @property
    def views(self) -> list[torch.Tensor]:
        """Views of all entries, in their own shapes and strides."""
        if self._views is None:
            # The first access may be in inference mode, whose tensors cannot be written to outside
            # it.
            with CallModes.inference(False):
                self._views = [self._view(entry) for entry in self.layout.entries]
        return self._views

    def clone(self) -> FlatTensors:
        """Return a copy with separate memory."""
        return FlatTensors(self.layout, memory=self.memory.clone())

    def copy_(self, other: FlatTensors, *, non_blocking: bool = False) -> None:
        """Copy the values of another object, which may have other dtypes."""
        if self.layout.dtypes == other.layout.dtypes:
            # A single kernel copies all sections.
            self.memory.copy_(other.memory, non_blocking=non_blocking)
            return
        for section, values in zip(self.sections, other.sections, strict=True):
            section.copy_(values, non_blocking=non_blocking)

    def let_go(self) -> None:
        """Drop the memory until `get_back`; it is freed unless other code holds views of it."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.sections, self._views, self.is_there = [], [], False

    def get_back(self) -> None:
        """Allocate uninitialized memory again."""
        self._fill(torch.empty(self.layout.nbytes, dtype=torch.uint8, device=self.device))

    def write(self, values: Sequence[torch.Tensor | None], *, skip: Collection[int] = ()) -> None:
        """Copy one tensor into each entry, zeros for None; skip the entries in ``skip``."""
        views, sources = [], []
        for number, (view, value) in enumerate(zip(self.views, values, strict=True)):
            if number in skip:
                continue
            # Zeroed, not skipped, because the memory still holds the values of the previous step.
            if value is None:
                view.zero_()
            else:
                views.append(view)
                sources.append(value)
        if views:
            copy_each(views, sources)

    def segment(self, segment: Segment) -> torch.Tensor:
        """Return a view of one segment: in the entry's shape if it is whole, else (numel,)."""
        if segment.whole:
            return self.views[segment.entry]
        entry = self.layout.entries[segment.entry]
        section = self.sections[entry.section]
        return section[entry.offset + segment.start : entry.offset + segment.stop]

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return a (stop - start,) view of a range of one section."""
        return self.sections[chunk.section][chunk.start : chunk.stop]

    def _view(self, entry: Entry) -> torch.Tensor:
        section = self.sections[entry.section]
        stretch = section[entry.offset : entry.offset + entry.numel]
        # DLPack gives the view a storage of its own size. An ordinary view would share the
        # section's storage, and saving or deep-copying one parameter would include the whole
        # section. Pass a capsule: from_dlpack rejects a tensor on a GPU that is not the current
        # one.
        return from_dlpack(to_dlpack(stretch)).as_strided(entry.shape, entry.stride)


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a (numel,) view of a dense tensor's elements in memory order."""
    # `reshape(-1)` would give their logical order, and copy a channels_last tensor to do so.
    return tensor.as_strided((tensor.numel(),), (1,))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes for reading elements, by element size in bytes."""


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements, in memory order, reinterpreted as integers.

    All bits count, equal NaNs compare equal, and NumPy does not have to know the dtype. A
    complex128 becomes two words.
    """
    return storage_order(tensor).view(_WORDS[min(8, tensor.element_size())])


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the same values with the given dense strides: a view if the memory already matches."""
    if tensor.stride() == stride:
        return tensor
    # PyTorch chooses the stride of a dimension of length 1 freely: it does not describe memory.
    sides = zip(tensor.shape, tensor.stride(), stride, strict=True)
    if all(ours == theirs for size, ours, theirs in sides if size > 1):
        return tensor.as_strided(tensor.shape, stride)
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values, last index fastest: (nbytes,) uint8.

    Strides, and pending conjugation or negation, are not part of the values. The result is a view
    of the tensor's memory if the values are stored in that order.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # An expanded single element is contiguous but has stride 0, which `view` rejects.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and past-the-last address that a non-empty tensor may touch."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; a NaN equals itself.

    The tensors may be on different devices.
    """
    # Compare bytes: `==` treats 0.0 and -0.0 as equal, and NaN as unequal to itself.
    first = bits_of(one)
    return torch.equal(first, bits_of(other).to(first.device))


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if its elements are contiguous in memory, else default
    strides."""
    if is_dense(tensor.shape, tensor.stride()):
        return tuple(tensor.stride())
    # The meta device allocates no memory, and gives PyTorch's own default strides.
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements of a tensor with these strides fill one block of memory."""
    # Going from the fastest dimension to the slowest, each stride must be the product of the faster
    # sizes. Dimensions of length 1 are exempt, because PyTorch leaves arbitrary strides there.
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def aligned(nbytes: int) -> int:
    """Round up to a multiple of 256 bytes, a valid start for a tensor of any dtype."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, in the module's order; tied ones once."""
    # Drop what the compiler adds to names, so that a compiled model has the plain model's
    # fingerprint.
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
    # Hash raw bytes: -0.0 and 0.0 differ, NaN equals itself, and dtypes that NumPy lacks work.
    text = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    text.update(bits_of(tensor.cpu()).numpy().data)
    return text.hexdigest()


_COMPILED = "_orig_mod"
"""Attribute name under which torch.compile stores the wrapped module."""


def own_name(name: str) -> str:
    """Return the name of a parameter or buffer without the prefixes of torch.compile.

    >>> own_name("_orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    # Keep the last word: it is the tensor's name, which a user chooses freely; only modules are
    # wrapped.
    *path, last = name.split(".")
    return ".".join([*(word for word in path if word != _COMPILED), last])


def all_finite(values: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite; integers are always finite."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex) or not values.numel():
        return True
    # Check every element only if the sum is not finite: see the note on what is checked.
    return bool(torch.isfinite(_sum(values))) or bool(torch.isfinite(_wide(values)).all())


def first_not_finite(
    sections: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """Return the name of the first tensor that is not finite; None if all are.

    Args:
        sections: flat tensors that contain all values.
        tensors: the same values by name; searched only if a section is not finite.
    """
    # Checking a few large sections takes far fewer kernels than checking thousands of parameters.
    # A few large sections are checked in far fewer kernels than thousands of small parameters.
    if all(map(all_finite, sections)):
        return None
    return next((name for name, value in tensors.items() if not all_finite(value)), None)


def names_with_nan(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the tensors that hold a NaN; infinities do not count."""
    # The cheap sum is nearly always enough, so no mask of a whole tensor is allocated.
    return {
        name
        for name, value in tensors.items()
        if not all_finite(value) and bool(torch.isnan(_wide(value)).any())
    }


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all values, (), in a dtype that low precision does not overflow."""
    # `sum(dtype=)` widens while it adds; `.float()` would first copy the tensor at twice its size.
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.detach().sum(dtype=torch.float32)
    return _wide(values).sum()


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Convert values to a dtype with all kernels used here; float8, for one, lacks some."""
    values = values.detach()
    return values.float() if values.dtype.is_floating_point and values.itemsize < 4 else values
