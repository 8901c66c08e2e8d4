"""Exact encoding of Python values, as bytes and as JSON.

`encode` writes the values that devices send to each other: MessagePack for the structure, followed
by the bytes of tensors and arrays. A value that MessagePack lacks becomes a list that begins with
the name of its kind. Lists are encoded in the same way, so that they cannot be mistaken for another
kind. Floats keep their 64 bits, including NaN.

`to_json` writes the values that checkpoints store in addition to tensors. A value that JSON lacks
becomes a dict with a special key that names the kind.

Note: why not pickle
--------------------
A checkpoint may come from anywhere, and unpickling runs code that its author chose. Decoding here
never runs code from the data: it constructs only the kinds of values that are listed here, whatever
the bytes claim.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta, MsgspecError, msgpack

from onefold.core.flat import bits_of

__all__ = ["Count", "decode", "encode", "from_json", "to_json"]

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""An integer of a checkpoint: steps and sizes fit, and the sum of two is below 2**63."""
_LENGTH_BYTES = 8
_DEEPEST = 50
"""Maximum nesting of containers; each takes up to three levels of JSON."""
_KINDS = "biufc"
"""NumPy's letters for booleans and numbers: arrays that consist only of their bytes."""
_EXPECTED = (
    "expected None, True or False, numbers, strings, bytes, tensors, NumPy arrays of numbers, or "
    "lists, tuples and dicts of these. Send its contents instead: its state_dict(), tuple(...), "
    "dataclasses.asdict(...)"
)
_TEXT = "utf-8", "surrogatepass"
"""Encoding of text, because the name of a file may have bytes that are not UTF-8."""


def encode(value: object, what: str) -> bytes:
    """Encode a value as bytes that `decode` reads.

    Args:
        value: None, a bool, int, float, str or bytes; a strided tensor of any dtype, shape and
            device; a NumPy array or scalar of numbers; or lists, tuples and mappings of these,
            with string keys.
        what: name of the value in errors.

    Raises:
        TypeError: the value contains another type, or is nested too deeply (or in itself).

    >>> decode(encode({"loss": 0.5, "sizes": (3, 4)}, "value"))
    {'loss': 0.5, 'sizes': (3, 4)}
    """
    parts: list[bytes] = []
    head = msgpack.encode(_tree(value, what, parts, 0))
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *parts])


def decode(data: bytes) -> Any:
    """Restore the value that `encode` wrote; tensors are on the host, mappings become dicts.

    Args:
        data: result of `encode`, possibly followed by other bytes.

    Raises:
        ValueError: `encode` did not write these bytes.
    """
    rest = BytesIO(data)
    try:
        head = rest.read(int.from_bytes(rest.read(_LENGTH_BYTES), "little"))
        return _value(msgpack.decode(head), rest)
    except (*_DAMAGE, MsgspecError) as error:
        raise ValueError(f"these bytes are not a value that onefold wrote: {error}") from None


def _check_depth(depth: int, what: str) -> None:
    if depth > _DEEPEST:
        raise TypeError(
            f"{what[:_DEEPEST]}… is nested more than {_DEEPEST} levels deep. Use fewer levels of "
            f"lists, tuples and dicts"
        )


def _tree(value: Any, what: str, parts: list[bytes], depth: int) -> Any:
    """Describe a value for MessagePack; append the bytes of tensors and arrays to ``parts``."""
    _check_depth(depth, what)
    if isinstance(value, np.generic | np.ndarray):
        return _array(value, what, parts)
    if isinstance(value, torch.Tensor):
        return _tensor(value, what, parts)
    # Compare `type`, not `isinstance`: state of a subclass would be lost silently.
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is int:
        # Hexadecimal, because Python refuses to parse integers of very many decimal digits.
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
                    f"{what} has the key {key!r} of type {type(key).__name__}, but keys must be "
                    f"strings. Use str(key), or send a list of pairs"
                )
        keys = [key.encode(*_TEXT) for key in value]
        inner = [_tree(v, f"{what}[{key!r}]", parts, depth + 1) for key, v in value.items()]
        return ["dict", keys, inner]
    raise TypeError(
        f"{what} is of type {kind.__name__}, which cannot be sent to another device: {_EXPECTED}"
    )


def _array(value: np.generic | np.ndarray[Any, Any], what: str, parts: list[bytes]) -> Any:
    scalar = isinstance(value, np.generic)
    if not (scalar or type(value) is np.ndarray) or value.dtype.kind not in _KINDS:
        raise TypeError(
            f"{what} is a NumPy {type(value).__name__} of {value.dtype}, which cannot be sent to "
            f"another device: expected numbers or booleans. Send value.tolist()"
        )
    parts.append(value.tobytes())
    return ["scalar" if scalar else "array", value.dtype.str, value.shape]


def _tensor(value: torch.Tensor, what: str, parts: list[bytes]) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        kind = "a quantized" if value.is_quantized else f"a {value.device.type} {value.layout}"
        raise TypeError(
            f"{what} is {kind} tensor, which cannot be sent to another device. Send a dense tensor "
            f"with values, such as value.to_dense()"
        )
    parts.append(bits_of(value.cpu()).numpy().tobytes())
    return ["tensor", str(value.dtype).removeprefix("torch."), value.shape]


def _value(tree: Any, rest: BytesIO) -> Any:
    """Restore a value, whose tensor and array bytes come next in ``rest``."""
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
            raise ValueError(f"unknown kind of value {tree[:2]}")
    return tree


_KIND = "kind of value"
"""Key of a dict that represents a value that JSON lacks."""
_NUMBERS = "biuf"
"""Kinds of arrays that can be written: booleans, integers, floating-point numbers."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter, "ordered dict": OrderedDict}
_NAMES = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions from decoding damaged bytes or JSON."""


def to_json(value: object, what: str, depth: int = 0) -> Any:
    """Convert a value to plain JSON values that `from_json` restores exactly.

    Args:
        value: None, a number, a string, a small tensor or array of numbers, or lists, tuples,
            sets, deques, dicts and counters of these.
        what: name of the value in errors.
        depth: number of containers around it.

    Raises:
        TypeError: the value contains another type, or is nested too deeply (or in itself).

    >>> to_json((1, 2.5), "betas")
    {'kind of value': 'tuple', 'items': [1, 2.5]}
    """
    _check_depth(depth, what)
    if value is None or isinstance(value, bool | str):
        return value
    # Before the other numbers: some NumPy scalars are subclasses of Python's numbers and some, such
    # as np.bool_, are not.
    if isinstance(value, np.generic):
        return to_json(value.item(), what, depth)
    # int() and float() strip subclasses, so that the result is plain. Finite floats keep their
    # bits, because JSON writes their repr: the shortest text that reads back as the same number.
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
    # Compare `type` from here on: state of a subclass would be lost silently.
    if type(value) is list:
        return [to_json(item, f"{what}[{number}]", depth + 1) for number, item in enumerate(value)]
    if type(value) not in _NAMES:
        raise TypeError(
            f"{what} is of type {type(value).__name__}, which cannot be saved in a checkpoint: "
            f"expected None, numbers, strings, tensors, arrays, or lists, tuples, sets and dicts "
            f"of these"
        )
    if isinstance(value, dict):
        named = {key: f"{what}[{key!r}]" for key in value}
        # Only these dicts become JSON objects: JSON would convert other keys to strings.
        if type(value) is dict and _KIND not in value and all(type(key) is str for key in value):
            return {key: to_json(item, named[key], depth + 1) for key, item in value.items()}
        written = [
            [to_json(key, f"{what}[...]", depth + 1), to_json(item, named[key], depth + 1)]
            for key, item in value.items()
        ]
    else:
        # The order of a set differs between processes, but equal values must give equal bytes.
        items: Any = sorted(value) if isinstance(value, set) else value
        written = [to_json(item, f"{what}[...]", depth + 1) for item in items]
    return {_KIND: _NAMES[type(value)], "items": written}


def from_json(value: Any) -> Any:
    """Restore the value that was passed to `to_json`; tensors are restored on the host.

    Raises:
        ValueError: `to_json` did not write the value.
    """
    try:
        return _from_json(value)
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise ValueError(f"a value in the checkpoint is damaged: {reason}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: Any = value.get(_KIND)
    # A user's dict that happens to have this key never gets here unchanged: `to_json` writes it as
    # pairs.
    if kind is None:
        return {key: _from_json(item) for key, item in value.items()}
    if kind == "float":
        return float(value["items"])
    # The dtype comes from the file, and `getattr` may find anything in torch, so accept only a
    # dtype.
    if kind == "tensor" and isinstance(getattr(torch, value["dtype"]), torch.dtype):
        return torch.tensor(_from_json(value["items"]), dtype=getattr(torch, value["dtype"]))
    if kind == "array" and _is_plain(np.dtype(str(value["dtype"]))):
        return np.array(_from_json(value["items"]), dtype=str(value["dtype"]))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_from_json(item) for item in value["items"])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_from_json(key): _from_json(item) for key, item in value["items"]})
    raise ValueError(f"unknown kind of value {kind!r}")


def _is_plain(dtype: np.dtype[Any]) -> bool:
    # Python's numbers cannot hold wider ones exactly.
    return dtype.kind in _NUMBERS and dtype.itemsize <= 8
