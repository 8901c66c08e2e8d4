"""Converts Python values to JSON and back, exactly: what an optimizer keeps beside its tensors.

Note: why not pickle
--------------------
A checkpoint may come from anywhere, and unpickling runs code that its author chose. So values are
written as JSON, and those that JSON lacks as a dict with a key of its own that names their kind.
Only the kinds listed here are ever constructed when reading, whatever the file claims.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch

__all__ = ["from_bytes", "from_json", "to_bytes", "to_json"]

_KIND = "kind of value"
"""The key that marks a dict as standing for a kind of value that JSON lacks."""

_LENGTH_BYTES = 8

_DEEPEST = 50
"""How many containers may be nested in each other; each takes up to three levels of JSON."""

_NUMBERS = "biuf"
"""The kinds of arrays that can be written: booleans, whole numbers, floating-point numbers."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter, "ordered dict": OrderedDict}
_NAMES = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What making values of damaged JSON may raise."""


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
    if depth > _DEEPEST:
        raise TypeError(
            f"{what[:_DEEPEST]}… is nested more than {_DEEPEST} levels deep, which a checkpoint "
            f"cannot hold: expected lists, tuples and dicts of fewer levels"
        )
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


def to_bytes(value: object) -> bytes:
    """Encode a value as JSON preceded by its length, so that other bytes may follow it."""
    text = json.dumps(value, allow_nan=False).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def from_bytes(memory: torch.Tensor) -> tuple[Any, int]:
    """Decode what `to_bytes` wrote; return the value and the number of bytes it takes up.

    Args:
        memory: (n,) uint8 on the host; other bytes may follow the value.
    """
    length = int.from_bytes(bytes(memory[:_LENGTH_BYTES].tolist()), "little")
    stop = _LENGTH_BYTES + length
    return json.loads(memory[_LENGTH_BYTES:stop].numpy().tobytes()), stop


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
