"""Writes a run as it is now to files, from copies or as the devices bring what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.background import Background
from onefold.checkpoint.copies import Copies
from onefold.checkpoint.folder import prune, write_checkpoint
from onefold.checkpoint.keeping import Keeping
from onefold.checkpoint.lead import Lead
from onefold.checkpoint.model import coming_parts, copy_model, is_saved_as_it_is
from onefold.checkpoint.record import check_run
from onefold.checkpoint.states import buffer_parts, carried_parts
from onefold.checkpoint.stream import Stream
from onefold.core.fingerprint import fingerprint_of
from onefold.engine.digests import agreed_digests
from onefold.engine.engine import Engine
from onefold.engine.optimizerstate import JoinedState, join, pack, unpack
from onefold.exchange.transport import roomy
from onefold.system.tensorfile import TensorParts

__all__ = ["Saving"]


class Saving:
    """Writes the checkpoints of one trainer; all devices make the same calls.

    Args:
        engine: the devices of this process.
        lead: the lead's work.
        writing: runs the writer.
    """

    def __init__(self, engine: Engine, lead: Lead, writing: Background) -> None:
        self._engine = engine
        self._parts = engine.replicas[0].parts
        self._lead = lead
        self._writing = writing
        self._rooms: dict[str, torch.Tensor] = {}
        """Where copies of the model's values are made, again for every checkpoint."""

    def readable(self) -> AbstractContextManager[None]:
        """Have all parameters here if the model itself computes what is saved of them."""
        lending = self._engine.lending
        by_stage = lending.is_whole or is_saved_as_it_is(self._parts.module)
        return nullcontext() if by_stage else lending.whole()

    def begin(self, folder: Path, record: dict[str, Any], keeping: Keeping) -> bool:
        """Begin to write; return whether all is written, or has failed, by now.

        Args:
            folder: where to.
            record: what is saved beside tensors.
            keeping: which checkpoints stay.
        """
        if self._engine.lending.is_whole:
            self._start_writing(folder, record, keeping)
            return False
        self._stream(folder, record, keeping)
        return True

    def _start_writing(self, folder: Path, record: dict[str, Any], keeping: Keeping) -> None:
        """Copy everything, and have the lead begin to write the copies."""
        pack(self._engine.update.states(), self._engine.exchange.transport.room)
        brought = self._engine.exchange.transport.bring()
        # Copied by the training thread: the thread that writes reads nothing but copies.
        if self._lead.is_here:
            copies = self._copies()
            self._writing.start(partial(self._write, folder, record, copies, brought, keeping))

    def _stream(self, folder: Path, record: dict[str, Any], keeping: Keeping) -> None:
        """Have the lead write what the devices keep, of which it never has more than a tensor."""
        stream = Stream(self._engine, self._lead)
        record["fingerprint"] = fingerprint_of(agreed_digests(self._engine))
        write = None
        if self._lead.is_here:
            self._add_state(record, stream.optimizer)
            files = self._coming_files(stream)
            write = partial(self._put, folder, files, lambda: record, keeping, record["run"])
        stream.feed(self._writing, write)

    def _coming_files(self, stream: Stream) -> dict[str, Sequence[TensorParts]]:
        """The tensors of each file, of which those of the stream come when they are written."""
        buffers = self._engine.replicas[0].buffers
        buffers.note_changes()
        left = carried_parts(buffers.carried.left(buffers.places.names))
        averages = buffer_parts(self._engine.averaging.buffers())
        numbers = {id(p): n for n, p in enumerate(self._engine.lending.parameters)}
        saved, rest = coming_parts(self._parts.module, numbers, stream.parameter)
        files: dict[str, Sequence[TensorParts]] = {
            "model.safetensors": saved,
            "optimizer.safetensors": [*stream.optimizer.tensors, *averages, *left],
        }
        return files | {"buffers.safetensors": rest} if rest else files

    def _write(
        self,
        folder: Path,
        record: dict[str, Any],
        copies: Copies,
        rooms: list[torch.Tensor],
        keeping: Keeping,
    ) -> None:
        """Write a checkpoint in the background, from copies alone: training changes the rest."""
        storage = self._engine.update.storage
        states = chain.from_iterable(map(unpack, rooms))
        joined = join(states, storage.pieces, storage.masters)
        self._add_state(record, joined)
        saved, rest = (copies.shown or copies.trained).parts()
        parts = [*joined.tensors, *buffer_parts(copies.averages), *copies.carried]
        files = {"model.safetensors": saved, "optimizer.safetensors": parts}
        if rest:
            files["buffers.safetensors"] = rest
        if copies.shown is not None:
            files["training.safetensors"] = [p for found in copies.trained.parts() for p in found]

        def described() -> dict[str, Any]:
            return {**record, "fingerprint": copies.trained.fingerprint()}

        self._put(folder, files, described, keeping, record["run"])

    @staticmethod
    def _add_state(record: dict[str, Any], state: JoinedState) -> None:
        kept = {"tensors": state.keys, "other_state": state.values, "strides": state.strides}
        record["optimizer"] |= kept

    @staticmethod
    def _put(
        folder: Path,
        files: Mapping[str, Sequence[TensorParts]],
        describe: Callable[[], dict[str, Any]],
        keeping: Keeping,
        run: str,
    ) -> None:
        """Write a checkpoint, and delete those that are no longer to be kept."""
        write_checkpoint(folder, files, describe, check_run)
        # Only now that the new one is on the disk: a failure before leaves all the old ones.
        if keeping.newest is not None:
            prune(folder.parent, run=run, keep=keeping.newest)

    def _copies(self) -> Copies:
        """Copy what the lead saves beside the states of pieces."""
        averaging = self._engine.averaging
        shown = None
        if averaging.is_shown:
            shown = copy_model(self._parts.module, partial(self._room, "shown"))
        with averaging.training_values():
            trained = copy_model(self._parts.module, partial(self._room, "trained"))
        buffers = self._engine.replicas[0].buffers
        buffers.note_changes()
        left = buffers.carried.left(buffers.places.names)
        return Copies(trained, shown, averaging.buffers(), carried_parts(left))

    def _room(self, what: str, nbytes: int) -> torch.Tensor:
        device, heap = self._engine.replicas[0].device, self._engine.exchange.memory.heap
        self._rooms[what] = roomy(self._rooms.get(what), nbytes, device, heap)
        return self._rooms[what]
