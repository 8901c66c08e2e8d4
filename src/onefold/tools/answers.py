"""Resumes a run in a script that runs again from its beginning, unaware of it.

`Answers` answers the script's calls from the record of its run, until the script is where the run
goes on. `Resumption` takes the values of the checkpoint there.

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
- ``end``: at the end of the script, which made no step after it. With a record, its values are
  taken right behind the last step, and settings are the script's own, so what it sets there acts if
  it now goes on for longer. Without a record, its values are shown at once, or a script that merely
  reads them at its end would find its own. Blocks and settings act on nothing up to the next epoch
  of `Trainer.epochs`; without it, up to the next step. Whether they belong to the part that is done
  is then undecidable: they count as done, and a step that follows says so.
- neither: wherever the script called `Trainer.save`, or at the end of an epoch as the run stopped.
  With a record, the place is right behind the call that came last; else it is the beginning of the
  pass that was under way, or of the next epoch.

While answers are still to come, the optimizer's settings and the scheduler stay the script's own:
they arrive at the checkpoint's by themselves. At the end of a run, the checkpoint's are only those
that the script now begins with otherwise, which is reported. Without a record, what `evaluate` and
`predict` return before the place, after a loop has begun, cannot be what it was. That is reported
once, with the line. What a script makes of it is taken back where it can be: schedulers and
settings are the checkpoint's at the place, and a loader of another subset is refused
(`onefold.data_order.position`). Of its own variables, weights are followed
(`onefold.tools.kept_weights`).
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
from onefold.core.options import LaunchContext
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
from onefold.system.output import drop_output, show_output
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
    """Note copies of weights that the script makes before it has a Trainer."""
    watch_copies()


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Resume the run of a script, if it has a checkpoint.

    Raises, from the function returned:
        ValueError: the script makes a second Trainer, or the directory is itself a checkpoint.
        CheckpointError: what was saved does not fit this run, or cannot be used.
        OSError: no checkpoint could be written there.
        LaunchError: another run saves itself there.
    """

    def begin(run: RunView) -> Answers:
        options = run.context.options
        # Loading may fail on one device alone, for lack of memory say: the others must be told.
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
    """Take the directory in which a run saves itself, for the run alone."""
    if run.devices.trainer > 0:
        raise ValueError(
            "onefold run --checkpoint follows one Trainer, and this script makes a second one: "
            "call trainer.save and trainer.load in the script instead"
        )
    if (directory / RUN).exists():
        raise ValueError(
            f"--checkpoint {directory} is the folder of one checkpoint: expected the directory "
            f"that holds it, {directory.parent}"
        )
    lock = lock_of_checkpoints(directory)
    if run.devices.has_lead:
        # Now, as a full or read-only disk is better found before the first hours of training.
        try_directory(directory)
        lock.acquire(run.context.options.grace_period_s)
    return lock


class Answers(Hook):
    """Answers the calls that a resumed script makes again.

    Args:
        run: the run.
        resumption: where it goes on.
    """

    def __init__(self, run: RunView, resumption: Resumption) -> None:
        self._run, self._resumption = run, resumption
        run.position.reached = self._reached
        at_good_end(self.finish)

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Answer a call that was made before; have others act where the run goes on."""
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
                return None  # all that is asked of the averages comes from the record
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
            raise failure  # on all devices alike
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
        if asked.data is not None:  # it goes through data, by a model of another time
            resumption.note_result(asked.words)
        return make()

    @contextmanager
    def around(self, asked: ScriptCall) -> Iterator[None]:
        """Undo what a block does that was made before."""
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
        """Warn of a script that has not come to where its run goes on."""
        if not self._run.left():
            self._resumption.finish()

    def close(self) -> None:
        """Take nothing more from the checkpoint."""
        self._resumption.close()


class Resumption:
    """The part of a resumed script that is done; all devices make the same calls.

    Args:
        run: the run.
        found: the checkpoint that it goes on from; None if there is none.
    """

    def __init__(self, run: RunView, found: LoadedCheckpoint | None) -> None:
        self._run, self._position = run, run.position
        self._weights = KeptWeights(run.engine.context.module, lambda: run.position.step)
        run.checkpoints.kept = self._weights.kept
        self._found = found
        """The checkpoint, until its values are taken for good."""
        self.replay: ScriptReplay | None = None
        """Answers what the script asks for once more; None where no record knows it."""
        self._quiet = ExitStack()
        """What is undone where the script comes to the place where its run goes on."""
        self._place: Place = None
        self._shown = self._over = self._warned = False
        self._is_current = False
        """Whether the model has, for good, the values that it had where the script is."""
        self._settings: object = None
        """The optimizer's settings as they were shown, if no record knows what the script set."""
        self._block = ""
        """The line of the last block that acted on nothing, if it may have been meant to act."""
        if found is not None:
            self._adopt(found)
        if not self.replaying:
            show_output()

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
            if self.replay.kept_entries is not None:
                self._run.note_left_out(self.replay.kept_entries)
        self.catch_up()
        return None

    def _adopt(self, found: LoadedCheckpoint) -> None:
        """Put the run where a checkpoint was made; its values come later."""
        saved, folder, run = found.stored.run, found.stored.folder, self._run
        self._place = saved["place"]
        # Its values are taken later, so another average than its own is refused until then.
        run.averaging().expected = saved_rule(saved, found.allow_changed)
        seen = {"entries": 0} if found.allow_changed else saved["recorded"]
        path, exchange = Path(run.context.options.recorded_in) / FILE, run.engine.context.exchange
        reads = run.devices.has_lead
        entries = entries_for_all(exchange, path, seen, checkpoint=folder, reads=reads)
        if reads:
            step, without = saved["step"], ", without a record that answers the script"
            note = without if step and not entries else ""
            tell(f"going on after step {step}: {folder}{note}")
        run.checkpoints.adopt_run(found, _ADVICE)
        if not entries:
            self._position.go_to(saved, found.allow_changed)
        else:
            self._position.expect(saved)
            device = run.engine.context.replicas[0].device
            self.replay = ScriptReplay(entries, device, ended=self._place == "end")
            self._position.replaying = lambda: self.answering
            self._position.next_batch = self.replay.next_batch
            for optimizer in optimizers_in(run.engine.context.update.optimizer).values():
                # Or PyTorch would warn of schedulers that are stepped before the first update.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            # All of its parts: a script may call one of several models, or a layer.
            for module in run.engine.context.module.modules():
                # A function, which a copy of the model shares: of a method it would copy `self`.
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
        """After which step the run goes on, until it does; else 0."""
        return 0 if self._found is None else int(self._found.stored.run["step"])

    @property
    def _where(self) -> str:
        assert self._found is not None
        stored = self._found.stored
        return f"after step {stored.run['step']} from {stored.folder}"

    def reached(self, where: Reached) -> None:
        """Show or take the values where the script begins an epoch or a pass, or is past them."""
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
        if self._place == "end" and self.replay is None and self._shown:
            self._warn_of_settings()
        self._load(self._found)

    def _warn_of_settings(self) -> None:
        now = settings_of(self._run.engine.context.update.optimizer)
        if now != self._settings:
            self._warn(
                "the optimizer's settings %s, as the script has set them, act on nothing: the run "
                "that had ended, which this one goes on with %s, has no record of what the script "
                "had set then, so its settings are used, %s. Set them in a loop over "
                "trainer.epochs, or behind the first new step",
                *(now, self._where, self._settings),
            )

    def note_answer(self) -> None:
        """Take the values where the run was saved right behind a call that has been answered."""
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

    def end(self) -> None:
        """Take nothing more from the checkpoint."""
        self._found = None
        self._quiet.close()
        self._weights.end()

    def close(self) -> None:
        """Take nothing more from the checkpoint, and look at the script's weights no more."""
        self.end()
        self._weights.close()

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
        later = self.answering and self._shown
        return later and self.replay is not None and self.replay.changes_model

    def _leaving(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """Have a function leave files as they are that the script writes again."""

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
        """Show the values of the checkpoint in the part that is done, if nobody has."""
        if self._found is not None and not self._shown:
            self._show(self._found)

    def _show(self, found: LoadedCheckpoint, *, settings: bool = False) -> None:
        # The rates of a script that is answered from the record are what they were at each step.
        settings |= self.replay is None
        # A loop may stand in a block of changes, as may a gradient.
        with self._run.changes().closed(self._position.step + 1):
            self._run.checkpoints.take(found, settings=settings)
        self._shown = True
        if self._has_later_values:
            self._weights.hide_model()
        if self.replay is None:
            self._settings = settings_of(self._run.engine.context.update.optimizer)
