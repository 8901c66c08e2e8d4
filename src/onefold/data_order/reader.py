"""Reads the shards of a batch, in a worker process or in this one, and digests a data set.

`Reader` answers requests for batches. It also digests a data set from a few samples, so that
processes notice when they read different ones: `digest_of` digests one sample, and `join_digests`
combines them. Such a digest covers the length and at most three samples. So it detects data that
were generated without a seed or lie in the wrong folder, and not a single picture in a thousand
that differs. Equal data have equal digests in any process: nothing in a digest depends on
addresses, on the order of a set or on the hash of a string.

Note: a shard that is made twice
--------------------------------
A batch must depend on its samples, the seed and its place alone, because devices and workers divide
the shards among them, and a resumed run makes none of those that are done. So every device makes
the first shard of a loader's first pass before the batch is read, as a `FirstShard`, and its bytes
are part of what devices compare. Whoever then reads this shard compares it with the one made
before. Made twice, it shows what the search for generators does not: a counter in ``collate``,
samples that are changed in place, generators of unknown kinds.

Note: why not pickle
--------------------
The bytes of a pickle would be a shorter way to a digest, and a wrong one: equal objects may pickle
differently, depending on which of their parts are the same object and on the order of sets, and a
sample may hold an open file or a lock, which do not pickle at all. A sample is any object of the
user's, so the walk must come to an end for every one: cycles, depth and size are limited, and what
is beyond a limit counts by its type alone, in every process at the same place.
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
"""Modules whose iterators can be gone through a single time."""


def is_stream(dataset: object) -> bool:
    """Whether a data set is to be read as a stream.

    An `IterableDataset` may inherit or define both methods of a data set with an index. A set has
    an order that differs between processes, and an iterator has no second pass.
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
    """What a loader can read: an object with a length, and an item for every index below it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One batch to read: which samples go into which of this process's shards."""

    loader: int
    epoch: int
    samples: int
    stop: int
    """Number of samples of the pass up to the end of this batch."""
    shares: Shares
    own: Sequence[int]
    """Numbers of this process's devices."""
    turn: int
    """How often shares or devices had changed during the pass when this was requested."""
    digest: bytes | None
    """Digest of the order, where the data set is digested; empty if it follows from the seed."""
    shards: dict[int, list[int]]
    """The indices of the samples of each of this process's shards, by shard number; empty if the
    reader cuts."""
    starts: dict[int, int]
    """For each shard the place of its first sample in the pass; empty if indices are unique."""
    item: int
    """The item of the data set that is the whole batch; -1 if the batch is made of samples."""
    check: tuple[list[int], int | None] | None = None
    """The indices of the samples of the first shard, and the place of the first of them if indices
    are not unique, where this shard is to be made twice; None where it is not."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, on its way to the process that will report it.

    It holds text and not the exception: one of a class of the user's may not unpickle elsewhere.
    """

    index: int
    epoch: int
    kind: str
    text: str
    traceback: str
    doing: str = "reading sample"
    """What failed, before its number; empty if the samples are not those of the saved run."""

    @classmethod
    def of_change(cls, request: Request, what: str) -> BadSample:
        """Describe that something was not the same when it was made twice.

        Args:
            request: asked for it.
            what: made it.
        """
        first = request.check[0][0] if request.check and request.check[0] else request.item
        text = (
            f"made twice from the same samples and seeds, this was not the same: {what} returned "
            f"other bytes the second time. Expected the same, because devices and workers divide "
            f"the data among them, and a resumed run does not make again what is done. Something "
            f"is kept between calls: a count, a value that is changed in place, or a random "
            f"generator that onefold does not find. Draw from the generators of PyTorch, Python or "
            f"NumPy, or from one kept as an attribute: all are seeded for each sample and shard. "
            f"For a count, use the number of the sample or of the epoch"
        )
        return cls(first, request.epoch, "StateError", text, "", "making the batch of sample")


class Answer(NamedTuple):
    """What was read for a request."""

    request: Request
    """As it was made; with other sizes if only reading has shown how large the batch is."""
    payloads: dict[int, Any] | BadSample
    """Each shard's payload."""
    digest: int = 0
    """Digest of the data, and of their order; 0 if it was not requested."""
    state: object = None
    """Where a stream stands after this batch, if it keeps a state."""
    others: tuple[int, ...] = ()
    """See `ShardedBatch.others`."""
    over: bool = False
    """Whether a stream has ended, so that there is no such batch."""


class HeldGenerators:
    """The generators that some objects reach, found when a process first reads.

    Not before: a worker that is not forked has copies of them, and many an object makes its
    generator in the process that uses it.

    Args:
        owners: the objects; none if they hold no generator for certain.
    """

    def __init__(self, *owners: object) -> None:
        self._owners = owners
        self._found = None if owners else OwnGenerators()

    def seed(self, seed: int) -> None:
        """Seed them all, each with a seed of its own."""
        if self._found is not None:
            self._found.seed(seed, "held by a data set")

    def read(self, read: Callable[[], _Read]) -> _Read:
        """Call a function that seeds and reads; put the generators back afterwards.

        The script, or a sampler, may draw from the same generators. The function is called twice
        if the objects make a generator in its first call, which is not seeded there.
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
    """Answers requests for batches; every worker process has one."""

    def __init__(self, dataset: SizedDataset, collate: Collate | None, seed: int) -> None:
        self._dataset = self.dataset = dataset
        self._collate = self.collate = collate
        self._seed = seed
        # Rows of tensors: nothing random, and nothing that can fail. A subclass may override how
        # items are read.
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
            # Without the epoch: the digest is that of the data, whenever a process computes it.
            common = "digest", (self._seed,)
            self._seed_all(derive_seed("digest", self._seed, index), common)
            # Returned rather than raised, as in `_read_shard`: DataLoader would wrap the exception
            # in one of its own, and the user would not learn which sample it was.
            try:
                digests.append(digest_of(self._dataset[index]))
            except Exception as error:
                return bad_sample(index, epoch, error)
        return join_digests(len(self._dataset), [*digests, order])

    def _read_shard(self, request: Request, shard: int, indices: list[int], first: Any) -> Any:
        if self._is_plain:
            # All rows are gathered at once into the list that default_collate would make.
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
        # Each sample has a seed of its own, so that its augmentation depends neither on the worker
        # that reads it nor on the samples that were read before it. But a sampler
        # may yield a sample several times in a pass, each time augmented in another way: then the
        # place in the pass takes the part of the index.
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
        # Collating may be random, too (mixup). The first number identifies the shard: within an
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
    """Yield at most so many items of an iterator, without a new ``iter()`` of it.

    Many an object is its own iterator and begins anew with each ``iter()``, which a ``for`` loop
    and `itertools.islice` would call.
    """
    for _ in range(most):
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


@contextmanager
def one_thread() -> Iterator[None]:
    """Read with one thread, as PyTorch's worker processes do.

    The bits of a sum depend on the number of threads, so samples that this process reads would
    otherwise differ from those that workers read.
    """
    before = torch.get_num_threads()
    # Setting the number of threads is not free, and each batch would set it twice.
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
    """Describe an exception that was raised in reading, to be reported elsewhere."""
    trace = "".join(traceback.format_exception(error))
    return BadSample(index, epoch, type(error).__name__, message_of(error), trace, doing)


def as_it_is(answer: Any) -> Any:
    """Return what was given."""
    # DataLoader's default would turn NumPy arrays into tensors. No lambda: a worker that is not
    # forked gets it pickled.
    return answer


class FirstShard:
    """The first shard of a batch, made before it is read.

    Args:
        samples: its samples.
        collate: makes its payload; seeds what it draws from.
    """

    def __init__(self, samples: object, collate: Callable[[Any], object]) -> None:
        self._samples, self._payload = digest_of(samples), b""
        try:
            # `collate` may change what it is given, which a data set may keep.
            self._payload = digest_of(collate(deepcopy(samples)))
        except Exception as error:  # whoever reads this shard reports what `collate` raises
            _log.debug("the first shard of a loader is not made twice: %s", error)

    @property
    def digest(self) -> bytes:
        """Digest of samples and payload, which must be the same on all devices."""
        return self._samples + self._payload

    def compared(
        self, request: Request, samples: object, collate: Callable[[Any], object]
    ) -> object:
        """Make the payload, and return it; a `BadSample` if it is not the same as before."""
        found = digest_of(samples)
        payload = collate(samples)
        if found != self._samples:
            return BadSample.of_change(request, "the data set")
        if self._payload and digest_of(payload) != self._payload:
            return BadSample.of_change(request, "collate")
        return payload


_MOST_PARTS = 100_000
"""The most parts of a sample that are read; any further ones count by their type alone."""
_MOST_DEEP = 50
"""The most containers nested in each other; what lies deeper counts by its type alone."""
_BY_NAME = (type, BuiltinFunctionType, FunctionType, MethodType, ModuleType)
"""Types whose ``__dict__`` is not data; they count by their name."""


def digest_samples(samples: int) -> list[int]:
    """Choose the samples of a data set that are read for its digest: first, middle and last.

    >>> digest_samples(9), digest_samples(2)
    ([0, 4, 8], [0, 1])
    """
    return sorted({0, samples // 2, samples - 1})


def join_digests(samples: int, digests: Iterable[bytes]) -> int:
    """Combine the digests of samples into that of the data set: a signed 64-bit number, never 0.

    Args:
        samples: length of the data set.
        digests: `digest_of` each of the samples that were read.
    """
    joined = hashlib.blake2b(struct.pack("<q", samples), digest_size=8)
    for digest in digests:
        joined.update(digest)
    # 0 stands for "no digest" in a batch and in a head.
    return int.from_bytes(joined.digest(), "little", signed=True) or 1


def digest_of(sample: object) -> bytes:
    """Digest everything that a sample holds.

    Tensors, arrays, pictures, numbers and text count by type and content; dicts, sets, tuples,
    lists, dataclasses and other objects with fields by what they hold. Anything else counts by its
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
            part: the sample, or anything in it.
            within: ids of the containers around it, any of which it may in turn contain.
        """
        self._left -= 1
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        content: Iterable[bytes] = ()
        # An id is only compared with those of containers that are alive around it: a table of all
        # that was ever seen would mistake a new object for a dead one at the same address.
        if self._left > 0 and len(within) < _MOST_DEEP and id(part) not in within:
            content = self._content(part, (*within, id(part)))
        joined = hashlib.blake2b(name.encode(), digest_size=16)
        # With their lengths: "ab" and "c" must not digest like "a" and "bc".
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
        # Sorted by digest: equal dicts may have been filled in different orders, and the order of a
        # set of strings differs from one process to the next.
        if isinstance(part, Mapping):
            return sorted(inner(key) + inner(value) for key, value in part.items())
        if isinstance(part, Set):
            return sorted(map(inner, part))
        if isinstance(part, list | tuple):
            return map(inner, part)
        return [piece for name, value in _fields(part) for piece in (name.encode(), inner(value))]


def _leaf(part: object) -> list[bytes] | None:
    """The content of a part that holds no other parts; None if it may hold some."""
    if part is None or isinstance(part, _BY_NAME):
        return [getattr(part, "__qualname__", "").encode()]
    # By the base classes' own methods: a subclass may print itself in any way it likes. In hex, for
    # Python refuses to print integers of thousands of digits in decimal.
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
    # As a plain tensor: a subclass may answer any of these calls in its own way.
    return [*kind, bits_of(tensor.detach().as_subclass(torch.Tensor).cpu()).numpy().tobytes()]


def _of_array(array: np.ndarray[Any, Any], inner: Callable[[object], bytes]) -> list[bytes]:
    kind = [array.dtype.str.encode(), str(array.shape).encode()]
    if isinstance(array, np.ma.MaskedArray):
        return [*map(inner, (np.ma.getmaskarray(array), array.filled(0)))]
    # Between the fields of a structured array there may be padding, which holds anything.
    if array.dtype.names is not None:
        fields = [array[name] for name in array.dtype.names]
        return [*kind, *map(str.encode, array.dtype.names), *map(inner, fields)]
    # The bytes of an array of objects are addresses, which differ in every process.
    if array.dtype.hasobject:
        return [*kind, *map(inner, array.flat)]
    return [*kind, array.tobytes()]


def _of_picture(part: object) -> list[bytes] | None:
    """The content of a Pillow image; None for anything else."""
    # Looked up and never imported: where there is such an image, somebody has loaded Pillow.
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(part, pillow.Image):
        return None
    palette = part.getpalette() if part.mode in ("P", "PA") else None
    return [part.mode.encode(), str(part.size).encode(), part.tobytes(), bytes(palette or ())]


def _fields(part: object) -> list[tuple[str, object]]:
    """The attributes of an object, sorted by name."""
    own: dict[str, object] = dict(getattr(part, "__dict__", {}))
    # A dataclass with slots has no `__dict__`.
    if dataclasses.is_dataclass(part):
        own |= {f.name: getattr(part, f.name, None) for f in dataclasses.fields(part)}
    return sorted(own.items())
