"""Writes values as bytes and reads them back, exactly: what devices report to each other.

A value is written as MessagePack, which says what it is made of, and behind it the bytes of its
tensors and arrays. What MessagePack lacks is written as a list that begins with the name of its
kind; so are lists, lest one be taken for another kind. Floats keep their 64 bits, NaN as well.

Note: why not pickle
--------------------
Unpickling runs code that the sender chose. Of what is read here nothing is run: only the kinds of
value listed in `encode` are ever constructed, whatever the bytes claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import torch
from msgspec import msgpack

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
_TEXT = "utf-8", "surrogatepass"
"""As the name of a file may have bytes that are no UTF-8."""


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
    head = msgpack.encode(_tree(value, what, parts, 0))
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *parts])


def decode(data: bytes) -> Any:
    """Restore what `encode` wrote; tensors are on the host, mappings are dicts.

    Args:
        data: may have other bytes after it.
    """
    rest = BytesIO(data)
    head = rest.read(int.from_bytes(rest.read(_LENGTH_BYTES), "little"))
    return _value(msgpack.decode(head), rest)


def _tree(value: Any, what: str, parts: list[bytes], depth: int) -> Any:
    """Describe a value for MessagePack; append the bytes of tensors and arrays to ``parts``."""
    if depth > _DEEPEST:
        raise TypeError(
            f"{what[:_DEEPEST]}… is nested more than {_DEEPEST} levels deep: expected lists, "
            f"tuples and dicts of fewer levels"
        )
    if isinstance(value, np.generic | np.ndarray):
        return _array(value, what, parts)
    if isinstance(value, torch.Tensor):
        return _tensor(value, what, parts)
    # By `type`, not `isinstance`: a subclass may carry state that would be lost without a word.
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is int:
        # Hexadecimal, as Python refuses to read whole numbers of very many decimal digits.
        return value if abs(value) < 1 << 63 else ["int", hex(value)]
    if kind is str:
        return ["str", value.encode(*_TEXT)]
    if kind is bytes:
        parts.append(value)
        return ["bytes", len(value)]
    if kind in (list, tuple):
        inner = [_tree(v, f"{what}[{n}]", parts, depth + 1) for n, v in enumerate(value)]
        return [kind.__name__, inner]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(
                    f"{what} has the key {key!r}, of type {type(key).__name__}: expected text for "
                    f"keys. Use str(key), or send a list of pairs"
                )
        keys = [key.encode(*_TEXT) for key in value]
        inner = [_tree(v, f"{what}[{key!r}]", parts, depth + 1) for key, v in value.items()]
        return ["dict", keys, inner]
    raise TypeError(
        f"{what} is of type {kind.__name__}, which no device can send to another one: {_EXPECTED}"
    )


def _array(value: np.generic | np.ndarray[Any, Any], what: str, parts: list[bytes]) -> Any:
    scalar = isinstance(value, np.generic)
    if not (scalar or type(value) is np.ndarray) or value.dtype.kind not in _KINDS:
        raise TypeError(
            f"{what} is a NumPy {type(value).__name__} of {value.dtype}, which no device can send "
            f"to another one: expected numbers or truth values. Send value.tolist()"
        )
    parts.append(value.tobytes())
    return ["scalar" if scalar else "array", value.dtype.str, value.shape]


def _tensor(value: torch.Tensor, what: str, parts: list[bytes]) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        kind = "a quantized" if value.is_quantized else f"a {value.device.type} {value.layout}"
        raise TypeError(
            f"{what} is {kind} tensor, which no device can send to another one: expected a dense "
            f"tensor with values, such as value.to_dense()"
        )
    parts.append(bits_of(value.cpu()).numpy().tobytes())
    return ["tensor", str(value.dtype).removeprefix("torch."), value.shape]


def _value(tree: Any, rest: BytesIO) -> Any:
    """Restore a value; the bytes of its tensors and arrays come next in ``rest``."""
    match tree:
        case ["str", text]:
            return text.decode(*_TEXT)
        case ["int", digits]:
            return int(digits, 16)
        case ["bytes", nbytes]:
            return rest.read(nbytes)
        case ["list", items]:
            return [_value(item, rest) for item in items]
        case ["tuple", items]:
            return tuple([_value(item, rest) for item in items])
        case ["dict", keys, items]:
            pairs = zip(keys, items, strict=True)
            return {key.decode(*_TEXT): _value(item, rest) for key, item in pairs}
        case ["tensor", name, shape] if isinstance(getattr(torch, name), torch.dtype):
            tensor = torch.empty(shape, dtype=getattr(torch, name))
            memory = bits_of(tensor).numpy()
            memory[:] = np.frombuffer(rest.read(memory.size), np.uint8).reshape(memory.shape)
            return tensor
        case ["array" | "scalar" as kind, name, shape] if np.dtype(name).kind in _KINDS:
            dtype = np.dtype(name)
            part = bytearray(rest.read(prod(shape) * dtype.itemsize))
            array = np.frombuffer(part, dtype).reshape(shape)
            return array if kind == "array" else array[()]
        case [*_]:
            raise ValueError(f"there is no kind of value {tree[:2]}")
    return tree
