"""Containers of batches: rebuilding them with other parts, and counting their samples. Pure.

Note: types are kept
--------------------
A loss may read attributes of a batch, so a batch that is cut or moved keeps its type. Subclasses of
dict are copied, with their attributes, and their items are replaced. So are dataclasses, including
frozen ones, without running ``__init__`` again. Other mappings, tuples and lists are rebuilt from
their items.

Note: dropped samples
---------------------
A collate function that drops broken samples returns k rows for n samples, and a scalar loss is then
the mean over k. A payload does not say which of its dimensions is the sample dimension. So the
count is k only if every field has k rows and none has n, and if no other reading is possible: a
list of tensors of one type may be a list of samples, and if every tensor has a dimension of n, that
may be the sample dimension. The count depends on one shard's payload alone, because other data that
a device has read must not affect the shard's bits.
"""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

__all__ = [
    "Broadcast",
    "Count",
    "Scatter",
    "count_of",
    "has_fields",
    "parts_of",
    "put_tensors",
    "tensors_of",
    "with_parts",
    "with_tensors",
]


def has_fields(value: object) -> bool:
    """Return whether a value is a dataclass instance."""
    return is_dataclass(value) and not isinstance(value, type)


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container with their paths; None if ``value`` is not a container.

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
    """Make a container of the same type with other parts, in the order of `parts_of`.

    Raises:
        TypeError: the container cannot be made from parts.
    """
    kind = type(value)
    # Nearly all containers are one of these.
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
            f"the containers of a batch must be constructible from their parts, but "
            f"{kind.__name__} is not ({error}). Use a dict, a tuple or a dataclass, or give "
            f"{kind.__name__} a method to(device) and make it in the collate of trainer.loader"
        ) from error


def _is_fields(value: object) -> bool:
    """Return whether the parts of a container are its fields alone."""
    return has_fields(value) and not isinstance(value, tuple | list | Mapping)


def _put(value: Any, parts: Sequence[Any]) -> Any:
    """Replace the parts of a mapping or a dataclass."""
    if isinstance(value, Mapping):
        for key, part in zip(list(value), parts, strict=True):
            value[key] = part  # type: ignore[index]  # only mutable ones get here
    else:
        for field, part in zip(fields(value), parts, strict=True):
            # Bypass a frozen class's own __setattr__, which raises.
            object.__setattr__(value, field.name, part)
    return value


def tensors_of(value: Any, kinds: Any = torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors, or the values of other types, in nested containers, in order."""
    if isinstance(value, kinds):
        yield value
        return
    for _, part in parts_of(value) or ():
        yield from tensors_of(part, kinds)


def with_tensors(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Replace the tensors in nested containers, in the order of `tensors_of`.

    Args:
        value: tensors in nested containers; unchanged containers are returned as they are.
        change: function that returns the replacement of a tensor.
        kind: type of values to replace, if not tensors.
    """
    if isinstance(value, kind):
        return change(value)
    parts = [part for _, part in parts_of(value) or ()]
    made = [with_tensors(part, change, kind) for part in parts]
    return value if all(map(operator.is_, made, parts)) else with_parts(value, made)


def put_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in containers, in the order of `tensors_of`.

    Lists, mutable mappings and dataclasses are changed in place, so other references see the new
    values.
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


_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Broadcast(Generic[_Value]):
    """A part of a batch that every shard receives whole: times, a grid, a temperature.

    Use it in batches that the script makes, for `Trainer.step`, `Trainer.gradient` or the function
    of `Trainer.batches`. The loss receives the value itself, with its tensors on the device.

    Args:
        value: tensors or NumPy arrays of any shape, in any containers; other values are passed as
            is.

    >>> def loss(model, batch):
    ...     return (model(batch["x"]) * batch["scale"]).square().mean(dim=1)
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> scale = torch.tensor([0.5, 2.0])
    >>> trainer.step({"x": torch.ones(6, 2), "scale": onefold.Broadcast(scale)}).samples
    6
    """

    value: _Value


@dataclass(frozen=True, slots=True)
class Scatter(Generic[_Value]):
    """A part of a batch with another number of samples, which is cut into shards separately.

    An example is boundary points in addition to interior points. The sample count of a step is that
    of the parts that are not wrapped, or of the first wrapped part if all are. Return an
    `onefold.Mean` for each part: a scalar, which is the mean over a shard, raises an error if the
    sizes of the shards are not in proportion.

    Args:
        value: tensors or NumPy arrays, in any containers, all of the same size in ``dim``.
        dim: sample dimension.

    >>> def loss(model, batch):
    ...     inside, edge = (model(part).square().mean(dim=1) for part in batch)
    ...     of_inside = onefold.Mean(inside.sum(), len(inside))
    ...     return of_inside + onefold.Mean(edge.sum(), len(edge))
    >>> trainer = onefold.Trainer(model, optimizer, loss, shards=2)
    >>> trainer.step((torch.ones(6, 2), onefold.Scatter(torch.ones(3, 2)))).samples
    6
    """

    value: _Value
    dim: int = 0


_Tensor = torch.Tensor | np.ndarray


class Count(NamedTuple):
    """Number of samples in a payload."""

    samples: int
    sure: bool = True
    """Whether the payload rules out a smaller number."""


def count_of(payload: object, samples: int, dim: int = 0) -> Count:
    """Count the samples of a payload: as many as were read, unless it shows that there are fewer.

    Args:
        payload: return value of ``collate`` for one shard.
        samples: n, number of samples passed to ``collate``.
        dim: sample dimension of tensors.

    >>> count_of([torch.zeros(3, 5), torch.zeros(3)], 4)
    Count(samples=3, sure=True)
    >>> count_of([torch.zeros(3, 5), torch.zeros(2)], 4)
    Count(samples=4, sure=False)
    """
    fields = []
    for lengths in _lengths(payload, samples, dim):
        if samples in lengths:
            return Count(samples)  # the common case
        fields += [lengths] if lengths else []
    listed, of_tensors = _listed(payload)
    # Two or three tensors of one type may still be fields.
    if listed == samples and (samples > 3 or not of_tensors):
        return Count(samples)
    least = min([listed or samples, *map(min, fields)])
    if least >= samples:
        return Count(samples)
    common = set.intersection(*fields) if fields else set()
    numbered = (each for each in tensors_of(payload, _Tensor) if each.ndim)
    elsewhere = dim == 0 and all(samples in _shape(each) for each in numbered)
    if len(common) != 1 or listed or elsewhere:
        return Count(samples, sure=False)
    return Count(common.pop())


def _lengths(payload: Any, samples: int, dim: int) -> Iterator[set[int]]:
    """Yield the possible sample counts of each field; an empty set if it gives none."""
    if isinstance(payload, _Tensor):
        yield _length(payload, dim)
        return
    for _, part in parts_of(payload) or ():
        if isinstance(part, Mapping) or has_fields(part):
            yield from _lengths(part, samples, dim)
        elif isinstance(part, tuple | list):
            # A list as long as the shard may hold many strings, so do not search it.
            inner = tensors_of(part, _Tensor) if len(part) != samples else ()
            lengths = [_length(tensor, dim) for tensor in inner if tensor.ndim]
            yield {len(part)}.union(set.intersection(*lengths) if lengths else ())
        elif isinstance(part, _Tensor):
            yield _length(part, dim)


def _length(tensor: Any, dim: int) -> set[int]:
    shape = _shape(tensor)
    return {shape[dim]} if len(shape) > dim else set()


def _shape(tensor: Any) -> tuple[int, ...]:
    # A nested tensor with sequences of several lengths has only its first size.
    nested = isinstance(tensor, torch.Tensor) and tensor.is_nested
    return (tensor.size(0),) if nested else tuple(tensor.shape)


def _listed(payload: object) -> tuple[int, bool]:
    """Return the number of items if all have one type, as samples do, and whether they are
    tensors."""
    if not isinstance(payload, tuple | list) or hasattr(payload, "_fields"):
        return 0, False
    of_tensors = all(isinstance(part, _Tensor) for part in payload)
    kinds = {(p.dtype, p.ndim) if isinstance(p, _Tensor) else type(p) for p in payload}
    # A single tensor is a field.
    return len(payload) if len(kinds) == 1 and len(payload) > of_tensors else 0, of_tensors
