"""Python values in JSON and back, exactly: what an optimizer or a schedule keeps beside tensors."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch

__all__ = ["from_bytes", "from_json", "to_bytes", "to_json"]

_KIND = "kind of value"
"""Key of a dict that stands for something JSON has no words for."""

_LENGTH_BYTES = 8

_DEEPEST = 50
"""Levels of containers in each other; each takes up to three levels of JSON."""

_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter, "ordered dict": OrderedDict}


_NOT_OURS = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)
"""What comes of values that somebody made up."""


def to_json(value: object, what: str) -> Any:
    """A value as JSON has them, from which `from_json` makes the same value again.

    Args:
        value: None, a number, text, a small tensor, or lists, tuples, sets, deques, dicts and
            counters of these.
        what: it is, for the error.

    Raises:
        TypeError: it holds something else, or containers in each other without end.

    >>> to_json((1, 2.5), "betas")
    {'kind of value': 'tuple', 'items': [1, 2.5]}
    """
    return _to_json(value, what, 0)


def _to_json(value: object, what: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise TypeError(
            f"{what[:_DEEPEST]}… is nested more than {_DEEPEST} levels deep, which a checkpoint "
            f"cannot hold: expected lists, tuples and dicts of fewer levels"
        )
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _to_json(value.item(), what, depth)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "items": str(value)}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        return {
            _KIND: "tensor",
            "dtype": str(plain.dtype).removeprefix("torch."),
            "items": _to_json(plain.tolist(), what, depth),
        }
    if type(value) is list:
        return [_to_json(item, f"{what}[{number}]", depth + 1) for number, item in enumerate(value)]
    for kind, sequence in _SEQUENCES.items():
        if type(value) is sequence:
            items: Any = value
            items = sorted(items) if kind == "set" else items
            told = [_to_json(item, f"{what}[...]", depth + 1) for item in items]
            return {_KIND: kind, "items": told}
    for kind, mapping in _MAPPINGS.items():
        if type(value) is mapping:
            return _mapping(value, kind, what, depth + 1)  # type: ignore[arg-type]
    raise TypeError(
        f"{what} is of type {type(value).__name__}, which a checkpoint cannot hold: expected None, "
        f"numbers, text, tensors, or lists, tuples, sets and dicts of these"
    )


def to_bytes(value: object) -> bytes:
    """JSON with its length before it, so that there may be other bytes behind it."""
    text = json.dumps(value, allow_nan=False).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def from_bytes(memory: torch.Tensor) -> tuple[Any, int]:
    """What `to_bytes` was given, and how many bytes it takes.

    Args:
        memory: uint8 on the host; there may be bytes behind it.
    """
    length = int.from_bytes(bytes(memory[:_LENGTH_BYTES].tolist()), "little")
    stop = _LENGTH_BYTES + length
    return json.loads(memory[_LENGTH_BYTES:stop].numpy().tobytes()), stop


def from_json(value: Any) -> Any:
    """The value that `to_json` was given; tensors come on the host.

    Raises:
        ValueError: `to_json` has not made this.
    """
    try:
        return _from_json(value)
    except (
        AttributeError,
        LookupError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise ValueError(f"a value is not as a checkpoint has it: {reason}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _from_json(item) for key, item in value.items()}
    if kind == "float":
        return float(value["items"])
    if kind == "tensor":
        return torch.tensor(_from_json(value["items"]), dtype=_dtype(value["dtype"]))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_from_json(item) for item in value["items"])
    if kind not in _MAPPINGS:
        raise ValueError(f"there is no kind of value {kind!r}")
    pairs = [(_from_json(key), _from_json(item)) for key, item in value["items"]]
    return _MAPPINGS[kind](dict(pairs))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no type of tensor {name!r}")
    return dtype


def _mapping(value: dict[Any, Any], kind: str, what: str, depth: int) -> dict[str, Any]:
    if kind == "dict" and _KIND not in value and all(type(key) is str for key in value):
        return {key: _to_json(item, f"{what}[{key!r}]", depth) for key, item in value.items()}
    pairs = [
        [_to_json(k, f"{what}[...]", depth), _to_json(v, f"{what}[{k!r}]", depth)]
        for k, v in value.items()
    ]
    return {_KIND: kind, "items": pairs}
