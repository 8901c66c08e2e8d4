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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.call_digest import Call
from onefold.core.late import load
from onefold.core.options import LaunchContext
from onefold.core.settings import Settings
from onefold.data_order.position import Position
from onefold.errors import CheckpointError, DisagreementError
from onefold.launcher.membership import RunStopped, at_good_end, is_failing, register
from onefold.session.batches import Batches, Wait, read_now
from onefold.session.forming import check_devices, choose_devices, settle_process, shares_of
from onefold.session.run import RunSetup, RunTools, RunView
from onefold.session.user_parts import UserParts, keep_code_private
from onefold.step.agreement import digest_of
from onefold.step.assembly import assemble, hold, take_from_holders
from onefold.step.hook import ScriptCall
from onefold.step.result import Step, StepResult
from onefold.system.words import script_line
from onefold.update.scheduler import RunScheduler
from onefold.watch.timing import Span

if TYPE_CHECKING:
    from onefold.passes.averaged import Averaging
    from onefold.passes.modifying import Modifying

__all__ = ["Session"]

_Value = TypeVar("_Value")

_OVER = "trainer.close(), or after another Trainer has taken the model"

_log = logging.getLogger("onefold")


class Session:
    """One Trainer of a run, on this process's devices.

    Args:
        context: how this process was started.
        user: model, optimizers, losses and scheduler.
        settings: the settings of the run.
        devices: devices that the script has this process drive; None if it names none.
        shares: how many shards each device runs; None for even shares.
        tools: the tools around the steps.

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
        shares: Sequence[int] | None,
        tools: RunTools,
    ) -> None:
        self._context, self._process = context, os.getpid()
        start = RunSetup(context=context, user=user, settings=settings, losses=user.losses)
        tools.adjust(start)
        # Refused before any device is used or another device is contacted.
        user.check(start.settings)
        optimizer = user.optimizer
        if optimizer is None:
            stand_in = load("session.script_updates").stand_in
            optimizer = stand_in(user.module, context.options)
        start.optimizer = optimizer
        tools.prepare(start)
        self.settings, self.parts = settings, user = start.settings, user
        self.devices = choose_devices(context, devices, shards=settings.shards, module=user.module)
        keep_code_private(user, settings)
        check_devices(self.devices.own_devices.values(), settings)
        chosen = shares_of(self.devices, settings.shards, shares)
        # Before the engine, whose first additions must have the run's number of threads.
        settle_process(self.devices, settings)
        # Only now, as a Trainer whose arguments are refused takes nothing.
        take_from_holders(user.module)
        self.engine = assemble(
            user.module,
            optimizer,
            start.losses,
            settings=settings,
            devices=self.devices,
            shares=chosen,
            scheduler=user.scheduler,
            stages=user.stages,
            joined=register,
        )
        self.hooks = self.engine.hooks
        self.asked_to_stop = False
        """Whether the script is to stop; the same on all devices, as a step agrees on it.

        Not where the run saves itself: a resumed script, which is not asked again, would differ.
        """
        self._scheduler = RunScheduler(user.scheduler, settings.scheduler_every, optimizer)
        self.position = Position(self._scheduler.end_epoch)
        self._left = self._is_over = False
        # From here on the model belongs to this Trainer, and what is written to it is looked at in
        # the end.
        hold(user.module, self.close)
        this = weakref.ref(self)
        at_good_end(lambda: None if (it := this()) is None else it.refuse_raced())
        self.batches = Batches(self.engine, self.devices, self.position, self.whole)
        """Makes loaders, and cuts what steps are given."""
        self.run = self._run()
        """What the tools of the run see."""
        tools.build_hooks(self.run)

    def _run(self) -> RunView:
        return RunView(
            context=self._context,
            engine=self.engine,
            devices=self.devices,
            position=self.position,
            scheduler=self._scheduler,
            changes=lambda: self.changes,
            averaging=lambda: self.averaging,
            batches=self.batches,
            telling_others=self.telling_others,
            count=self._count,
            left=lambda: self._left,
        )

    @cached_property
    def changes(self) -> Modifying:
        """The block in which a script may change the model."""
        made: Modifying = load("passes.modifying").Modifying(self.engine)
        return made

    @cached_property
    def averaging(self) -> Averaging:
        """The averages of the model, if the run keeps any."""
        made: Averaging = load("passes.averaged").Averaging(self.engine)
        return made

    @cached_property
    def gradients(self) -> Any:
        """The `GradientSteps` of this session; see `Trainer.gradient`."""
        return load("session.script_updates").GradientSteps(self)

    def set_shares(self, counts: Sequence[int]) -> None:
        """Have each device run this many shards from the next batch on.

        Raises:
            TypeError, ValueError: the counts are no shares of this run.
        """
        shares = shares_of(self.devices, self.settings.shards, counts)
        self.engine.assignment = self.engine.assignment.with_shares(shares)

    def whole(self, batch: ShardedBatch) -> Any:
        """Bring the payload of all of a batch's shards to every device, on the host."""
        with self.telling_others():
            batch = read_now(batch)
            asked = ScriptCall("payloads", given=batch)
            collectives = load("passes.collectives")
            text = self.hooks.call(asked, lambda: collectives.written_shards(asked.given.shards))
            self.engine.agree(digest_of(batch, self.position.step + 1, Call.GATHER, loss=0))
            return collectives.gather_batch(
                self.engine.context.exchange, self.devices.own, text, batch
            )

    def result(self, words: str, make: Callable[[], _Value]) -> _Value:
        """What a call gives to the script, which hooks may have answered."""
        value: _Value = self.hooks.call(ScriptCall("result", words=words), make)
        return value

    def save(self, directory: Path, **choices: Any) -> Path:
        """Write a checkpoint; see `Trainer.save`."""
        choices |= {"line": script_line()}
        asked = ScriptCall("save", given=directory.absolute(), choices=choices)
        with self.telling_others():
            folder: Path = self.hooks.call(
                asked, lambda: self.run.checkpoints.save(asked.given, **asked.choices)
            )
            return folder

    def load(self, directory: Path, **choices: Any) -> Any:
        """Go on from a checkpoint; see `Trainer.load`."""
        asked = ScriptCall("load", given=directory.absolute(), choices=choices)
        try:
            with self.telling_others(but=CheckpointError):
                return self.hooks.call(
                    asked, lambda: self.run.checkpoints.load(asked.given, **asked.choices)
                )
        finally:
            if "gradients" in vars(self):
                self.gradients.forget()

    @property
    def replaying(self) -> bool:
        """Whether a resumed script runs through what is done."""
        return bool(self.hooks.call(ScriptCall("replaying"), lambda: False))

    def step(self, batch: object, loss: str | None = None, dim: int = 0) -> Step:
        """Make one update; see `Trainer.step`."""
        name = self.parts.loss_name(loss)
        if self.parts.optimizer is None:
            raise RuntimeError(load("session.script_updates").NO_STEP)
        asked = ScriptCall("step", given=batch, name=name, dim=dim)
        step: Step = self.hooks.call(asked, partial(self._step, asked))
        return step

    def _step(self, asked: ScriptCall) -> Step:
        engine, name = self.engine, asked.name
        # Drop the times of a step that failed, if the script survived it.
        engine.take_spans()
        cut, waited = self.batches.cut(asked.given, asked.dim)
        with self.telling_others():
            self.start_step(asked, cut)
            with self.hooks.around(asked):
                assert asked.batch is not None
                stop = asked.asked_to_stop
                outcome = engine.step(asked.batch, asked.number, name=name, asked_to_stop=stop)
            self._scheduler.note_step(self.position.here, name, updates=outcome.verdict.updates)
        # The step is done for everybody. The position follows before anything else can fail, or a
        # checkpoint might count the batch as unused.
        self.note_done(cut, outcome)
        engine.end_step()
        return self.told(asked, outcome, waited)

    def start_step(self, asked: ScriptCall, cut: ShardedBatch) -> None:
        """Check a step before all devices begin it."""
        self.engine.agreement.refuse_torn(Call[asked.kind.upper()])
        asked.cut = asked.batch = cut
        asked.number = self.position.step + asked.begins
        if asked.begins:
            self._scheduler.check_step(self.position.here)

    def note_done(self, cut: ShardedBatch | None, outcome: StepResult) -> None:
        """Note that a step is done; None for one that was done before."""
        self.asked_to_stop |= outcome.verdict.stops and not self.hooks.saves_run
        if cut is not None:
            self.position.note_step(cut)

    def told(self, asked: ScriptCall, outcome: StepResult, waited: Wait) -> Step:
        """A step that is made, of which all hooks are told."""
        cut = asked.cut
        assert cut is not None
        spans, own = self.engine.take_spans(), self.devices.own[0]
        spans[own].insert(0, Span("data", "batch", *waited))
        step = Step(asked.number, cut.samples, cut.epoch, outcome, spans[own], asked.name)
        if asked.begins:
            for tell in self.hooks.after_step:
                tell(asked, step, spans)
        return step

    def _count(self, asked: ScriptCall, step: Step, batch: ShardedBatch | None) -> Step:
        """Count a step that a hook has answered, and tell all hooks of it."""
        if batch is None:
            self.position.step += 1
        else:
            self.position.note_step(batch)
        step = replace(step, number=self.position.step)
        for tell in self.hooks.after_step:
            tell(asked, step, {})
        return step

    @contextmanager
    def modifying(self, *, optimizer_state: bool | None) -> Iterator[None]:
        """Open the block in which the model may be changed; see `Trainer.modifying`."""
        asked = ScriptCall("modifying")
        with (
            self.telling_others(),
            self.hooks.around(asked),
            self.changes.block(self.position.step + 1, state=optimizer_state),
        ):
            yield
            for note in asked.inside:
                note()

    def close(self) -> None:
        """Leave the run; see `Trainer.close`."""
        # The last save needs all devices. If this script is failing, the others do not come: leave
        # it to the failure, which ends the run.
        failing = is_failing()
        saves_with_others = self.hooks.saves_run and self.engine.context.with_others
        if saves_with_others and not self._left and failing:
            return
        self.hooks.finish()
        if not self._is_over:
            with self.telling_others():
                self._leave(together=not failing and not self._left)
        self._left = True
        self.hooks.close()
        self.engine.context.exchange.close()

    def drop(self) -> None:
        """Leave the model to the script, which has no Trainer any more; waits for nobody."""
        # A run that saves itself ends with its program, which saves the model as it is then.
        if self._is_over or self.hooks.saves_run or os.getpid() != self._process:
            return
        try:
            self.engine.refuse_raced()
        except DisagreementError as error:
            at_good_end(partial(_raise, error))  # nobody hears what is raised here
        self._leave(together=False)
        self.hooks.close()

    def refuse_raced(self) -> None:
        """Refuse parameters of which the values are left to chance, at the end of the script."""
        if not self._is_over:
            self.engine.refuse_raced()

    def _leave(self, *, together: bool) -> None:
        self._is_over = True
        self.engine.leave(self.position.step + 1, _OVER, together=together)

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
            load("system.output").show_output()  # the script may print what it catches
            if but is None or not isinstance(error, but):
                # Alone, nobody else is left waiting: a script that survives the error may go on.
                self._left |= self.engine.context.with_others
                self.engine.context.exchange.close(error)
            raise


def _raise(error: Exception) -> None:
    raise error
