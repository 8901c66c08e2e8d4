"""The containers of batches: how to make one like another, and how many samples it holds. Pure.

Note: the type is kept
----------------------
A loss may ask a batch for its attributes, so what is cut or moved keeps its type. Dicts of other
kinds are copied, with whatever else they hold, and their items are replaced; so are dataclasses,
also frozen ones, whose ``__init__`` is not run again. Other mappings, and kinds of tuple and list,
are made anew from their items.

Note: samples that are left out
-------------------------------
A collate function that drops broken samples returns k rows for the n samples that it was given, and
a scalar loss is then the mean over k. A payload does not say which of its dimensions is that of the
samples. So it is k only where every field has k rows and none has n, and where nothing speaks for
another reading: a list of tensors of one kind may be one of samples, and where each tensor has a
dimension of n the samples may lie there. The answer follows from one shard's payload alone: what
else a device has read must not show in its bits.
"""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

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


_Tensor = torch.Tensor | np.ndarray


class Count(NamedTuple):
    """How many samples a payload holds."""

    samples: int
    sure: bool = True
    """Whether nothing speaks for fewer."""


def count_of(payload: object, samples: int, dim: int = 0) -> Count:
    """Find out how many samples a payload holds; as many as were read unless fewer are seen.

    Args:
        payload: what ``collate`` returned for one shard.
        samples: n, how many samples it was given.
        dim: the dimension of tensors in which the samples lie.

    >>> count_of([torch.zeros(3, 5), torch.zeros(3)], 4)
    Count(samples=3, sure=True)
    >>> count_of([torch.zeros(3, 5), torch.zeros(2)], 4)
    Count(samples=4, sure=False)
    """
    fields = []
    for lengths in _lengths(payload, samples, dim):
        if samples in lengths:
            return Count(samples)  # nearly always, and at once
        fields += [lengths] if lengths else []
    listed, of_tensors = _listed(payload)
    # Two or three tensors of one kind may still be fields.
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
    """For each field, how many samples it may hold; nothing where it does not say."""
    if isinstance(payload, _Tensor):
        yield _length(payload, dim)
        return
    for _, part in parts_of(payload) or ():
        if isinstance(part, Mapping) or has_fields(part):
            yield from _lengths(part, samples, dim)
        elif isinstance(part, tuple | list):
            # Texts may be many: a list as long as there are samples is not gone through.
            inner = tensors_of(part, _Tensor) if len(part) != samples else ()
            lengths = [_length(tensor, dim) for tensor in inner if tensor.ndim]
            yield {len(part)}.union(set.intersection(*lengths) if lengths else ())
        elif isinstance(part, _Tensor):
            yield _length(part, dim)


def _length(tensor: Any, dim: int) -> set[int]:
    shape = _shape(tensor)
    return {shape[dim]} if len(shape) > dim else set()


def _shape(tensor: Any) -> tuple[int, ...]:
    # One of sequences of several lengths has only the first number.
    nested = isinstance(tensor, torch.Tensor) and tensor.is_nested
    return (tensor.size(0),) if nested else tuple(tensor.shape)


def _listed(payload: object) -> tuple[int, bool]:
    """How many parts of one kind there are, as samples are, and whether they are tensors."""
    if not isinstance(payload, tuple | list) or hasattr(payload, "_fields"):
        return 0, False
    of_tensors = all(isinstance(part, _Tensor) for part in payload)
    kinds = {(p.dtype, p.ndim) if isinstance(p, _Tensor) else type(p) for p in payload}
    # A tensor alone is a field.
    return len(payload) if len(kinds) == 1 and len(payload) > of_tensors else 0, of_tensors
