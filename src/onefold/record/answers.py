"""Answers what a resumed script asks for once more, out of the record of its run.

Note: what is answered
----------------------
A resumed script runs again from its beginning. Until it comes to the place where its checkpoint was
made, each step, evaluation, prediction and value of another device is what it was: the entries of
the record are taken in their order, and nothing is computed. So a best score, a list of losses, an
early stop or a set chosen by a prediction is what it was. A script that asks for something else
than it did before is told the first place where it does.

A run that had come to its end may go on for longer, with more epochs say. What its script asked for
behind its last step is then left out as soon as the script asks for something else, now and
whenever the run is resumed: the record says where.
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
    """What a script asked for up to the place where its run goes on; alike on all devices.

    Args:
        entries: those that the checkpoint has seen, in order, as `onefold.record.whole_run` returns
            them.
        device: where the tensors of a step's result lie.
        ended: whether the run had come to the end of its script.
    """

    def __init__(
        self, entries: Iterable[tuple[int, Entry]], device: torch.device, *, ended: bool
    ) -> None:
        self._device, self._ended = device, ended
        # Checkpoints of the launcher's lie between any two entries, and nobody asks for them.
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
        """How many entries of the record come before those that were left out, if any were."""

    def knows(self, kind: type[Entry], call: str = "") -> bool:
        """Whether the script is still in the part that is done, now that it makes a call.

        Args:
            kind: of the entry that answers it.
            call: for results.

        Raises:
            RecordError: the run had ended with a change to the model, which cannot be left out.
        """
        while self._entries and isinstance(entry := self._entries[0], Result):
            if entry.value is not None or entry.call == call:
                break
            self._entries.popleft()  # it could not be answered, and need not be asked for
        if self.over or not self._ended or self._steps:
            return not self.over
        entry = self._entries[0]
        asked = kind, call, script_line()
        if asked != (type(entry), getattr(entry, "call", ""), getattr(entry, "line", "")):
            for each in self._entries:
                if isinstance(each, BlockEntry):
                    raise RecordError(
                        f"{script_line()}: the script goes on behind the end of its run, which had "
                        f"changed the model by trainer.modifying at {each.line} before its last "
                        f"checkpoint was made: expected no such change behind the last step of a "
                        f"run that is to go on. To begin anew, name another directory"
                    )
            self.kept_entries = self._numbers[-len(self._entries)]
            self._entries.clear()
        return not self.over

    @property
    def over(self) -> bool:
        """Whether the script has come to the place where its run goes on."""
        return not self._entries

    @property
    def is_behind_end(self) -> bool:
        """Whether the run had ended, and its script has made all that changed the model."""
        return self._ended and not self.changes_model

    @property
    def changes_model(self) -> bool:
        """Whether the model was another one where the script is, as it changed later."""
        return any(isinstance(each, StepEntry | BlockEntry) for each in self._entries)

    def next_batch(self, loader: int, number: int, given: int) -> tuple[int, int] | None:
        """The next batch of a loader's pass that a step has used: where it ends, and its samples.

        Args:
            loader: number of the loader.
            number: of its pass.
            given: where the batch before it ends.

        Returns:
            None if no step has used any further batch of the pass.
        """
        coming = self._coming[loader, number]
        while coming and coming[0][0] <= given:
            coming.popleft()
        return coming[0] if coming else None

    def failure(self) -> Exception | None:
        """What the step raised that the script makes again; None if it was done."""
        if not isinstance(failed := self._entries[0], FailureEntry):
            return None
        self._entries.popleft()
        found = getattr(errors, failed.error, None) or getattr(builtins, failed.error, None)
        kind: type[Exception] = errors.OnefoldError
        if isinstance(found, type) and issubclass(found, Exception):
            kind = found
        return kind.__new__(kind, failed.text)  # some constructors ask for more than a text

    def step(self, batch: ShardedBatch, name: str) -> StepResult:
        """The result of a step with a batch.

        Raises:
            RecordError: the run had no such step here.
        """
        entry = self._next(StepEntry, f"a step of {batch.samples} samples{_of(name)}")
        if (entry.samples, entry.name) != (batch.samples, name):
            raise RecordError(
                f"{script_line()}: step {entry.step} of the resumed run has {batch.samples} "
                f"samples{_of(name)}, and had {entry.samples}{_of(entry.name)} before: "
                f"{_SAME}{_CHANGED}"
            )
        if entry.place != (here := places_of(batch)):
            raise RecordError(
                f"{script_line()}: step {entry.step} of the resumed run has the batch at {here} "
                f"(loader, pass, its end in the pass, samples), and had that at {entry.place} "
                f"before: {_SAME}{_CHANGED}"
            )
        return _RecordedResult(entry, self._device)

    def result(self, call: str) -> Any:
        """What a call returned.

        Raises:
            RecordError: the run made no such call here, or what it returned was too large to keep.
        """
        entry = self._next(Result, call)
        if entry.call != call:
            raise self._other(entry, call)
        if entry.value is None:
            raise RecordError(
                f"{script_line()}: what {call} returned after step {entry.step} was too large for "
                f"the record, so a resumed script cannot be given it: make the call under `if not "
                f"trainer.replaying:`, and keep what follows from it by trainer.state"
            )
        return restore(entry.value, entry.step)

    def block(self) -> None:
        """Note that a block of `Trainer.modifying` ends that the run has ended before."""
        self._next(BlockEntry, "a block of trainer.modifying")

    def saved(self) -> None:
        """Note that a checkpoint is asked for that was made before."""
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
        # Not `trainer.replaying`, which is another each time that the run is resumed.
        return RecordError(
            f"{script_line()}: the resumed script asks for {call}, where the run before had {was}: "
            f"{_SAME}. Keep the calls that the run made, and make new ones under `if trainer.steps "
            f"> {self._last}:`. To begin anew, name another directory"
        )


_SAME = "a resumed script must ask for the same as before, as it is answered from the record"
_CHANGED = (
    ". If that was changed on purpose, onefold run --allow-changed batch_size (or dataset) goes on "
    "from the checkpoint without these answers. To begin anew, name another directory"
)


def _of(name: str) -> str:
    return f" of loss {name}" if name else ""


class _RecordedResult(StepResult):
    """The result of a step that the record has; what is asked for is made of it then.

    Args:
        entry: what the record has.
        device: where its tensors lie.
    """

    __slots__ = ("_device", "_entry")
    _device: torch.device
    _entry: StepEntry

    def __init__(self, entry: StepEntry, device: torch.device) -> None:
        set_field = partial(object.__setattr__, self)
        set_field("_entry", entry)
        set_field("_device", device)
        set_field("weight", entry.weight)
        set_field("verdict", Verdict(entry.skipped, stops=False))

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
    """Outputs of a step that were too large to keep: whoever reads them is told."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        if self._names:
            raise RecordError(
                f"{script_line()}: the outputs of a step, {listed(self._names)}, were too large "
                f"for the record, so a resumed script cannot be given them: read them under `if "
                f"not trainer.replaying:`, and keep what follows from them by trainer.state"
            )
        return iter(())

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def entries_for_all(
    exchange: Exchange, path: Path, seen: Mapping[str, Any], *, checkpoint: Path, reads: bool
) -> list[tuple[int, Entry]]:
    """Give all devices the entries of a run that a checkpoint has seen; see `whole_run`.

    Args:
        exchange: of this process's devices.
        path: the record.
        seen: what the checkpoint says of them, as `Recorder.note_checkpoint` returned it.
        checkpoint: its folder, for a warning.
        reads: whether this is the process that reads the record.

    Raises:
        RecordError: the record is damaged, or another one; raised where it is read.
    """
    entries: list[tuple[int, Entry]] = []
    if reads and seen["entries"]:
        there = path.exists()
        entries = whole_run(path, seen["entries"], seen["head"]) if there else []
        if not there:
            _log.warning(
                "%s is missing, of which %s has seen %d entries, so the script is not answered "
                "from it. It goes on in the epoch that it was in; a model that it calls itself "
                "before its first step has not the values of the checkpoint",
                *(path, checkpoint, seen["entries"]),
            )
    text = broadcast(exchange, written(encode(entries)) if reads else None)
    return entries if reads else msgspec.msgpack.decode(text, type=list[tuple[int, Entry]])
