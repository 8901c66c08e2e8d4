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

_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter, "ordered dict": OrderedDict}


def to_json(value: object, what: str) -> Any:
    """A value as JSON has them, from which `from_json` makes the same value again.

    Args:
        value: None, a number, text, a small tensor, or lists, tuples, sets, deques, dicts and
            counters of these.
        what: it is, for the error.

    Raises:
        TypeError: it holds something else.

    >>> to_json((1, 2.5), "betas")
    {'kind of value': 'tuple', 'items': [1, 2.5]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item(), what)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "items": str(value)}
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        return {
            _KIND: "tensor",
            "dtype": str(plain.dtype).removeprefix("torch."),
            "items": to_json(plain.tolist(), what),
        }
    if type(value) is list:
        return [to_json(item, f"{what}[{number}]") for number, item in enumerate(value)]
    for kind, sequence in _SEQUENCES.items():
        if type(value) is sequence:
            items: Any = value
            items = sorted(items) if kind == "set" else items
            return {_KIND: kind, "items": [to_json(item, f"{what}[...]") for item in items]}
    for kind, mapping in _MAPPINGS.items():
        if type(value) is mapping:
            return _mapping(value, kind, what)  # type: ignore[arg-type]
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
    """The value that `to_json` was given; tensors come on the host."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: from_json(item) for key, item in value.items()}
    if kind == "float":
        return float(value["items"])
    if kind == "tensor":
        return torch.tensor(from_json(value["items"]), dtype=getattr(torch, value["dtype"]))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_json(item) for item in value["items"])
    pairs = [(from_json(key), from_json(item)) for key, item in value["items"]]
    return _MAPPINGS[kind](dict(pairs))


def _mapping(value: dict[Any, Any], kind: str, what: str) -> dict[str, Any]:
    if kind == "dict" and _KIND not in value and all(type(key) is str for key in value):
        return {key: to_json(item, f"{what}[{key!r}]") for key, item in value.items()}
    pairs = [[to_json(k, f"{what}[...]"), to_json(v, f"{what}[{k!r}]")] for k, v in value.items()]
    return {_KIND: kind, "items": pairs}
