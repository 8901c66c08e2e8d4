"""The optimizer's state between devices and files: in pieces there, in whole tensors here.

A process packs the state of its pieces into one stretch of bytes, so that it can travel; the lead
joins what came from all into whole tensors, under the parameters' names. For a process that goes on
from them, the lead packs the pieces that the process has now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onefold.core.flat import Layout, Piece, aligned, laid_out, storage_order
from onefold.core.jsonvalue import from_bytes, from_json, to_bytes, to_json
from onefold.system.tensorfile import DTYPES, TensorParts

__all__ = [
    "JoinedState",
    "PieceState",
    "check_saved",
    "is_by_element",
    "join",
    "pack",
    "packed",
    "take_apart",
    "unpack",
]

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def is_by_element(key: str, value: object, shape: Sequence[int]) -> bool:
    """Whether a value of an optimizer's state goes element by element with its parameter.

    A count of steps does not, even where the parameter is a single number as well.

    Args:
        key: of the value.
        value: any.
        shape: of the parameter.
    """
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        return False
    return value.dim() > 0 or key != "step"


class PieceState(NamedTuple):
    """One value of the state of one piece."""

    piece: int
    """Number of the piece, among those of the model."""
    key: str
    """As the optimizer calls it."""
    value: Any
    """A tensor, or what JSON can hold."""
    by_element: bool
    """A tensor with one number for each element of the piece, in storage order."""


@dataclass(frozen=True, slots=True)
class JoinedState:
    """The whole optimizer's state."""

    tensors: Sequence[TensorParts]
    """Named NAME.KEY."""
    keys: Mapping[str, Sequence[str]]
    """For each parameter, which of its keys are tensors."""
    values: Mapping[str, Mapping[str, Any]]
    """For each parameter, the values of the other keys, as JSON."""


def pack(states: Sequence[PieceState], room: Callable[[int], torch.Tensor]) -> None:
    """Copy states into one stretch of bytes.

    Args:
        states: tensors on any device.
        room: takes a number of bytes, and returns (at least that many,) uint8 on the host.

    Raises:
        TypeError: a value is neither a tensor nor JSON, or of a type that a file cannot hold.
    """
    listed: list[list[Any]] = []
    start = 0
    for piece, key, value, by_element in states:
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPES:
                raise TypeError(
                    f"the optimizer's {key} is of {value.dtype}, which no file can hold"
                )
            kind: list[Any] = [DTYPES[value.dtype], list(value.shape), by_element, start]
            start += aligned(value.numel() * value.element_size())
            listed.append([piece, key, kind, None])
        else:
            listed.append([piece, key, None, to_json(value, f"the optimizer's {key}")])
    header = to_bytes(listed)
    first = aligned(len(header))
    memory = room(first + start)
    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for (_, _, kind, _), state in zip(listed, states, strict=True):
        if kind is not None and state.value.numel():
            place = first + kind[3]
            nbytes = state.value.numel() * state.value.element_size()
            target = memory[place : place + nbytes].view(state.value.dtype)
            target.view(state.value.shape).copy_(state.value)


def packed(states: Sequence[PieceState]) -> torch.Tensor:
    """States in new memory on the host: (k,) uint8, see `pack`."""
    made: list[torch.Tensor] = []

    def room(nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[0]

    pack(states, room)
    return made[0]


def unpack(memory: torch.Tensor) -> Iterator[PieceState]:
    """What was packed; the tensors lie in the same memory.

    Args:
        memory: uint8 on the host, as filled by `pack`; there may be bytes behind it.
    """
    listed, stop = from_bytes(memory)
    first = aligned(stop)
    for piece, key, kind, value in listed:
        if kind is None:
            yield PieceState(piece, key, from_json(value), False)
            continue
        name, shape, by_element, start = kind
        dtype = _DTYPES[name]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        stretch = memory[first + start : first + start + nbytes]
        tensor = stretch.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
        yield PieceState(piece, key, tensor, by_element)


def join(states: Iterable[PieceState], pieces: Sequence[Piece], layout: Layout) -> JoinedState:
    """Put the pieces of all devices together; nothing is copied.

    Args:
        states: from `unpack`, of all processes.
        pieces: of the model.
        layout: of the trained parameters.
    """
    grouped: dict[tuple[int, str], list[PieceState]] = defaultdict(list)
    for state in sorted(states, key=lambda state: state.piece):
        grouped[pieces[state.piece].entry, state.key].append(state)
    tensors: list[TensorParts] = []
    keys: dict[str, list[str]] = defaultdict(list)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for (number, key), parts in grouped.items():
        entry, first = layout.entries[number], parts[0]
        if not isinstance(first.value, torch.Tensor):
            values[entry.name][key] = to_json(first.value, f"the optimizer's {key}")
            continue
        keys[entry.name].append(key)
        # What has no number for each element is the same for all pieces of a parameter.
        used = parts if first.by_element else parts[:1]
        shape = entry.shape if first.by_element else tuple(first.value.shape)
        stride = entry.stride if first.by_element else first.value.stride()
        stretches = [part.value.reshape(-1).view(torch.uint8).numpy() for part in used]
        name = f"{entry.name}.{key}"
        tensors.append(TensorParts(name, first.value.dtype, shape, stride, stretches))
    return JoinedState(tensors, dict(keys), dict(values))


def check_saved(
    keys: Mapping[str, Sequence[str]],
    kind_of: Callable[[str], tuple[tuple[int, ...], str] | None],
    pieces: Sequence[Piece],
    layout: Layout,
) -> None:
    """Refuse tensors that `take_apart` could not take apart.

    Args:
        keys: see `JoinedState`.
        kind_of: takes a tensor's name, and returns its shape and type; None if there is none.
        pieces: of the model.
        layout: of the trained parameters.

    Raises:
        ValueError: one is missing, or has neither the shape of its parameter nor that of a number.
    """
    divided = {piece.entry for piece in pieces if not piece.whole}
    for number, entry in enumerate(layout.entries):
        for key in keys.get(entry.name, ()):
            name = f"{entry.name}.{key}"
            found = kind_of(name)
            if found is None:
                raise ValueError(f"the optimizer's {name} is not among its tensors")
            shape, dtype = found
            if dtype not in _DTYPES:
                raise ValueError(f"the optimizer's {name} is of {dtype}, which is not known")
            if number in divided and shape not in ((), entry.shape):
                raise ValueError(
                    f"the optimizer's {name} has shape {shape}, expected that of its parameter, "
                    f"{entry.shape}"
                )


def take_apart(
    keys: Mapping[str, Sequence[str]],
    values: Mapping[str, Mapping[str, Any]],
    read: Callable[[str], torch.Tensor],
    owned: Iterable[int],
    pieces: Sequence[Piece],
    layout: Layout,
) -> Iterator[PieceState]:
    """The states of some pieces, from whole tensors.

    Args:
        keys: see `JoinedState`.
        values: see `JoinedState`.
        read: takes a tensor's name.
        owned: numbers of the pieces that are wanted, in order.
        pieces: of the model.
        layout: of the trained parameters.

    Raises:
        ValueError: a tensor has neither a number for each element of its parameter nor does it
            belong to a whole one.
    """
    laid: dict[str, torch.Tensor] = {}
    for number in owned:
        piece = pieces[number]
        entry = layout.entries[piece.entry]
        for key in keys.get(entry.name, ()):
            name = f"{entry.name}.{key}"
            if name not in laid:
                laid = {n: t for n, t in laid.items() if n.startswith(f"{entry.name}.")}
                whole = read(name)
                shaped = tuple(whole.shape) == entry.shape
                laid[name] = laid_out(whole, entry.stride) if shaped else whole
            tensor = laid[name]
            by_element = is_by_element(key, tensor, entry.shape)
            if by_element:
                tensor = storage_order(tensor)[piece.start : piece.stop]
            elif not piece.whole and tensor.dim():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected that of its parameter, "
                    f"{entry.shape}"
                )
            yield PieceState(number, key, tensor, by_element)
        for key, value in values.get(entry.name, {}).items():
            yield PieceState(number, key, from_json(value), False)
