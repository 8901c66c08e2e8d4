"""A Trainer's part in a run, from its start to its end.

The Trainer is the face and computes nothing; the engine computes and knows no run. What lies
between them is here: the order in which a step, its checkpoints, its observers and a request to
stop follow each other, and who is told of a failure.

Note: who is told of a failure
------------------------------
An exception on one device leaves the others waiting for a call that it never makes. So whatever may
raise between two calls to the others runs in `telling_others`, which closes the exchange with the
reason: every wait then ends with it. What fails before any such call (an unusable argument in
``__init__``) is found by the others when this process ends.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from onefold.checkpoint.autosave import Autosave, Resumption
from onefold.checkpoint.resume import Checkpoints
from onefold.core.batch import ShardedBatch
from onefold.core.calldigest import Call
from onefold.core.context import LaunchContext
from onefold.core.settings import AS_GIVEN, Settings
from onefold.data_order.loader import Loader
from onefold.data_order.position import Position, Reached
from onefold.data_order.reader import Collate, SizedDataset
from onefold.errors import DisagreementError
from onefold.exchange.progress import places_of, progress_of
from onefold.passes.averaged import Averaging
from onefold.passes.collectives import gather_batch, written_shards
from onefold.passes.evaluation import DataCall, ScoreFunction
from onefold.passes.modifying import Modifying
from onefold.passes.statistics import recompute_statistics
from onefold.record.entries import StepEntry
from onefold.record.replay import Replay
from onefold.run.batches import Batches, Wait, read_now
from onefold.run.forming import check_devices, choose_devices, plan_of, settle_process
from onefold.run.gradientsteps import GradientSteps, Place
from onefold.run.hostwatch import note_places
from onefold.run.membership import RunStopped, at_good_end, is_failing, only_noting, register
from onefold.run.observers import Observers
from onefold.run.planning import plan_instead
from onefold.run.recordedcalls import RecordedCalls
from onefold.run.userparts import UserParts, keep_code_private
from onefold.step.agreement import digest_of
from onefold.step.assembly import assemble, hold, take_from_holders
from onefold.step.audit import Auditor
from onefold.step.engine import Engine
from onefold.step.result import Step, StepResult
from onefold.system.output import show_output
from onefold.system.process import STOPPED_CODE, requests_by_signals
from onefold.update.byscript import NO_STEP, ByScript, chosen_optimizer
from onefold.update.schedule import RunSchedule
from onefold.verifying import Verifying
from onefold.watch.timing import Span

__all__ = ["Session"]

_Value = TypeVar("_Value")

_OVER = "trainer.close(), or after another Trainer has taken the model"

_log = logging.getLogger("onefold")


class Session:
    """One Trainer of a run, on this process's devices.

    Args:
        context: how this process was started.
        user: model, optimizers, losses and schedule.
        settings: the settings of the run.
        devices: devices that the script has this process drive; None if it names none.
        plan: how many shards each device runs; None for even shares.

    Raises:
        TypeError, ValueError: an argument is of a wrong type or value.
        LaunchError: a device does not exist.
        DisagreementError: another device of the run was given something else.
    """

    def __init__(
        self,
        context: LaunchContext,
        user: UserParts,
        settings: Settings,
        *,
        devices: Sequence[str | torch.device] | None,
        plan: Sequence[int] | None,
    ) -> None:
        if context.options.probe_mathematics:
            # The loss function is compared, not how it is computed, which would hide it. Compiled
            # code would not see the random draws either that the comparison replaces.
            settings = replace(settings, precision=AS_GIVEN, microbatch=None, compile=False)
        # Refused before any device is touched or anybody else is contacted.
        user.check(settings)
        optimizer = chosen_optimizer(user.optimizer, user.module, context.options)
        plan_instead(context, user, optimizer, settings)
        self.settings, self.parts = settings, user
        # Before others are waited for: a notice that comes meanwhile would end this process.
        self._requests = requests_by_signals(context.options.stop_signals)
        self.devices = choose_devices(context, devices, shards=settings.shards, module=user.module)
        keep_code_private(user, settings)
        check_devices(self.devices.own_devices.values(), settings)
        chosen = plan_of(self.devices, settings.shards, plan)
        # Before the engine, whose first additions must have the run's number of threads.
        settle_process(self.devices, settings)
        # Only now, as a Trainer whose arguments are refused takes nothing.
        take_from_holders(user.module)
        self.verifying = Verifying(context, user.module, user.losses)
        self.engine = assemble(
            user.module,
            optimizer,
            self.verifying.losses,
            settings=settings,
            devices=self.devices,
            plan=chosen,
            schedule=user.schedule,
            stages=user.stages,
            joined=register,
        )
        self.changes = Modifying(self.engine)
        """The block in which a script may change the model."""
        self.averaging = Averaging(self.engine)
        """The averages of the model, if the run keeps any."""
        self.verifying.begin(self.engine, self.devices)
        self.asked_to_stop = False
        """Whether the script is to stop; the same on all devices, as a step agrees on it.

        Not where the run saves itself: a resumed script, which is not asked again, would differ.
        """
        self._schedule = RunSchedule(user.schedule, settings.schedule_every, optimizer)
        self.position = Position(self._schedule.end_epoch)
        self.gradients = GradientSteps(on_lead=self.devices.has_lead)
        """Which calls of `gradient` belong to one step."""
        self.checkpoints = Checkpoints(
            self.engine, self.averaging, self.devices, self.position, self._schedule
        )
        self._context, self._process = context, os.getpid()
        self._left = self._is_over = False
        # From here on the model belongs to this Trainer, and what is written to it is looked at in
        # the end.
        hold(user.module, self.close)
        this = weakref.ref(self)
        at_good_end(lambda: None if (it := this()) is None else it.refuse_raced())
        self._progress, self._places = progress_of(context), places_of(context)
        # May find a checkpoint, so what starts from the step that is done comes after it.
        self._begin_saving()
        run = self.engine, self.devices, self.position
        self.batches = Batches(*run, self.verifying, self.resumption, self.whole)
        """Makes loaders, and cuts what steps are given."""
        self.recording = RecordedCalls(*run, self.checkpoints, self.resumption)
        """Writes down what is computed, and answers a script that is resumed."""
        self._watch_steps()
        self.note_progress()
        note_places(context, self.engine, self.batches)
        with self._seen_whole():
            watches = {each.number: each.watch for each in self.engine.context.replicas}
            self.observers = Observers(self.devices, user.module, watches)

    def _watch_steps(self) -> None:
        """Have steps audited, looked into and written down, as the launcher asks for it."""
        options, engine = self._context.options, self.engine
        if options.audit:
            run, note = (engine.context, engine.placement, options), self.recording.note_audit
            engine.auditor = Auditor(*run, note)
        if options.inspection:
            self.recording.inspect(Path(options.inspection), self.batches.datasets)
        elif options.recorded_in and not self.devices.trainer:
            with self.telling_others():
                self.recording.begin(Path(options.recorded_in))

    def _begin_saving(self) -> None:
        """Refuse what could not be saved while nothing is lost yet, and resume what was saved."""
        with_run = (self.engine, self.changes, self.checkpoints, self.position)
        self.resumption = Resumption(*with_run, on_lead=self.devices.has_lead)
        """Has the values of a checkpoint take effect where the script goes on."""
        try:
            self.checkpoints.check_can_be_saved()
        except TypeError as error:
            if self._context.options.checkpoint:
                raise
            if self.devices.has_lead:  # a run that saves nothing may go on
                _log.warning("trainer.save will refuse this run: %s", error)
        # Loading may fail on one device alone, for lack of memory say: the others must be told.
        self._autosave: Autosave | None = None
        if self._context.options.checkpoint and self._progress is not None:
            with self.telling_others():
                self._autosave = Autosave(
                    *(self.devices, self.checkpoints, self.position),
                    *(self._progress, self.resumption),
                    blocks=lambda: self.changes.blocks,
                )
            self.position.reached = self._reached
            at_good_end(self._finish)

    def set_plan(self, counts: Sequence[int]) -> None:
        """Have each device run this many shards from the next batch on.

        Raises:
            TypeError, ValueError: the counts are no plan for this run.
        """
        plan = plan_of(self.devices, self.settings.shards, counts)
        self.engine.assignment = self.engine.assignment.with_plan(plan)

    def whole(self, batch: ShardedBatch) -> Any:
        """Bring the payload of all of a batch's shards to every device, on the host."""
        with self.telling_others():
            batch = read_now(batch)
            text = written_shards(self.verifying.plain(batch).shards)
            self.engine.agree(digest_of(batch, self.position.step + 1, Call.GATHER, loss=0))
            return gather_batch(self.engine.context.exchange, self.devices.own, text, batch)

    def over_data(
        self,
        call: Call,
        compute: Callable[[Engine, ScoreFunction, Loader, DataCall], dict[str, Any]],
        function: ScoreFunction,
        model: str | None,
        chosen: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Make a call over a data set, in its order, which all devices must make."""
        part = self.parts.on_part(function, model)
        batches = self.batches.loader(**chosen)
        with self.telling_others():
            self.checkpoints.check()
            self.engine.check_last_step()
            size = batches.track.size
            made = DataCall(call, self.position.step + 1, size.samples, size.batch_size, function)
            said, data = (call, function, model), batches.dataset

            def ask() -> dict[str, Any]:
                self.resumption.note_result(call.words)
                work = partial(compute, self.engine, part, batches, made)
                found: dict[str, Any] = self.verifying.result(said, data, work)
                return found

            return self.recording.answered(call.words, ask)

    @contextmanager
    def averaged(
        self,
        data: SizedDataset | None,
        batch_size: int | None,
        *,
        workers: int,
        collate: Collate | None,
    ) -> Iterator[None]:
        """Open the block in which the model holds its averages; see `Trainer.averaged`."""
        step = self.position.step + 1
        if data is None:
            with self.verifying.another_model(), self.averaging.block(step):
                yield
            return
        if len(self.parts.losses) > 1:
            raise ValueError(
                "update_bn runs the model by the loss, and this Trainer has several: expected the "
                "block without update_bn, where statistics are averaged like everything else"
            )
        # Before anything is shown: what is unusable is refused here.
        batches = self.batches.loader(data, collate, batch_size=batch_size, workers=workers)
        with self.verifying.another_model(), self.averaging.block(step, recomputes=True):
            size = batches.track.size
            call = DataCall(Call.UPDATE_BN, step, size.samples, size.batch_size, self.engine.loss)
            # In the part that is done all that is asked of the averages comes from the record.
            if not self.resumption.answering:
                recompute_statistics(self.engine, batches, call)
            yield

    def step(self, batch: object, loss: str | None = None, dim: int = 0) -> Step:
        """Make one update; see `Trainer.step`."""
        name = self.parts.loss_name(loss)
        if isinstance(self.engine.context.update.optimizer, ByScript):
            raise RuntimeError(NO_STEP)
        if (replay := self.resumption.answers(StepEntry)) is not None:
            return self._step_of_record(self.batches.cut(batch, dim)[0], name, replay)
        if (same := self.verifying.step_again(name)) is not None:
            return self._note_again(batch, same)
        # Drop the times of a step that failed, if the script survived it.
        self.engine.take_spans()
        cut, waited = self.batches.cut(batch, dim)
        number = self.position.step + 1
        with self.telling_others():
            self._before_step(cut, name, gradient=False)
            self.recording.look(cut, number, name)
            try:
                with self.verifying.step(cut, number, name) as given:
                    outcome = self.engine.step(
                        given, number, name=name, asked_to_stop=self._is_asked_to_stop()
                    )
            except Exception as error:
                self.recording.note_failure(error)
                raise
            self._schedule.note_step(self.position.here, name, updates=outcome.verdict.updates)
        # The step is done for everybody. The position follows before anything else can fail, or a
        # checkpoint might count the batch as unused.
        self.asked_to_stop |= outcome.verdict.stops and self._autosave is None
        self.position.note_step(cut)
        self.engine.end_step()
        self.note_progress()
        step, spans = self._made(number, cut, outcome, name, waited)
        self._observe(step, spans, cut, gradient=False)
        self._after_step(cut, stop=outcome.verdict.stops, updated=True)
        self.verifying.note_step(step)
        return step

    def _step_of_record(self, cut: ShardedBatch, name: str, replay: Replay) -> Step:
        """The step with a batch as it was before the run was resumed; nothing is computed."""
        if (failure := replay.failure()) is not None:
            raise failure  # on all devices alike
        with self.telling_others():
            self.resumption.show()
            outcome = replay.step(cut, name)
            self._schedule.note_step(self.position.here, name, updates=outcome.verdict.updates)
            self.position.note_step(cut)
            step = Step(self.position.step, cut.samples, cut.epoch, outcome, (), name)
            self.observers.tell_script(step)
            self.resumption.note_answer()
        return step

    def _observe(
        self,
        step: Step,
        spans: Mapping[int, Sequence[Span]],
        batch: ShardedBatch,
        *,
        gradient: bool,
    ) -> None:
        """Show a step that is done to all that watch the run."""
        self.recording.note_step(step, batch, gradient=gradient)
        with self._seen_whole():
            self.observers.observe(step, spans)

    def _made(
        self, number: int, cut: ShardedBatch, outcome: StepResult, name: str, waited: Wait
    ) -> tuple[Step, dict[int, list[Span]]]:
        """A step that is made, and its spans by device, the wait for its batch among them."""
        spans, own = self.engine.take_spans(), self.devices.own[0]
        spans[own].insert(0, Span("data", "batch", *waited))
        return Step(number, cut.samples, cut.epoch, outcome, spans[own], name), spans

    def _note_again(self, batch: object, same: Step) -> Step:
        """Count a step that is not computed, as the last one stands for it."""
        if isinstance(batch, ShardedBatch):
            self.position.note_step(batch)
        else:
            self.position.step += 1
        step = replace(same, number=self.position.step)
        self.observers.observe(step, {})
        return step

    def gradient(self, batch: object, loss: str | None = None, dim: int = 0) -> Step:
        """Leave a batch's gradient in ``.grad``; see `Trainer.gradient`."""
        engine, name = self.engine, self.parts.loss_name(loss)
        engine.take_spans()
        with self.telling_others():
            place = Place(self.position.step, self.changes.number, self.changes.blocks)
            again = self.gradients.goes_on(batch, place, name)
            if (same := self.verifying.step_again(name)) is not None:
                self.gradients.note(batch, place, name, begins=not again)
                return same if again else self._note_again(batch, same)
            cut, waited = self.batches.cut(batch, dim)
            with self.changes.closed(place.step + 1):
                if not again:
                    self._before_step(cut, name, gradient=True)
                number = place.step + (not again)
                if not again:
                    self.recording.look(cut, number, name)
                try:
                    with self.verifying.step(cut, number, name) as given:
                        outcome = engine.gradient(
                            given, number, name=name, asked_to_stop=self._is_asked_to_stop()
                        )
                except Exception as error:
                    self.recording.note_failure(error)
                    raise
                self.asked_to_stop |= outcome.verdict.stops and self._autosave is None
                self.gradients.note(batch, place, name, begins=not again)
                if not again:
                    # Its update is the script's, and comes later.
                    self.position.note_step(cut)
                    self.note_progress()
                    self._after_step(cut, stop=outcome.verdict.stops, updated=False)
        step, spans = self._made(number, cut, outcome, name, waited)
        if not again:
            self._observe(step, spans, cut, gradient=True)
            self.verifying.note_step(step)
        self.verifying.note_gradients()
        return step

    def _seen_whole(self) -> AbstractContextManager[None]:
        """Have all parameters on the devices of a run whose launcher looks at them."""
        looked_at = self._context.options.probe
        return self.engine.placement.unsharded() if looked_at else nullcontext()

    def _reached(self, where: Reached) -> None:
        with self.telling_others():
            self.resumption.reached(where)

    @contextmanager
    def modifying(self, *, optimizer_state: bool | None) -> Iterator[None]:
        """Open the block in which the model may be changed; see `Trainer.modifying`."""
        with self.telling_others(), self.recording.block() as note:
            block = self.changes.block(self.position.step + 1, state=optimizer_state)
            with self.verifying.another_model(), block:
                yield
                note()

    def _before_step(self, batch: ShardedBatch, loss: str, *, gradient: bool) -> None:
        """Save what is due.

        Raises:
            RunStopped: the run was asked to stop, and is saved.
        """
        self.checkpoints.check()
        self.resumption.begin_step()
        self.checkpoints.note_step(loss)
        self._schedule.check_step(self.position.here)
        if self._autosave is not None:
            self._autosave.check(batch, gradient=gradient)
            if self._autosave.before_step(batch):
                raise RunStopped(STOPPED_CODE)
        self.recording.begin_step()

    def _after_step(self, batch: ShardedBatch, *, stop: bool, updated: bool) -> None:
        """Note that a step is done, but for the script's own update, if it makes one."""
        if self._autosave is not None:
            with self.telling_others():
                self._autosave.after_step(batch, stop=stop, updated=updated)

    def close(self) -> None:
        """Leave the run; see `Trainer.close`."""
        # The last save needs all devices. If this script is failing, the others do not come: leave
        # it to the failure, which ends the run.
        failing = is_failing()
        saves_with_others = self._autosave is not None and self.engine.context.with_others
        if saves_with_others and not self._left and failing:
            return
        self._finish()
        if not self._is_over:
            with self.telling_others():
                self._leave(together=not failing and not self._left)
        self._left = True
        self.verifying.end()
        self.resumption.end()
        self.recording.close()
        self.engine.context.exchange.close()

    def drop(self) -> None:
        """Leave the model to the script, which has no Trainer any more; waits for nobody."""
        # A run that saves itself ends with its program, which saves the model as it is then.
        if self._is_over or self._autosave is not None or os.getpid() != self._process:
            return
        try:
            self.engine.refuse_raced()
        except DisagreementError as error:
            at_good_end(partial(_raise, error))  # nobody hears what is raised here
        self._leave(together=False)

    def refuse_raced(self) -> None:
        """Refuse parameters of which the values are left to chance, at the end of the script."""
        if not self._is_over:
            self.engine.refuse_raced()

    def _leave(self, *, together: bool) -> None:
        self._is_over = True
        self.engine.leave(self.position.step + 1, _OVER, together=together)

    def _finish(self) -> None:
        """Write everything that is still to be saved."""
        if self._autosave is not None and not self._left:
            with self.telling_others(), only_noting():
                self._autosave.finish()
                self.resumption.finish()
        with self.telling_others():
            self.checkpoints.finish()
        if self._autosave is not None:
            self._autosave.leave()

    @contextmanager
    def telling_others(self, but: type[Exception] | None = None) -> Iterator[None]:
        """Tell the other devices what is raised here, except ``but``, which they raise as well."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the Trainer was made in process {self._process}, and this is process "
                f"{os.getpid()}, a forked child of it: what it does would be done twice. Use the "
                f"Trainer where it was made"
            )
        try:
            yield
            self.engine.agreement.note_call(0)
        except RunStopped:
            raise  # on all devices alike, and everything is saved
        except BaseException as error:
            show_output()  # the script may print what it catches
            if but is None or not isinstance(error, but):
                # Alone, nobody else is left waiting: a script that survives the error may go on.
                self._left |= self.engine.context.with_others
                self.engine.context.exchange.close(error)
            raise

    def _is_asked_to_stop(self) -> bool:
        """Whether this process was asked to stop and can; others may not know of it yet.

        Devices see a signal at different times; the step makes one answer of it.
        """
        options, by_launcher = self._context.options, False
        if self._progress is not None:
            by_launcher = self._progress.stop_requested()
        by_launcher |= options.stops_after == self.position.step + 1
        return options.may_stop and (by_launcher or bool(self._requests))

    def note_progress(self) -> None:
        """Note which step is next: later failures are reported as in that step."""
        if self._places is not None:
            self._places.set_step(self._context.rank, self.position.step + 1)


def _raise(error: Exception) -> None:
    raise error
