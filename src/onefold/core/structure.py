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
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

__all__ = [
    "Broadcast",
    "Scatter",
    "has_fields",
    "parts_of",
    "put_tensors",
    "tensors_of",
    "with_parts",
    "with_tensors",
]


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
    if isinstance(value, dict | UserDict) or _is_fields(value):
        return _put(copy.copy(value), parts)
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


def _is_fields(value: object) -> bool:
    """Whether the parts of a container are its fields alone."""
    return has_fields(value) and not isinstance(value, tuple | list | Mapping)


def _put(value: Any, parts: Sequence[Any]) -> Any:
    """Put other parts into a mapping or a dataclass."""
    if isinstance(value, Mapping):
        for key, part in zip(list(value), parts, strict=True):
            value[key] = part  # type: ignore[index]  # of those that can be changed
    else:
        for field, part in zip(fields(value), parts, strict=True):
            # Past a frozen class's own method, which refuses.
            object.__setattr__(value, field.name, part)
    return value


def tensors_of(value: Any, kinds: Any = torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, or what is of other kinds, in their order."""
    if isinstance(value, kinds):
        yield value
        return
    for _, part in parts_of(value) or ():
        yield from tensors_of(part, kinds)


def with_tensors(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Make the same containers with other tensors, in the order of `tensors_of`.

    Args:
        value: tensors in nested containers; those in which nothing changes stay what they are.
        change: returns what takes the place of a tensor.
        kind: what to change in place of tensors.
    """
    if isinstance(value, kind):
        return change(value)
    parts = [part for _, part in parts_of(value) or ()]
    made = [with_tensors(part, change, kind) for part in parts]
    return value if all(map(operator.is_, made, parts)) else with_parts(value, made)


def put_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Put other tensors into containers, in the order of `tensors_of`.

    Lists, dicts and objects stay what they are: others who hold them see what is in them now.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if next(tensors_of(value), None) is None:
        return value
    parts = [put_tensors(part, change) for _, part in parts_of(value) or ()]
    if isinstance(value, list):
        value[:] = parts
        return value
    if isinstance(value, MutableMapping) or _is_fields(value):
        return _put(value, parts)
    return with_parts(value, parts)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A part of a batch that every shard gets whole: times, a grid, a temperature.

    In a batch of the script's own, for `Trainer.step`, `Trainer.gradient` or the function of
    `Trainer.batches`. The loss gets what is in it, with its tensors on the device.

    Args:
        value: tensors or NumPy arrays of any shape, in any containers; anything else goes along.

    >>> def loss(model, batch):
    ...     return (model(batch["x"]) * batch["scale"]).square().mean(dim=1)
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> scale = torch.tensor([0.5, 2.0])
    >>> trainer.step({"x": torch.ones(6, 2), "scale": onefold.Broadcast(scale)}).samples
    6
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Scatter:
    """A part of a batch with another number of samples, which is cut into shards by itself.

    Such as the points of a boundary beside those of the inside. The samples of a step are those of
    what is not wrapped; of the first such part if all is. Return an `onefold.Mean` for each
    part: a scalar, which is the mean of a shard, is refused where the sizes of shards are not in
    proportion.

    Args:
        value: tensors or NumPy arrays, in any containers, alike in the length of ``dim``.
        dim: the dimension in which the samples lie.

    >>> def loss(model, batch):
    ...     inside, edge = (model(part).square().mean(dim=1) for part in batch)
    ...     of_inside = onefold.Mean(inside.sum(), len(inside))
    ...     return of_inside + onefold.Mean(edge.sum(), len(edge))
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> trainer.step((torch.ones(6, 2), onefold.Scatter(torch.ones(3, 2)))).samples
    6
    """

    value: Any
    dim: int = 0
