"""Copies a model for writing, fills in saved values, and reads the other tensors of a checkpoint.

`copy_model` and `TensorFiles` move a model between memory and files. `StoredStates` has the files
of a checkpoint that is loaded: it decides which of their tensors are used, and what for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from onefold.checkpoint.folder import StoredCheckpoint
from onefold.checks.model import sorted_values, state_of
from onefold.core.flat import (
    aligned,
    bits_of,
    fingerprint_of,
    named_tensors,
    own_name,
    tensor_digests,
)
from onefold.core.settings import added_up_in
from onefold.core.storage import Storage
from onefold.errors import CheckpointError
from onefold.system.accelerator import DTYPES
from onefold.system.allocator import TensorAllocator
from onefold.system.tensor_file import TensorParts
from onefold.update.averages import AVERAGE, AverageRule
from onefold.update.optimizer import MASTER
from onefold.update.staging import SegmentState
from onefold.update.state import check_saved, packed, take_apart

__all__ = [
    "VALUES",
    "ModelCopy",
    "StoredStates",
    "buffer_parts",
    "carried_parts",
    "coming_parts",
    "copy_model",
    "left_by_shard",
    "saved_rule",
    "tensor_parts",
]


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """A copy of a model's values at one moment, on the host."""

    model: Mapping[str, torch.Tensor]
    """The values that ``state_dict`` names."""
    rest: Mapping[str, torch.Tensor]
    """Parameters and buffers that ``state_dict`` leaves out."""
    names: tuple[str, ...]
    """Names of all parameters and buffers, in the model's own order."""

    def parts(self) -> tuple[list[TensorParts], list[TensorParts]]:
        """``model`` and ``rest``, ready to be written; views of the copy."""
        return tensor_parts(self.model), tensor_parts(self.rest)

    def fingerprint(self) -> str:
        """What ``trainer.fingerprint()`` was at that moment."""
        known = {**self.model, **self.rest}
        return fingerprint_of(tensor_digests({name: known[name] for name in self.names}))


def copy_model(module: torch.nn.Module, room: Callable[[int], torch.Tensor]) -> ModelCopy:
    """Copy every parameter and buffer of a model to the host.

    Args:
        module: the user's own model.
        room: takes a number of bytes, and returns (at least that many,) uint8 on the host.

    Raises:
        TypeError: the model holds something that is no tensor, or of a type that no file can hold.
    """
    # Into one stretch that is used again for every checkpoint: fresh memory would cost a page fault
    # every 4 KiB, while training waits.
    model, rest, names = sorted_values(module)
    values = {**model, **rest}
    memory = room(sum(aligned(value.nbytes) for value in values.values()))
    start = 0
    for name, value in values.items():
        stretch = memory[start : start + value.nbytes].view(value.dtype)
        values[name] = stretch.view(value.shape).copy_(value.detach())
        start += aligned(value.nbytes)
    return ModelCopy({n: values[n] for n in model}, {n: values[n] for n in rest}, names)


def coming_parts(
    module: torch.nn.Module, numbers: Mapping[int, int], coming: Callable[[str, int], TensorParts]
) -> tuple[list[TensorParts], list[TensorParts]]:
    """What ``state_dict`` names, and what it leaves out, of a model whose parameters are elsewhere.

    Args:
        module: the user's own model, which `is_saved_as_it_is`.
        numbers: those of the parameters that are elsewhere, by their identity.
        coming: makes what is written of one of them, given its name and number.

    Raises:
        TypeError: the model holds something that is no tensor, or of a type that no file can hold.
    """
    model, rest, _ = sorted_values(module)

    def part(name: str, value: torch.Tensor) -> TensorParts:
        if id(value) in numbers:
            return coming(name, numbers[id(value)])
        return tensor_parts({name: value.detach().cpu()})[0]

    return [part(*each) for each in model.items()], [part(*each) for each in rest.items()]


class TensorFiles:
    """The tensors in some files of a checkpoint, which stay open, whoever deletes them meanwhile.

    Args:
        paths: the files.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path} is a broken safetensors file: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def check(self, module: torch.nn.Module) -> None:
        """Compare names, shapes and types with those of a model.

        Args:
            module: made by the user.

        Raises:
            CheckpointError: a tensor differs, or is in only one of the two; the message names it.
        """
        wanted = {**state_of(module), **named_tensors(module)}
        kinds = {n: (tuple(t.shape), DTYPES.get(t.dtype)) for n, t in wanted.items()}
        for name in dict.fromkeys([*kinds, *self._files]):
            here, there = kinds.get(name), self.kind_of(name)
            if here == there:
                continue
            if there is None:
                words = f", of shape {kinds[name][0]}, is in this model and not in the checkpoint"
            elif here is None:
                words = f", of shape {there[0]}, is in the checkpoint and not in this model"
            else:
                one, other = (f"{dtype} {shape}" for shape, dtype in (there, here))
                words = f" is {one} in the checkpoint and {other} in this model"
            raise CheckpointError(f"{name}{words}: it was saved from another model")

    def check_fingerprint(self, module: torch.nn.Module, expected: str) -> None:
        """Compare the values with what was noted of them when they were saved.

        Raises:
            CheckpointError: they have other bits, so that some are not those of the run.
        """
        read: dict[str, str] = {}
        for name in named_tensors(module):  # one at a time, as all would take twice the memory
            read |= tensor_digests({name: self.read(name)})
        if (found := fingerprint_of(read)) != expected:
            raise CheckpointError(
                f"its values have the fingerprint {found}, expected {expected}, which its run.json "
                f"names: one of the two is of another run"
            )

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.keys()

    def kind_of(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """The shape of a tensor, and its type as `DTYPES` calls it; None if it is not there."""
        if name not in self._files:
            return None
        saved = self._files[name].get_slice(name)
        return tuple(saved.get_shape()), saved.get_dtype()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the host."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def fill(self, module: torch.nn.Module, *, but: Collection[int] = ()) -> None:
        """Write the values into a model's parameters and buffers, where these lie.

        Args:
            module: made by the user.
            but: the identities of those that are left alone.
        """
        # In place: the parameters are views of flat memory that the engine goes on with.
        with torch.no_grad():
            for name, tensor in named_tensors(module).items():
                if id(tensor) not in but:
                    tensor.copy_(self.read(name))


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> list[TensorParts]:
    """Tensors on the host, by name, ready to be written; views of those that are contiguous."""
    return [
        TensorParts.in_rows(name, tensor.dtype, tuple(tensor.shape), [bits_of(tensor).numpy()])
        for name, tensor in tensors.items()
    ]


VALUES = "onefold.values"
"""The key under which the values of a parameter travel as the optimizer's state does."""
_SHARD = "onefold.shard"
"""With a shard's number: the key under which what the shard carries in a buffer is saved."""


def saved_rule(run: Mapping[str, Any], allow_changed: Collection[str]) -> AverageRule | None:
    """The rule of the average that goes on with a checkpoint; None if none does."""
    saved = None if "average" in allow_changed else run["average"]
    return None if saved is None else AverageRule.from_json(saved)


def buffer_parts(averages: Mapping[str, torch.Tensor]) -> list[TensorParts]:
    """The averages of buffers, by name, ready to be written beside those of the parameters."""
    return tensor_parts({_key_of(name): value for name, value in averages.items()})


def carried_parts(left: Iterable[tuple[str, int, torch.Tensor]]) -> list[TensorParts]:
    """What shards carry in buffers: name, shard and value; copied, ready to be written."""
    return tensor_parts({_key_in(name, shard): v.to("cpu", copy=True) for name, shard, v in left})


def left_by_shard(states: Iterable[SegmentState]) -> dict[int, dict[int, torch.Tensor]]:
    """What shards carry, by the buffer's number and the shard's; copied."""
    left: dict[int, dict[int, torch.Tensor]] = {}
    for state in states:
        left.setdefault(state.segment, {})[int(state.key)] = state.value.clone()
    return left


class StoredStates:
    """The open files of a checkpoint.

    Args:
        stored: the checkpoint.
        storage: the layouts of the run that loads it.
        carried: numbers of the buffers that each shard has for itself.
        allow_changed: what may differ from the run that was saved.
        allocator: where what is handed out lies.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        storage: Storage,
        carried: Sequence[int],
        allow_changed: Collection[str],
        allocator: TensorAllocator,
    ) -> None:
        # A checkpoint that was saved with averages in the model has what is trained beside it.
        trained = stored.path("training.safetensors")
        names = ("model.safetensors", "buffers.safetensors")
        paths = [path for name in names if (path := stored.path(name)) is not None]
        self.model = TensorFiles(paths if trained is None else [trained])
        """What the model goes on with."""
        self._files = TensorFiles([stored.folder / "optimizer.safetensors"])
        kept = stored.path("kept.safetensors")
        self._kept = TensorFiles([] if kept is None else [kept])
        self._storage, self._allocator = storage, allocator
        self._carried = () if "shards" in allow_changed else carried
        self._with_optimizer = "optimizer" not in allow_changed
        self._with_average = saved_rule(stored.run, allow_changed) is not None
        saved = stored.run["optimizer"]
        self._keys = {
            name: [key for key in keys if self._is_used(key)]
            for name, keys in saved["tensors"].items()
        }
        self._values = saved["other_state"] if self._with_optimizer else {}
        self._strides = saved["strides"]

    def kept(self) -> dict[str, torch.Tensor]:
        """Read the copies of weights that the script referred to, by the names they have there."""
        return {name: self._kept.read(name) for name in self._kept.names}

    def check(self) -> None:
        """Refuse states that do not fit, before anything is changed.

        Raises:
            ValueError: a tensor is missing, or of another shape or type than is expected.
        """
        storage = self._storage
        layouts = storage.segments, storage.masters, self._strides
        check_saved(self._keys, self._files.kind_of, *layouts)
        for name, values in self._values.items():
            for key in (MASTER, AVERAGE):
                if key in values:
                    raise ValueError(f"{key} of {name} is no tensor")
        for entry in storage.masters.entries:
            if MASTER in self._keys.get(entry.name, ()):
                self._check_kind(f"{entry.name}.{MASTER}", entry.shape, None)
        if self._with_average:
            self._check_averages()
        for number, _, key in self._left():
            entry = storage.buffers.entries[number]
            self._check_kind(key, entry.shape, DTYPES[storage.buffers.dtypes[entry.section]])

    def segments(self, owned: Iterable[int]) -> torch.Tensor:
        """Pack the states of some segments, averages among them, for the process that owns them."""
        storage, read = self._storage, self._files.read
        layouts = storage.segments, storage.masters, self._strides
        states = take_apart(self._keys, self._values, read, owned, *layouts)
        return packed(list(states), self._allocator)

    def values(self, owned: Iterable[int]) -> torch.Tensor:
        """Pack the values of some of the partitioned segments, for the process that keeps them."""
        layout = self._storage.partitioned_layout().layout
        segments = self._storage.partitioned_segments()
        keys = {entry.name: [VALUES] for entry in layout.entries}

        def read(name: str) -> torch.Tensor:
            return self.model.read(own_name(name.removesuffix(f".{VALUES}")))

        return packed(list(take_apart(keys, {}, read, owned, segments, layout)), self._allocator)

    def buffers(self) -> torch.Tensor:
        """Pack the averages of buffers that go on, and what shards carry, for `left_by_shard`."""
        kept = [(number, str(shard), key) for number, shard, key in self._left()]
        if self._with_average:
            entries = enumerate(self._storage.buffers.entries)
            kept += [(number, AVERAGE, _key_of(entry.name)) for number, entry in entries]
        return packed(
            [SegmentState(n, what, self._files.read(key), False) for n, what, key in kept]
        )

    def _left(self) -> Iterator[tuple[int, int, str]]:
        for number in self._carried:
            name = self._storage.buffers.entries[number].name
            for shard in range(self._storage.shards):
                key = _key_in(name, shard)
                if self._files.kind_of(key) is not None:
                    yield number, shard, key

    def _is_used(self, key: str) -> bool:
        return self._with_average if key == AVERAGE else self._with_optimizer

    def _check_averages(self) -> None:
        parameters, buffers = self._storage.masters, self._storage.buffers
        for entry in parameters.entries:
            if AVERAGE in self._keys.get(entry.name, ()):
                dtype = DTYPES[added_up_in(parameters.dtypes[entry.section])]
                self._check_kind(f"{entry.name}.{AVERAGE}", entry.shape, dtype)
            # Another optimizer may train parameters that had no average; theirs begins anew.
            elif self._with_optimizer:
                raise ValueError(f"{entry.name} has no average, though the run keeps one")
        for entry in buffers.entries:
            dtype = DTYPES[added_up_in(buffers.dtypes[entry.section])]
            self._check_kind(_key_of(entry.name), entry.shape, dtype)

    def _check_kind(self, name: str, shape: tuple[int, ...], dtype: str | None) -> None:
        found = self._files.kind_of(name)
        if found is None:
            raise ValueError(f"{name} is not among its tensors")
        if found != (shape, dtype or found[1]):
            expected = f"{dtype or found[1]} {shape}"
            raise ValueError(f"{name} is {found[1]} {found[0]}, expected {expected}")


def _key_in(buffer: str, shard: int) -> str:
    return f"{own_name(buffer)}.{_SHARD}{shard}"


def _key_of(buffer: str) -> str:
    return f"{own_name(buffer)}.{AVERAGE}"
