"""Tells with a few samples whether two processes read the same data set.

It reads the length and three samples at most, so it finds data that were made without a seed or lie
in another folder, and not one picture in a thousand that differs. Equal data have equal digests in
any process: nothing in one depends on addresses, on the order of a set or on the hash of a string.
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

__all__ = ["digest_of", "digest_samples", "join_digests"]

_MOST_PARTS = 100_000
"""Of a sample; what comes after them counts by its type alone."""
_MOST_DEEP = 50
"""Containers in containers; what lies deeper counts by its type alone."""
_BY_NAME = (type, BuiltinFunctionType, FunctionType, MethodType, ModuleType)
"""Have a ``__dict__`` that is not data."""


def digest_samples(samples: int) -> list[int]:
    """Which samples of a data set are read for its digest: the first, middle and last.

    >>> digest_samples(9), digest_samples(2)
    ([0, 4, 8], [0, 1])
    """
    return sorted({0, samples // 2, samples - 1})


def join_digests(samples: int, digests: Iterable[bytes]) -> int:
    """The digest of a data set: a number of 64 bits with a sign, and never 0.

    Args:
        samples: its length.
        digests: `digest_of` each of the samples that were read.
    """
    joined = hashlib.blake2b(struct.pack("<q", samples), digest_size=8)
    for digest in digests:
        joined.update(digest)
    return int.from_bytes(joined.digest(), "little", signed=True) or 1


def digest_of(sample: object) -> bytes:
    """A digest of what a sample holds.

    Tensors, arrays, pictures, numbers and text count by type and content; dicts, sets, tuples,
    lists, dataclasses and other objects with fields by what they hold. Anything else counts by its
    type alone.
    """
    return _Walk().digest(sample, ())


class _Walk:
    """Goes through one sample."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def digest(self, part: object, within: tuple[int, ...]) -> bytes:
        """The digest of one part.

        Args:
            part: a sample, or what lies in one.
            within: ids of the containers that it lies in, which may lie in it as well.
        """
        self._left -= 1
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        content: Iterable[bytes] = ()
        if self._left > 0 and len(within) < _MOST_DEEP and id(part) not in within:
            content = self._content(part, (*within, id(part)))
        joined = hashlib.blake2b(name.encode(), digest_size=16)
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
        if isinstance(part, Mapping):
            return sorted(inner(key) + inner(value) for key, value in part.items())
        if isinstance(part, Set):
            return sorted(map(inner, part))
        if isinstance(part, list | tuple):
            return map(inner, part)
        return [piece for name, value in _fields(part) for piece in (name.encode(), inner(value))]


def _leaf(part: object) -> list[bytes] | None:
    """The content of what holds no other parts; None if it may."""
    if part is None or isinstance(part, _BY_NAME):
        return [getattr(part, "__qualname__", "").encode()]
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
    here = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous()
    return [*kind, here.reshape(-1).view(torch.uint8).numpy().tobytes()]


def _of_array(array: np.ndarray[Any, Any], inner: Callable[[object], bytes]) -> list[bytes]:
    kind = [array.dtype.str.encode(), str(array.shape).encode()]
    if isinstance(array, np.ma.MaskedArray):
        return [*map(inner, (np.ma.getmaskarray(array), array.filled(0)))]
    if array.dtype.names is not None:  # between the fields there may be anything
        fields = [array[name] for name in array.dtype.names]
        return [*kind, *map(str.encode, array.dtype.names), *map(inner, fields)]
    if array.dtype.hasobject:
        return [*kind, *map(inner, array.flat)]
    return [*kind, array.tobytes()]


def _of_picture(part: object) -> list[bytes] | None:
    """The content of an image of Pillow's, which is loaded if there is one."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(part, pillow.Image):
        return None
    palette = part.getpalette() if part.mode in ("P", "PA") else None
    return [part.mode.encode(), str(part.size).encode(), part.tobytes(), bytes(palette or ())]


def _fields(part: object) -> list[tuple[str, object]]:
    """What an object holds, in the order of the names."""
    own: dict[str, object] = dict(getattr(part, "__dict__", {}))
    if dataclasses.is_dataclass(part):  # which may have slots
        own |= {f.name: getattr(part, f.name, None) for f in dataclasses.fields(part)}
    return sorted(own.items())
