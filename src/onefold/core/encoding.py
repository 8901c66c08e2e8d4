"""Writes Python values exactly, and reads them back: as bytes, and as JSON.

`encode` writes what devices report to each other. A value is written as MessagePack, which says
what it is made of, and behind it the bytes of its tensors and arrays. What MessagePack lacks is
written as a list that begins with the name of its kind; so are lists, lest one be taken for another
kind. Floats keep their 64 bits, NaN as well.

`to_json` writes what checkpoints keep beside tensors. What JSON lacks is written as a dict with a
key of its own that names the kind.

Note: why not pickle
--------------------
A checkpoint may come from anywhere, and unpickling runs code that its author chose. Of what is read
here nothing is run: only the kinds of value that are listed here are ever constructed, whatever the
bytes claim.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import torch
from msgspec import MsgspecError, msgpack

from onefold.core.flat import bits_of

__all__ = ["decode", "encode", "from_json", "to_json"]

_LENGTH_BYTES = 8
_DEEPEST = 50
"""How many containers may be nested in each other; each takes up to three levels of JSON."""
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

    Raises:
        ValueError: the bytes are not what `encode` writes.
    """
    rest = BytesIO(data)
    try:
        head = rest.read(int.from_bytes(rest.read(_LENGTH_BYTES), "little"))
        return _value(msgpack.decode(head), rest)
    except (*_DAMAGE, MsgspecError) as error:
        raise ValueError(f"these bytes are no value as onefold writes it: {error}") from None


def _check_depth(depth: int, what: str) -> None:
    if depth > _DEEPEST:
        raise TypeError(
            f"{what[:_DEEPEST]}… is nested more than {_DEEPEST} levels deep: expected lists, "
            f"tuples and dicts of fewer levels"
        )


def _tree(value: Any, what: str, parts: list[bytes], depth: int) -> Any:
    """Describe a value for MessagePack; append the bytes of tensors and arrays to ``parts``."""
    _check_depth(depth, what)
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


_KIND = "kind of value"
"""The key that marks a dict as standing for a kind of value that JSON lacks."""
_NUMBERS = "biuf"
"""The kinds of arrays that can be written: booleans, whole numbers, floating-point numbers."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter, "ordered dict": OrderedDict}
_NAMES = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What making values of damaged bytes or JSON may raise."""


def to_json(value: object, what: str, depth: int = 0) -> Any:
    """Convert a value to plain JSON values, from which `from_json` restores it exactly.

    Args:
        value: None, a number, text, a small tensor or array of numbers, or lists, tuples, sets,
            deques, dicts and counters of these.
        what: what the value is called in errors.
        depth: in how many containers it lies.

    Raises:
        TypeError: the value holds something else, or is nested too deeply (or in itself).

    >>> to_json((1, 2.5), "betas")
    {'kind of value': 'tuple', 'items': [1, 2.5]}
    """
    _check_depth(depth, what)
    if value is None or isinstance(value, bool | str):
        return value
    # Before the other numbers: some of NumPy's scalars are subclasses of Python's numbers and some,
    # such as np.bool_, are not.
    if isinstance(value, np.generic):
        return to_json(value.item(), what, depth)
    # int() and float() strip subclasses, so that the result is plain. Finite floats keep their
    # bits, for JSON writes their repr: the shortest text that reads back as the same number.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "items": str(value)}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        return {
            _KIND: "tensor",
            "dtype": str(plain.dtype).removeprefix("torch."),
            "items": to_json(plain.tolist(), what, depth),
        }
    if type(value) is np.ndarray and _is_plain(value.dtype):
        rows = to_json(value.tolist(), what, depth)
        return {_KIND: "array", "dtype": value.dtype.str, "items": rows}
    # By `type` from here on: a subclass may carry state that would be lost without a word.
    if type(value) is list:
        return [to_json(item, f"{what}[{number}]", depth + 1) for number, item in enumerate(value)]
    if type(value) not in _NAMES:
        raise TypeError(
            f"{what} is of type {type(value).__name__}, which a checkpoint cannot hold: expected "
            f"None, numbers, text, tensors, arrays, or lists, tuples, sets and dicts of these"
        )
    if isinstance(value, dict):
        named = {key: f"{what}[{key!r}]" for key in value}
        # Only such dicts are JSON objects: JSON would turn other keys into text.
        if type(value) is dict and _KIND not in value and all(type(key) is str for key in value):
            return {key: to_json(item, named[key], depth + 1) for key, item in value.items()}
        written = [
            [to_json(key, f"{what}[...]", depth + 1), to_json(item, named[key], depth + 1)]
            for key, item in value.items()
        ]
    else:
        # The order of a set differs between processes; equal values must give equal bytes.
        items: Any = sorted(value) if isinstance(value, set) else value
        written = [to_json(item, f"{what}[...]", depth + 1) for item in items]
    return {_KIND: _NAMES[type(value)], "items": written}


def from_json(value: Any) -> Any:
    """Restore the value that `to_json` was given; tensors are restored on the host.

    Raises:
        ValueError: the value was not written by `to_json`.
    """
    try:
        return _from_json(value)
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise ValueError(f"a value is not as a checkpoint has it: {reason}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: Any = value.get(_KIND)
    # A user's dict that happens to have our key never gets here as it is: `to_json` writes such a
    # dict as pairs.
    if kind is None:
        return {key: _from_json(item) for key, item in value.items()}
    if kind == "float":
        return float(value["items"])
    # The dtype is the file's: `getattr` may find anything in torch, so only a dtype is let through.
    if kind == "tensor" and isinstance(getattr(torch, value["dtype"]), torch.dtype):
        return torch.tensor(_from_json(value["items"]), dtype=getattr(torch, value["dtype"]))
    if kind == "array" and _is_plain(np.dtype(str(value["dtype"]))):
        return np.array(_from_json(value["items"]), dtype=str(value["dtype"]))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_from_json(item) for item in value["items"])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_from_json(key): _from_json(item) for key, item in value["items"]})
    raise ValueError(f"there is no kind of value {kind!r}")


def _is_plain(dtype: np.dtype[Any]) -> bool:
    # Wider numbers would not survive as numbers of Python.
    return dtype.kind in _NUMBERS and dtype.itemsize <= 8
