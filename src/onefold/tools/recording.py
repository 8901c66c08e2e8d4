"""Records a run: writes an entry for each step, result and checkpoint.

`Recorder` writes the record; this hook passes the events to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onefold.core.flat import named_tensors
from onefold.launcher.environment import STARTED_IN, kernel_flags
from onefold.launcher.membership import at_good_end
from onefold.record import FILE
from onefold.record.entries import BlockEntry, FailureEntry
from onefold.record.recorder import Recorder, begun
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall, Spans
from onefold.step.result import Step
from onefold.system.words import script_line
from onefold.tools.digests import digest_of_all

__all__ = ["RecordKeeping", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Record a run on the lead, if it has a folder for its record."""
    return _begin


def _begin(run: RunView) -> Hook | None:
    if run.recorded_in is None or not run.devices.has_lead:
        return None
    with run.telling_others():
        run.recorded_in.mkdir(parents=True, exist_ok=True)
        return RecordKeeping(run, run.recorded_in)


class RecordKeeping(Hook):
    """Records the calls of a script, on the lead.

    Args:
        run: the run.
        folder: folder of the record.
    """

    def __init__(self, run: RunView, folder: Path) -> None:
        self._run = run
        self._recorder = Recorder(folder / FILE, run.engine.context.update.optimizer)
        run.note_checkpoint = self._recorder.note_checkpoint
        run.note_left_out = self._note_left_out
        run.found.append(self._recorder.note)
        step = max(run.position.step, run.begun_after)
        self._note_begin(step, anew=run.begun_after > 0 and not run.is_answered)
        at_good_end(self._recorder.close)

    def _note_left_out(self, kept: int) -> None:
        self._note_begin(max(self._run.position.step, self._run.begun_after), kept, anew=False)

    def _note_begin(self, step: int, kept: int | None = None, *, anew: bool) -> None:
        run, checkpoints = self._run, self._run.checkpoints
        kept = checkpoints.recorded if kept is None else kept
        about = checkpoints.run, step, run.devices, run.engine.description
        self._recorder.note(begun(*about, kernel_flags(), STARTED_IN, kept=kept, anew=anew))

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Record a result, or that `Trainer.load` moved the run; have new streams checked."""
        value = make()
        if asked.kind == "loader" and hasattr(value.source, "starts_twice"):
            # Other processes would compare what they read.
            if not self._run.engine.context.with_others:
                value.source.starts_twice = True
        elif asked.kind == "result":
            self._recorder.note_result(self._run.position.step, asked.words, script_line(), value)
        elif asked.kind == "load" and value is not None:
            self._note_begin(self._run.position.step, anew=True)
        return value

    @contextmanager
    def around(self, asked: ScriptCall) -> Iterator[None]:
        """Record a step's learning rates and errors, or a `modifying` block."""
        if asked.kind in ("step", "gradient"):
            if asked.begins:
                self._recorder.begin_step()
            try:
                yield
            except Exception as error:  # the script may catch it and continue
                self._note_failure(error)
                raise
        elif asked.kind == "modifying" and asked.computed:
            found: list[int] = []
            asked.inside.append(lambda: found.append(self._digest_of_model()))
            yield
            entry = BlockEntry(step=self._run.position.step, line=script_line(), digest=found[0])
            self._recorder.note(entry)
        else:
            yield

    def _digest_of_model(self) -> int:
        tensors = named_tensors(self._run.engine.context.module).values()
        return digest_of_all([tensor.detach() for tensor in tensors], self._run.position.step)

    def _note_failure(self, error: Exception) -> None:
        step, what = self._run.position.step, {"error": type(error).__name__, "text": str(error)}
        self._recorder.note(FailureEntry(step=step, line=script_line(), **what))

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Record a finished step; see `Recorder.note_step`."""
        if asked.computed and asked.cut is not None:
            self._recorder.note_step(step, asked.cut, gradient=asked.kind == "gradient")

    def close(self) -> None:
        """Write the pending step and close the record."""
        self._recorder.close()
