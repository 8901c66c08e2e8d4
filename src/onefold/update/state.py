"""Converts the optimizer's state between segments and whole tensors, and keeps the model's
averages.

Devices hold segments, and files hold whole tensors. `Averages` keeps the averages of the model: of
parameters segment by segment at their owners, of buffers everywhere.

A process packs the state of its segments into one stretch of bytes, so that it can travel; the lead
joins what it receives from all into whole tensors, under the parameters' names. For a process that
goes on from a file, the lead packs the segments that the process owns now.

Note: a packed stretch
----------------------
It is a message as devices of a pipeline send them (`onefold.exchange.transport`): a list of every
value, as JSON, and then the tensors, which `unpack` reads in place. Nothing is pickled: a stretch
may come over a network. The memory may be a transport's that is used again, so whoever keeps what
`unpack` yields must copy it.

Note: where an average lies
---------------------------
The owner of a segment keeps its average, as it keeps the segment's state of the optimizer, so all
devices together hold one. An average travels, and is saved, among that state under a key of its
own. Every process keeps the averages of all buffers, which are few and alike everywhere.

Segments do not depend on the number of devices, and an average is computed element by element from
values that every run has alike. So the bits of the averages do not depend on it either.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from onefold.core.flat import (
    FlatTensors,
    Layout,
    Segment,
    bits_of,
    dense_stride,
    is_dense,
    laid_out,
    storage_order,
)
from onefold.core.json_value import from_json, to_json
from onefold.core.settings import added_up_in
from onefold.exchange.transport import Message, head_of, read_message, write_message
from onefold.system.allocator import DEFAULT_ALLOCATOR, TensorAllocator
from onefold.system.tensor_file import DTYPES, Bytes, TensorParts
from onefold.update.staging import Staging

if TYPE_CHECKING:
    from onefold.core.averaging import AverageRule

__all__ = [
    "AVERAGE",
    "Averages",
    "JoinedState",
    "SegmentState",
    "check_saved",
    "described",
    "is_by_element",
    "join",
    "pack",
    "packed",
    "read_described",
    "take_apart",
    "unpack",
]


_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def is_by_element(
    key: str, value: object, shape: Sequence[int], stride: Sequence[int] | None = None
) -> bool:
    """Whether a value of an optimizer's state has one number for each element of its parameter.

    A count of steps does not, even where the parameter is a single number as well.

    Args:
        key: the optimizer's name of the value.
        value: any value of a state.
        shape: the shape of the parameter.
        stride: the parameter's, if it is never cut. A value that lies otherwise then stays as it
            is: it may be a matrix to multiply with, whose bits depend on how it lies.
    """
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        return False
    if stride is not None and value.stride() != tuple(stride):
        return False
    return value.dim() > 0 or key != "step"


class SegmentState(NamedTuple):
    """One value of the state of one segment."""

    segment: int
    """Number of the segment, among those of the model."""
    key: str
    """The optimizer's name of the value."""
    value: Any
    """A tensor of any shape and dtype, or what JSON can hold."""
    by_element: bool
    """Whether it is a tensor with one number for each element of the segment, in storage order."""


@dataclass(frozen=True, slots=True)
class JoinedState:
    """The whole optimizer's state."""

    tensors: Sequence[TensorParts]
    """The tensors, each named PARAMETER.KEY."""
    keys: Mapping[str, Sequence[str]]
    """For each parameter, which of its keys are tensors."""
    values: Mapping[str, Mapping[str, Any]]
    """For each parameter, the values of its other keys, as JSON."""
    strides: Mapping[str, Sequence[int]]
    """Of the tensors with several dimensions that do not lie as their parameters do."""


def pack(states: Sequence[SegmentState], room: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Copy states into one stretch of bytes.

    Args:
        states: the states; tensors may be on any device.
        room: takes a number of bytes, and returns (at least that many,) uint8 on the host.

    Returns:
        The memory that ``room`` returned.

    Raises:
        TypeError: a value is neither a tensor nor JSON, or of a dtype that a file cannot hold.
    """
    tensors = [each.value for each in states if isinstance(each.value, torch.Tensor)]
    head = json.dumps(_listed(states))
    message = Message(head, [laid_out(each, dense_stride(each)) for each in tensors])
    start, nbytes = head_of(message)
    memory = room(nbytes)
    write_message(message, start, memory)
    return memory


def described(states: Sequence[SegmentState]) -> bytes:
    """Describe states, for `read_described`: all but the values of tensors.

    Raises:
        TypeError: as `pack`.
    """
    tensors = [each.value for each in states if isinstance(each.value, torch.Tensor)]
    forms = [[DTYPES[each.dtype], [*each.shape], [*dense_stride(each)]] for each in tensors]
    return json.dumps([_listed(states), forms]).encode()


def read_described(text: bytes) -> Iterator[SegmentState]:
    """Yield the states that were described; their tensors have no values, and are on no device."""
    listed, forms = json.loads(text)
    tensors = (
        torch.empty_strided(shape, stride, dtype=_DTYPES[name], device="meta")
        for name, shape, stride in forms
    )
    return _read(listed, tensors)


def _listed(states: Sequence[SegmentState]) -> list[list[Any]]:
    """All of the states but their tensors."""
    listed: list[list[Any]] = []
    for segment, key, value, by_element in states:
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.dtype not in DTYPES:
            raise TypeError(f"the optimizer's {key} is of {value.dtype}, which no file can hold")
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
    """Yield the states that were packed; their tensors are views of the same memory.

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
    """Join the segments of all devices into whole tensors, without copying any.

    Args:
        states: those of all processes, from `unpack` or `read_described`.
        segments: the segments of the model.
        layout: the trained parameters'.
        coming: where only descriptions are at hand, how the bytes of a tensor are found, given the
            number of its parameter and its key.
    """
    grouped: dict[tuple[int, str], list[SegmentState]] = defaultdict(list)
    # By number: segments of one parameter then follow each other in storage order, whoever sent
    # them.
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
        # A count of steps is the same for all segments of a parameter: the first stands for all.
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
        # What is not by element is written in rows, see `bits_of`.
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
    """Refuse saved tensors that `take_apart` could not take apart.

    Args:
        keys: see `JoinedState`.
        kind_of: takes a tensor's name, and returns its shape and dtype; None if there is none.
        segments: the segments of the model.
        layout: the trained parameters'.
        strides: see `JoinedState`.

    Raises:
        ValueError: a tensor is missing, is of an unknown dtype, has strides with gaps, or has
            neither the shape of its parameter nor that of a single number.
    """
    # State of a parameter that is never cut may have any shape, as Adafactor's rows and columns.
    divided = {segment.entry for segment in segments if not segment.whole}
    for number, entry in enumerate(layout.entries):
        for key in keys.get(entry.name, ()):
            name = f"{entry.name}.{key}"
            found = kind_of(name)
            if found is None:
                raise ValueError(f"the optimizer's {name} is not among its tensors")
            shape, dtype = found
            if dtype not in _DTYPES:
                raise ValueError(f"the optimizer's {name} is of {dtype}, which is not known")
            stride = (strides or {}).get(name)
            if stride and not (len(stride) == len(shape) and is_dense(shape, stride)):
                raise ValueError(
                    f"the optimizer's {name} has strides {stride}, expected those of a tensor of "
                    f"shape {shape} without gaps"
                )
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
        layout: the trained parameters'.
        strides: see `JoinedState`.

    Raises:
        ValueError: a parameter is cut into segments, and a tensor of its state cannot be.
    """
    # Only the current parameter's: in order, each tensor is read once, and only a few are held.
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
            by_element = not own and is_by_element(key, tensor, entry.shape)
            if by_element:
                tensor = storage_order(tensor)[segment.start : segment.stop]
            elif not segment.whole and tensor.dim():
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected that of its parameter, "
                    f"{entry.shape}"
                )
            yield SegmentState(number, key, tensor, by_element)
        for key, value in values.get(entry.name, {}).items():
            yield SegmentState(number, key, from_json(value), False)


AVERAGE = "onefold.average"
"""The key under which the average of a segment, or of a buffer, travels and is saved."""


class Averages:
    """The averages that this process keeps; none until `start`.

    Args:
        allocator: where those of segments lie.
        staging: brings segments to the device that computes.
    """

    def __init__(self, allocator: TensorAllocator, staging: Staging) -> None:
        self._allocator, self._staging = allocator, staging
        self.rule: AverageRule | None = None
        """How they follow the model; None where there are none."""
        self.steps = 0
        """How many steps they have followed; those that were skipped do not count."""
        self.segments: dict[int, torch.Tensor] = {}
        """The average of each segment of this process, by the segment's number: of the shape and
        the strides of the values that the optimizer updates."""
        self.buffers: FlatTensors | None = None
        """The averages of the module's buffers, on this process's first device."""

    def start(
        self,
        rule: AverageRule,
        values: Mapping[int, torch.Tensor],
        buffers: FlatTensors,
        *,
        steps: int = 0,
    ) -> None:
        """Begin with the values as they are now, where `adopt` has brought no average.

        Args:
            rule: how the averages are to follow.
            values: of the segments of this process, by number.
            buffers: the module's buffers.
            steps: how many steps the averages that were brought have followed.
        """
        self.rule, self.steps = rule, steps
        for number, value in values.items():
            if number not in self.segments:
                self.adopt(number, value, storage_order(value))
        if self.buffers is None:
            self.buffers = FlatTensors(buffers.layout.converted(added_up_in), device=buffers.device)
            self.buffers.copy_(buffers)

    def end(self) -> None:
        """Keep no averages any more."""
        self.rule, self.steps, self.buffers = None, 0, None
        self.segments.clear()

    def follow(self, values: Mapping[int, torch.Tensor], buffers: FlatTensors) -> None:
        """Update the averages after a step that updated the model, when that is due.

        Args:
            values: of the segments of this process, by number.
            buffers: the module's buffers.
        """
        if self.rule is None or self.buffers is None:
            return
        self.steps += 1
        if self.steps % self.rule.every:
            return
        kept = self.rule.kept(self.steps // self.rule.every)
        self._staging.change(
            lambda averages, newest: _move(averages, newest, kept),
            [self.segments[number] for number in values],
            list(values.values()),
        )
        for average, section in zip(self.buffers.sections, buffers.sections, strict=True):
            _move_buffers(average, section, kept)

    def states(self) -> list[SegmentState]:
        """List the averages of the segments as states that travel."""
        return [
            SegmentState(number, AVERAGE, storage_order(average), True)
            for number, average in self.segments.items()
        ]

    def adopt(self, number: int, values: torch.Tensor, average: torch.Tensor) -> None:
        """Keep the average of a segment that has come from elsewhere.

        Args:
            number: the number of the segment.
            values: of the segment; their shape, strides and device are the average's.
            average: (numel,) in storage order; copied.
        """
        self.segments[number] = self._allocator.like(values, added_up_in(values.dtype))
        storage_order(self.segments[number]).copy_(average)

    def adopt_buffers(self, layout_of: FlatTensors, states: Iterable[SegmentState]) -> None:
        """Keep averages of buffers that have come from elsewhere.

        Args:
            layout_of: the module's buffers.
            states: one for each buffer, by its number in the layout; copied.
        """
        layout = layout_of.layout.converted(added_up_in)
        self.buffers = FlatTensors(layout, device=layout_of.device)
        for state in states:
            self.buffers.views[state.segment].copy_(state.value)


def _move(averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor], kept: float) -> None:
    """Move averages toward values in place; the nearer, the less of them is kept."""
    alike: dict[
        tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
    ] = {}
    # A list on several devices or of several dtypes falls back to a kernel for each tensor.
    for average, value in zip(averages, values, strict=True):
        group = alike.setdefault((average.device, average.dtype), ([], []))
        group[0].append(average)
        group[1].append(value.detach().to(average.dtype))
    move = get_ema_multi_avg_fn(kept)  # type: ignore[no-untyped-call]
    for targets, sources in alike.values():
        move(targets, sources, 0)


def _move_buffers(average: torch.Tensor, section: torch.Tensor, kept: float) -> None:
    """Move the averages of a section of buffers; whole numbers take the newest value."""
    newest = section.to(average.dtype)
    if not (average.is_floating_point() or average.is_complex()):
        average.copy_(newest)
        return
    moved = average.clone()
    _move([moved], [newest], kept)
    # Masks hold infinities, which have no average: infinity less infinity is not a number.
    average.copy_(torch.where(torch.isfinite(moved), moved, newest))
