"""Copies a model for writing, loads saved values into it, and reads a checkpoint's other tensors.

`copy_model` and `TensorFiles` move a model between memory and files. `StoredStates` holds the open
files of a checkpoint while it is loaded, and decides which of their tensors are used.
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
    """A host copy of a model's values at one moment."""

    model: Mapping[str, torch.Tensor]
    """Values that ``state_dict`` names."""
    rest: Mapping[str, torch.Tensor]
    """Parameters and buffers that ``state_dict`` omits."""
    names: tuple[str, ...]
    """Names of all parameters and buffers, in the model's own order."""

    def parts(self) -> tuple[list[TensorParts], list[TensorParts]]:
        """Return ``model`` and ``rest`` ready for writing, as views of the copy."""
        return tensor_parts(self.model), tensor_parts(self.rest)

    def fingerprint(self) -> str:
        """Return the value of ``trainer.fingerprint()`` at that moment."""
        known = {**self.model, **self.rest}
        return fingerprint_of(tensor_digests({name: known[name] for name in self.names}))


def copy_model(module: torch.nn.Module, room: Callable[[int], torch.Tensor]) -> ModelCopy:
    """Copy every parameter and buffer of a model to the host.

    Args:
        module: the user's own model.
        room: takes a number of bytes, and returns a uint8 host tensor of at least that many.

    Raises:
        TypeError: the model holds a value that is not a tensor, or has a dtype that no file can
            hold.
    """
    # Copy into one block that every checkpoint reuses: fresh memory would cost a page fault per 4
    # KiB while training waits.
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
    """Return what ``state_dict`` names, and what it omits, of a model with partitioned parameters.

    Args:
        module: the user's own model, which `is_saved_as_it_is`.
        numbers: numbers of the partitioned parameters, by identity.
        coming: returns the parts to write for a partitioned parameter, given its name and number.

    Raises:
        TypeError: the model holds a value that is not a tensor, or has a dtype that no file can
            hold.
    """
    model, rest, _ = sorted_values(module)

    def part(name: str, value: torch.Tensor) -> TensorParts:
        if id(value) in numbers:
            return coming(name, numbers[id(value)])
        return tensor_parts({name: value.detach().cpu()})[0]

    return [part(*each) for each in model.items()], [part(*each) for each in rest.items()]


class TensorFiles:
    """Tensors of a checkpoint's files, which stay open even if another process deletes them.

    Args:
        paths: paths of the files.
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
        """Compare names, shapes and dtypes with those of a model.

        Args:
            module: the user's own model.

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
                words = f", of shape {kinds[name][0]}, is in this model but not in the checkpoint"
            elif here is None:
                words = f", of shape {there[0]}, is in the checkpoint but not in this model"
            else:
                one, other = (f"{dtype} {shape}" for shape, dtype in (there, here))
                words = f" is {one} in the checkpoint but {other} in this model"
            raise CheckpointError(f"{name}{words}: the checkpoint is of another model")

    def check_fingerprint(self, module: torch.nn.Module, expected: str) -> None:
        """Compare the fingerprint of the values with the one stored when they were saved.

        Raises:
            CheckpointError: the bits differ, so some values are not from this run.
        """
        read: dict[str, str] = {}
        for name in named_tensors(module):  # one at a time: all at once would double the memory
            read |= tensor_digests({name: self.read(name)})
        if (found := fingerprint_of(read)) != expected:
            raise CheckpointError(
                f"its values have the fingerprint {found}, but its run.json names {expected}: one "
                f"of the two files is from another run"
            )

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._files.keys()

    def kind_of(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Return the shape and `DTYPES` name of a tensor; None if it is not in the files."""
        if name not in self._files:
            return None
        saved = self._files[name].get_slice(name)
        return tuple(saved.get_shape()), saved.get_dtype()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the host."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def fill(self, module: torch.nn.Module, *, but: Collection[int] = ()) -> None:
        """Copy the values into a model's parameters and buffers, in place.

        Args:
            module: the user's own model.
            but: identities of tensors that keep their values.
        """
        # In place, because the parameters are views of flat memory that the engine keeps using.
        with torch.no_grad():
            for name, tensor in named_tensors(module).items():
                if id(tensor) not in but:
                    tensor.copy_(self.read(name))


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> list[TensorParts]:
    """Return host tensors ready for writing, by name; views if they are contiguous."""
    return [
        TensorParts.in_rows(name, tensor.dtype, tuple(tensor.shape), [bits_of(tensor).numpy()])
        for name, tensor in tensors.items()
    ]


VALUES = "onefold.values"
"""Key for the values of a parameter when they are sent like optimizer state."""
_SHARD = "onefold.shard"
"""Prefix of the key for a shard's own copy of a buffer; the shard's number follows."""


def saved_rule(run: Mapping[str, Any], allow_changed: Collection[str]) -> AverageRule | None:
    """Return the rule of the average that resumes from a checkpoint; None if there is none."""
    saved = None if "average" in allow_changed else run["average"]
    return None if saved is None else AverageRule.from_json(saved)


def buffer_parts(averages: Mapping[str, torch.Tensor]) -> list[TensorParts]:
    """Return the averages of buffers, by name, ready for writing with those of the parameters."""
    return tensor_parts({_key_of(name): value for name, value in averages.items()})


def carried_parts(left: Iterable[tuple[str, int, torch.Tensor]]) -> list[TensorParts]:
    """Copy the shards' own buffers (name, shard, value) to the host, ready for writing."""
    return tensor_parts({_key_in(name, shard): v.to("cpu", copy=True) for name, shard, v in left})


def left_by_shard(states: Iterable[SegmentState]) -> dict[int, dict[int, torch.Tensor]]:
    """Return copies of the shards' own buffers, by the numbers of buffer and shard."""
    left: dict[int, dict[int, torch.Tensor]] = {}
    for state in states:
        left.setdefault(state.segment, {})[int(state.key)] = state.value.clone()
    return left


class StoredStates:
    """The open files of a checkpoint.

    Args:
        stored: the checkpoint.
        storage: memory layouts of the run that loads it.
        carried: numbers of the buffers that each shard keeps separately.
        allow_changed: settings that may differ from the saved run.
        allocator: allocates the returned tensors.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        storage: Storage,
        carried: Sequence[int],
        allow_changed: Collection[str],
        allocator: TensorAllocator,
    ) -> None:
        # A checkpoint saved while the model shows averages stores the trained values in a separate
        # file.
        trained = stored.path("training.safetensors")
        names = ("model.safetensors", "buffers.safetensors")
        paths = [path for name in names if (path := stored.path(name)) is not None]
        self.model = TensorFiles(paths if trained is None else [trained])
        """Values with which training resumes."""
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
        """Read the copies of weights that the script refers to, by their names in the file."""
        return {name: self._kept.read(name) for name in self._kept.names}

    def check(self) -> None:
        """Raise if the states do not fit, before anything changes.

        Raises:
            ValueError: a tensor is missing, or has the wrong shape or dtype.
        """
        storage = self._storage
        layouts = storage.segments, storage.masters, self._strides
        check_saved(self._keys, self._files.kind_of, *layouts)
        for name, values in self._values.items():
            for key in (MASTER, AVERAGE):
                if key in values:
                    raise ValueError(f"{key} of {name} is not a tensor")
        for entry in storage.masters.entries:
            if MASTER in self._keys.get(entry.name, ()):
                self._check_kind(f"{entry.name}.{MASTER}", entry.shape, None)
        if self._with_average:
            self._check_averages()
        for number, _, key in self._left():
            entry = storage.buffers.entries[number]
            self._check_kind(key, entry.shape, DTYPES[storage.buffers.dtypes[entry.section]])

    def segments(self, owned: Iterable[int]) -> torch.Tensor:
        """Pack the states of segments, including averages, for the process that owns them."""
        storage, read = self._storage, self._files.read
        layouts = storage.segments, storage.masters, self._strides
        states = take_apart(self._keys, self._values, read, owned, *layouts)
        return packed(list(states), self._allocator)

    def values(self, owned: Iterable[int]) -> torch.Tensor:
        """Pack the values of partitioned segments for the process that stores them."""
        layout = self._storage.partitioned_layout().layout
        segments = self._storage.partitioned_segments()
        keys = {entry.name: [VALUES] for entry in layout.entries}

        def read(name: str) -> torch.Tensor:
            return self.model.read(own_name(name.removesuffix(f".{VALUES}")))

        return packed(list(take_apart(keys, {}, read, owned, segments, layout)), self._allocator)

    def buffers(self) -> torch.Tensor:
        """Pack the averages of buffers, and the shards' own buffers for `left_by_shard`."""
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
            # Another optimizer may train parameters that had no average; their averages start
            # fresh.
            elif self._with_optimizer:
                raise ValueError(f"{entry.name} has no average, although the run keeps averages")
        for entry in buffers.entries:
            dtype = DTYPES[added_up_in(buffers.dtypes[entry.section])]
            self._check_kind(_key_of(entry.name), entry.shape, dtype)

    def _check_kind(self, name: str, shape: tuple[int, ...], dtype: str | None) -> None:
        found = self._files.kind_of(name)
        if found is None:
            raise ValueError(f"{name} is not among its tensors")
        if found != (shape, dtype or found[1]):
            expected = f"{dtype or found[1]} {shape}"
            raise ValueError(f"{name} is {found[1]} {found[0]}, but must be {expected}")


def _key_in(buffer: str, shard: int) -> str:
    return f"{own_name(buffer)}.{_SHARD}{shard}"


def _key_of(buffer: str) -> str:
    return f"{own_name(buffer)}.{AVERAGE}"
