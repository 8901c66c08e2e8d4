"""Digests a data set from a few samples, so that processes notice when they read different ones.

A digest covers the length and at most three samples. So it detects data that were generated without
a seed or lie in the wrong folder, and not a single picture in a thousand that differs. Equal data
have equal digests in any process: nothing in a digest depends on addresses, on the order of a set
or on the hash of a string.

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
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from onefold.core.flat import bits_of

__all__ = ["digest_of", "digest_samples", "join_digests"]

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
