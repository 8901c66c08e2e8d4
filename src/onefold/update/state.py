"""Converts the optimizer's state between segments, on devices, and whole tensors, in files.

A process packs the state of its segments into one stretch of bytes, to send it. The lead joins what
it receives from all into whole tensors, under the parameters' names. For a process that resumes
from a file, the lead packs the segments that the process now owns.

Note: a packed stretch
----------------------
It is a message as devices of a pipeline send it (`onefold.exchange.transport`): a list of all
values, as JSON, and then the tensors, which `unpack` reads in place. Nothing is pickled, because a
stretch may arrive over a network. The memory may belong to a transport that reuses it, so a caller
that keeps what `unpack` yields must copy it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onefold.core.encoding import from_json, to_json
from onefold.core.flat import (
    Layout,
    Segment,
    bits_of,
    dense_stride,
    is_dense,
    laid_out,
    storage_order,
)
from onefold.exchange.transport import Message, head_of, read_message, write_message
from onefold.system.accelerator import DTYPES
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.tensor_file import Bytes, TensorParts
from onefold.update.staging import SegmentState, is_by_element

__all__ = [
    "JoinedState",
    "check_kinds",
    "check_saved",
    "described",
    "join",
    "pack",
    "packed",
    "read_described",
    "take_apart",
    "unpack",
]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class JoinedState:
    """The complete state of an optimizer."""

    tensors: Sequence[TensorParts]
    """The tensors, each named PARAMETER.KEY."""
    keys: Mapping[str, Sequence[str]]
    """Keys of each parameter whose values are tensors."""
    values: Mapping[str, Mapping[str, Any]]
    """Values of each parameter's other keys, as JSON."""
    strides: Mapping[str, Sequence[int]]
    """Strides of tensors with several dimensions, if they differ from the parameter's."""


def check_kinds(state: Mapping[Any, Any], optimizer: str) -> None:
    """Refuse state that a file cannot hold, because its tensor class gives its bytes a meaning.

    Args:
        state: the state of an optimizer.
        optimizer: the name of the optimizer.

    Raises:
        TypeError: a value is of a subclass of tensors.
    """
    for values in state.values():
        if not isinstance(values, Mapping):
            # Its key is not a parameter, which is refused elsewhere.
            continue
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
                raise TypeError(
                    f"{optimizer} keeps its {key} in a {type(value).__name__}, a tensor subclass, "
                    f"which onefold cannot save. Use an optimizer whose state is in plain tensors, "
                    f"or train without checkpoints"
                )


def pack(states: Sequence[SegmentState], room: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Copy states into one stretch of bytes.

    Args:
        states: the states; tensors may be on any device.
        room: takes a number of bytes, and returns (at least that many,) uint8 on the host.

    Returns:
        The memory that ``room`` returned.

    Raises:
        TypeError: a value is neither a tensor nor JSON, or has a dtype that cannot be saved.
    """
    # Tensors and their entries in the list are linked by their order alone: that of the states.
    tensors = [each.value for each in states if isinstance(each.value, torch.Tensor)]
    head = json.dumps(_listed(states))
    message = Message(head, [laid_out(each, dense_stride(each)) for each in tensors])
    start, nbytes = head_of(message)
    memory = room(nbytes)
    write_message(message, start, memory)
    return memory


def described(states: Sequence[SegmentState]) -> bytes:
    """Describe states for `read_described`: everything except the values of tensors.

    Raises:
        TypeError: as `pack`.
    """
    tensors = [each.value for each in states if isinstance(each.value, torch.Tensor)]
    forms = [[DTYPES[each.dtype], [*each.shape], [*dense_stride(each)]] for each in tensors]
    return json.dumps([_listed(states), forms]).encode()


def read_described(text: bytes) -> Iterator[SegmentState]:
    """Yield the described states. Their tensors have no values, and are on the meta device."""
    listed, forms = json.loads(text)
    tensors = (
        torch.empty_strided(shape, stride, dtype=_DTYPES[name], device="meta")
        for name, shape, stride in forms
    )
    return _read(listed, tensors)


def _listed(states: Sequence[SegmentState]) -> list[list[Any]]:
    """List everything of the states except their tensors."""
    listed: list[list[Any]] = []
    for segment, key, value, by_element in states:
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.dtype not in DTYPES:
            raise TypeError(f"the optimizer's {key} has dtype {value.dtype}, which cannot be saved")
        # Tensors follow the list in the same order, so that no entry needs an offset.
        kept = None if is_tensor else to_json(value, f"the optimizer's {key}")
        listed.append([segment, key, kept, by_element, is_tensor])
    return listed


def _read(listed: list[list[Any]], tensors: Iterator[Any]) -> Iterator[SegmentState]:
    for segment, key, value, by_element, is_tensor in listed:
        found = next(tensors) if is_tensor else from_json(value)
        yield SegmentState(segment, key, found, by_element)


def packed(
    states: Sequence[SegmentState], allocator: TensorAllocator = DEFAULT_ALLOCATOR
) -> torch.Tensor:
    """Pack states into new memory on the host: (k,) uint8, see `pack`."""
    return pack(states, allocator.empty)


def unpack(memory: torch.Tensor) -> Iterator[SegmentState]:
    """Yield the packed states; their tensors are views of the same memory.

    Args:
        memory: (k,) uint8 on the host, as filled by `pack`; more bytes may follow.
    """
    message = read_message(memory)
    return _read(json.loads(message.head), iter(message.tensors))


def join(
    states: Iterable[SegmentState],
    segments: Sequence[Segment],
    layout: Layout,
    coming: Callable[[int, str], Iterable[Bytes]] | None = None,
) -> JoinedState:
    """Join the segments of all devices into whole tensors, without copying them.

    Args:
        states: states of all processes, from `unpack` or `read_described`.
        segments: the segments of the model.
        layout: the layout of the trained parameters.
        coming: if there are only descriptions, returns the bytes of a tensor, given the number of
            its parameter and its key.
    """
    grouped: dict[tuple[int, str], list[SegmentState]] = defaultdict(list)
    # Sort by number: segments of one parameter then follow each other in storage order, whichever
    # process sent them.
    for state in sorted(states, key=lambda state: state.segment):
        grouped[segments[state.segment].entry, state.key].append(state)
    tensors: list[TensorParts] = []
    keys: dict[str, list[str]] = defaultdict(list)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    strides: dict[str, Sequence[int]] = {}
    for (number, key), parts in grouped.items():
        entry, first = layout.entries[number], parts[0]
        if not isinstance(first.value, torch.Tensor):
            values[entry.name][key] = to_json(first.value, f"the optimizer's {key}")
            continue
        keys[entry.name].append(key)
        # A step count is the same for all segments of a parameter, so the first one represents all.
        used = parts if first.by_element else parts[:1]
        shape = entry.shape if first.by_element else tuple(first.value.shape)
        stretches = (
            coming(number, key)
            if coming is not None
            else [bits_of(part.value).numpy() for part in used]
        )
        given = (f"{entry.name}.{key}", first.value.dtype, shape)
        if not first.by_element and len(shape) > 1:
            strides[given[0]] = first.value.stride()
        # Values that are not by element are written in rows, see `bits_of`.
        tensors.append(
            TensorParts(*given, entry.stride, stretches)
            if first.by_element
            else TensorParts.in_rows(*given, stretches)
        )
    return JoinedState(tensors, dict(keys), dict(values), strides)


def check_saved(
    keys: Mapping[str, Sequence[str]],
    kind_of: Callable[[str], tuple[tuple[int, ...], str] | None],
    segments: Sequence[Segment],
    layout: Layout,
    strides: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Refuse saved tensors that `take_apart` could not split.

    Args:
        keys: see `JoinedState`.
        kind_of: takes a tensor's name, and returns its shape and dtype; None if there is none.
        segments: the segments of the model.
        layout: the layout of the trained parameters.
        strides: see `JoinedState`.

    Raises:
        ValueError: a tensor is missing, has an unknown dtype or strides with gaps, or has neither
            the shape of its parameter nor the shape of a single number.
    """
    # State of a parameter that is never cut may have any shape, such as Adafactor's rows and
    # columns.
    divided = {segment.entry for segment in segments if not segment.whole}
    for number, entry in enumerate(layout.entries):
        for key in keys.get(entry.name, ()):
            name = f"{entry.name}.{key}"
            found = kind_of(name)
            if found is None:
                raise ValueError(f"the optimizer's {name} is missing from its tensors")
            shape, dtype = found
            if dtype not in _DTYPES:
                raise ValueError(f"the optimizer's {name} has the unknown dtype {dtype}")
            # Strides come from a file, so check that they fit the shape.
            stride = (strides or {}).get(name)
            if stride and not (len(stride) == len(shape) and is_dense(shape, stride)):
                raise ValueError(
                    f"the optimizer's {name} has strides {stride}, which do not describe a tensor "
                    f"of shape {shape} without gaps"
                )
            if number in divided and shape not in ((), entry.shape):
                raise ValueError(
                    f"the optimizer's {name} has shape {shape}, but its parameter has shape "
                    f"{entry.shape}"
                )


def take_apart(
    keys: Mapping[str, Sequence[str]],
    values: Mapping[str, Mapping[str, Any]],
    read: Callable[[str], torch.Tensor],
    owned: Iterable[int],
    segments: Sequence[Segment],
    layout: Layout,
    strides: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[SegmentState]:
    """Yield the states of some segments, cut from whole tensors.

    Args:
        keys: see `JoinedState`.
        values: see `JoinedState`.
        read: takes a tensor's name, and returns the tensor.
        owned: numbers of the wanted segments, in order.
        segments: the segments of the model.
        layout: the layout of the trained parameters.
        strides: see `JoinedState`.

    Raises:
        ValueError: a parameter is cut into segments, but a tensor of its state cannot be.
    """
    # Keep tensors of the current parameter only: each tensor is then read once, and few are in
    # memory.
    laid: dict[str, torch.Tensor] = {}
    for number in owned:
        segment = segments[number]
        entry = layout.entries[segment.entry]
        for key in keys.get(entry.name, ()):
            name = f"{entry.name}.{key}"
            own = (strides or {}).get(name) if segment.whole else None
            if name not in laid:
                laid = {n: t for n, t in laid.items() if n.startswith(f"{entry.name}.")}
                whole = read(name)
                shaped = tuple(whole.shape) == entry.shape
                stride = tuple(own) if own else entry.stride
                laid[name] = laid_out(whole, stride) if own or shaped else whole
            tensor = laid[name]
            # A tensor with its own strides is never cut, even if it has the parameter's shape.
            by_element = not own and is_by_element(key, tensor, entry.shape)
            if by_element:
                tensor = storage_order(tensor)[segment.start : segment.stop]
            elif not segment.whole and tensor.dim():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, but its parameter has shape "
                    f"{entry.shape}"
                )
            yield SegmentState(number, key, tensor, by_element)
        for key, value in values.get(entry.name, {}).items():
            yield SegmentState(number, key, from_json(value), False)
