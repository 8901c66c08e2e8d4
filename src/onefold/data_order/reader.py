"""Reads the shards of a batch, in a worker process or in this one, and digests a data set.

`Reader` answers requests for batches. It also digests a data set from a few samples, so that
processes detect when they read different data: `digest_of` digests one sample, and `join_digests`
combines the digests. The result covers the length and at most three samples. It detects data that
are generated without a seed or stored in the wrong directory, but not one different image in a
thousand. Equal data have equal digests in any process: no digest depends on addresses, on the order
of a set or on the hash of a string.

Note: a shard that is made twice
--------------------------------
A batch must depend only on its samples, the seed and its position, because devices and workers
divide the shards among them, and a resumed run does not repeat completed shards. Every device
therefore makes the first shard of a loader's first pass in advance, as a `FirstShard`, and its
bytes are part of the data that devices compare. The device or worker that then reads this shard
compares the two results. This detects state that the search for generators misses: a counter in
``collate``, samples changed in place, generators of unknown types.

Note: why not pickle
--------------------
Hashing a pickle would be shorter, but wrong: the pickles of equal objects may differ, depending on
shared parts and on the order of sets, and a sample may hold an open file or a lock, which cannot be
pickled. A sample may be any object, so the walk must always end: cycles, depth and size are
limited, and objects beyond a limit count by their type alone, at the same point in every process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from onefold.core.flat import bits_of
from onefold.core.randomness import (
    OwnGenerators,
    derive_seed,
    loader_seed,
    seed_generators,
)
from onefold.core.shard import Shares
from onefold.data_order.kept_state import generators_in
from onefold.system.words import message_of

__all__ = [
    "Answer",
    "BadSample",
    "Collate",
    "FirstShard",
    "HeldGenerators",
    "Reader",
    "Request",
    "SizedDataset",
    "as_it_is",
    "bad_sample",
    "digest_of",
    "digest_samples",
    "is_stream",
    "join_digests",
    "one_thread",
    "take_items",
]

_log = logging.getLogger("onefold")

_Read = TypeVar("_Read")

_ONCE = ("_io", "builtins", "itertools")
"""Modules whose iterators have a single pass."""


def is_stream(dataset: object) -> bool:
    """Whether a data set is read as a stream.

    An `IterableDataset` may also inherit or define the methods of a map-style data set. A set is
    not a stream, because its order differs between processes; nor is an iterator, which has one
    pass.
    """
    if isinstance(dataset, IterableDataset):
        return True
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    once = hasattr(dataset, "__next__") and type(dataset).__module__ in _ONCE
    unordered = isinstance(dataset, set | frozenset)
    return hasattr(dataset, "__iter__") and not (indexed or once or unordered)


Collate = Callable[[list[Any]], Any]
"""Makes one shard's payload from its samples."""


class SizedDataset(Protocol):
    """A map-style data set: an object with a length and an item for every index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one batch: the samples of each of this process's shards."""

    loader: int
    epoch: int
    samples: int
    stop: int
    """Number of samples in the pass up to the end of this batch."""
    shares: Shares
    own: Sequence[int]
    """Numbers of this process's devices."""
    turn: int
    """Number of changes of shares or devices in the pass before this request."""
    digest: bytes | None
    """Digest of the order if the data set is digested; empty if the order follows from the seed."""
    shards: dict[int, list[int]]
    """Sample indices of each of this process's shards, by shard number; empty if the reader cuts
    the batch."""
    starts: dict[int, int]
    """Position of each shard's first sample in the pass; empty if indices are unique."""
    item: int
    """Item of the data set that is the whole batch; -1 if the batch consists of samples."""
    check: tuple[list[int], int | None] | None = None
    """Sample indices of a first shard that must be made twice, and the position of its first sample
    if indices are not unique; None for other batches."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """Describes a sample that could not be read, for the process that will raise the error.

    It stores text, not the exception: an exception of a user's class may not unpickle elsewhere.
    """

    index: int
    epoch: int
    kind: str
    text: str
    traceback: str
    doing: str = "reading sample"
    """The operation that failed; empty if the samples differ from the saved run's."""

    @classmethod
    def of_change(cls, request: Request, what: str) -> BadSample:
        """Describe a result that differed when it was made twice.

        Args:
            request: the request for the result.
            what: the object that made it.
        """
        first = request.check[0][0] if request.check and request.check[0] else request.item
        text = (
            f"{what} returned different bytes when called twice for the same samples and seeds. "
            f"The result must be the same, because devices and workers divide the data, and a "
            f"resumed run does not repeat completed batches. Some state is kept between calls: a "
            f"counter, a value that is changed in place, or a random generator that onefold cannot "
            f"find. Use the generators of PyTorch, Python or NumPy, or one that is stored as an "
            f"attribute: all of these are seeded for each sample and shard. Instead of a counter, "
            f"use the number of the sample or of the epoch"
        )
        return cls(first, request.epoch, "StateError", text, "", "making the batch of sample")


class Answer(NamedTuple):
    """The answer to a request."""

    request: Request
    """The request, with other sizes if only reading shows the size of the batch."""
    payloads: dict[int, Any] | BadSample
    """Payload of each shard."""
    digest: int = 0
    """Digest of the data and their order; 0 if not requested."""
    state: object = None
    """State of the stream after this batch, if it keeps one."""
    others: tuple[int, ...] = ()
    """See `ShardedBatch.others`."""
    over: bool = False
    """Whether the stream has ended, so that the batch does not exist."""


class HeldGenerators:
    """The generators reachable from some objects, found when a process first reads.

    They are not searched earlier, because a spawned worker has copies of them, and many objects
    create their generator only in the process that uses it.

    Args:
        owners: the objects; none if they certainly hold no generator.
    """

    def __init__(self, *owners: object) -> None:
        self._owners = owners
        self._found = None if owners else OwnGenerators()

    def seed(self, seed: int) -> None:
        """Seed every generator with its own seed."""
        if self._found is not None:
            self._found.seed(seed, "held by a data set")

    def read(self, read: Callable[[], _Read]) -> _Read:
        """Call a function that seeds and reads; restore the generators afterwards.

        The script or a sampler may draw from the same generators. The function is called twice if
        its first call creates a generator in the objects, which is not seeded in that call.
        """
        if (known := self._found) is None:
            self._found = known = OwnGenerators(generators_in(*self._owners))
            with known.kept():
                result = read()
            found = generators_in(*self._owners)
            if [*map(id, found)] == [*map(id, known.all)]:
                return result
            self._found = known = OwnGenerators(found)
        with known.kept():
            return read()


class Reader(Dataset[Any]):
    """Answers requests for batches. Every worker process has one."""

    def __init__(self, dataset: SizedDataset, collate: Collate | None, seed: int) -> None:
        self._dataset = self.dataset = dataset
        self._collate = self.collate = collate
        self._seed = seed
        # Rows of tensors are neither random nor able to fail. Require the exact type, because a
        # subclass may override how items are read.
        self._is_plain = type(dataset) is TensorDataset and collate is None
        self._held = HeldGenerators(*(() if self._is_plain else (dataset, collate)))

    def __getitem__(self, request: Request) -> Answer:
        return self._held.read(lambda: self._answer(request))

    def _answer(self, request: Request) -> Answer:
        payloads, digest = {}, 0
        first: Any = None  # a FirstShard
        if request.check is not None and not self._is_plain:
            samples = self._samples(request, *request.check)
            collate = partial(self._collated, request, *request.check)
            first = FirstShard(samples, collate)
        if request.digest is not None:
            order = request.digest + (first.digest if first else b"")
            found = self._read_digest(request.epoch, order)
            if isinstance(found, BadSample):
                return Answer(request, found)
            digest = found
        for shard, indices in request.shards.items():
            payload = self._read_shard(request, shard, indices, None if shard else first)
            if isinstance(payload, BadSample):
                return Answer(request, payload, digest)
            payloads[shard] = payload
        return Answer(request, payloads, digest)

    def _read_digest(self, epoch: int, order: bytes) -> int | BadSample:
        digests = []
        for index in digest_samples(len(self._dataset)):
            # Leave out the epoch: the digest of the data must be the same in every pass.
            self._seed_all(derive_seed("digest", self._seed, index), ("digest", (self._seed,)))
            # Return the error, as in `_read_shard`: DataLoader would wrap a raised exception in its
            # own, and hide which sample failed.
            try:
                digests.append(digest_of(self._dataset[index]))
            except Exception as error:
                return bad_sample(index, epoch, error)
        return join_digests(len(self._dataset), [*digests, order])

    def _read_shard(self, request: Request, shard: int, indices: list[int], first: Any) -> Any:
        if self._is_plain:
            # Gather all rows at once, into the list that default_collate would make.
            tensors: Any = self._dataset
            return [tensor[indices] for tensor in tensors.tensors]
        place = request.starts.get(shard)
        samples = self._samples(request, indices, place)
        if isinstance(samples, BadSample):
            return samples
        collate = partial(self._collated, request, indices, place)
        return collate(samples) if first is None else first.compared(request, samples, collate)

    def _samples(
        self, request: Request, indices: list[int], first: int | None
    ) -> list[Any] | BadSample:
        samples, seed, epoch, loader = [], self._seed, request.epoch, request.loader
        # Seed each sample, so that its augmentation depends neither on the worker that reads it nor
        # on the samples read before it. A sampler may yield a sample several times in a pass, each
        # time with another augmentation: then the position in the pass replaces the index.
        common = "batch", (seed, epoch, loader, request.stop)
        kind = "sample" if first is None else "place"
        numbers = indices if first is None else range(first, first + len(indices))
        for number, index in zip(numbers, indices, strict=True):
            self._seed_all(loader_seed(kind, seed, epoch, number, loader=loader), common)
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                return bad_sample(index, epoch, error)
        return samples

    def _collated(
        self, request: Request, indices: list[int], first: int | None, samples: list[Any]
    ) -> Any:
        # Collating may be random too (mixup). The first number identifies the shard: within an
        # epoch no other shard has it.
        kind, number = ("collate", indices[0]) if first is None else ("collate at place", first)
        numbers = self._seed, request.epoch
        drawn = loader_seed(kind, *numbers, number, loader=request.loader)
        self._seed_all(drawn, ("batch", (*numbers, request.loader, request.stop)))
        return (self._collate or default_collate)(samples)

    def _seed_all(self, seed: int, common: tuple[str, tuple[int, ...]] | None = None) -> None:
        seed_generators(seed, common=common)
        self._held.seed(seed)


def take_items(iterator: Iterator[Any], most: int) -> Iterator[Any]:
    """Yield up to ``most`` items of an iterator, without calling ``iter()`` on it.

    Some objects are their own iterator and restart in each ``iter()``, which a ``for`` loop and
    `itertools.islice` would call.
    """
    for _ in range(most):
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside this context, as PyTorch's worker processes do.

    The bits of a sum depend on the number of threads, so samples read in this process would
    otherwise differ from samples read by workers.
    """
    before = torch.get_num_threads()
    # Setting the number of threads is not free, and would happen twice per batch.
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bad_sample(
    index: int, epoch: int, error: Exception, doing: str = "reading sample"
) -> BadSample:
    """Describe an exception raised while reading, to be reported by another process."""
    trace = "".join(traceback.format_exception(error))
    return BadSample(index, epoch, type(error).__name__, message_of(error), trace, doing)


def as_it_is(answer: Any) -> Any:
    """Return the argument unchanged."""
    # DataLoader's default would convert NumPy arrays to tensors. This is not a lambda, because it
    # must be picklable for spawned workers.
    return answer


class FirstShard:
    """The first shard of a batch, made in advance for comparison.

    Args:
        samples: its samples.
        collate: makes its payload; seeds the generators that it draws from.
    """

    def __init__(self, samples: object, collate: Callable[[Any], object]) -> None:
        self._samples, self._payload = digest_of(samples), b""
        try:
            # Copy the samples: `collate` may change them, and a data set may keep them.
            self._payload = digest_of(collate(deepcopy(samples)))
        except Exception as error:  # the reader of this shard reports the errors of `collate`
            _log.debug("the first shard of a loader is not made twice: %s", error)

    @property
    def digest(self) -> bytes:
        """Digest of samples and payload, which must be the same on all devices."""
        return self._samples + self._payload

    def compared(
        self, request: Request, samples: object, collate: Callable[[Any], object]
    ) -> object:
        """Return the payload of this shard; a `BadSample` if it differs from the first time."""
        found = digest_of(samples)
        payload = collate(samples)
        if found != self._samples:
            return BadSample.of_change(request, "the data set")
        if self._payload and digest_of(payload) != self._payload:
            return BadSample.of_change(request, "collate")
        return payload


_MOST_PARTS = 100_000
"""Maximum number of parts read per sample; further parts count by their type alone."""
_MOST_DEEP = 50
"""Maximum nesting depth of containers; deeper parts count by their type alone."""
_BY_NAME = (type, BuiltinFunctionType, FunctionType, MethodType, ModuleType)
"""Types that count by their name, because their ``__dict__`` is not data."""


def digest_samples(samples: int) -> list[int]:
    """Choose the samples that represent a data set in its digest: first, middle and last.

    >>> digest_samples(9), digest_samples(2)
    ([0, 4, 8], [0, 1])
    """
    return sorted({0, samples // 2, samples - 1})


def join_digests(samples: int, digests: Iterable[bytes]) -> int:
    """Combine the digests of samples to that of a data set: a signed 64-bit number, never 0.

    Args:
        samples: length of the data set.
        digests: results of `digest_of` for the chosen samples.
    """
    joined = hashlib.blake2b(struct.pack("<q", samples), digest_size=8)
    for digest in digests:
        joined.update(digest)
    # 0 stands for "no digest" in a batch and in a head.
    return int.from_bytes(joined.digest(), "little", signed=True) or 1


def digest_of(sample: object) -> bytes:
    """Digest the whole content of a sample.

    Tensors, arrays, images, numbers and text count by type and content; dicts, sets, tuples, lists,
    dataclasses and other objects with fields by their members. All other objects count by their
    type alone.
    """
    return _Walk().digest(sample, ())


class _Walk:
    """A walk through one sample."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def digest(self, part: object, within: tuple[int, ...]) -> bytes:
        """Digest one part of the sample.

        Args:
            part: the sample, or any part of it.
            within: ids of the enclosing containers, to detect cycles.
        """
        self._left -= 1
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        content: Iterable[bytes] = ()
        # Compare ids only with enclosing containers, which are alive: in a table of all ids seen so
        # far, a new object could have the address of a deleted one.
        if self._left > 0 and len(within) < _MOST_DEEP and id(part) not in within:
            content = self._content(part, (*within, id(part)))
        joined = hashlib.blake2b(name.encode(), digest_size=16)
        # Include lengths: "ab" and "c" must not digest like "a" and "bc".
        for piece in content:
            joined.update(struct.pack("<q", len(piece)))
            joined.update(piece)
        return joined.digest()

    def _content(self, part: object, within: tuple[int, ...]) -> Iterable[bytes]:
        def inner(value: object) -> bytes:
            return self.digest(value, within)

        if (leaf := _leaf(part)) is not None:
            return leaf
        if isinstance(part, np.ndarray | np.generic):
            return _of_array(np.asanyarray(part), inner)
        # Sort by digest: equal dicts may be filled in different orders, and the order of a set of
        # strings differs between processes.
        if isinstance(part, Mapping):
            return sorted(inner(key) + inner(value) for key, value in part.items())
        if isinstance(part, Set):
            return sorted(map(inner, part))
        if isinstance(part, list | tuple):
            return map(inner, part)
        return [piece for name, value in _fields(part) for piece in (name.encode(), inner(value))]


def _leaf(part: object) -> list[bytes] | None:
    """Return the content of a part without inner parts; None if it may have some."""
    if part is None or isinstance(part, _BY_NAME):
        return [getattr(part, "__qualname__", "").encode()]
    # Use the base classes' methods, because a subclass may override its formatting. Use hex,
    # because Python refuses to print integers of thousands of digits in decimal.
    if isinstance(part, int):
        return [int.__format__(part, "x").encode()]
    if isinstance(part, float):
        return [float.hex(part).encode()]
    if isinstance(part, complex):
        return [float.hex(part.real).encode(), float.hex(part.imag).encode()]
    if isinstance(part, str):
        return [part.encode(errors="surrogatepass")]
    if isinstance(part, bytes | bytearray | memoryview):
        return [bytes(part)]
    if isinstance(part, torch.Tensor):
        return _of_tensor(part)
    return _of_picture(part)


def _of_tensor(tensor: torch.Tensor) -> list[bytes]:
    kind = [str(tensor.dtype).encode(), str(tensor.layout).encode()]
    if tensor.is_nested or tensor.layout != torch.strided:
        return kind
    kind.append(str(tuple(tensor.shape)).encode())
    if tensor.is_meta or tensor.is_quantized:
        return kind
    # Convert to a plain tensor: a subclass may override any of these calls.
    return [*kind, bits_of(tensor.detach().as_subclass(torch.Tensor).cpu()).numpy().tobytes()]


def _of_array(array: np.ndarray[Any, Any], inner: Callable[[object], bytes]) -> list[bytes]:
    kind = [array.dtype.str.encode(), str(array.shape).encode()]
    if isinstance(array, np.ma.MaskedArray):
        return [*map(inner, (np.ma.getmaskarray(array), array.filled(0)))]
    # Digest the fields separately: the padding between them is arbitrary memory.
    if array.dtype.names is not None:
        fields = [array[name] for name in array.dtype.names]
        return [*kind, *map(str.encode, array.dtype.names), *map(inner, fields)]
    # Digest the objects: the array's bytes are addresses, which differ between processes.
    if array.dtype.hasobject:
        return [*kind, *map(inner, array.flat)]
    return [*kind, array.tobytes()]


def _of_picture(part: object) -> list[bytes] | None:
    """Return the content of a Pillow image; None for anything else."""
    # Look Pillow up instead of importing it: if the part is an image, Pillow is already loaded.
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(part, pillow.Image):
        return None
    palette = part.getpalette() if part.mode in ("P", "PA") else None
    return [part.mode.encode(), str(part.size).encode(), part.tobytes(), bytes(palette or ())]


def _fields(part: object) -> list[tuple[str, object]]:
    """Return the attributes of an object, sorted by name."""
    own: dict[str, object] = dict(getattr(part, "__dict__", {}))
    # A dataclass with slots has no `__dict__`.
    if dataclasses.is_dataclass(part):
        own |= {f.name: getattr(part, f.name, None) for f in dataclasses.fields(part)}
    return sorted(own.items())
