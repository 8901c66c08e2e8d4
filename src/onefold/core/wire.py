"""Writes values as bytes and reads them back, exactly: what devices report to each other.

A value is written as one line of JSON, which says what it is made of, and behind it the bytes of
its tensors and arrays. Floats travel as their 64 bits, so that NaN and the infinities keep theirs.

Note: why not pickle
--------------------
Unpickling runs code that the sender chose. Of what is read here nothing is run: only the kinds of
value listed in `encode` are ever constructed, whatever the bytes claim.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from onefold.core.flat import bits_of

__all__ = ["decode", "encode"]

_LENGTH_BYTES = 8
_DEEPEST = 50
"""How many containers may be nested in each other."""
_KINDS = "biufc"
"""NumPy's letters for truth values and numbers: the arrays that are nothing but their bytes."""
_EXPECTED = (
    "expected None, True or False, numbers, text, bytes, tensors, NumPy arrays of numbers, or "
    "lists, tuples and dicts of these. Send what it is made of: its state_dict(), tuple(...), "
    "dataclasses.asdict(...)"
)

_Tree = list[Any]


def encode(value: object, what: str) -> bytes:
    """Write a value as bytes, from which `decode` restores it.

    Args:
        value: None, a bool, int, float, str or bytes; a strided tensor of any dtype, shape and
            device; a NumPy array or scalar of numbers; or lists, tuples and mappings of these,
            whose keys are text.
        what: what the value is called in errors.

    Raises:
        TypeError: the value holds something else, or is nested too deeply (or in itself).

    >>> decode(encode({"loss": 0.5, "sizes": (3, 4)}, "value"))
    {'loss': 0.5, 'sizes': (3, 4)}
    """
    parts: list[bytes] = []
    text = json.dumps(_tree(value, what, parts, 0)).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts])


def decode(data: bytes) -> Any:
    """Restore what `encode` wrote; tensors are on the host, mappings are dicts.

    Args:
        data: may have other bytes after it.
    """
    start = _LENGTH_BYTES
    stop = start + int.from_bytes(data[:start], "little")
    return _Reading(data, stop).value(json.loads(data[start:stop]))


def _tree(value: object, what: str, parts: list[bytes], depth: int) -> _Tree:
    """Describe a value as JSON; append the bytes of its tensors and arrays to ``parts``."""
    if depth > _DEEPEST:
        raise TypeError(
            f"{what[:_DEEPEST]}… is nested more than {_DEEPEST} levels deep: expected lists, "
            f"tuples and dicts of fewer levels"
        )
    if value is None or isinstance(value, bool):
        return ["plain", value]
    # Before Python's numbers: np.float64 is a subclass of float, and must come back as it is.
    if isinstance(value, np.generic | np.ndarray):
        return _array(value, what, parts)
    if isinstance(value, torch.Tensor):
        return _tensor(value, what, parts)
    # `type() is` from here on: a subclass may carry state that would be lost without a word.
    plain = _PLAIN.get(type(value))
    if plain is not None:
        return plain(value)
    if type(value) is bytes:
        parts.append(value)
        return ["bytes", len(value)]
    if type(value) in (list, tuple):
        items: Any = value
        inner = [_tree(v, f"{what}[{n}]", parts, depth + 1) for n, v in enumerate(items)]
        return [type(value).__name__, inner]
    if isinstance(value, Mapping):
        pairs = [_key(key, what) for key in value]
        inner = [_tree(value[key], f"{what}[{key!r}]", parts, depth + 1) for key in pairs]
        return ["dict", pairs, inner]
    raise TypeError(
        f"{what} is of type {type(value).__name__}, which no device can send to another one: "
        f"{_EXPECTED}"
    )


_PLAIN: Mapping[type, Callable[[Any], _Tree]] = {
    str: lambda value: ["plain", value],
    # Hexadecimal, as Python refuses to read whole numbers of very many decimal digits.
    int: lambda value: ["int", hex(value)],
    float: lambda value: ["float", struct.pack("<d", value).hex()],
}


def _key(key: object, what: str) -> str:
    if type(key) is not str:
        raise TypeError(
            f"{what} has the key {key!r}, of type {type(key).__name__}: expected text for keys. "
            f"Use str(key), or send a list of pairs"
        )
    return key


def _array(value: np.generic | np.ndarray[Any, Any], what: str, parts: list[bytes]) -> _Tree:
    plain = isinstance(value, np.generic) or type(value) is np.ndarray
    if not plain or value.dtype.kind not in _KINDS:
        raise TypeError(
            f"{what} is a NumPy {type(value).__name__} of {value.dtype}, which no device can send "
            f"to another one: expected numbers or truth values. Send value.tolist()"
        )
    parts.append(value.tobytes())
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.str]
    return ["array", value.dtype.str, list(value.shape)]


def _tensor(value: torch.Tensor, what: str, parts: list[bytes]) -> _Tree:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        kind = "a quantized" if value.is_quantized else f"a {value.device.type} {value.layout}"
        raise TypeError(
            f"{what} is {kind} tensor, which no device can send to another one: expected a dense "
            f"tensor with values, such as value.to_dense()"
        )
    parts.append(bits_of(value.cpu()).numpy().tobytes())
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]


class _Reading:
    """Takes the bytes of tensors and arrays one after the other.

    Args:
        data: what `encode` wrote.
        start: where they begin.
    """

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start

    def value(self, tree: _Tree) -> Any:
        """Restore a value, and take its bytes."""
        kind, *rest = tree
        if kind not in _READERS:
            raise ValueError(f"there is no kind of value {kind!r}")
        return _READERS[kind](self, *rest)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, self._at = self._at, self._at + nbytes
        return self._data[start : self._at]

    def tensor(self, name: str, shape: list[int]) -> torch.Tensor:
        """Restore a tensor on the host."""
        dtype = getattr(torch, name)
        # The name came from elsewhere: `getattr` may find anything in torch.
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there is no type of tensor {name!r}")
        # A tensor of its own, which begins where any dtype may.
        flat = torch.empty(prod(shape), dtype=dtype)
        memory = flat.view(torch.uint8).numpy()
        memory[:] = np.frombuffer(self.take(memory.size), dtype=np.uint8)
        return flat.view(shape)

    def array(self, name: str, shape: list[int]) -> np.ndarray[Any, Any]:
        """Restore a NumPy array, which may be written to."""
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS:
            raise ValueError(f"there is no type of array {name!r}")
        part = self.take(prod(shape) * dtype.itemsize)
        return np.frombuffer(part, dtype=dtype).reshape(shape).copy()

    def mapping(self, keys: list[str], items: list[_Tree]) -> dict[str, Any]:
        """Restore a dict."""
        return {key: self.value(item) for key, item in zip(keys, items, strict=True)}


_READERS: Mapping[str, Callable[..., Any]] = {
    "plain": lambda reading, value: value,
    "int": lambda reading, text: int(text, 16),
    "float": lambda reading, text: struct.unpack("<d", bytes.fromhex(text))[0],
    "bytes": _Reading.take,
    "list": lambda reading, items: [reading.value(item) for item in items],
    "tuple": lambda reading, items: tuple([reading.value(item) for item in items]),
    "dict": _Reading.mapping,
    "tensor": _Reading.tensor,
    "array": _Reading.array,
    "scalar": lambda reading, name: reading.array(name, [])[()],
}
