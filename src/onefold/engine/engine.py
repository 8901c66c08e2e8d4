"""Drives a step through replicas, exchange and update, or leaves its gradient to the script.

The model's state is the replicas'. `WholeGradient` leaves the whole gradient of a batch in
``.grad`` of the user's parameters, on every device.

Note: whose memory it is
------------------------
What shards and fold have made belongs to the exchange, which writes to it again in the next step.
So each call makes new memory for the whole gradient, and ``.grad`` are views of it: it is the
script's, lives as long as one of them does, and no later call overwrites it. A later call replaces
``.grad`` by other tensors, as ``zero_grad`` and ``backward`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import FlatTensors
from onefold.core.head import Call, Said, StepHead
from onefold.core.randomness import kept_generators
from onefold.core.roster import Roster
from onefold.core.settings import Settings
from onefold.core.values import ShardResult
from onefold.core.weights_of_step import StepWeight, total_weight
from onefold.engine.agreement import Agreement, ModeWarning, Siblings, head_of, refuse_unfrozen
from onefold.engine.averaging import Averaging
from onefold.engine.changes import Changes
from onefold.engine.compiling import Rehearsal
from onefold.engine.fitting import Fitting
from onefold.engine.gradientrules import FiniteCheck, GradientRules, bad_gradient, named_if_room
from onefold.engine.gradients import Gradients, keeping_gradients
from onefold.engine.guard import Turns
from onefold.engine.kernels import Compilers, current_gpu, repeatable_kernels
from onefold.engine.leftovers import allow_clipping
from onefold.engine.lending import lending_of
from onefold.engine.modelparts import OutsideModules, in_mode
from onefold.engine.optimizers import Optimizers
from onefold.engine.optimizerstate import PieceState, pack, packed, unpack
from onefold.engine.replica import LossFunction, Replica, ShardTask
from onefold.engine.share import line_of, run_rounds, run_share
from onefold.engine.step import Outcome, verdict_of
from onefold.engine.together import Preparing, objectives_of
from onefold.engine.update import SpanOptimizer
from onefold.engine.valuetrade import ValueTrade
from onefold.errors import DisagreementError
from onefold.exchange.exchange import Exchange
from onefold.watch.timing import Span

__all__ = ["Engine", "Outcome"]


class Engine:
    """The devices of this process, at work together with all others.

    Args:
        replicas: the model on each device of this process.
        exchange: with all devices.
        roster: who takes part.
        update: the optimizer on this process's spans.
        losses: the user's, by name; each computes one shard.
        settings: the run's.
        frozen: parameters that must stay frozen, by name.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[Replica],
        exchange: Exchange,
        roster: Roster,
        update: SpanOptimizer,
        losses: Mapping[str, LossFunction],
        settings: Settings,
        frozen: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self.replicas, self.exchange = replicas, exchange
        self.roster = roster
        """Who takes part; `bind` sets it."""
        self.update, self._is_lent = update, exchange.memory.is_lent
        self.losses = losses
        """The user's, by name."""
        self.seed, self._deterministic, self._frozen = settings.seed, settings.deterministic, frozen
        self._parts, self._module = replicas[0].parts, replicas[0].module
        trained = self._parts.trained.values()
        self._objectives = objectives_of(losses, update.optimizer, trained, settings)
        self.objective = next(iter(self._objectives.values()))
        """What the step is made of, or the last one was."""
        self._outside = OutsideModules(self._module, *losses.values())
        self._turns = Turns()
        self._agreement = Agreement(replicas, exchange, update, self._outside, self._turns)
        self.guard = self._agreement.guard
        self._siblings = Siblings(replicas, self.guard, self._turns)
        with_all = (replicas, exchange, update, self._agreement, self._siblings)
        self.changes = Changes(*with_all, lambda: self.lending.whole())
        """The block in which a script may change the model."""
        self.averaging = Averaging(*with_all, self.follow_parameters, self.whole)
        """The averages of the model, if the run keeps any."""
        self._compilers = Compilers(self._module, *losses.values(), compiles=settings.compile)
        self._rehearsal = Rehearsal(settings, self._outside, notes=not self._compilers.by_user)
        self.rules = GradientRules(settings, update, exchange)
        """What is done to each gradient."""
        self.fitting = Fitting(settings, replicas, self.attached, exchange)
        """Into pieces of how many samples shards are run."""
        self._finite = FiniteCheck(settings, self.rules, exchange)
        self._gradients: Gradients = []
        self._preparing = Preparing(replicas, exchange, self.attached)
        self.lending = lending_of(replicas, update, exchange)
        """Brings parameters that other devices keep."""
        self._line = line_of(replicas, self.attached, exchange, self.lending, self._compilers)
        self._whole = WholeGradient(replicas[0], update, exchange)
        self._values = ValueTrade(replicas, exchange)
        self._mode_warning = ModeWarning(self._module, on_lead=replicas[0].number == 0)
        self._updating = self._torn = False
        self.gradient_ready: Callable[[float], None] | None = None
        """Called before clipping and update with the weight that the gradient is divided by."""

    @property
    def loss(self) -> LossFunction:
        """The user's loss, where there is only one."""
        return next(iter(self.losses.values()))

    @property
    def with_others(self) -> bool:
        """Whether other processes take part."""
        return len(self.replicas) < self.exchange.board.shape.devices

    @property
    def is_torn(self) -> bool:
        """Whether a step failed in its update and was survived: parameters may be of two steps."""
        return self._torn or self._updating

    def end_step(self) -> None:
        """Note that all of the last step is done, its place in the data included."""
        self._updating = False

    @property
    def _alone(self) -> bool:
        """Whether there is only one device in the whole run."""
        return self.exchange.board.shape.devices == 1

    def bind(self, roster: Roster) -> None:
        """Adopt the next roster; called on all devices, between two steps.

        The optimizer's state of the pieces that change owners travels through the lead's process,
        which holds it for a moment. No checkpoint may be in writing: it reads the room that the
        state is packed into.
        """
        before, self.roster = self.roster, roster
        if roster.spans == before.spans:
            return
        leads = self.replicas[0].number == 0
        arriving = arriving_states(before, roster, self.update, self.exchange, leads=leads)
        # Now that all states have been packed and handed out, those that leave may be dropped.
        self.update.bind(roster)
        self.update.adopt_states(arriving)
        self.exchange.bind(roster)

    def step(
        self, batch: ShardedBatch, number: int, *, name: str = "", asked_to_stop: bool = False
    ) -> Outcome:
        """Update the parameters once; the order is that of `onefold.exchange.exchange`.

        Args:
            batch: the batch, with this process's shards of it.
            number: the step's.
            name: of the loss.
            asked_to_stop: whether this process has been asked to stop; all devices are informed.

        Raises:
            DisagreementError: another device is at another call, or was given another batch.
            LossError: a loss cannot be read, is not finite, or depends on no parameter.
            StateError: a shard has changed what it must not.
            PeerError: another device is lost or has failed.
        """
        outcome, failure = self._computed(batch, number, Call.STEP, name, asked_to_stop)
        if outcome.norm is not None and outcome.verdict.updates:
            self._update(outcome.norm)
            self.fitting.note_update()
        else:
            self.update.drop()
        self._end_shards(batch, failure)
        if outcome.verdict.updates:
            self.averaging.follow(name)
        start = self.replicas[0].watch.now()
        self.exchange.spread()  # from here on the board is no longer ours to read
        self.replicas[0].watch.note("exchange", "spread", start)
        if not self._alone:
            self.guard.note()
        return outcome

    def gradient(
        self, batch: ShardedBatch, number: int, *, name: str = "", asked_to_stop: bool = False
    ) -> Outcome:
        """Leave the gradient of a batch in ``.grad`` of the user's parameters, on all devices.

        Arguments and errors are those of `step`. Of a batch that would be skipped, all parameters
        have None there.
        """
        check_gradient(self.update)
        allow_clipping(self._parts.trained.values())
        outcome, failure = self._computed(batch, number, Call.GRADIENT, name, asked_to_stop)
        self._end_shards(batch, failure)
        start = self.replicas[0].watch.now()
        if outcome.norm is not None and outcome.verdict.updates:
            self.rules.clip(outcome.norm)
            self._whole.hand_out()
        else:
            self.update.drop()
            self.exchange.spread()
        self.replicas[0].watch.note("exchange", "share the gradient", start)
        if not self._alone:
            self.guard.note()
        return outcome

    def _computed(
        self, batch: ShardedBatch, number: int, call: Call, name: str, asked_to_stop: bool
    ) -> tuple[Outcome, str]:
        """Run and fold a batch's shards; return what comes of it, and what is not finite in it."""
        watch, board = self.replicas[0].watch, self.exchange.board
        self._torn, self._updating = self.is_torn, False
        self._turns.advance()
        refuse_unfrozen(self._frozen)
        self.objective = self._objectives[name]
        if isinstance(self.update.optimizer, Optimizers):
            self.update.optimizer.active = self.update.optimizer.of_loss(name)
        start = watch.now()
        head = head_of(batch, number, call, loss=self.objective.number)
        agreed = self.agree(head, stop=asked_to_stop)
        watch.note("exchange", "agree", start)
        self._mode_warning.give()
        with self._finite.computing():
            self._gradients = []  # of a step that failed, and was survived
        weight = self._run(batch, number)
        now = call is Call.GRADIENT  # what the script will use must be looked at before it does
        failure, norm = self._finite.of_loss(batch, number, now=now), None
        if weight.value > 0 and not failure:
            norm = self._gradient(batch, weight)
            bad = partial(named_if_room, self._name_bad_gradient, batch, number, alone=self._alone)
            # Whoever compares gradients reports what is not finite in them as well.
            if self.gradient_ready is None:
                failure = self._finite.of_gradient(norm, number, bad)
            self.rules.end_step(overflow=bool(failure))
        verdict = verdict_of(weight, agreed, failure)
        # A copy, as `Step.loss` may be asked for long after the board is written again.
        values = self._values.of_step(batch, number)
        return Outcome(board.totals.clone(), weight.value, verdict, norm, values), failure

    def _end_shards(self, batch: ShardedBatch, failure: str) -> None:
        """Drop the shards' gradients, and have buffers follow unless something is not finite."""
        # Or they would still be there while the next step makes its own.
        self._gradients = []
        # What is not finite would stay in running means for ever: they are as before the step.
        for replica in self.replicas if not failure else ():
            replica.buffers.end_step(self.exchange.board, batch, due=self._turns.due)

    def agree(self, head: StepHead, *, function: object = None, stop: bool = False) -> Said:
        """Wait for all devices to have begun the same call; see `Agreement.begin`."""
        self.lending.refuse_call(Call(head.call))
        return self._agreement.begin(head, function=function, stop=stop)

    def leave(self, step: int, why: str, *, together: bool) -> None:
        """Have the model be the script's, with values of this process alone; once, at the end.

        Args:
            step: the number of the next step.
            why: for whoever calls the trainer later.
            together: whether all devices call this, and may be waited for.

        Raises:
            DisagreementError: the script has changed parameters since the last call.
            RuntimeError: it is inside a block of the trainer.
        """
        memory, agreement = self.exchange.memory, self._agreement
        agreement.refuse_inside(Call.CLOSE)
        if together:
            agreement.end(step)
        # What is kept apart from a device has no room there as a whole.
        if together and not memory.heap.apart:
            self.lending.stay_whole()
        memory.make_own()
        self.update.end()
        allow_clipping(self._parts.trained.values())
        agreement.left = why

    def refuse_raced(self) -> None:
        """Refuse what this process has written to parameters that lie in others' memory as well.

        Where only the lead writes, there is no race.

        Raises:
            DisagreementError: a parameter was changed since the last call.
        """
        if self.exchange.memory.is_common and self.with_others and self.replicas[0].number:
            changed = self.guard.changed(values=False)
            if changed:
                raise DisagreementError(
                    f"{self.guard.name_of(changed)} was changed on device "
                    f"{self.replicas[0].number} after the last call of its Trainer, in memory that "
                    f"all devices have in common: its values are left to chance. Call "
                    f"trainer.close() before, on every device"
                )

    def check_last_step(self) -> None:
        """Wait for the last step's loss and gradient where nobody has looked at them yet.

        Raises:
            LossError, GradientError: the loss or the gradient is not finite.
        """
        self._finite.check_last()

    def take_spans(self) -> dict[int, list[Span]]:
        """Return what each device of this process has done since the last call, by its number."""
        return {replica.number: replica.watch.take() for replica in self.replicas}

    @contextmanager
    def evaluating(self, *, training: bool = False) -> Iterator[None]:
        """Set the state in which models are evaluated; everything is put back afterwards.

        Args:
            training: whether the modules are in training mode all the same.
        """
        # Other devices of this process compute in turn, without what the first has in `.grad`.
        with (
            keeping_gradients(self._parts.trained.values()),
            self._computing(),
            in_mode(self._module, training=training),
            torch.no_grad(),
        ):
            yield

    def noting(self, where: str, *, wanted: bool) -> AbstractContextManager[None]:
        """Refuse changes to modules other than the model inside this context, if ``wanted``."""
        watched = wanted and not self._compilers.compiled  # hooks would make it compile anew
        return self._outside.refusing_changes(where) if watched else nullcontext()

    @contextmanager
    def attached(self, replica: Replica) -> Iterator[None]:
        """Have the module compute on one of this process's devices, and afterwards on the first."""
        if replica is not self.replicas[0]:
            replica.attach()
        try:
            with current_gpu(replica.device):
                yield
        finally:
            replica.buffers.restore()
            if replica is not self.replicas[0]:
                self.replicas[0].attach()

    def model_loaded(self) -> None:
        """Take over what a checkpoint has just put into the first device's model."""
        self._torn = self._updating = False
        self.replicas[0].buffers.note_loaded()
        self._siblings.copy_first()
        self.guard.note()
        self._turns.restart()

    @contextmanager
    def _computing(self, *, due: bool = True) -> Iterator[None]:
        """Set the state in which models run; generators and kernels are put back afterwards."""
        first = self.replicas[0]
        first.check_places()
        with (
            kept_generators(*(replica.device for replica in self.replicas)),
            repeatable_kernels(deterministic=self._deterministic, may_compile=due),
            self._compilers.settled(),
        ):
            first.buffers.begin_step()
            self._siblings.follow_first()
            yield

    def _run(self, batch: ShardedBatch, number: int) -> StepWeight:
        """Compute all shards' gradients and losses; once more where a loss turns out to need it."""
        due, shards, parts = self._turns.due, batch.plan.shards, self._parts
        objective = self.objective
        several = shards > 1
        task = ShardTask(
            loss=objective.run,
            seed=self.seed,
            step=number,
            shards=shards,
            modes=parts.modes.read() if several else b"",
            trainable=parts.trainable() if several else (),
            scale=self.rules.loss_scale,
            due=due,
            left_out=objective.left_out,
        )
        if self._alone and (several or self._is_lent):
            # What the user has changed since the last step is the user's affair.
            self.guard.note(values=due)
        watched = due and several  # one shard may do what a plain loop may
        with self._computing(due=due), self.noting(f"step {number}, the loss", wanted=watched):
            with self._at_hand():
                task = self.fitting.fitted(task, batch)
            while True:
                with self._at_hand():
                    task, done = self._preparing.prepared(objective, batch, task)
                    self._task = task
                    self._gradients = self._run_shards(batch, task, done)
                board = self.exchange.board
                weight = total_weight(board.weights.tolist(), batch.sizes, number)
                if weight.terms == 1 and not weight.gathers and not weight.late:
                    break
                objective.several_terms |= weight.terms > 1
                objective.gathers |= weight.gathers
                self._rehearsal.check_gathering(gathers=weight.gathers)
                self.exchange.spread()  # nothing was updated; the board is free again
        return weight

    @contextmanager
    def whole(self, step: int) -> Iterator[None]:
        """A block before a step in which this process has all parameters; called on all devices."""
        if not self.lending.is_whole:
            self.agree(StepHead(Call.WHOLE, step))
        with self.lending.whole(look=True), ExitStack() as leaving:
            leaving.callback(self.follow_parameters)
            yield

    def _at_hand(self) -> AbstractContextManager[None]:
        """Have all parameters at hand in a step that cannot do with those of one stage."""
        # Gathering and several terms run shards outside of the rounds in which devices bring each
        # other something; compiled code takes all of its parameters as arguments.
        known, tries = self.objective, self._compilers.compiled or self.fitting.trials
        all_of_it = tries or known.gathers or known.several_terms
        return self.lending.whole() if all_of_it else nullcontext()

    def _run_shards(
        self, batch: ShardedBatch, task: ShardTask, done: Mapping[int, ShardResult]
    ) -> Gradients:
        gradients: Gradients = []
        exchange = self.exchange
        before = partial(self._rehearsal.before, batch=batch, task=task, board=exchange.board)
        if self._line is not None:
            self._line.run(batch, task)
        elif exchange.stages is not None:
            early = not self._compilers.compiled
            with self.lending.rounds(task) as task:
                run_rounds(self.replicas, self.attached, before, batch, task, exchange, done, early)
        for replica in self.replicas if exchange.stages is None else ():
            with self.attached(replica), before(replica):
                gradients = run_share(replica, batch, task, exchange, done)
        if task.shards > 1 or self._is_lent:
            # Before `collect`: no process must update with what was computed of such parameters.
            self.guard.refuse_writing(task.step, values=self._turns.due)
        watch = self.replicas[0].watch
        start = watch.now()
        exchange.collect(batch.plan)
        watch.note("exchange", "collect", start)
        return gradients

    def _gradient(self, batch: ShardedBatch, weight: StepWeight) -> torch.Tensor:
        """Take the totals of the step; return the norm of the gradient, (), alike everywhere."""
        start = self.replicas[0].watch.now()
        numbers = range(self.replicas[0].number, self.replicas[-1].number + 1)
        self.rules.take(batch, weight, numbers, self._task)
        if self.gradient_ready is not None:
            self.gradient_ready(weight.value)
        widened = self.update.storage.rounds or not self._task.is_plain(batch)
        norm = self.rules.norm(batch.plan.shards, self._gradients, widened=widened)
        self.replicas[0].watch.note("exchange", "norm", start)
        return norm

    def follow_parameters(self) -> None:
        """Have what is kept follow what a process with all devices changed between steps."""
        # They are not to follow averages that the model shows, nor parameters that are not here.
        here = self.lending.is_whole and not self.averaging.is_shown
        if not self.with_others and here and (self._is_lent or self.update.storage.rounds):
            self.update.follow_parameters()
            self.exchange.memory.follow_lead(self.replicas[0].buffers.flat)

    def _update(self, norm: torch.Tensor) -> None:
        start = self.replicas[0].watch.now()
        self.follow_parameters()
        self.rules.clip(norm)
        self._updating = True
        self.update.step()
        self.replicas[0].watch.note("update", "update", start)

    def _name_bad_gradient(self, batch: ShardedBatch) -> str:
        """Compute the step's shards once more, to name the first gradient that is not finite."""
        task, done = replace(self._task, scale=1.0), dict[int, ShardResult]()
        with self._computing(), self.lending.whole():
            if self.objective.gathers and not task.is_plain(batch):
                bad = self._preparing.spoilt(batch, task)
                if bad:
                    return bad
                task, done = self._preparing.prepared(self.objective, batch, task)
            return bad_gradient(self.replicas, self.attached, batch, task, self.exchange, done)


def arriving_states(
    before: Roster, after: Roster, update: SpanOptimizer, exchange: Exchange, *, leads: bool
) -> Iterator[PieceState]:
    """Return the states of the pieces that come to this process; called on all devices.

    They travel through the lead's process, which holds them for a moment.

    Args:
        before: who owns what now.
        after: who is to own it.
        update: the optimizer on this process's spans as they are now.
        exchange: with all devices.
        leads: whether this is the lead's process.
    """
    moving = {n for n in range(before.pieces) if before.owner_of(n) != after.owner_of(n)}
    transport, heap = exchange.transport, exchange.memory.heap
    with_others = len(exchange.memory.trained) < len(after.devices)
    pack([s for s in update.states(moving=True) if s.piece in moving], transport.room)
    brought = [state for memory in transport.bring() for state in unpack(memory)]

    def make(device: int) -> torch.Tensor:
        devices = {device} if with_others else set(range(len(after.devices)))
        return packed([s for s in brought if after.owner_of(s.piece) in devices], heap)

    return unpack(transport.hand_out(make if leads else None))


class WholeGradient:
    """Brings the gradients of all spans together in every process.

    Args:
        first: the first device of this process, whose parameters are the user's.
        update: holds the gradients of this process's pieces.
        exchange: with all devices.
    """

    def __init__(self, first: Replica, update: SpanOptimizer, exchange: Exchange) -> None:
        self._first = first
        self._update = update
        self._exchange = exchange

    def hand_out(self) -> None:
        """Set ``.grad`` from the gradients that were taken; called on all devices.

        Parameters to which no shard gave a gradient have None.
        """
        update, first = self._update, self._first
        whole = FlatTensors(update.storage.gradients, device=first.device)
        for item, gradient in zip(update.owned, update.gradients, strict=True):
            if gradient is not None:
                whole.piece(item.piece).copy_(gradient)
        # Read before the exchange is over: from then on the board is no longer ours to read.
        gave = self._exchange.board.gave.sum(axis=0).tolist()
        self._exchange.share_gradient(whole)
        update.drop()
        trained = first.parts.trained.values()
        for parameter, view, given in zip(trained, whole.views, gave, strict=True):
            # Rounded only now, where the model is in low precision: sums are in float32.
            parameter.grad = view.to(parameter.dtype) if given else None


def check_gradient(update: SpanOptimizer) -> None:
    """Refuse a gradient without an update where that would not be what it seems.

    Raises:
        ValueError: the model holds rounded values of those that the optimizer updates, or an
            average is kept.
    """
    if update.storage.rounds:
        raise ValueError(
            "trainer.gradient was called in a precision in which Trainer's optimizer updates "
            "float32 values, of which the model holds rounded ones: an update of the script's "
            'would be lost in rounding. Expected precision="bf16", "fp16", "fp32" or None'
        )
    if update.averages.rule is not None:
        raise ValueError(
            "trainer.gradient was called while trainer.average keeps an average, which follows the "
            "updates that trainer.step makes and would not see the script's: keep it in the "
            "script, by torch.optim.swa_utils.AveragedModel, or use trainer.step"
        )
