"""What a run writes down, and what a resumed script is answered from it; around each call.

`Recorder` and `Replay` know the record, and `Resumption` where the run goes on. Here they meet:
a call is answered, or it is made and written down. In a run that is computed once more, `Inspector`
compares it with the record instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from onefold.checkpoint.autosave import Resumption
from onefold.checkpoint.folder import folder_of
from onefold.checkpoint.resume import Checkpoints
from onefold.core.assignment import Devices
from onefold.core.batch import ShardedBatch
from onefold.core.calldigest import Call, CallDigest
from onefold.core.flat import named_tensors
from onefold.data_order.position import Position
from onefold.record import FILE
from onefold.record.entries import (
    Audited,
    BlockEntry,
    Failed,
    Found,
    Result,
    SameProcessEntry,
    SavedEntry,
)
from onefold.record.recorder import Recorder, begun
from onefold.run.context import STARTED_IN, kernel_flags
from onefold.run.inspection import Inspector
from onefold.run.membership import at_good_end
from onefold.shard.digest import GradientDigests, digest_of_all
from onefold.step.audit import SameProcess, WrongResult
from onefold.step.engine import Engine
from onefold.step.result import Step
from onefold.system.words import script_line

__all__ = ["RecordedCalls"]

_Value = TypeVar("_Value")


class RecordedCalls:
    """Writes down the calls of a script, or answers those that a resumed script makes again.

    Args:
        engine: the devices of this process.
        devices: who takes part; the lead writes.
        position: where the run is.
        checkpoints: of the run.
        resumption: where it goes on, if it was resumed.
    """

    def __init__(
        self,
        engine: Engine,
        devices: Devices,
        position: Position,
        checkpoints: Checkpoints,
        resumption: Resumption,
    ) -> None:
        self._writes = not devices.context.options.inspection
        self._engine, self._checkpoints, self._position = engine, checkpoints, position
        self._resumption, self._devices = resumption, devices
        self._recorder: Recorder | None = None
        self._inspector: Inspector | None = None

    def record(self, folder: Path) -> None:
        """Begin in the middle of a run; see `Trainer.record`."""
        if not self._writes:
            return
        if self._engine.digests is not None:
            raise RuntimeError(f"the run has a record already: expected no other, in {folder}")
        self._engine.agree(CallDigest(Call.RECORD, self._position.step + 1))
        if self._devices.has_lead:
            folder.mkdir(parents=True, exist_ok=True)
        self.begin(folder)

    def begin(self, folder: Path) -> None:
        """Have the run written down from here on; called on all devices."""
        context, resumption = self._engine.context, self._resumption
        self._digest()
        if not self._devices.has_lead:
            return
        self._recorder = Recorder(folder / FILE, context.update.optimizer)
        self._checkpoints.noted = self._recorder.note_checkpoint
        self._note_begin(anew=resumption.step > 0 and resumption.replay is None)
        resumption.note_left_out = lambda kept: self._note_begin(kept, anew=False)
        at_good_end(self._recorder.close)

    def inspect(self, asked: Path, datasets: Mapping[int, Any]) -> None:
        """Look into one step of a run that is computed once more; see `Inspector`."""
        inspector = Inspector(asked, self._engine, self._position, datasets)
        if inspector.trainer == self._devices.trainer:
            self._inspector = inspector
            self._digest()

    def look(self, batch: ShardedBatch, number: int, name: str) -> None:
        """Look into a step that begins, if it is the one; see `Inspector.look`."""
        if self._inspector is not None:
            self._inspector.look(batch, number, name)

    def _digest(self) -> None:
        context = self._engine.context
        sizes = [parameter.numel() for parameter in context.parts.trained.values()]
        self._engine.digests = GradientDigests(sizes, context.settings.seed)

    def note_load(self) -> None:
        """Note that the script has had the run go on from elsewhere."""
        self._note_begin(anew=True)

    def _note_begin(self, kept: int | None = None, *, anew: bool) -> None:
        if self._recorder is None:
            return
        step = max(self._position.step, self._resumption.step)
        kept = self._checkpoints.recorded if kept is None else kept
        run = self._checkpoints.run, step, self._devices, self._engine.description
        self._recorder.note(begun(*run, kernel_flags(), STARTED_IN, kept=kept, anew=anew))

    def answered(self, call: str, ask: Callable[[], _Value]) -> _Value:
        """What a call returns: as the record has it where it was made before, else computed now.

        Args:
            call: its name.
            ask: makes the call.
        """
        if (replay := self._resumption.answers(Result, call)) is not None:
            known: _Value = replay.result(call)
            self._resumption.note_answer()
            return known
        value = ask()
        if self._recorder is not None:
            self._recorder.note_result(self._position.step, call, script_line(), value)
        return value

    def saved(self, directory: Path) -> Path | None:
        """The folder of a checkpoint that was saved before; None of a new one."""
        if (replay := self._resumption.answers(SavedEntry)) is None:
            return None
        replay.saved()
        self._resumption.note_answer()
        return folder_of(directory, self._position.step)

    @contextmanager
    def block(self) -> Iterator[Callable[[], None]]:
        """Surround a block in which the script may change the model.

        Yields:
            What is to be called at the end of the block, while the model is there.
        """
        replay = self._resumption.answers(BlockEntry)
        left: list[int] = []

        def note() -> None:
            if self._recorder is not None and replay is None:
                tensors = named_tensors(self._engine.context.module).values()
                step = self._position.step
                left.append(digest_of_all([tensor.detach() for tensor in tensors], step))

        yield note
        self._resumption.end_block(replay)
        if self._recorder is not None and left:
            entry = BlockEntry(step=self._position.step, line=script_line(), digest=left[0])
            self._recorder.note(entry)

    def begin_step(self) -> None:
        """Note the learning rates of a step that begins."""
        if self._recorder is not None:
            self._recorder.begin_step()

    def note_step(self, step: Step, batch: ShardedBatch, *, gradient: bool) -> None:
        """Note a step that is done; see `Recorder.note_step`."""
        if self._inspector is not None:
            self._inspector.note(step)
        if self._recorder is not None:
            self._recorder.note_step(step, batch, gradient=gradient)

    def note_failure(self, error: Exception) -> None:
        """Note what a step has raised: the script may survive it."""
        if self._recorder is not None:
            what = {"error": type(error).__name__, "text": str(error)}
            self._recorder.note(Failed(step=self._position.step, line=script_line(), **what))

    def note_audit(self, found: WrongResult | SameProcess) -> None:
        """Note what an audit has found."""
        if self._recorder is not None:
            kind: type[Found] = Audited if isinstance(found, WrongResult) else SameProcessEntry
            self._recorder.note(msgspec.convert(found._asdict(), kind))

    def close(self) -> None:
        """Write what is left."""
        if self._recorder is not None:
            self._recorder.close()
