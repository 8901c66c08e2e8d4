"""The files of a checkpoint that is loaded: which of their tensors are used, and what for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from onefold.checkpoint.folder import StoredCheckpoint
from onefold.checkpoint.model import ModelFiles, tensor_parts
from onefold.core.averaging import AverageRule, averaged_in
from onefold.core.names import own_name
from onefold.core.storage import Storage
from onefold.engine.averages import AVERAGE
from onefold.engine.optimizerstate import PieceState, check_saved, packed, take_apart
from onefold.engine.update import MASTER
from onefold.system.heap import ORDINARY, Heap
from onefold.system.tensorfile import DTYPES, TensorParts

__all__ = [
    "VALUES",
    "StoredStates",
    "buffer_parts",
    "carried_parts",
    "left_by_shard",
    "saved_rule",
]

VALUES = "onefold.values"
"""The key under which the values of a parameter travel as the optimizer's state does."""
_SHARD = "onefold.shard"
"""With a shard's number: the key under which what the shard carries in a buffer is saved."""


def saved_rule(run: Mapping[str, Any], changed: Collection[str]) -> AverageRule | None:
    """The rule of the average that goes on with a checkpoint; None if none does."""
    # An earlier version kept none.
    saved = None if "average" in changed else run.get("average")
    return None if saved is None else AverageRule.from_json(saved)


def buffer_parts(averages: Mapping[str, torch.Tensor]) -> list[TensorParts]:
    """The averages of buffers, by name, ready to be written beside those of the parameters."""
    return tensor_parts({_key_of(name): value for name, value in averages.items()})


def carried_parts(left: Iterable[tuple[str, int, torch.Tensor]]) -> list[TensorParts]:
    """What shards carry in buffers: name, shard and value; copied, ready to be written."""
    return tensor_parts({_key_in(name, shard): v.to("cpu", copy=True) for name, shard, v in left})


def left_by_shard(states: Iterable[PieceState]) -> dict[int, dict[int, torch.Tensor]]:
    """What shards carry, by the buffer's number and the shard's; copied from `carried`."""
    left: dict[int, dict[int, torch.Tensor]] = {}
    for state in states:
        left.setdefault(state.piece, {})[int(state.key)] = state.value.clone()
    return left


class StoredStates:
    """The open files of a checkpoint.

    Args:
        stored: the checkpoint.
        storage: the layouts of the run that loads it.
        carried: numbers of the buffers that each shard has for itself.
        changed: what may differ from the run that was saved.
        stack: closes the files.
        heap: where what is handed out lies.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        storage: Storage,
        carried: Sequence[int],
        changed: Collection[str],
        stack: ExitStack,
        heap: Heap = ORDINARY,
    ) -> None:
        # A checkpoint that was saved with averages in the model has what is trained beside it.
        trained = stored.path("training.safetensors")
        names = ("model.safetensors", "buffers.safetensors")
        paths = [path for name in names if (path := stored.path(name)) is not None]
        self.model = stack.enter_context(ModelFiles(*(paths if trained is None else [trained])))
        """What the model goes on with."""
        self._files = stack.enter_context(ModelFiles(stored.folder / "optimizer.safetensors"))
        self._storage, self._heap = storage, heap
        self._carried = () if "shards" in changed else carried
        self._with_optimizer = "optimizer" not in changed
        self._with_average = saved_rule(stored.run, changed) is not None
        saved = stored.run["optimizer"]
        self._keys = {
            name: [key for key in keys if self._is_used(key)]
            for name, keys in saved["tensors"].items()
        }
        self._values = saved["other_state"] if self._with_optimizer else {}
        # An earlier version did not save them.
        self._strides = saved.get("strides", {})

    def check(self) -> None:
        """Refuse states that do not fit, before anything is changed.

        Raises:
            ValueError: a tensor is missing, or of another shape or type than is expected.
        """
        storage = self._storage
        layouts = storage.pieces, storage.masters, self._strides
        check_saved(self._keys, self._kind_of, *layouts)
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

    def pieces(self, owned: Iterable[int]) -> torch.Tensor:
        """Pack the states of some pieces, averages among them, for the process that owns them."""
        storage, read = self._storage, self._files.read
        layouts = storage.pieces, storage.masters, self._strides
        states = take_apart(self._keys, self._values, read, owned, *layouts)
        return packed(list(states), self._heap)

    def values(self, owned: Iterable[int]) -> torch.Tensor:
        """Pack the values of some of `Storage.lent_pieces`, for the process that keeps them."""
        layout, pieces = self._storage.lent_layout().layout, self._storage.lent_pieces()
        keys = {entry.name: [VALUES] for entry in layout.entries}

        def read(name: str) -> torch.Tensor:
            return self.model.read(own_name(name.removesuffix(f".{VALUES}")))

        return packed(list(take_apart(keys, {}, read, owned, pieces, layout)), self._heap)

    def buffers(self) -> torch.Tensor:
        """Pack the averages of all buffers, by number; of none if the average does not go on."""
        return packed(list(self._averaged_buffers()))

    def carried(self) -> torch.Tensor:
        """Pack what shards carry in buffers, for `left_by_shard`."""
        left = [(n, str(shard), self._files.read(key)) for n, shard, key in self._left()]
        return packed([PieceState(*each, by_element=False) for each in left])

    def _left(self) -> Iterator[tuple[int, int, str]]:
        for number in self._carried:
            name = self._storage.buffers.entries[number].name
            for shard in range(self._storage.shards):
                key = _key_in(name, shard)
                if key in self._files.names:
                    yield number, shard, key

    def _averaged_buffers(self) -> Iterator[PieceState]:
        entries = self._storage.buffers.entries if self._with_average else ()
        for number, entry in enumerate(entries):
            yield PieceState(number, AVERAGE, self._files.read(_key_of(entry.name)), False)

    def _is_used(self, key: str) -> bool:
        return self._with_average if key == AVERAGE else self._with_optimizer

    def _check_averages(self) -> None:
        parameters, buffers = self._storage.masters, self._storage.buffers
        for entry in parameters.entries:
            if AVERAGE in self._keys.get(entry.name, ()):
                dtype = DTYPES[averaged_in(parameters.dtypes[entry.section])]
                self._check_kind(f"{entry.name}.{AVERAGE}", entry.shape, dtype)
            # Another optimizer may train parameters that had no average; theirs begins anew.
            elif self._with_optimizer:
                raise ValueError(f"{entry.name} has no average, though the run keeps one")
        for entry in buffers.entries:
            dtype = DTYPES[averaged_in(buffers.dtypes[entry.section])]
            self._check_kind(_key_of(entry.name), entry.shape, dtype)

    def _check_kind(self, name: str, shape: tuple[int, ...], dtype: str | None) -> None:
        found = self._kind_of(name)
        if found is None:
            raise ValueError(f"{name} is not among its tensors")
        if found != (shape, dtype or found[1]):
            expected = f"{dtype or found[1]} {shape}"
            raise ValueError(f"{name} is {found[1]} {found[0]}, expected {expected}")

    def _kind_of(self, name: str) -> tuple[tuple[int, ...], str] | None:
        return self._files.kind_of(name) if name in self._files.names else None


def _key_in(buffer: str, shard: int) -> str:
    return f"{own_name(buffer)}.{_SHARD}{shard}"


def _key_of(buffer: str) -> str:
    return f"{own_name(buffer)}.{AVERAGE}"
