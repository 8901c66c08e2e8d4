"""The containers in which batches come, and how to make one like another. Pure.

Note: the type is kept
----------------------
A loss may ask a batch for its attributes, so what is cut or moved keeps its type. Dicts of other
kinds are copied, with whatever else they hold, and their items are replaced; so are dataclasses,
also frozen ones, whose ``__init__`` is not run again. Other mappings, and kinds of tuple and list,
are made anew from their items.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["has_fields", "parts_of", "with_parts"]


def has_fields(value: object) -> bool:
    """Whether something is an object of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container, each with the path to it; None if it is no container.

    >>> parts_of({"x": 1, "y": [2]})
    [("['x']", 1), ("['y']", [2])]
    >>> parts_of("xy") is None
    True
    """
    if isinstance(value, tuple | list):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if has_fields(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    return None


def with_parts(value: Any, parts: Sequence[Any]) -> Any:
    """Make a container of the same type that holds other parts, in the order of `parts_of`.

    Raises:
        TypeError: the container cannot be made from parts.
    """
    kind = type(value)
    # Nearly all are one of these.
    if kind is tuple or kind is list:
        return kind(parts)
    if kind is dict:
        return dict(zip(value, parts, strict=True))
    if isinstance(value, dict | UserDict):
        made = copy.copy(value)
        for key, part in zip(list(value), parts, strict=True):
            made[key] = part
        return made
    if has_fields(value) and not isinstance(value, tuple | list | Mapping):
        return _with_fields(value, parts)
    try:
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*parts)
        if isinstance(value, Mapping):
            return kind(dict(zip(value, parts, strict=True)))
        return kind(parts)
    except Exception as error:
        raise TypeError(
            f"expected a batch of containers that can be made from their parts, and "
            f"{kind.__name__} cannot ({error}). Use a dict, a tuple or a dataclass, or give "
            f"{kind.__name__} a method to(device) and make it in the collate of trainer.loader"
        ) from error


def _with_fields(value: Any, parts: Sequence[Any]) -> Any:
    made = copy.copy(value)
    for field, part in zip(fields(value), parts, strict=True):
        # Past a frozen class's own method, which refuses.
        object.__setattr__(made, field.name, part)
    return made
