"""Writes the current state of a run to files, and lets the lead work while other devices wait.

`Saving` writes from copies, or streams partitioned state through `PartitionedState`. `LeadWork`
runs work on the lead while the other devices wait, however long it takes.

Note: streaming partitioned state
---------------------------------
The lead writes in a background thread. When the writer reaches a tensor whose segments are
partitioned among devices, it requests the tensor and blocks. The training threads of all devices
meet, learn which tensor is requested, send the lead their segments, and meet again. They also meet
while nothing is requested, so that they know that the lead is alive (see `LeadWork`). So the lead
holds only its own partition and one tensor, or two while one arrives and the other is freed.
Training waits for all of it.

Note: slow is not dead
----------------------
Reading and writing may take longer than the timeout. So the lead does both in a background thread,
and meanwhile all devices repeatedly exchange whether the work is done: the waiting devices know
that the lead is alive, and notice at once if it is not. Only the lead's training thread
communicates; the work itself must not make collective calls.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from onefold.checkpoint.folder import prune, write_checkpoint
from onefold.checkpoint.manifest import TENSOR_FILES, check_run
from onefold.checkpoint.model import (
    VALUES,
    ModelCopy,
    buffer_parts,
    carried_parts,
    coming_parts,
    copy_model,
    tensor_parts,
)
from onefold.core.assignment import Devices
from onefold.core.flat import all_finite, fingerprint_of, first_not_finite, own_name
from onefold.errors import CheckpointError, StateError
from onefold.exchange.transport import host_buffer
from onefold.passes.averaged import Averaging
from onefold.passes.collectives import agreed_digests
from onefold.placement.base import StepContext
from onefold.step.engine import Engine
from onefold.system.background import Background
from onefold.system.tensor_file import Bytes, TensorParts
from onefold.update.staging import SegmentState
from onefold.update.state import JoinedState, described, join, pack, read_described, unpack

__all__ = ["LeadWork", "Saving"]


_log = logging.getLogger("onefold")
_Result = TypeVar("_Result")

_LOOK_S = 1.0
_LOOKS_OF_A_LIMIT = 4
"""Minimum number of these exchanges within the timeout, however short it is."""


class LeadWork:
    """Work that only the lead does. All devices make the same calls in the same order.

    Args:
        engine: engine of this process's devices.
        devices: devices of the run.
        timeout_s: timeout of a device that waits for another.
    """

    def __init__(self, engine: Engine, devices: Devices, timeout_s: float) -> None:
        self._engine = engine
        self._devices = devices
        self._timeout_s = timeout_s
        self.look_s = min(_LOOK_S, timeout_s / _LOOKS_OF_A_LIMIT)
        """Interval between signs of life from the lead to the waiting devices, in seconds."""

    @property
    def is_here(self) -> bool:
        """Whether the lead is in this process."""
        return self._devices.has_lead

    def share(self, number: float) -> float:
        """Return the lead's number on every device; other devices' numbers are ignored."""
        return float(self._shared(number)[0])

    def least(self, number: float) -> float:
        """Return the minimum of all devices' numbers, on every device."""
        return float(self._shared(number).min())

    def _shared(self, number: float) -> torch.Tensor:
        rows = {
            n: torch.tensor([number], dtype=torch.float64, device=d)
            for n, d in self._devices.own_devices.items()
        }
        return self._engine.context.exchange.transport.all_gather_rows(rows)

    def wait_for(self, job: Background) -> None:
        """Wait until a job of the lead is done. On the lead, re-raise its exception."""
        warn_if_due = self.patience(job)
        while True:
            # The others do not sleep: they block in `share` for as long as the lead waits.
            done = job.wait(self.look_s) if self.is_here else True
            if self.share(float(done)) > 0:
                return
            warn_if_due()

    def patience(self, job: Background) -> Callable[[], None]:
        """Start waiting for a job; return a function that warns if the wait takes long."""
        began_s, warnings = time.monotonic(), 0

        def warn_if_due() -> None:
            nonlocal warnings
            passed_s = time.monotonic() - began_s
            # Warn once per timeout, so that a hung disk does not go unnoticed.
            if self.is_here and passed_s > (warnings + 1) * self._timeout_s:
                warnings += 1
                words = "%s has taken %.0f s so far and is still running; the run waits for it"
                _log.warning(words, job.what, passed_s)

        return warn_if_due

    def do(self, what: str, work: Callable[[], _Result] | None) -> _Result | None:
        """Run work on the lead that may take long.

        Args:
            what: name of the work, for warnings.
            work: the work, on the lead's process; None elsewhere.

        Returns:
            The result of the work on the lead; None elsewhere.
        """
        if not self._engine.context.with_others:
            return None if work is None else work()
        done: list[_Result] = []
        job = Background(what, gives_way=False)
        try:
            if self.is_here and work is not None:
                job.start(lambda: done.append(work()))
            self.wait_for(job)
        # If a peer is lost, the thread may still be reading files that the caller will close.
        finally:
            job.abandon()
        return done[0] if done else None

    def scatter_from_lead(self, make: Callable[[int], torch.Tensor] | None) -> torch.Tensor:
        """Scatter as the transport does, but make one device's part at a time, with `do`.

        Making a part reads files, which must not look like a hang.

        Args:
            make: on the lead's process; see `Transport.scatter_from_lead`.
        """
        exchange = self._engine.context.exchange
        if not self._engine.context.with_others:
            return exchange.transport.scatter_from_lead(make)
        mine = torch.empty(0, dtype=torch.uint8)
        for device in range(len(self._devices.all)):
            work = None if make is None else partial(make, device)
            made = self.do("reading the optimizer's state", work)
            part = None if made is None else partial(_part_for, device, made)
            # All devices join each scatter, and all but one receive nothing: the lead never holds
            # more than one device's part.
            given = exchange.transport.scatter_from_lead(part)
            if device in self._devices.own:
                mine = given
        return mine


def _part_for(wanted: int, made: torch.Tensor, device: int) -> torch.Tensor:
    """Return the part made for one device, and an empty slice of it for the others."""
    return made if device == wanted else made[:0]


class Saving:
    """Writes the checkpoints of one trainer. All devices make the same calls.

    Args:
        engine: engine of this process's devices.
        averaging: holds the averages of the model.
        lead: runs work on the lead.
        writing: runs the writer in the background.
    """

    def __init__(
        self, engine: Engine, averaging: Averaging, lead: LeadWork, writing: Background
    ) -> None:
        self._engine, self._averaging = engine, averaging
        self._lead, self._writing = lead, writing
        self.written: Callable[[Path], None] = lambda folder: None
        """Called with each complete checkpoint, in the thread that wrote it."""
        self._rooms: dict[str, torch.Tensor] = {}
        """Host memory for copies of the model, reused by every checkpoint."""

    @property
    def _context(self) -> StepContext:
        return self._engine.context

    def refuse_not_finite(self, step: int) -> None:
        """Raise on all devices if a value to be saved is not finite.

        The lead checks the values that it holds. If parameters are partitioned, each device also
        checks its partition.

        Args:
            step: number of the last step.

        Raises:
            StateError: a parameter is not finite, or a buffer is NaN.
        """
        module = self._context.module
        parameters = [own_name(name) for name, _ in module.named_parameters()]
        names = [*parameters, *(own_name(name) for name, _ in module.named_buffers())]
        found = [*self._of_partition()]
        if self._lead.is_here:
            found += self._of_lead()
        # Share the name as a number: its position in a list that all devices have.
        number = self._lead.least(min(map(names.index, found), default=math.inf))
        if not math.isfinite(number):
            return
        what = "parameter" if number < len(parameters) else "buffer"
        raise StateError(
            f"{what} {names[int(number)]} is not finite after step {step}, so no checkpoint was "
            f"written; existing ones are kept. The loss was finite, but a gradient, or another "
            f"value computed with it, was not. Inspect the samples of that step, and square roots, "
            f"norms and divisions at 0. Lower the learning rate, or set clip_norm. The run can "
            f"resume from the previous checkpoint"
        )

    def _of_partition(self) -> Iterator[str]:
        """Yield the names of values in this device's partition that are not finite."""
        if not self._engine.placement.partitioned:
            return
        update, frozen = self._context.update, self._context.exchange.memory.frozen
        entries = update.storage.partitioned_layout().layout.entries
        for item in update.owned:
            if not all_finite(update.values_of(item.number)):
                yield own_name(entries[item.segment.entry].name)
        if frozen is not None:
            spoilt = (n for n in frozen.numbers if not all_finite(frozen.part(n)))
            yield from (own_name(entries[frozen.entry_of(number)].name) for number in spoilt)

    def _of_lead(self) -> Iterator[str]:
        """Yield the name of the first value that is not finite among all that the lead holds."""
        first, frozen = self._context.first, self._context.exchange.memory.frozen
        of_all = [] if frozen is None else frozen.flat.sections
        with self._averaging.training_values() as trained:
            partitioned = set(map(id, self._engine.placement.partitioned))
            here = {name: p for name, p in first.parts.named.items() if id(p) not in partitioned}
            named = {own_name(name): parameter for name, parameter in here.items()}
            found = first_not_finite((*trained.sections, *first.other.sections, *of_all), named)
            spoilt = self._engine.spoilt_buffers()
            yield from [name for name in (found, min(spoilt, default=None)) if name is not None]

    def start(self, folder: Path, record: dict[str, Any], kept: Mapping[str, torch.Tensor]) -> bool:
        """Start writing; return whether the write has already finished or failed.

        Args:
            folder: directory to write.
            record: values to save in addition to tensors.
            kept: copies of weights that the script refers to, on the lead.
        """
        rest_of_script = tensor_parts(kept)
        if self._engine.placement.partitioned:
            self._stream(folder, record, rest_of_script)
            return True
        transport = self._context.exchange.transport
        pack(self._context.update.states(), transport.buffer)
        brought = transport.gather_to_lead()
        # Copy in the training thread, because the writer thread must read only copies.
        if self._lead.is_here:
            given = *self._copies(), brought, rest_of_script
            self._writing.start(partial(self._write, folder, record, *given))
        return False

    def _stream(self, folder: Path, record: dict[str, Any], kept: Sequence[TensorParts]) -> None:
        """Stream the partitioned state to the lead, which writes it one tensor at a time."""
        stream = PartitionedState(self._engine, self._lead)
        record["fingerprint"] = fingerprint_of(agreed_digests(self._engine))
        write = None
        if self._lead.is_here:
            numbers = {id(p): n for n, p in enumerate(self._engine.placement.partitioned)}
            saved, rest = coming_parts(self._context.module, numbers, stream.parameter)
            of_buffers = self._of_buffers()
            tensors = of_buffers, saved, rest, (), kept
            write = partial(self._write_all, folder, record, stream.optimizer, *tensors)
        stream.feed(self._writing, write)

    def _write(
        self,
        folder: Path,
        record: dict[str, Any],
        trained: ModelCopy,
        shown: ModelCopy | None,
        of_buffers: Sequence[TensorParts],
        rooms: list[torch.Tensor],
        kept: Sequence[TensorParts],
    ) -> None:
        """Write a checkpoint in the background, from copies only: training changes the rest."""
        storage = self._context.update.storage
        states = chain.from_iterable(map(unpack, rooms))
        joined = join(states, storage.segments, storage.masters)
        saved, rest = (shown or trained).parts()
        beside = [] if shown is None else [*chain(*trained.parts())]
        record["fingerprint"] = trained.fingerprint()
        self._write_all(folder, record, joined, of_buffers, saved, rest, beside, kept)

    def _write_all(self, folder: Path, record: dict[str, Any], *tensors: Any) -> None:
        _write_all(folder, record, *tensors)
        self.written(folder)

    def _copies(self) -> tuple[ModelCopy, ModelCopy | None, list[TensorParts]]:
        """Copy the trained values, the averages if the model shows them, and buffers."""
        shown = None
        if self._engine.agreement.averaged:
            shown = copy_model(self._context.module, partial(self._room, "shown"))
        with self._averaging.training_values():
            trained = copy_model(self._context.module, partial(self._room, "trained"))
        return trained, shown, self._of_buffers()

    def _of_buffers(self) -> list[TensorParts]:
        """Copy the averages of buffers, and the shards' own buffers."""
        buffers = self._context.first.buffers
        buffers.note_changes()
        left = buffers.carried.left(buffers.places.names)
        return [*buffer_parts(self._averaging.buffers()), *carried_parts(left)]

    def _room(self, what: str, nbytes: int) -> torch.Tensor:
        device = self._context.first.device
        allocator = self._context.exchange.memory.allocator
        self._rooms[what] = host_buffer(self._rooms.get(what), nbytes, device, allocator)
        return self._rooms[what]


def _write_all(
    folder: Path,
    record: dict[str, Any],
    optimizer: JoinedState,
    of_buffers: Sequence[TensorParts],
    saved: Sequence[TensorParts],
    rest: Sequence[TensorParts],
    trained: Sequence[TensorParts],
    kept: Sequence[TensorParts],
) -> None:
    """Write a checkpoint, and delete the older ones that its rule does not keep."""
    keys, values = optimizer.keys, optimizer.values
    record["optimizer"] |= {"tensors": keys, "other_state": values, "strides": optimizer.strides}
    tensors = saved, [*optimizer.tensors, *of_buffers], rest, trained, kept
    # The first two files are written even if they are empty.
    files = {
        name: each
        for name, each in zip(TENSOR_FILES, tensors, strict=True)
        if each or name in TENSOR_FILES[:2]
    }
    write_checkpoint(folder, files, record, check_run)
    # Prune only when the new checkpoint is on disk: if the write fails, all old ones remain.
    if record["keep"] is not None:
        prune(folder.parent, run=record["run"], keep=record["keep"])


_NOTHING, _ENDED = -1, -2


class PartitionedState:
    """Parameters and optimizer state that are partitioned among devices.

    All devices create one together, and then call `feed`.

    Args:
        engine: engine of this process's device.
        lead: runs work on the lead.

    Raises:
        TypeError: a value is neither a tensor nor JSON, or has a dtype that a file cannot hold.
    """

    def __init__(self, engine: Engine, lead: LeadWork) -> None:
        self._lead = lead
        self._update = update = engine.context.update
        self._storage = storage = update.storage
        self._transport = engine.context.exchange.transport
        own = update.states()
        device = engine.context.replicas[0].number
        texts = self._transport.all_gather_objects({device: described(own)})
        states = [*chain.from_iterable(map(read_described, texts))]
        self.optimizer = join(states, storage.segments, storage.masters, self._coming)
        """The optimizer state. Its tensors are gathered when they are read."""
        self._own: dict[tuple[int, str], list[SegmentState]] = defaultdict(list)
        for state in own:
            self._own[self._place(state)].append(state)
        self._layout = storage.partitioned_layout().layout
        self._segments = storage.partitioned_segments()
        self._frozen = engine.context.exchange.memory.frozen
        values = [(number, VALUES) for number in range(len(self._layout.entries))]
        self._places = [*values, *dict.fromkeys(map(self._place, states))]
        self._numbers = {place: number for number, place in enumerate(self._places)}
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Bytes] | None] = queue.SimpleQueue()

    def parameter(self, name: str, number: int) -> TensorParts:
        """Return a partitioned parameter for writing; its values are gathered when read."""
        entry, dtype = self._layout.entries[number], self._layout.dtype_of(number)
        parts = self._coming(number, VALUES)
        return TensorParts(own_name(name), dtype, entry.shape, entry.stride, parts)

    def feed(self, writing: Background, write: Callable[[], None] | None) -> None:
        """Gather the tensors that the lead's writer requests, until it ends. Collective.

        Args:
            writing: runs the writer. The caller that waits for it gets its exceptions.
            write: writes the files, on the lead's process; None elsewhere.
        """
        try:
            if write is not None:
                writing.start(partial(self._run, write))
            warn_if_due = self._lead.patience(writing)
            while (number := self._next()) != _ENDED:
                if number == _NOTHING:
                    warn_if_due()
                else:
                    self._supply(*self._places[number])
        except BaseException:
            # Without an answer the writer would block forever, and the end of the process with it.
            self._answers.put(None)
            writing.abandon()
            raise

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:
            self._asked.put(_ENDED)

    def _next(self) -> int:
        """Return, on all devices, the number of the requested tensor, `_NOTHING` or `_ENDED`."""
        number = _ENDED
        if self._lead.is_here:
            try:
                number = self._asked.get(timeout=self._lead.look_s)
            except queue.Empty:
                number = _NOTHING
        return int(self._lead.share(number))

    def _supply(self, entry: int, key: str) -> None:
        """Gather one tensor of a parameter to the lead, and pass it to the writer."""
        pack(self._states(entry, key), self._transport.buffer)
        brought = self._transport.gather_to_lead()
        if self._lead.is_here:
            states = chain.from_iterable(map(unpack, brought))
            (tensor,) = join(states, self._segments, self._layout).tensors
            self._answers.put([*tensor.parts])

    def _states(self, entry: int, key: str) -> list[SegmentState]:
        if key != VALUES:
            return self._own.get((entry, key), [])
        update, frozen = self._update, self._frozen
        values = {item.number: update.values_of for item in update.owned}
        values |= {} if frozen is None else dict.fromkeys(frozen.numbers, frozen.part)
        return [
            SegmentState(number, VALUES, value_of(number), True)
            for number, value_of in values.items()
            if self._segments[number].entry == entry
        ]

    def _coming(self, entry: int, key: str) -> Iterator[Bytes]:
        """Request a tensor from the writer's thread as soon as its bytes are read."""
        self._asked.put(self._numbers[entry, key])
        # The training thread answers, also with None if it fails.
        found = self._answers.get()
        if found is None:
            raise CheckpointError("the checkpoint was abandoned: another device did not respond")
        yield from found

    def _place(self, state: SegmentState) -> tuple[int, str]:
        return self._storage.segments[state.segment].entry, state.key
