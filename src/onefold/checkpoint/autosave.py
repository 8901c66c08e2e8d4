"""Saves and resumes a run as the launcher asks, without a line of the script changed.

`Autosave` makes the checkpoints. `Resumption` goes on from one, in a script that runs again from
its beginning, unaware of it.

Note: when the checkpoint's values become the run's
---------------------------------------------------
A resumed script runs again from its beginning. Where the record of its run knows what it asked
for, it is answered from there, step by step (`onefold.record.answers`); else it goes through the
beginning of the epoch that it was in (of all epochs, where it loops by ``range``), whose passes
come empty. Either way it may change the model, step a scheduler, copy a target network. The
checkpoint has the effect of all that. So its values are taken where the checkpoint was made, and
not before::

    Trainer                    the checkpoint is found, checked and kept open; without a record,
        │                      step, epoch and the places in the data are the checkpoint's from here
        │  before any loop     the model is what it was here in the whole run: the script's own
        ▼
    the first epoch or pass    the values are shown, as what the script does here (an evaluation, a
        │                      copy for later) is nearer to what it was with them; at the beginning
        │                      of an epoch whose first step comes next it is the same
        │  until the place     a block of `changing` acts on nothing: the values are back at its end
        ▼
    the place                  the values are taken, whatever has been done to them before; from
                               here on everything acts once

The place is where the checkpoint was made, as it says itself:

- ``step``: at the beginning of the next step, where `Autosave` makes its own. So everything that
  the script does between two steps is in the checkpoint of the first of them.
- ``end``: at the end of the script, which made no step after it. Its values are shown at once, or a
  script that merely reads them at its end would find its own. Blocks act on nothing up to the next
  epoch of `Trainer.epochs`, if the script now goes on for longer; without it, up to the next step.
  Whether a block between them belongs to the part that is done is then undecidable: it counts as
  done, and a step that follows says so, with the line.
- neither: wherever the script called `Trainer.save`, or at the end of an epoch as the run stopped.
  With a record, the place is right behind the call that came last; else it is the beginning of the
  pass that was under way, or of the next epoch.

While answers are still to come, the optimizer's settings and the scheduler stay the script's own:
they arrive at the checkpoint's by themselves. Without a record, what `evaluate` and `predict`
return before the place, after a loop has begun, cannot be what it was. That is reported once, with
the line. What a script makes of it is taken back where it can be: schedulers and settings are the
checkpoint's at the place, and a loader of another subset is refused
(`onefold.data_order.position`). Its own variables cannot be seen.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.folder import Keeping, try_directory
from onefold.checkpoint.manifest import RUN, Place
from onefold.checkpoint.resume import Checkpoints, LoadedCheckpoint
from onefold.core.assignment import Devices
from onefold.core.batch import ShardedBatch
from onefold.data_order.position import Position, Reached
from onefold.errors import StateError
from onefold.exchange.progress import Progress
from onefold.passes.modifying import Modifying
from onefold.record import FILE
from onefold.record.answers import ScriptReplay
from onefold.record.entries import Entry
from onefold.step.engine import Engine
from onefold.system.folder_lock import lock_of_checkpoints
from onefold.system.output import drop_output, show_output
from onefold.system.words import script_line
from onefold.update.optimizers import optimizers_in

__all__ = ["Autosave", "Resumption"]

_log = logging.getLogger("onefold")


class SaveClock:
    """Makes a checkpoint due by time, after the same step on all devices.

    The lead's clock decides, before a step begins. It asks for one step at a time: for the next one
    when that is saved, which all devices do together, and so when all have seen it.

    Args:
        progress: the table in which the lead asks for it.
        every_s: how many seconds apart checkpoints are written; 0 for never.
        devices: who takes part; the lead decides.
    """

    def __init__(self, progress: Progress, every_s: float, devices: Devices) -> None:
        self._progress, self._every_s, self._devices = progress, every_s, devices
        self.restart()

    def restart(self) -> None:
        """Begin anew, as a checkpoint was written."""
        self._began, self._asked = time.monotonic(), False

    def begin_step(self, step: int) -> None:
        """Ask for a checkpoint after ``step``, which is about to begin, if it is time for one."""
        late = self._every_s and time.monotonic() - self._began >= self._every_s
        if late and not self._asked and self._devices.has_lead:
            self._progress.save_after(step)
            self._asked = True

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint was asked for after ``step``, which is done."""
        return self._progress.saves_after(step)


_MOST_PUT_OFF = 100
"""The most steps for which a checkpoint is put off: an iterator that the script keeps and never
goes on with would put it off for ever."""


class Autosave:
    """Saves the one trainer of a script every so many steps or seconds, and at the end.

    A checkpoint that is due after a step is written when the next one begins, so that it has all
    that the script has done by then: at the end of an epoch, at the beginning of the next one, to
    its scheduler, in an update of its own. A resumed run goes on at that very place, see
    `Resumption`. One that falls between two steps of one batch, or between the
    steps of batches that several loaders have read side by side, waits for the last of these.

    Args:
        devices: who takes part, and what was asked for.
        checkpoints: saves and loads the trainer.
        position: where the trainer is.
        progress: the table in which the lead asks for what is due by time.
        resumption: goes on from the last checkpoint, if there is one.
        blocks: returns how many blocks of changes the script has opened.

    Raises:
        ValueError: the script makes a second trainer, or the directory is itself a checkpoint.
        CheckpointError: what was saved does not fit this run, or cannot be used.
        OSError: no checkpoint could be written there.
        LaunchError: another run saves itself there.
    """

    def __init__(
        self,
        devices: Devices,
        checkpoints: Checkpoints,
        position: Position,
        progress: Progress,
        resumption: Resumption,
        blocks: Callable[[], int],
    ) -> None:
        options, leave_out = devices.context.options, devices.context.leave_out
        if devices.trainer > 0:
            raise ValueError(
                "onefold run --checkpoint follows one Trainer, and this script makes a second one: "
                "call trainer.save and trainer.load in the script instead"
            )
        self._directory = directory = Path(options.checkpoint)
        if (directory / RUN).exists():
            raise ValueError(
                f"--checkpoint {directory} is the folder of one checkpoint: expected the directory "
                f"that holds it, {directory.parent}"
            )
        self._lock = lock_of_checkpoints(directory)
        """The lead's process holds it."""
        if devices.has_lead:
            # Now, as a full or read-only disk is better found before the first hours of training.
            try_directory(directory)
            self._lock.acquire(options.grace_period_s)
        found = checkpoints.find(
            directory, allow_changed=options.allow_changed, if_any=True, leave_out=leave_out
        )
        if found is not None:
            resumption.adopt_step(found, Path(options.recorded_in) / FILE)
        if not resumption.replaying:
            show_output()
        self._every, self._keeping = options.save_every, Keeping(options.keep_last)
        self._clock = SaveClock(progress, options.save_every_s, devices)
        self._checkpoints, self._position, self._blocks = checkpoints, position, blocks
        self._scheduler = checkpoints.scheduler
        self._saved = max(position.step, resumption.step)
        self._at_next = False
        """Whether the checkpoint that is due is to be written as the next step begins."""
        self._reuses = False
        """Whether the script uses batches for several steps."""
        self._blocks_before: int | None = None
        """How many blocks of changes the script had opened before its first step."""
        self._put_off = 0
        """For how many steps what is due has been put off; 0 if nothing is."""
        self._stop = False

    def check(self, batch: ShardedBatch, *, gradient: bool) -> None:
        """Refuse a step that could not be resumed as if nothing had happened.

        Args:
            batch: the batch of the step.
            gradient: whether the update is the script's own.

        Raises:
            ValueError: the script cuts its batches itself, or steps a scheduler that no checkpoint
                would hold.
        """
        if batch.data_pass is None and gradient:
            raise ValueError(
                "onefold run --checkpoint goes on at the very sample where a run stopped, and does "
                "not know it for batches of your own with trainer.gradient, whose updates no "
                "record has: use trainer.loader or trainer.batches, or call trainer.save and "
                "trainer.load in the script and leave out what trainer.steps says is done"
            )
        if self._position.repeats_part(batch):
            raise ValueError(
                "one of the batches in this step was used in a step before and another was not, as "
                "with itertools.cycle, which keeps the batches of the first pass: onefold run "
                "--checkpoint could not go on with it. Read the loader again and again, by "
                "itertools.chain.from_iterable(itertools.repeat(loader))"
            )
        self._reuses |= self._position.has_used(batch)
        if self._blocks_before is None:
            self._blocks_before = self._blocks()
        if self._scheduler.is_missing:
            raise ValueError(
                "a learning rate scheduler is attached to the optimizer that onefold run "
                "--checkpoint does not save, as Trainer was not given it: make Trainer with "
                'scheduler=scheduler and scheduler_every="script", and leave the lines that step '
                'it as they are; or with scheduler_every="epoch" or "step", and without those lines'
            )

    def before_step(self, batch: ShardedBatch) -> bool:
        """Save what is due; return whether to stop now.

        Raises:
            ValueError: the batch is used on and on, and no checkpoint can be made meanwhile.
        """
        is_used = self._position.has_used(batch)
        too_long = self._put_off > _MOST_PUT_OFF
        if self._at_next and is_used and too_long:
            raise ValueError(
                f"this batch is used for more than {_MOST_PUT_OFF} steps, and onefold run "
                f"--checkpoint saves between batches: use each of a run for at most "
                f"{_MOST_PUT_OFF}, or call trainer.save and trainer.load in the script, after "
                f"the last step of a batch"
            )
        waits = is_used or (self._position.is_at_an_end() and not too_long)
        saves = self._at_next and not waits
        if saves:
            self._save("step")
        self._clock.begin_step(self._position.step + 1)
        return saves and self._stop

    def after_step(self, batch: ShardedBatch, *, stop: bool, updated: bool) -> None:
        """Note whether a checkpoint is due, as of every so many steps, or as the run is to stop.

        Args:
            batch: the batch of the step.
            stop: whether the run was asked to stop.
            updated: whether the step is done; an update of the script's is still to come.
        """
        self._stop |= stop
        step = self._position.step
        due = stop or (self._every > 0 and step % self._every == 0) or self._clock.is_due(step)
        self._at_next = False
        if not due and not self._put_off:
            return
        # All devices come to the same answer here, as it follows from agreed values alone.
        self._put_off += 1
        between = self._position.is_between_batches(batch)
        self._at_next = between or self._put_off > _MOST_PUT_OFF
        # A request to stop at the end of an epoch: the script's work there may take longer than the
        # grace period, so save first as well, unless the script may change the saved state between
        # two steps.
        plain = updated and not self._reuses and not self._scheduler.is_the_scripts
        plain = plain and self._blocks() == self._blocks_before
        if self._stop and plain and between and self._position.is_at_an_end():
            self._write(None)

    def finish(self) -> None:
        """Save the end of the run, unless it is saved already."""
        if self._position.step > self._saved or self._checkpoints.lost:
            self._stop = True
            self._save("end")

    def leave(self) -> None:
        """Let another run save itself in the directory, once everything is written."""
        self._lock.let_go()

    def _save(self, place: Place) -> None:
        self._write(place)
        self._clock.restart()
        self._at_next = False
        self._put_off = 0
        self._saved = self._position.step

    def _write(self, place: Place) -> None:
        self._lock.keep()
        self._checkpoints.save(self._directory, keeping=self._keeping, wait=self._stop, place=place)


_MARK = "onefold"
"""In the metadata of a ``state_dict``."""


class Resumption:
    """The part of a resumed script that is done; all devices make the same calls.

    Args:
        engine: the devices of this process.
        modifying: the block in which a script may change the model.
        checkpoints: takes the values of the checkpoint.
        position: where the run is.
        devices: who takes part; the lead alone warns.
    """

    def __init__(
        self,
        engine: Engine,
        modifying: Modifying,
        checkpoints: Checkpoints,
        position: Position,
        devices: Devices,
    ) -> None:
        self._engine, self._modifying = engine, modifying
        self._checkpoints, self._position = checkpoints, position
        self._devices = devices
        self._found: LoadedCheckpoint | None = None
        """The checkpoint, until its values are taken for good."""
        self.replay: ScriptReplay | None = None
        """Answers what the script asks for once more; None where no record knows it."""
        self._quiet = ExitStack()
        """What is undone where the script comes to the place where its run goes on."""
        self._to_finish = ExitStack()
        """What is undone where the script ends."""
        self.note_left_out: Callable[[int], None] | None = None
        """Called on the lead of a recorded run with `ScriptReplay.kept_entries`."""
        self._place: Place = None
        self._shown = self._over = self._warned = self._is_taking = self._has_taken = False
        self._block = ""
        """The line of the last block that acted on nothing, if it may have been meant to act."""

    @property
    def answering(self) -> bool:
        """Whether there are calls still to come that are answered from the record."""
        return self.replaying and self.replay is not None and not self.replay.over

    @property
    def replaying(self) -> bool:
        """Whether the script runs through what is done: all that it does up to its next step."""
        return self._found is not None and self.replay is not None

    def answers(self, kind: type[Entry], call: str = "") -> ScriptReplay | None:
        """What answers a call of the script; None where the script makes it for the first time.

        Args:
            kind: of the entry of the record that answers it.
            call: its name, for results.
        """
        if self.answering:
            assert self.replay is not None
            if self.replay.knows(kind, call):
                return self.replay
            if self.note_left_out is not None and self.replay.kept_entries is not None:
                self.note_left_out(self.replay.kept_entries)
        self.catch_up()
        return None

    def adopt_step(self, found: LoadedCheckpoint, record: Path) -> None:
        """Have the run stand where a checkpoint was made; its values come later.

        Args:
            found: the checkpoint.
            record: what was written down of its run.
        """
        self._found, self._place = found, found.stored.run["place"]
        step, folder = found.stored.run["step"], found.stored.folder
        self._checkpoints.expect_average(found)
        entries = self._checkpoints.entries_of(found, record)
        if self._devices.has_lead:
            note = "" if entries or not step else ", without a record that answers the script"
            print(f"onefold: going on after step {step}: {folder}{note}", file=sys.stderr)
        if not entries:
            self._checkpoints.adopt_place(found)
        else:
            self._checkpoints.adopt_loaders(found)
            device = self._engine.context.replicas[0].device
            self.replay = ScriptReplay(entries, device, ended=self._place == "end")
            self._position.replaying = lambda: self.answering
            self._position.next_batch = self.replay.next_batch
            for optimizer in optimizers_in(self._engine.context.update.optimizer).values():
                # Or PyTorch would warn of schedulers that are stepped before the first update.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            # All of its parts: a script may call one of several models, or a layer.
            for module in self._engine.context.module.modules():
                # A function, which a copy of the model shares: of a method it would copy `self`.
                called = module.register_forward_pre_hook(lambda part, _: self._refuse_call(part))
                self._quiet.callback(called.remove)
                taken = module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    lambda _part, _state, prefix, about: self._note_taking(prefix, about)
                )
                self._quiet.callback(taken.remove)
            self._watch_loading()
            write = torch.save
            torch.save = lambda what, file, *given, **options: (
                None if self._leaves(file) else write(what, file, *given, **options)
            )
            self._quiet.callback(setattr, torch, "save", write)
            if self._devices.has_lead:
                self._quiet.callback(show_output)
                drop_output()
            return
        if self._place == "end":
            self._show(found)

    @property
    def step(self) -> int:
        """After which step the run goes on, until it does; else 0."""
        return 0 if self._found is None else int(self._found.stored.run["step"])

    @property
    def _where(self) -> str:
        assert self._found is not None
        stored = self._found.stored
        return f"after step {stored.run['step']} from {stored.folder}"

    def reached(self, where: Reached) -> None:
        """Show or take the values where the script begins an epoch or a pass, or is past them."""
        if self._found is None or self._engine.agreement.averaged:
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
        """Take the values where the first step begins."""
        if self._found is None:
            return
        if self._place == "end" and self._block:
            self._warn(
                "the block of trainer.modifying at %s was taken for one of the run that had ended, "
                "which this one goes on with %s, and has changed nothing. If it is to prepare the "
                "steps that follow, have it stand in a loop over trainer.epochs",
                *(self._block, self._where),
            )
        self._load(self._found)

    def note_answer(self) -> None:
        """Take the values where the run was saved right behind a call that has been answered."""
        if self._place is None:
            self.catch_up()
        elif self._place == "end" and not self.answering:
            self._quiet.close()  # what the script prints in the end is shown again

    def catch_up(self) -> None:
        """Take the values if the script has come to the place where its run goes on."""
        if self._found is not None and self.replay is not None and self.replay.over:
            self._load(self._found)

    def end_block(self, replay: ScriptReplay | None) -> None:
        """Undo what a block of `changing` has done, if the checkpoint has it already.

        Args:
            replay: what has answered it.
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
        """Warn once of what a call returns that the whole run made earlier than the checkpoint."""
        done = self._place == "end" and self._over
        if self._found is None or not self._shown or self._warned or done:
            return
        self._warned = True
        self._warn(
            "%s at %s comes before the place where this run goes on, %s: it uses the values of "
            "that checkpoint, and what it returns may not be what it was when the run came "
            "through here before. No later step may depend on it",
            *(call, script_line(), self._where),
        )

    def begin_save(self) -> None:
        """Have a save of the script in the part that is done hold what the checkpoint does."""
        if self._found is not None:
            self._show(self._found)
            self.note_result("trainer.save")

    def begin_anew(self) -> None:
        """Leave all to a `Trainer.load` of the script, which has just gone on from elsewhere."""
        if self._found is not None:
            self._warn(
                "trainer.load at %s takes the place of onefold run --checkpoint, which was to go "
                "on %s",
                *(script_line(), self._where),
            )
        self.end()
        self._to_finish.close()

    def finish(self) -> None:
        """Warn at the end of a script that has not come to the place where its run goes on."""
        if self.answering:
            self._warn(
                "the script has ended before the place where its run goes on, %s: its model has "
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
                "the script has ended before the place where its run goes on, %s: %s",
                self._where,
                f"the block of trainer.modifying at {self._block} has changed nothing"
                if self._shown
                else "its model has the values that the script gave it, and not the checkpoint's",
            )
        self.end()
        self._to_finish.close()

    def end(self) -> None:
        """Take nothing more from the checkpoint."""
        self._found = None
        self._quiet.close()

    def _refuse_call(self, module: torch.nn.Module) -> None:
        """Refuse a call of the model by the script where its values are not those of then."""
        has_values = any(True for _ in chain(module.parameters(), module.buffers()))
        if self.answering and self._shown and has_values:
            raise StateError(
                f"{script_line()}: the script calls the model itself, in the part of the run that "
                f"is done, {self._where}: what it returned there is in no record. Use "
                f"trainer.evaluate or trainer.predict, whose results are kept; or make the call "
                f"under `if not trainer.replaying:`, and keep what follows by trainer.state"
            )

    @property
    def _has_later_values(self) -> bool:
        """Whether the model has the checkpoint's weights where the script had others before."""
        later = self.answering and self._shown and not self._is_taking
        return later and self.replay is not None and self.replay.changes_model

    def _leaves(self, file: object) -> bool:
        """Whether a file that the script writes again is left as it is."""
        if not isinstance(file, str | os.PathLike) or not self.answering:
            return False
        return self._has_later_values or os.path.exists(file)

    def _note_taking(self, prefix: str, about: dict[str, Any]) -> None:
        """Mark weights that are not those of then, and say so once."""
        if prefix or not self._has_later_values:
            return
        about[_MARK] = self._where
        if not self._has_taken:
            self._warn(
                "%s: the script takes the model's state_dict in the part of the run that is done, "
                "%s, and is given the weights of that checkpoint. Files that torch.save wrote are "
                "left as they are. Weights that the script keeps in memory are lost: keep them in "
                "a file, or in one of several models of the trainer",
                *(script_line(), self._where),
            )
        self._has_taken = True

    def _watch_loading(self) -> None:
        """Look at what is loaded, until the script ends."""
        load = torch.nn.Module.load_state_dict

        @wraps(load)
        def checked(
            module: torch.nn.Module, state: Mapping[str, Any], *given: Any, **by: Any
        ) -> Any:
            self._refuse_loading(getattr(state, "_metadata", {}).get("", {}))
            return load(module, state, *given, **by)

        # No hook of a module, which would be pickled with it.
        torch.nn.Module.load_state_dict = checked  # type: ignore[assignment,method-assign]
        self._to_finish.callback(setattr, torch.nn.Module, "load_state_dict", load)

    def _refuse_loading(self, about: Mapping[str, Any]) -> None:
        """Refuse marked weights, except in the part that is done: changes there are undone."""
        if _MARK in about and not self.replaying:
            raise StateError(
                f"{script_line()}: these weights were taken by state_dict in the part of the run "
                f"that was done, {about[_MARK]}: they are the checkpoint's weights, not those of "
                f"that moment. Write the best weights to a file, which a resumed run leaves as it "
                f"is, or keep them in one of several models of the trainer"
            )

    def _warn(self, text: str, *arguments: object) -> None:
        if self._devices.has_lead:
            _log.warning(text, *arguments)

    def _load(self, found: LoadedCheckpoint) -> None:
        self._show(found, settings=True)
        self.end()

    def show(self) -> None:
        """Show the values of the checkpoint in the part that is done, if nobody has."""
        if self._found is not None and not self._shown:
            self._show(self._found)

    def _show(self, found: LoadedCheckpoint, *, settings: bool = False) -> None:
        # The rates of a script that is answered from the record are what they were at each step.
        settings |= self.replay is None
        # A loop may stand in a block of changes, as may a gradient.
        self._is_taking = True
        try:
            with self._modifying.closed(self._position.step + 1):
                self._checkpoints.load_found(found, settings=settings)
        finally:
            self._is_taking = False
        self._shown = True
