"""Runs a step: agree, compute, judge, update, publish; or leaves its gradient to the script.

The replicas hold the model's state, the placement decides where it is stored, and the exchange
moves it between devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from onefold.core.assignment import Assignment
from onefold.core.batch import ShardedBatch
from onefold.core.call_digest import Agreed, Call, CallDigest
from onefold.core.late import load
from onefold.core.results import ShardResult, StepWeight, total_weight
from onefold.errors import DisagreementError, StateError
from onefold.placement.base import Before, Placement, StepContext, StepTotals
from onefold.shard.model_parts import ExternalModules, buffers_with_nan
from onefold.shard.replica import LossFunction, ShardTask
from onefold.step.agreement import Agreement, digest_of, refuse_unfrozen
from onefold.step.hook import Attempt, Hooks
from onefold.step.result import StepResult, objectives_of, verdict_of
from onefold.step.rules import (
    FiniteCheck,
    GradientRules,
    bad_gradient,
    write_gradient,
)
from onefold.update.norms import allow_clipping
from onefold.update.optimizers import Optimizers
from onefold.watch.timing import Span

if TYPE_CHECKING:
    from onefold.shard.compiling import EagerComparison
    from onefold.step.joint import JointShards, ValueExchange
    from onefold.step.microbatch import MicrobatchSearch

__all__ = ["Engine", "StepResult"]

_log = logging.getLogger("onefold")


class Engine:
    """Runs the steps of this process's devices, together with all other devices.

    Args:
        context: this process's part of the run.
        placement: where the model is stored.
        assignment: which device runs which shards and owns which parameters.
        losses: the user's loss functions, by name; each computes one shard.
        frozen: parameters that must stay frozen, by name.
        description: what all devices must have in common, in words.
    """

    def __init__(
        self,
        context: StepContext,
        placement: Placement,
        assignment: Assignment,
        losses: Mapping[str, LossFunction],
        frozen: Mapping[str, torch.nn.Parameter],
        description: Mapping[str, str],
    ) -> None:
        self.context, self.placement = context, placement
        self.description = description
        """Facts that all devices must share, in words: see `onefold.checks.description`."""
        self.assignment = assignment
        """Which device runs which shards. Another assignment may replace it between two steps."""
        self.losses = losses
        """The user's loss functions, by name."""
        self._frozen, settings, update = frozen, context.settings, context.update
        trained = context.parts.trained.values()
        self.objectives = objectives_of(losses, update.optimizer, trained, settings)
        """Each loss with its number and flags, by the name of the loss."""
        self.objective = next(iter(self.objectives.values()))
        """Objective of the current step, or of the last one."""
        self.external = ExternalModules(context.module, *losses.values(), context=context)
        """Modules that the losses use in addition to the model."""
        self.agreement = Agreement(context, placement, self.external)
        """Compares this process's state with the other devices at the start of each call."""
        self._comparison: EagerComparison | None = None
        if settings.compile:
            make = load("shard.compiling").EagerComparison
            by_user = context.compilers.by_user
            self._comparison = make(settings, self.external, notes=not by_user)
        self.rules = GradientRules(settings, update)
        """Divides, scales and clips each gradient."""
        self._cuts_shards = settings.microbatch is not None
        self._finite = FiniteCheck(settings, self.rules, context.table)
        self._has_warned = self._has_looked = False
        self._nan_before = buffers_with_nan(context.module)
        self.hooks = Hooks()
        """The tools of the run, called around its steps."""

    @property
    def loss(self) -> LossFunction:
        """The user's loss, if there is only one."""
        return next(iter(self.losses.values()))

    def end_step(self) -> None:
        """Note that the last step is complete, and that the position in the data includes it."""
        self.agreement.torn = ""

    def step(
        self, batch: ShardedBatch, number: int, *, name: str = "", requests: int = 0
    ) -> StepResult:
        """Update the parameters once; `onefold.exchange.exchange` describes the order of messages.

        Args:
            batch: the batch, with this process's shards of it.
            number: the number of the step.
            name: name of the loss.
            requests: `StepRequests` of this process to all devices.

        Raises:
            DisagreementError: another device made another call, or got another batch.
            LossError: a loss cannot be interpreted, is not finite, or depends on no parameter.
            StateError: a shard changed state that it must not change.
            PeerError: another device is lost or failed.
        """
        context = self.context
        agreed = self._agree_on_step(batch, number, Call.STEP, name, requests)
        totals, weight = self._compute(batch, number)
        outcome, failure = self._judge(totals, weight, agreed, now=False)
        if outcome.norm is not None and outcome.verdict.updates:
            with context.timed("update", "update"):
                self.follow_parameters()
                self.rules.clip(outcome.norm)
                # The model is inconsistent from here until `end_step`.
                self.agreement.torn = f"step {number}"
                context.update.around = self._around_update if self.hooks.updates else None
                context.update.step()
            if self._cuts_shards:
                self.microbatches.note_update()
        else:
            context.update.drop()
        # Free this step's totals before the next step allocates its own.
        del totals
        self._end_shards(failure)
        if outcome.verdict.updates:
            self._follow_average(name)
        with context.timed("exchange", "publish parameters"):
            # After this call other devices may write to the table, so it must not be read.
            self.placement.publish()
        if not context.alone:
            context.guard.note()
        return outcome

    def gradient(
        self, batch: ShardedBatch, number: int, *, name: str = "", requests: int = 0
    ) -> StepResult:
        """Leave the gradient of a batch in ``.grad`` of the user's parameters, on all devices.

        Takes the arguments and raises the errors of `step`. If the batch is skipped, ``.grad`` of
        every parameter is None.
        """
        context = self.context
        allow_clipping(context.parts.trained.values())
        agreed = self._agree_on_step(batch, number, Call.GRADIENT, name, requests)
        totals, weight = self._compute(batch, number)
        # The script reads the gradient as soon as this call returns, so check it now.
        outcome, failure = self._judge(totals, weight, agreed, now=True)
        del totals
        self._end_shards(failure)
        with context.timed("exchange", "share the gradient"):
            if outcome.norm is not None and outcome.verdict.updates:
                self.rules.clip(outcome.norm)
                write_gradient(context)
            else:
                context.update.drop()
                self.placement.publish()
        self.end_step()
        if not context.alone:
            context.guard.note()
        return outcome

    def inspect_step(
        self, batch: ShardedBatch, number: int, *, name: str = ""
    ) -> tuple[ShardTask, StepResult]:
        """Compute a step without making its update. Call it on all devices.

        Leaves the gradient in ``.grad`` of the user's parameters, without clipping or checks, on
        devices that keep all parameters.

        Returns:
            The task that all shards of the step share, and the result.
        """
        context = self.context
        agreed = self._agree_on_step(batch, number, Call.STEP, name, False)
        totals, weight = self._compute(batch, number)
        norm: torch.Tensor | None = None
        if weight.value > 0 and any(totals.gave):
            self.rules.load_totals(weight, totals, self._task)
            norm = self._norm(totals)
        numbers, weights = context.table.numbers.clone(), context.table.weights.tolist()
        if norm is not None and not self.placement.partitioned:
            write_gradient(context)
        else:
            context.update.drop()
            self.placement.publish()
        task = replace(self._task, scale=1.0, send=None)
        return task, StepResult(numbers, weights, weight.value, verdict_of(weight, agreed), norm)

    def _agree_on_step(
        self, batch: ShardedBatch, number: int, call: Call, name: str, requests: int
    ) -> Agreed:
        """Wait until all devices have started the same step."""
        context = self.context
        context.checks.advance()
        refuse_unfrozen(self._frozen)
        self.objective = self.objectives[name]
        optimizer = context.update.optimizer
        if isinstance(optimizer, Optimizers):
            optimizer.active = optimizer.of_loss(name)
        with context.timed("exchange", "agree"):
            # A single process compares nothing.
            head = CallDigest(call, number)
            if context.with_others:
                head = digest_of(batch, number, call, loss=self.objective.number)
            agreed = self.agree(head, requests=requests)
        self._warn_of_mode()
        return agreed

    def _warn_of_mode(self) -> None:
        """Warn once, on the lead, if the model is trained in evaluation mode."""
        if self._has_warned or self.context.module.training:
            return
        self._has_warned = True
        if self.context.leads:
            _log.warning(
                "the model is in evaluation mode: dropout and batch norm do not train. onefold "
                "leaves modes to the script. If this is not intended, call model.train() before "
                "the steps"
            )

    def _compute(self, batch: ShardedBatch, number: int) -> tuple[StepTotals, StepWeight]:
        """Compute the gradients and losses of all shards; twice if a loss requires it."""
        context, parts, several = self.context, self.context.parts, batch.shares.shards > 1
        objective, run_checks = self.objective, context.checks.run_checks
        objective.trained = parts.trainable()
        task = ShardTask(
            loss=objective.run,
            batch=batch,
            seed=context.settings.seed,
            step=number,
            modes=parts.modes.read() if several else b"",
            trainable=objective.trained if several else (),
            scale=self.rules.loss_scale,
            run_checks=run_checks,
            left_out=objective.left_out,
        )
        for add in self.hooks.tasks:
            task = add(task)
        if context.alone and not self.placement.may_write(task.shards):
            # A single device compares nothing between two steps, so changes by the user are valid.
            # Make the current values the reference, against which writes by shards are detected.
            context.guard.note(values=run_checks)
        self.agreement.torn = f"step {number}"
        try:
            computed = self._compute_task(task)
            if task.run_checks and not self._has_looked:
                self._has_looked = True
                self._refuse_new_generators(f"step {number}")
        except BaseException:
            # Ctrl-C may have interrupted the code that restores the state, so restore it again.
            context.undo(task)
            self.agreement.torn = ""
            raise
        self.agreement.torn = ""
        return computed

    def _refuse_new_generators(self, where: str) -> None:
        """Refuse a random generator that a shard created: nothing seeded it for the shard.

        Raises:
            StateError: a shard created one and keeps it.
        """
        context = self.context
        known = {id(each) for each in context.first.own_generators.all}
        context.find_generators(*self.losses.values())
        if any(id(each) not in known for each in context.first.own_generators.all):
            raise StateError(f"{where}: {load('shard.left_state').NEW_GENERATOR}")

    def _compute_task(self, task: ShardTask) -> tuple[StepTotals, StepWeight]:
        context, objective, number, batch = self.context, self.objective, task.step, task.batch
        # A single shard may change state outside the model, as a plain loop may, unless a resumed
        # run would lose that state.
        watched = task.run_checks and (task.shards > 1 or self.external.resumes)
        if task.run_checks:
            context.find_generators(*self.losses.values())
        with (
            self._finite,
            context.computing(run_checks=task.run_checks),
            context.keeping_generators(),
            self.external.watched(f"step {number}, the loss", wanted=watched),
        ):
            if self._cuts_shards:
                with self._gathered_if_needed():
                    task = self.microbatches.fitted(task)
            while True:
                with self._gathered_if_needed():
                    done: dict[int, ShardResult] = {}
                    if objective.gathers or objective.several_terms:
                        task, done = self._joint.prepared(objective, task)
                    self._task = task
                    before = self._before(task)
                    attempt = Attempt(task)
                    with self.hooks.around_compute(attempt):
                        totals = self.placement.compute(task, done, before)
                        weight = total_weight(context.table.weights.tolist(), batch.sizes, number)
                        known = not weight.gathers and not weight.late
                        attempt.whole = weight.terms == 1 and known
                if attempt.whole and not attempt.again:
                    self._gradient_taken = attempt.gradient_taken
                    return totals, weight
                if attempt.whole:
                    # A hook, such as the SDC check, rejected the result before any update.
                    self.placement.publish()
                    continue
                # The attempt showed that the loss gathers or has several terms. Remember it, and
                # start again on the path for such losses.
                objective.several_terms |= weight.terms > 1
                objective.gathers |= weight.gathers
                if self._comparison is not None:
                    self._comparison.check_gathering(gathers=weight.gathers)
                # Nothing was updated; this call lets the exchange reuse its table.
                self.placement.publish()

    def _before(self, task: ShardTask) -> Before:
        """Return the context manager that surrounds all shards of a device."""
        if self._comparison is None:
            return lambda replica: nullcontext()
        return partial(self._comparison.before, task=task, table=self.context.table)

    @cached_property
    def microbatches(self) -> MicrobatchSearch:
        """The microbatch size, and the search for it."""
        made: MicrobatchSearch = load("step.microbatch").MicrobatchSearch(self.context)
        return made

    @cached_property
    def _joint(self) -> JointShards:
        """Computes shards that gather from each other, or that need several denominators."""
        made: JointShards = load("step.joint").JointShards(self.context)
        return made

    @cached_property
    def _values(self) -> ValueExchange:
        """Exchanges the metrics and outputs that losses return."""
        made: ValueExchange = load("step.joint").ValueExchange(self.context)
        return made

    def _around_update(
        self, optimizer: torch.optim.Optimizer, segments: Sequence[torch.Tensor]
    ) -> None:
        """Run the optimizer's step inside the hooks that surround an update."""
        # Wrap from the innermost outward, so that the first hook is outermost.
        update: Callable[[], object] = optimizer.step
        for hook in reversed(self.hooks.updates):
            update = partial(hook, self._task, optimizer, segments, update)
        update()

    def _gathered_if_needed(self) -> AbstractContextManager[None]:
        """Gather all parameters for a step that cannot run with one stage at a time."""
        # Devices gather each other's stages in rounds of shards. Three passes run outside of these
        # rounds: the search for a microbatch size, joint shards, and the weights of loss terms.
        # Compiled code takes all of its parameters as arguments.
        known = self.objective
        tries = self._cuts_shards and self.microbatches.trials
        all_of_it = tries or self.context.compilers.compiled or known.gathers or known.several_terms
        return self.placement.gathered() if all_of_it else nullcontext()

    def _judge(
        self, totals: StepTotals, weight: StepWeight, agreed: Agreed, *, now: bool
    ) -> tuple[StepResult, str]:
        """Decide whether to update; return the step's result, and which value is not finite.

        Args:
            totals: the totals of all shards.
            weight: the weight of the whole batch.
            agreed: what all devices reported at the start of the step.
            now: whether to check loss and gradient at once, which blocks on a GPU.
        """
        context, task, seen = self.context, self._task, self._gradient_taken
        alone = weight.value <= 0 or seen is not None
        failure = self._finite.of_loss(task, now=now, alone=alone)
        norm: torch.Tensor | None = None
        if weight.value > 0 and not failure:
            with context.timed("exchange", "norm"):
                self.rules.load_totals(weight, totals, self._task)
                # If a hook takes the gradient, pass it the denominator, and do not check the norm.
                if seen is not None:
                    seen(weight.value)
                norm = self._norm(totals)
            if seen is None:
                failure, norm = self._finite.of_gradient(norm, task.step, self._name_bad_gradient)
            if norm is not None and self.rules.scale is not None:
                self.agreement.torn = f"step {task.step}"
                self.rules.end_step(overflow=bool(failure))
        verdict = verdict_of(weight, agreed, failure)
        # Call any() on a list: on a tensor with so few numbers it takes far longer.
        beside = any(context.table.kinds.tolist())
        values = self._values.of_step(task.batch, task.step) if beside else None
        # Clone the numbers: the script may read `Step.loss` long after the table is overwritten.
        numbers, weights = context.table.numbers.clone(), context.table.weights.tolist()
        return StepResult(numbers, weights, weight.value, verdict, norm, values), failure

    def _norm(self, totals: StepTotals) -> torch.Tensor:
        """Compute the norm of the whole gradient."""
        widened = self.context.update.storage.rounds or not self._task.is_plain
        share = self.context.exchange.transport.all_gather_rows
        return self.rules.norm(self._task.shards, totals, share, widened=widened)

    def _follow_average(self, name: str) -> None:
        """Update the EMA after a step whose loss it follows."""
        context, averages = self.context, self.context.update.averages
        if averages.rule is not None and averages.rule.after in ("", name):
            with context.timed("update", "average"):
                averages.follow(context.update.exact_values(), context.first.buffers.flat)

    def _end_shards(self, failure: str) -> None:
        """Combine the shards' buffers, unless a value of the step is not finite."""
        table, batch, run_checks = self.context.table, self._task.batch, self._task.run_checks
        # A value that is not finite would stay in running means forever, so buffers keep the values
        # from before the step.
        for replica in self.context.replicas if not failure else ():
            replica.buffers.end_step(table, batch, run_checks=run_checks)
        # The task holds the batch, which the script may have released already.
        del self._task

    def agree(self, head: CallDigest, *, function: object = None, requests: int = 0) -> Agreed:
        """Wait until all devices have started the same call; see `Agreement.start_call`."""
        self.placement.parameters.refuse_call(Call(head.call))
        return self.agreement.start_call(head, function=function, requests=requests)

    def leave(self, step: int, why: str, *, together: bool) -> None:
        """Return the model to the script, in memory of this process alone; once, at the end.

        Args:
            step: the number of the next step.
            why: the reason that later calls of the trainer report.
            together: whether all devices make this call, so that it may wait for them.

        Raises:
            DisagreementError: the script changed parameters since the last call.
            RuntimeError: the script is inside a block of the trainer.
        """
        context, agreement = self.context, self.agreement
        agreement.refuse_inside(Call.CLOSE)
        if together:
            agreement.end(step)
        self.placement.leave(together=together)
        # Once memory is private, the script may write to the model without changing the others'
        # parameters.
        context.exchange.memory.make_own()
        context.update.end()
        allow_clipping(context.parts.trained.values())
        agreement.left = why

    def refuse_raced(self) -> None:
        """Refuse changes that this process made to parameters in shared memory.

        If only the lead writes, there is no race.

        Raises:
            DisagreementError: a parameter was changed since the last call.
        """
        context = self.context
        if context.exchange.memory.is_common and context.with_others and not context.leads:
            changed = context.guard.changed(values=False)
            if changed:
                raise DisagreementError(
                    f"{context.guard.name_of(changed)} was changed on device "
                    f"{context.first.number} after the last call of its Trainer, in memory that "
                    f"all devices share. The order of such writes is random. Call trainer.close() "
                    f"first, on every device"
                )

    def check_last_step(self) -> None:
        """Check the last step's loss and gradient, if this is still due; blocks on a GPU.

        Raises:
            LossError, GradientError: the loss or the gradient is not finite.
        """
        self._finite.check_last()

    def take_spans(self) -> dict[int, list[Span]]:
        """Return and clear the time spans of each device of this process, by its number."""
        return {replica.number: replica.watch.drain() for replica in self.context.replicas}

    def model_loaded(self) -> None:
        """Adopt the values that a checkpoint has just put into the first device's model."""
        context = self.context
        context.first.buffers.note_loaded()
        context.copy_first()
        context.guard.note()
        context.checks.restart()
        self._nan_before = buffers_with_nan(context.module)

    def spoilt_buffers(self) -> set[str]:
        """Names of buffers that became NaN during the run; others were NaN before."""
        return buffers_with_nan(self.context.module) - self._nan_before

    @contextmanager
    def gathered(self, step: int) -> Iterator[None]:
        """Gather all parameters for a block between two steps. Call it on all devices."""
        if self.placement.partitioned:
            self.agree(CallDigest(Call.WHOLE, step))
        with self.placement.gathered(detect_writes=True), ExitStack() as leaving:
            leaving.callback(self.follow_parameters)
            yield

    def follow_parameters(self) -> None:
        """Update masters and buffers after changes to the model between two steps."""
        context, update = self.context, self.context.update
        # Masters must not follow while the model holds averages, or if parameters are not resident.
        here = update.is_whole and not self.agreement.averaged
        if not context.with_others and here and update.has_masters:
            update.follow_parameters()
            context.exchange.memory.broadcast_from_lead(context.first.buffers.flat)

    def _name_bad_gradient(self) -> str:
        """Recompute the step's shards to name the first gradient that is not finite."""
        task, done = replace(self._task, scale=1.0), dict[int, ShardResult]()
        try:
            with self.context.computing(), self.placement.gathered():
                if self.objective.gathers and not task.is_plain:
                    bad = self._joint.spoilt(task)
                    if bad:
                        return bad
                    task, done = self._joint.prepared(self.objective, task)
                return bad_gradient(self.context, task, done)
        except torch.OutOfMemoryError:
            # Other devices wait in the collectives above, so none may give up alone.
            if not self.context.alone:
                raise
            return (
                f"the gradient of step {task.step} is not finite (naming the shard needs memory "
                f"for all parameters on the device, and there is not enough)"
            )
