"""Resumes a run in a script that runs again from its beginning and does not know of the resume.

`Answers` replays the script's calls from the record of its run, until the script reaches the resume
position. There `Resumption` loads the values of the checkpoint.

Note: when the checkpoint's values are loaded
---------------------------------------------
A resumed script runs again from its beginning. If the run has a record, the script's calls are
replayed from it, step by step (`onefold.record.answers`). Otherwise the script runs the beginning
of its current epoch again (of all epochs, if it loops over ``range``), whose passes yield no
batches. Either way it may change the model, step a scheduler or copy a target network. The
checkpoint already contains the effects of all that. So its values are loaded at the position where
it was made, and not earlier::

    Trainer                    the checkpoint is found, checked and kept open; without a record,
        │                      step, epoch and data positions are the checkpoint's from here on
        │  before any loop     the model has the same values as in the whole run: the script's own
        ▼
    the first epoch or pass    the values are shown, that is, loaded for now: they make results of
        │                      what the script does here (an evaluation, a copy for later) more
        │                      accurate, and exact at the start of an epoch before its first step
        │  until the position  a `modifying` block has no effect: its end restores the values
        ▼
    the position               the values are loaded, whatever happened to them before; from here
                               on everything takes effect once

The checkpoint stores where it was made, its place:

- ``step``: at the start of the next step, where `Autosaving` makes its checkpoints. So everything
  that the script does between two steps is in the checkpoint of the first step.
- ``end``: at the end of the script, after its last step. With a record, its values are loaded right
  after the last step, but settings stay the script's own, so new settings take effect if the script
  now extends the run. Without a record, its values are shown immediately, because a script that
  only reads them at its end would otherwise find its own. Blocks and settings have no effect until
  the next epoch of `Trainer.epochs`, or without it, until the next step. onefold cannot tell
  whether they belong to the finished part: they count as done, and the next step logs a warning.
- None: where the script called `Trainer.save`, or at the end of an epoch when the run stopped. With
  a record, the position is right after the last recorded call; otherwise it is the start of the
  pass that was under way, or of the next epoch.

During replay, the optimizer's settings and the scheduler stay the script's own: the replayed steps
bring them to the checkpoint's values. Settings that the script now initializes differently begin
with the saved run's values, with a warning. At the end of a run, the checkpoint's values replace
only these, and all others stay the script's own. Without a record, results of
`evaluate` and `predict` after a loop begins but before the position may differ from the original
ones. This is reported once, with the line. Effects of such results are undone if possible:
schedulers and settings get the checkpoint's values at the position, and a loader of another subset
raises an error (`onefold.data_order.position`). Among the script's own variables, only copies of
weights are followed (`onefold.tools.kept_weights`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from onefold.checkpoint.folder import folder_of, try_directory
from onefold.checkpoint.manifest import RUN, Place
from onefold.checkpoint.model import saved_rule
from onefold.checkpoint.resume import LoadedCheckpoint
from onefold.checkpoint.run_state import Advice
from onefold.core.batch import map_parts
from onefold.core.options import RECORD_FILE, LaunchContext
from onefold.data_order.position import Reached
from onefold.errors import StateError
from onefold.launcher.membership import at_good_end
from onefold.record import FILE
from onefold.record.answers import ScriptReplay, entries_for_all
from onefold.record.entries import BlockEntry, Entry, Result, SavedEntry, StepEntry
from onefold.session.batches import read_now
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall
from onefold.step.result import Step
from onefold.system.folder_lock import FolderLock, lock_of_checkpoints
from onefold.system.output import drop_output, hold_output, show_output
from onefold.system.words import script_line, tell
from onefold.tools.kept_weights import KeptWeights, watch_copies
from onefold.update.optimizers import optimizers_in, settings_of

__all__ = ["Answers", "prepare", "prepare_process"]

_log = logging.getLogger("onefold")

_ADVICE = Advice(
    where="in the loop, under `if not trainer.replaying:`",
    anew="onefold run --allow-changed scheduler",
)


def prepare_process(context: LaunchContext) -> None:
    """Note copies of weights that the script makes, and hold its output until it has a Trainer."""
    watch_copies()
    options = context.options
    saved = any(Path(options.checkpoint).glob("step-*"))
    saved = saved and Path(options.recorded_in, RECORD_FILE).exists()
    # A checkpoint in object storage is known later.
    if context.rank == 0 and (saved or options.remote):
        hold_output()


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Resume the run of a script, if it has a checkpoint.

    The returned function raises:
        ValueError: the script creates a second Trainer, or the directory is itself a checkpoint.
        CheckpointError: the saved run does not fit this one, or is damaged.
        OSError: no checkpoint can be written to the directory.
        LaunchError: another run saves itself there.
    """

    def begin(run: RunView) -> Answers:
        options = run.context.options
        if run.context.launcher != "onefold":
            prepare_process(run.context)
        # Loading may fail on one device only, by lack of memory for example: report it to the
        # others.
        with run.telling_others():
            run.lock = _claimed(run, Path(options.checkpoint))
            try:
                found = run.checkpoints.find(
                    Path(options.checkpoint),
                    allow_changed=options.allow_changed,
                    if_any=True,
                    leave_out=run.context.leave_out,
                )
                resumption = Resumption(run, found)
            except BaseException:
                run.lock.let_go()
                raise
        run.begun_after, run.is_answered = resumption.step, resumption.replaying
        return Answers(run, resumption)

    return begin


def _claimed(run: RunView, directory: Path) -> FolderLock:
    """Lock the directory of automatic checkpoints for this run."""
    if run.devices.trainer > 0:
        raise ValueError(
            "onefold run --checkpoint supports one Trainer, but this script creates a second one. "
            "Call trainer.save and trainer.load in the script instead"
        )
    if (directory / RUN).exists():
        raise ValueError(
            f"--checkpoint {directory} is the folder of one checkpoint. Pass the directory that "
            f"contains it, {directory.parent}"
        )
    lock = lock_of_checkpoints(directory)
    if run.devices.has_lead:
        # Check now: a full or read-only disk should be found before hours of training.
        try_directory(directory)
        lock.acquire(run.context.options.grace_period_s)
    return lock


class Answers(Hook):
    """Replays the calls that a resumed script repeats.

    Args:
        run: the run.
        resumption: state of the resume.
    """

    def __init__(self, run: RunView, resumption: Resumption) -> None:
        self._run, self._resumption = run, resumption
        run.position.reached = self._reached
        at_good_end(self.finish)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Replay a recorded call, or resume the run at the right position and make the call."""
        resumption = self._resumption
        match asked.kind:
            case "step" | "gradient":
                return self._step(asked, make)
            case "result":
                return self._result(asked, make)
            case "save":
                if (replay := resumption.answers(SavedEntry)) is not None:
                    replay.saved()
                    resumption.note_answer()
                    return folder_of(asked.given, self._run.position.step)
                resumption.begin_save()
            case "load":
                found = make()
                if found is not None:
                    resumption.begin_anew()
                return found
            case "statistics" if resumption.answering:
                return None  # the record has every result that depends on the averages
            case "replaying":
                return resumption.replaying
        return make()

    def _step(self, asked: ScriptCall, make: Make) -> Any:
        resumption, run = self._resumption, self._run
        replay = resumption.answers(StepEntry) if asked.kind == "step" else None
        if replay is None:
            if resumption.replay is not None and not resumption.answering:
                asked.given = map_parts(asked.given, read_now)
            if asked.begins:
                with run.telling_others():
                    resumption.begin_step()
            return make()
        cut = run.batches.cut(asked.given, asked.dim)[0]
        if (failure := replay.failure()) is not None:
            raise failure  # on all devices
        asked.computed, name = False, asked.name
        with run.telling_others():
            resumption.show()
            outcome, scheduler = replay.step(cut, name), run.scheduler
            scheduler.note_step(run.position.here, name, updates=outcome.verdict.updates)
            made = Step(0, cut.samples, cut.epoch, outcome, (), name)
            step = run.count(asked, made, cut)
            resumption.note_answer()
        return step

    def _result(self, asked: ScriptCall, make: Make) -> Any:
        resumption = self._resumption
        if (replay := resumption.answers(Result, asked.words)) is not None:
            known = replay.result(asked.words)
            resumption.note_answer()
            return known
        if asked.data is not None:  # an evaluation, of a model with later values
            resumption.note_result(asked.words)
        return make()

    @contextmanager
    def around(self, asked: ScriptCall) -> Iterator[None]:
        """Undo the changes of a block that the checkpoint already includes."""
        if asked.kind != "modifying":
            yield
            return
        replay = self._resumption.answers(BlockEntry)
        asked.computed = replay is None
        yield
        self._resumption.end_block(replay)

    def _reached(self, where: Reached) -> None:
        with self._run.telling_others():
            self._resumption.reached(where)

    def finish(self) -> None:
        """Warn if the script ended before its resume position."""
        if not self._run.left():
            self._resumption.finish()

    def close(self) -> None:
        """Stop loading from the checkpoint."""
        self._resumption.close()


class Resumption:
    """The state of a resume up to its position. All devices make the same calls.

    Args:
        run: the run.
        found: the checkpoint to resume from; None if there is none.
    """

    def __init__(self, run: RunView, found: LoadedCheckpoint | None) -> None:
        self._run, self._position = run, run.position
        self._weights = KeptWeights(run.engine.context.module, lambda: run.position.step)
        run.checkpoints.kept = self._weights.kept
        self._found = found
        """The checkpoint, until its values are loaded permanently."""
        self.replay: ScriptReplay | None = None
        """The recorded calls of the script; None without a record."""
        self._quiet = ExitStack()
        """Cleanup at the resume position: removes hooks and patches, and shows output again."""
        self._place: Place = None
        self._shown = self._over = self._warned = False
        self._is_current = False
        """Whether the model permanently has the values of the script's current position."""
        self._settings: object = None
        """Optimizer settings loaded with the values, if no record has the script's own."""
        self._block = ""
        """Line of the last block whose changes were undone, if it may have been a new one."""
        if found is not None:
            self._adopt(found)
        if not self.replaying:
            show_output()

    @property
    def answering(self) -> bool:
        """Whether recorded calls remain to be replayed."""
        return self.replaying and self.replay is not None and not self.replay.over

    @property
    def replaying(self) -> bool:
        """Whether a resumed script, with a record, is still before its next step."""
        return self._found is not None and self.replay is not None

    def answers(self, kind: type[Entry], call: str = "") -> ScriptReplay | None:
        """Return the recorded calls if they contain this one; None if the call is new.

        Args:
            kind: kind of the entry that replays the call.
            call: name of the call, for results.
        """
        if self.answering:
            assert self.replay is not None
            if self.replay.knows(kind, call):
                return self.replay
            if self.replay.kept_entries is not None:
                self._run.note_left_out(self.replay.kept_entries)
        self.catch_up()
        return None

    def _adopt(self, found: LoadedCheckpoint) -> None:
        """Move the run to a checkpoint's position; its values are loaded later."""
        saved, folder, run = found.stored.run, found.stored.folder, self._run
        self._place = saved["place"]
        # Values are loaded later: until then, reject an average other than the checkpoint's.
        run.averaging().expected = saved_rule(saved, found.allow_changed)
        seen = {"entries": 0} if found.allow_changed else saved["recorded"]
        path, exchange = Path(run.context.options.recorded_in) / FILE, run.engine.context.exchange
        reads = run.devices.has_lead
        entries = entries_for_all(exchange, path, seen, checkpoint=folder, reads=reads)
        if reads:
            step, without = saved["step"], ", without a record, so the script is not replayed"
            note = without if step and not entries else ""
            tell(f"resuming after step {step}: {folder}{note}")
        run.checkpoints.adopt_run(found, _ADVICE)
        if not entries:
            self._position.go_to(saved, found.allow_changed)
        else:
            self._position.expect(saved)
            run.checkpoints.start_as_saved(found)
            device = run.engine.context.replicas[0].device
            self.replay = ScriptReplay(entries, device, ended=self._place == "end")
            self._position.replaying = lambda: self.answering
            self._position.next_batch = self.replay.next_batch
            for optimizer in optimizers_in(run.engine.context.update.optimizer).values():
                # Otherwise PyTorch warns of schedulers that are stepped before the first update.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            # All submodules: a script may call one of several models, or a single layer.
            for module in run.engine.context.module.modules():
                # A plain function: deepcopy of the model would copy a bound method's `self`.
                called = module.register_forward_pre_hook(lambda part, _: self._refuse_call(part))
                self._quiet.callback(called.remove)
            for place, name in ((torch, "save"), (safetensors.torch, "serialize_file")):
                write = getattr(place, name)
                setattr(place, name, self._leaving(write))
                self._quiet.callback(setattr, place, name, write)
            self._weights.give(run.checkpoints.kept_of(found), self._where)
            if run.devices.has_lead:
                self._quiet.callback(show_output)
                drop_output()
            return
        if self._place == "end":
            self._show(found)

    @property
    def step(self) -> int:
        """Step after which the run resumes, until it does; 0 otherwise."""
        return 0 if self._found is None else int(self._found.stored.run["step"])

    @property
    def _where(self) -> str:
        assert self._found is not None
        stored = self._found.stored
        return f"after step {stored.run['step']} from {stored.folder}"

    def reached(self, where: Reached) -> None:
        """Show or load the values at the start of an epoch or a pass, or after the epochs."""
        if self._found is None or self._run.engine.agreement.averaged:
            return
        self._over |= where == "over"
        if self.replay is not None:
            if self.replay.over and self._place != "step":
                self._load(self._found)
            elif not self._shown:
                self._show(self._found)
            return
        known = self._place is None or (self._place == "end" and where == "epoch")
        if known and not self._position.awaits:
            self._load(self._found)
        elif not self._shown:
            self._show(self._found)

    def begin_step(self) -> None:
        """Load the values at the start of the first new step."""
        if self._found is None:
            return
        if self._place == "end" and self._block:
            self._warn(
                "the block of trainer.modifying at %s had no effect, because it counted as part of "
                "the finished run that this one resumes %s. If it prepares new steps, put it in a "
                "loop over trainer.epochs",
                *(self._block, self._where),
            )
        if self._place == "end" and self.replay is None and self._shown:
            self._warn_of_settings()
        self._load(self._found)

    def _warn_of_settings(self) -> None:
        now = settings_of(self._run.engine.context.update.optimizer)
        if now != self._settings:
            self._warn(
                "the script's optimizer settings %s have no effect: this run resumes a finished "
                "one, %s, without a record of the script's settings, so the saved settings %s are "
                "used. Set them in a loop over trainer.epochs, or after the first new step",
                *(now, self._where, self._settings),
            )

    def note_answer(self) -> None:
        """Load the values if the checkpoint was made right after the replayed call."""
        replay, found = self.replay, self._found
        if found is None or replay is None:
            return
        if not replay.changes_model and not self._is_current:
            self._is_current = True
            if self._place == "end" or self._weights.writes:
                self._show(found)
            self._weights.show_model()
        if self._place is None:
            self.catch_up()
        elif self._place == "end" and not self.answering:
            self._quiet.close()  # show the script's final output again

    def catch_up(self) -> None:
        """Load the values if the script has reached the resume position."""
        if self._found is not None and self.replay is not None and self.replay.over:
            self._load(self._found)

    def end_block(self, replay: ScriptReplay | None) -> None:
        """Restore the values after a `modifying` block that the checkpoint already includes.

        Args:
            replay: recorded calls that contain the block; None if there are none.
        """
        if replay is not None:
            replay.block()
            self.note_answer()
        if self._found is None or not self._shown:
            return
        if self.replay is None and (self._place != "end" or not self._position.awaits):
            self._block = script_line()
        self._show(self._found)

    def note_result(self, call: str) -> None:
        """Warn once about a call whose original result came before the checkpoint's values."""
        done = self._place == "end" and self._over
        if self._found is None or not self._shown or self._warned or done:
            return
        self._warned = True
        self._warn(
            "%s at %s is before the position at which this run resumes, %s. It uses the values of "
            "that checkpoint, so its result may differ from the original one. Later steps must not "
            "depend on it",
            *(call, script_line(), self._where),
        )

    def begin_save(self) -> None:
        """Make a `trainer.save` before the resume position save the checkpoint's values."""
        if self._found is not None:
            self._show(self._found)
            self.note_result("trainer.save")

    def begin_anew(self) -> None:
        """Stop the resume, because the script itself has just resumed with `Trainer.load`."""
        if self._found is not None:
            self._warn(
                "trainer.load at %s overrides onefold run --checkpoint, which was about to resume "
                "%s",
                *(script_line(), self._where),
            )
        self.end()

    def finish(self) -> None:
        """Warn if the script ended before its resume position."""
        if self.answering:
            self._warn(
                "the script ended before the position at which its run resumes, %s: its model has "
                "the values of the checkpoint",
                self._where,
            )
        elif (
            self._found is not None
            and self.replay is None
            and self._place != "end"
            and (self._block or not self._shown)
        ):
            self._warn(
                "the script ended before the position at which its run resumes, %s: %s",
                self._where,
                f"the block of trainer.modifying at {self._block} had no effect"
                if self._shown
                else "its model has the values that the script gave it, not the checkpoint's",
            )
        self.end()

    def end(self) -> None:
        """Stop loading from the checkpoint."""
        self._found = None
        self._quiet.close()
        self._weights.end()

    def close(self) -> None:
        """Stop loading from the checkpoint, and stop watching the script's weights."""
        self.end()
        self._weights.close()

    def _refuse_call(self, module: torch.nn.Module) -> None:
        """Raise if the script calls the model during replay, with the checkpoint's values."""
        has_values = any(True for _ in chain(module.parameters(), module.buffers()))
        if self.answering and self._shown and has_values:
            raise StateError(
                f"{script_line()}: the script calls the model itself during replay, {self._where}, "
                f"but the record has no result of such a call. Use trainer.evaluate or "
                f"trainer.predict, whose results are recorded, or make the call under `if not "
                f"trainer.replaying:`, and store what depends on it in trainer.state"
            )

    @property
    def _has_later_values(self) -> bool:
        """Whether the model has the checkpoint's weights where the script had others before."""
        later = self.answering and self._shown
        return later and self.replay is not None and self.replay.changes_model

    def _leaving(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a save function so that it does not overwrite existing files during replay."""

        @wraps(write)
        def leaving(*given: Any, **named: Any) -> Any:
            file: Any = given[1] if len(given) > 1 else named.get("f", named.get("filename"))
            is_file = isinstance(file, str | os.PathLike)
            if self.answering and is_file and (self._has_later_values or os.path.exists(file)):
                return None
            return write(*given, **named)

        return leaving

    def _warn(self, text: str, *arguments: object) -> None:
        if self._run.devices.has_lead:
            _log.warning(text, *arguments)

    def _load(self, found: LoadedCheckpoint) -> None:
        if self._place != "end" or self.replay is None:
            self._show(found, settings=True)
        else:
            if not self._is_current:
                self._show(found)
            self._run.checkpoints.take_given_otherwise(found)
        self.end()

    def show(self) -> None:
        """Show the values of the checkpoint if they are not shown yet."""
        if self._found is not None and not self._shown:
            self._show(self._found)

    def _show(self, found: LoadedCheckpoint, *, settings: bool = False) -> None:
        # During replay, the script sets the learning rates itself, as it did at each step.
        settings |= self.replay is None
        # A loop, or a gradient, may be inside a `modifying` block.
        with self._run.changes().closed(self._position.step + 1):
            self._run.checkpoints.take(found, settings=settings)
        self._shown = True
        if self._has_later_values:
            self._weights.hide_model()
        if self.replay is None:
            self._settings = settings_of(self._run.engine.context.update.optimizer)
