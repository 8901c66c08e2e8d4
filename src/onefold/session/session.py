"""The lifetime of a Trainer in a run.

`Trainer` is the public interface and computes nothing; `Engine` computes and does not know the run.
`Session` connects them: it orders steps, checkpoints, observers and stop requests, and reports
failures to the other devices.

Note: reporting failures
------------------------
An exception on one device leaves the others waiting for a call that it never makes. So code that
may raise between two collective calls runs in `telling_others`, which closes the exchange with the
exception as the reason: every wait then ends with it. Failures before the first collective call (an
invalid argument in ``__init__``) reach the others when this process exits.
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
from onefold.core.call_digest import Call, StepRequests
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
from onefold.shard.kernels import thread_modes
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
        context: launch context of this process.
        user: model, optimizers, losses and scheduler.
        settings: settings of the run.
        devices: devices that the script assigns to this process; None if it names none.
        shares: number of shards per device; None for even shares.
        tools: tools that add hooks to the run.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
        LaunchError: a device does not exist.
        DisagreementError: another device of the run received different arguments.
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
        # Check before any device is used or another device is contacted.
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
        # Before the engine is created: its first sums must use the run's number of threads.
        settle_process(self.devices, settings)
        # After all checks: a Trainer that raises must not take the model from its holder.
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
        """Whether the script is to stop. All devices have the same value, because a step agrees on
        it.

        It stays False if the run saves itself: a resumed script is replayed without the request,
        and would differ.
        """
        self._scheduler = RunScheduler(user.scheduler, settings.scheduler_every, optimizer)
        self.position = Position(self._scheduler.end_epoch)
        self._left = self._is_over = False
        # The model now belongs to this Trainer, and the end of the script checks it for writes.
        hold(user.module, self.close)
        this = weakref.ref(self)
        at_good_end(lambda: None if (it := this()) is None else it.refuse_raced())
        self.batches = Batches(self.engine, self.devices, self.position, self.whole)
        """Creates loaders, and cuts the batches of steps into shards."""
        self.run = self._run()
        """The run as its tools see it."""
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
        """The block in which a script may modify the model."""
        made: Modifying = load("passes.modifying").Modifying(self.engine)
        return made

    @cached_property
    def averaging(self) -> Averaging:
        """Averages of the model, if the run keeps any."""
        made: Averaging = load("passes.averaged").Averaging(self.engine)
        return made

    @cached_property
    def gradients(self) -> Any:
        """`GradientSteps` of this session; see `Trainer.gradient`."""
        return load("session.script_updates").GradientSteps(self)

    def set_shares(self, counts: Sequence[int]) -> None:
        """Assign this many shards to each device from the next batch on.

        Raises:
            TypeError, ValueError: the counts are not valid shares of this run.
        """
        shares = shares_of(self.devices, self.settings.shards, counts)
        self.engine.assignment = self.engine.assignment.with_shares(shares)

    def whole(self, batch: ShardedBatch) -> Any:
        """Gather the payloads of all shards of a batch to every device, on the host."""
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
        """Return the result of a call; a hook may replay it."""
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
        """Resume from a checkpoint; see `Trainer.load`."""
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
        """Whether a resumed script is being replayed."""
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
        # Drop the spans of a failed step whose error the script caught.
        engine.take_spans()
        cut, waited = self.batches.cut(asked.given, asked.dim)
        with self.telling_others():
            self.start_step(asked, cut)
            with self.hooks.around(asked):
                assert asked.batch is not None
                requests = asked.requests
                outcome = engine.step(asked.batch, asked.number, name=name, requests=requests)
            self._scheduler.note_step(self.position.here, name, updates=outcome.verdict.updates)
        # All devices have committed the step. Update the position first, or a checkpoint could
        # count the batch as unused.
        self.note_done(cut, outcome)
        engine.end_step()
        return self.finish_step(asked, outcome, waited)

    def start_step(self, asked: ScriptCall, cut: ShardedBatch) -> None:
        """Check a step before all devices begin it."""
        self.engine.agreement.refuse_torn(Call[asked.kind.upper()])
        asked.cut = asked.batch = cut
        asked.number = self.position.step + asked.begins
        if asked.begins:
            self._scheduler.check_step(self.position.here)

    def note_done(self, cut: ShardedBatch | None, outcome: StepResult) -> None:
        """Record a finished step; ``cut`` is None if its batch was counted before."""
        stops = StepRequests.STOP in outcome.verdict.requests
        self.asked_to_stop |= stops and not self.hooks.saves_run
        if cut is not None:
            self.position.note_step(cut)

    def finish_step(self, asked: ScriptCall, outcome: StepResult, waited: Wait) -> Step:
        """Return a finished step, after calling all hooks with it."""
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
        """Count a step that a hook returned without computing it, and call all hooks with it."""
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
        """Open the block in which the script may modify the model; see `Trainer.modifying`."""
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
        # The last save needs all devices. If this script is failing, the others do not join it:
        # return and let the failure end the run.
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
        """Return the model to a script that dropped its Trainer, without waiting for devices."""
        # A run that saves itself ends with its process, which then saves the model's final state.
        if self._is_over or self.hooks.saves_run or os.getpid() != self._process:
            return
        try:
            self.engine.refuse_raced()
        except DisagreementError as error:
            at_good_end(partial(_raise, error))  # an exception raised here would be ignored
        self._leave(together=False)
        self.hooks.close()

    def refuse_raced(self) -> None:
        """Raise at the end of the script if this process wrote to shared parameters, a race."""
        if not self._is_over:
            self.engine.refuse_raced()

    def _leave(self, *, together: bool) -> None:
        self._is_over = True
        self.engine.leave(self.position.step + 1, _OVER, together=together)

    @contextmanager
    def telling_others(self, but: type[Exception] | None = None) -> Iterator[None]:
        """Report an exception to the other devices, except ``but``, which they raise too."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this Trainer was created in process {self._process} and cannot be used in its "
                f"forked child {os.getpid()}, which would repeat its work. Use it only in the "
                f"process that created it"
            )
        restore_modes = thread_modes(self.engine.context.first.device.type)
        try:
            yield
            self.engine.agreement.note_call(0)
        except RunStopped:
            raise  # all devices raise it, and everything is saved
        except BaseException as error:
            try:
                self.engine.context.restore()
                restore_modes()
            finally:
                # Before the script catches the error and prints.
                load("system.output").show_output()
                if but is None or not isinstance(error, but):
                    # A single device leaves no peer waiting: a script may catch its error.
                    self._left |= self.engine.context.with_others
                    self.engine.context.exchange.close(error)
            raise


def _raise(error: Exception) -> None:
    raise error
