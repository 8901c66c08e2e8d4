"""Replays a run's record to the resumed script.

Note: replay
------------
A resumed script runs again from its beginning. Until it reaches the position of its checkpoint,
each step, evaluation, prediction and gathered value is taken from the record, in order, and nothing
is computed. So a best score, a list of losses, an early stop or a data set chosen by a prediction
is the same as before. If the script's calls differ from the recorded ones, it gets an error that
names the first differing call.

A finished run may be extended, with more epochs for example. If the script's calls then differ from
those recorded after the last step, the recorded ones are discarded, now and at every later resume:
the record stores the position.
"""

from __future__ import annotations

import builtins
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from onefold import errors
from onefold.core.batch import ShardedBatch
from onefold.core.call_digest import StepRequests
from onefold.core.values import StepValues
from onefold.errors import RecordError
from onefold.exchange.exchange import Exchange
from onefold.passes.collectives import broadcast, written
from onefold.record import shards_of, whole_run
from onefold.record.entries import (
    BlockEntry,
    Entry,
    FailureEntry,
    Found,
    Result,
    SavedEntry,
    StartEntry,
    StepEntry,
    encode,
    restore,
)
from onefold.record.recorder import places_of
from onefold.step.result import StepResult, Verdict
from onefold.system.words import listed, script_line

__all__ = ["ScriptReplay", "entries_for_all"]

_log = logging.getLogger("onefold")

_Kind = TypeVar("_Kind", StepEntry, Result, BlockEntry, SavedEntry)


class ScriptReplay:
    """The recorded calls of a script up to its checkpoint; the same on all devices.

    Args:
        entries: entries that the checkpoint includes, in order, from `onefold.record.whole_run`.
        device: device of the tensors in a step's result.
        ended: whether the run reached the end of its script.
    """

    def __init__(
        self, entries: Iterable[tuple[int, Entry]], device: torch.device, *, ended: bool
    ) -> None:
        self._device, self._ended = device, ended
        # Skip the launcher's checkpoints: they may be anywhere, and the script does not request
        # them.
        asked_for = [
            (number, each)
            for number, each in entries
            if not isinstance(each, Found | StartEntry)
            and (not isinstance(each, SavedEntry) or each.line)
        ]
        self._entries = deque(entry for _, entry in asked_for)
        self._numbers = [number for number, _ in asked_for]
        self._coming: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        for entry in self._entries:
            for loader, number, *place in entry.place if isinstance(entry, StepEntry) else ():
                self._coming[loader, number].append((place[0], place[1]))
        steps = [entry.step for entry in self._entries if isinstance(entry, StepEntry)]
        self._steps, self._last = len(steps), steps[-1] if steps else 0
        self.kept_entries: int | None = None
        """Number of recorded entries before the discarded ones; None if none were discarded."""

    def knows(self, kind: type[Entry], call: str = "") -> bool:
        """Whether the script's next call is replayed.

        Args:
            kind: kind of the entry that replays the call.
            call: name of the call, for results.

        Raises:
            RecordError: the script goes beyond a finished run that changed the model after its last
                step. That change cannot be discarded.
        """
        while self._entries and isinstance(entry := self._entries[0], Result):
            if entry.value is not None or entry.call == call:
                break
            self._entries.popleft()  # too large to store, so the script may omit the call
        if self.over or not self._ended or self._steps:
            return not self.over
        entry = self._entries[0]
        asked = kind, call, script_line()
        if asked != (type(entry), getattr(entry, "call", ""), getattr(entry, "line", "")):
            for each in self._entries:
                if isinstance(each, BlockEntry):
                    raise RecordError(
                        f"{script_line()}: the script continues past the end of the recorded run, "
                        f"which changed the model in trainer.modifying ({each.line}) after its "
                        f"last step. Such a run cannot be extended. To start over, use another "
                        f"directory"
                    )
            self.kept_entries = self._numbers[-len(self._entries)]
            self._entries.clear()
        return not self.over

    @property
    def over(self) -> bool:
        """Whether the replay has ended."""
        return not self._entries

    @property
    def is_behind_end(self) -> bool:
        """Whether the run had ended and all its recorded changes to the model are replayed."""
        return self._ended and not self.changes_model

    @property
    def changes_model(self) -> bool:
        """Whether the recorded run changed the model after the script's current position."""
        return any(isinstance(each, StepEntry | BlockEntry) for each in self._entries)

    def next_batch(self, loader: int, number: int, given: int) -> tuple[int, int] | None:
        """Return the end and the size of the next batch of a pass that a recorded step used.

        Args:
            loader: number of the loader.
            number: number of its pass.
            given: end of the previous batch.

        Returns:
            The batch's end in the pass and its samples; None if no step used another batch of it.
        """
        coming = self._coming[loader, number]
        while coming and coming[0][0] <= given:
            coming.popleft()
        return coming[0] if coming else None

    def failure(self) -> Exception | None:
        """Return the recorded error of the replayed step; None if the step succeeded."""
        if not isinstance(failed := self._entries[0], FailureEntry):
            return None
        self._entries.popleft()
        found = getattr(errors, failed.error, None) or getattr(builtins, failed.error, None)
        kind: type[Exception] = errors.OnefoldError
        if isinstance(found, type) and issubclass(found, Exception):
            kind = found
        # `kind(text)` may fail: some constructors require more arguments.
        return kind.__new__(kind, failed.text)

    def step(self, batch: ShardedBatch, name: str) -> StepResult:
        """Return the recorded result of a step.

        Raises:
            RecordError: the record does not have this step here.
        """
        entry = self._next(StepEntry, f"a step of {batch.samples} samples{_of(name)}")
        if (entry.samples, entry.name) != (batch.samples, name):
            raise RecordError(
                f"{script_line()}: step {entry.step} of the resumed run has {batch.samples} "
                f"samples{_of(name)}, but the recorded step has {entry.samples}{_of(entry.name)}: "
                f"{_SAME}{_CHANGED}"
            )
        if entry.place != (here := places_of(batch)):
            raise RecordError(
                f"{script_line()}: step {entry.step} of the resumed run uses the batch at {here} "
                f"(loader, pass, end in the pass, samples), but the recorded step used the batch "
                f"at {entry.place}: {_SAME}{_CHANGED}"
            )
        return _RecordedResult(entry, self._device)

    def result(self, call: str) -> Any:
        """Return the recorded result of a call.

        Raises:
            RecordError: the record does not have this call here, or its result was too large to
                store.
        """
        entry = self._next(Result, call)
        if entry.call != call:
            raise self._other(entry, call)
        if entry.value is None:
            raise RecordError(
                f"{script_line()}: the result of {call} after step {entry.step} was too large for "
                f"the record, so it cannot be replayed. Make the call under `if not "
                f"trainer.replaying:`, and store what depends on it in trainer.state"
            )
        return restore(entry.value, entry.step)

    def block(self) -> None:
        """Skip the recorded end of a `Trainer.modifying` block."""
        self._next(BlockEntry, "a block of trainer.modifying")

    def saved(self) -> None:
        """Skip a recorded `Trainer.save`."""
        self._next(SavedEntry, "trainer.save")

    def _next(self, kind: type[_Kind], call: str) -> _Kind:
        entry = self._entries.popleft()
        if not isinstance(entry, kind):
            raise self._other(entry, call)
        self._steps -= isinstance(entry, StepEntry)
        return entry

    def _other(self, entry: Entry, call: str) -> RecordError:
        if isinstance(entry, StepEntry):
            was = f"step {entry.step}"
        else:
            names = {BlockEntry: "a block of trainer.modifying", SavedEntry: "trainer.save"}
            names |= {FailureEntry: "a step that raised an error"}
            name = names.get(type(entry)) or getattr(entry, "call", "")
            was = f"{name} after step {entry.step} at {getattr(entry, 'line', '')}"
        # The step number is fixed, whereas `trainer.replaying` ends elsewhere at every resume.
        return RecordError(
            f"{script_line()}: the resumed script reaches {call}, but the recorded run had {was}: "
            f"{_SAME}. Keep the calls that the run made, and put new ones under `if trainer.steps "
            f"> {self._last}:`. To start over, use another directory"
        )


_SAME = "a resumed script must make the same calls as before, because the record replays them"
_CHANGED = (
    ". If you changed this on purpose, onefold run --allow-changed batch_size (or dataset) resumes "
    "from the checkpoint without replay. To start over, use another directory"
)


def _of(name: str) -> str:
    return f" of loss {name}" if name else ""


class _RecordedResult(StepResult):
    """The recorded result of a step; its tensors are created on access.

    Args:
        entry: recorded step.
        device: device of its tensors.
    """

    __slots__ = ("_device", "_entry")
    _device: torch.device
    _entry: StepEntry

    def __init__(self, entry: StepEntry, device: torch.device) -> None:
        set_field = partial(object.__setattr__, self)
        set_field("_entry", entry)
        set_field("_device", device)
        set_field("weight", entry.weight)
        set_field("verdict", Verdict(entry.skipped, StepRequests(0)))

    @property
    def numbers(self) -> torch.Tensor:
        totals, _, digests = shards_of(self._entry)
        both = np.stack((totals, digests.view(np.float64)), axis=1)
        return torch.from_numpy(both).to(self._device)

    @property
    def weights(self) -> list[float]:
        return list(np.frombuffer(self._entry.weights))

    @property
    def loss(self) -> torch.Tensor:
        return self._number(self._entry.loss)

    @property
    def norm(self) -> torch.Tensor:
        return self._number(self._entry.norm)

    @property
    def values(self) -> StepValues:
        rows, names = self._entry.rows, self._entry.outputs
        return StepValues.known(
            self._entry.values,
            restore(rows, self._entry.step) if rows else _Unkept(names),
            self._device,
        )

    def _number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._device)


class _Unkept(Mapping[str, Any]):
    """Outputs that were too large to store. Reading them raises `RecordError`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        if self._names:
            raise RecordError(
                f"{script_line()}: the outputs of a step, {listed(self._names)}, were too large "
                f"for the record, so they cannot be replayed. Read them under `if not "
                f"trainer.replaying:`, and store what depends on them in trainer.state"
            )
        return iter(())

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def entries_for_all(
    exchange: Exchange, path: Path, seen: Mapping[str, Any], *, checkpoint: Path, reads: bool
) -> list[tuple[int, Entry]]:
    """Broadcast the entries that a checkpoint includes to all devices; see `whole_run`.

    Args:
        exchange: exchange of this process's devices.
        path: path of the record.
        seen: count and digest of the entries, as `Recorder.note_checkpoint` returned them.
        checkpoint: path of the checkpoint, for a warning.
        reads: whether this process reads the record.

    Raises:
        RecordError: the record is damaged or does not match; only the reading process raises it.
    """
    entries: list[tuple[int, Entry]] = []
    if reads and seen["entries"]:
        there = path.exists()
        entries = whole_run(path, seen["entries"], seen["head"]) if there else []
        if not there:
            _log.warning(
                "%s does not exist, although %s includes %d of its entries, so the script is not "
                "replayed. It resumes in the epoch of the checkpoint; a model that it calls itself "
                "before its first step does not have the checkpoint's values",
                *(path, checkpoint, seen["entries"]),
            )
    text = broadcast(exchange, written(encode(entries)) if reads else None)
    return entries if reads else msgspec.msgpack.decode(text, type=list[tuple[int, Entry]])
