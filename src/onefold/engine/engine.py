"""Drives one step through replicas, exchange and update. Holds no memory of its own."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.fold import fold_shards
from onefold.core.head import Call, Said, StepHead, checksum, read_said
from onefold.core.jsonvalue import from_bytes, to_bytes
from onefold.core.randomness import kept_generators
from onefold.core.roster import Roster
from onefold.core.settings import Settings
from onefold.core.shard import Plan
from onefold.core.weights_of_step import StepWeight, total_weight
from onefold.engine.gradients import Gradients
from onefold.engine.guard import Samples, Turns, ValueGuard
from onefold.engine.kernels import Compilers, repeatable_kernels
from onefold.engine.modes import evaluating
from onefold.engine.optimizerstate import pack, packed, unpack
from onefold.engine.outside import OutsideModules
from onefold.engine.replica import LossFunction, Replica, ShardTask, Weighed
from onefold.engine.settings import GroupSettings
from onefold.engine.update import SpanOptimizer
from onefold.errors import DisagreementError, LossError, StateError
from onefold.exchange.board import Board
from onefold.exchange.exchange import Exchange
from onefold.watch.timing import Span

__all__ = ["Engine", "Outcome", "plan_number"]

_log = logging.getLogger("onefold")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step came to."""

    totals: torch.Tensor
    """(V,) float64, where the lead computes: each shard's part of the loss."""
    weight: float
    """What their sum is divided by; where it is 0 nothing was updated."""
    asked_to_stop: bool
    """Whether some device has been asked to stop; all devices say the same."""


class Engine:
    """The devices of this process, at work together with all others.

    Args:
        replicas: of this process's devices.
        exchange: with all devices.
        roster: who takes part.
        update: the optimizer on this process's spans.
        loss: of one shard.
        settings: of the run.
        frozen: parameters that must go on being frozen, by name.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[Replica],
        exchange: Exchange,
        roster: Roster,
        update: SpanOptimizer,
        loss: LossFunction,
        settings: Settings,
        frozen: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self.replicas = replicas
        self.exchange = exchange
        self.roster = roster
        """Who takes part; `bind` sets it."""
        self.seed = settings.seed
        self.update = update
        self._loss = loss
        self._clip_norm = settings.clip_norm
        self._deterministic = settings.deterministic
        self._frozen = frozen
        first = replicas[0]
        self._parts = first.parts
        self._module = first.module
        self._guard = ValueGuard(self._parts.named, [first.trained, first.other])
        self._buffer_samples = Samples([first.buffers.flat])
        self._settings = GroupSettings(update.optimizer)
        self._outside = OutsideModules(self._module, loss)
        self._turns = Turns()
        self._samples = [Samples([r.trained, r.other]) for r in replicas[1:]]
        self._compilers = Compilers(self._module, loss)
        self._unread: tuple[int, torch.Tensor] | None = None
        self._several_terms = False
        self._changing = False
        self._warned_of_mode = False
        self._updating = False
        self._torn = False
        self.gradient_ready: Callable[[float], None] | None = None
        """Called before clipping and update with the weight that the gradient is divided by."""

    def bind(self, roster: Roster) -> None:
        """Follow the next roster; called on all devices, between two steps.

        The optimizer's state of the pieces that change hands travels through the lead's process,
        which holds it for a moment.
        """
        before, self.roster = self.roster, roster
        if roster.spans == before.spans:
            return
        moving = {n for n in range(before.pieces) if before.owner_of(n) != roster.owner_of(n)}
        transport, leads = self.exchange.transport, self.replicas[0].number == 0
        pack([s for s in self.update.states() if s.piece in moving], transport.room)
        brought = [state for memory in transport.bring() for state in unpack(memory)]

        def make(device: int) -> torch.Tensor:
            devices = {device} if self.with_others else set(range(len(roster.devices)))
            return packed([s for s in brought if roster.owner_of(s.piece) in devices])

        given = transport.hand_out(make if leads else None)
        self.update.bind(roster)
        self.update.adopt_states(unpack(given))
        self.exchange.bind(roster)

    @property
    def with_others(self) -> bool:
        """Whether other processes take part."""
        return len(self.replicas) < self.exchange.board.shape.devices

    @property
    def is_torn(self) -> bool:
        """Whether a step broke off in its update, and was survived: the model is in no step."""
        return self._torn or self._updating

    def end_step(self) -> None:
        """All that belongs to the last step has been done."""
        self._updating = False

    @property
    def _alone(self) -> bool:
        """Whether there is one device in all."""
        return self.exchange.board.shape.devices == 1

    def step(self, batch: ShardedBatch, number: int, *, asked_to_stop: bool = False) -> Outcome:
        """One update of the parameters.

        Args:
            batch: this process's shards of it.
            number: of the step.
            asked_to_stop: whether this process has been; all devices are told.

        Raises:
            DisagreementError: another device is somewhere else, or was given something else.
            LossError: a loss is of the wrong kind, or not finite.
            StateError: a shard has changed what it must not.
            PeerError: another device is lost or has failed.
        """
        watch = self.replicas[0].watch
        self._torn, self._updating = self.is_torn, False
        self._turns.advance()
        self._check_frozen()
        start = watch.now()
        said = self.agree(
            Call.STEP,
            number,
            samples=batch.samples,
            plan=plan_number(batch.plan),
            loader=batch.loader,
            data_pass=batch.pass_number,
            place=batch.stop,
            data=batch.data_digest,
            batch=batch.digest,
            stop=asked_to_stop,
        )
        watch.note("exchange", "agree", start)
        self._warn_of_mode()
        weight = self._run(batch, number)
        board = self.exchange.board
        self._check_finite(board, number)
        outcome = Outcome(board.totals.clone(), weight.value, said.stop)
        if weight.value > 0:
            self._apply(batch, weight, number)
        for replica in self.replicas:
            replica.buffers.end_step(board, batch, due=self._turns.due)
        start = watch.now()
        self.exchange.spread()  # from here on the board is no longer ours to read
        watch.note("exchange", "spread", start)
        if not self._alone:
            self._guard.note()
        return outcome

    def agree(
        self,
        call: Call,
        step: int,
        *,
        samples: int = 0,
        batch_size: int = 0,
        plan: int = 0,
        loader: int = 0,
        data_pass: int = 0,
        place: int = 0,
        data: int = 0,
        batch: int = 0,
        arguments: object = None,
        function: object = None,
        stop: bool = False,
    ) -> Said:
        """Wait for all devices to have begun the same call, in the same state.

        Args:
            call: what is to be done together.
            step: those done, and one.
            arguments: of the call, alike on all devices; anything with a repr that tells.
            function: what is to be computed, if it is not the loss.

        The others are fields of `onefold.core.head.StepHead`.

        Raises:
            DisagreementError: a device is somewhere else, or its parameters were changed.
        """
        if self._changing and call is not Call.CHANGED:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.changing():`, where devices may "
                f"differ: expected the block to end first"
            )
        self.update.check_groups()
        due = call is not Call.STEP or self._turns.due
        if due:
            self.replicas[0].check_places()
            self._parts.check_parts()
            self._parts.modes.refresh()
        if not self.with_others:
            return Said((0,), stop)
        # What is being loaded or was changed in the block makes all else equal.
        settles = call in (Call.LOAD, Call.CHANGED)
        self.replicas[0].buffers.absorb()
        changed, values = (0, 0) if settles else self._look_at_values(due=due)
        head = StepHead(
            call=call,
            step=step,
            samples=samples,
            batch_size=batch_size,
            plan=plan,
            loader=loader,
            data_pass=data_pass,
            place=place,
            data=data,
            batch=batch,
            settings=0 if settles else self._settings.checksum(due=due),
            modes=self._modes_checksum(),
            values=values,
            arguments=0 if arguments is None else checksum(repr(arguments).encode()),
            outside=self._outside.checksum(function) if due else 0,
        )
        said = read_said(self.exchange.agree(step, head.word(changed=changed, stop=stop)))
        if any(said.changed):
            raise DisagreementError(self._words_of_change(said, head))
        return said

    @contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """A block in which the lead's changes of the model and of settings become everybody's.

        Args:
            step: those done, and one.
        """
        private = self.exchange.memory.is_common and self.replicas[0].number != 0
        try:
            if private:
                # What this process writes is its own; copied before anybody may write.
                self.replicas[0].check_places()
                copies = [parameter.data.clone() for parameter in self._parts.named.values()]
            self.agree(Call.CHANGING, step)
            self._changing = True
            if private:
                for parameter, copy in zip(self._parts.named.values(), copies, strict=True):
                    parameter.data = copy
            yield
        finally:
            self._changing = False
            if private:
                self.replicas[0].attach()
        first = self.replicas[0]
        first.check_places()
        first.buffers.places.check()
        first.buffers.absorb()
        self._changing = True
        try:
            self.agree(Call.CHANGED, step)
        finally:
            self._changing = False
        self.exchange.memory.follow_lead(first.buffers.flat)
        if self.with_others:
            self._settings.adopt(self._settings_of_lead())
        self._give_to_others()
        self._guard.note()

    def _settings_of_lead(self) -> list[dict[str, Any]]:
        leads = self.replicas[0].number == 0
        text = to_bytes(self._settings.as_json()) if leads else b""

        def make(device: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)

        said: list[dict[str, Any]] = from_bytes(
            self.exchange.transport.hand_out(make if leads else None)
        )[0]
        return said

    def check_last_step(self) -> None:
        """Wait for the last step's loss where nobody has looked at it yet.

        Raises:
            LossError: it is not finite.
        """
        if self._unread is not None:
            (step, totals), self._unread = self._unread, None
            _raise_if_not_finite(totals.cpu(), step)

    def take_spans(self) -> dict[int, list[Span]]:
        """What each device of this process has done since the last time, by its number."""
        return {replica.number: replica.watch.take() for replica in self.replicas}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The state in which models are evaluated; all is put back afterwards."""
        with self._computing(), evaluating(self._module), torch.no_grad():
            yield

    @contextmanager
    def noting(self, where: str, *, wanted: bool) -> Iterator[None]:
        """Refuse modules beside the model that are changed in here, if ``wanted``."""
        watched = wanted and not self._compilers.compiled  # hooks would make it compile anew
        with self._outside.noting(wanted=watched):
            yield
        if watched:
            self._outside.check(where)

    @contextmanager
    def attached(self, replica: Replica) -> Iterator[None]:
        """Have the module compute on one of this process's devices."""
        if replica is not self.replicas[0]:
            replica.attach()
        try:
            with _current(replica.device):
                yield
        finally:
            replica.buffers.restore()
            if replica is not self.replicas[0]:
                self.replicas[0].attach()

    def model_loaded(self) -> None:
        """The model was given the values of a checkpoint."""
        self._torn = self._updating = False
        self._give_to_others()
        self._guard.note()
        self._turns.restart()

    @contextmanager
    def _computing(self, *, due: bool = True) -> Iterator[None]:
        """The state in which models run; generators and buffers are put back afterwards."""
        first = self.replicas[0]
        first.check_places()
        with (
            kept_generators(*(replica.device for replica in self.replicas)),
            repeatable_kernels(deterministic=self._deterministic, may_compile=due),
            self._compilers.settled(),
        ):
            first.buffers.begin_step()
            if len(self.replicas) > 1:
                self._follow_first()
            yield

    def _run(self, batch: ShardedBatch, number: int) -> StepWeight:
        """All shards' gradients and losses; begins again where several divisors are found."""
        due, shards, parts = self._turns.due, batch.plan.shards, self._parts
        several = shards > 1
        task = ShardTask(
            loss=self._loss,
            seed=self.seed,
            step=number,
            shards=shards,
            modes=parts.modes.read() if several else b"",
            trainable=parts.trainable() if several else (),
            due=due,
        )
        if self._alone and several:
            # What the user has changed since the last step is the user's affair.
            self._guard.note(values=due)
        watched = due and several  # with one shard it is as in a plain loop
        with self._computing(due=due), self.noting(f"step {number}, the loss", wanted=watched):
            while True:
                if self._several_terms and several:
                    task = replace(task, divisors=self._trade_divisors(batch, task))
                self._gradients = self._run_shards(batch, task)
                board = self.exchange.board
                weight = total_weight(board.weights.tolist(), batch.sizes, number)
                if weight.terms == 1:
                    break
                self._several_terms = True
                self.exchange.spread()  # nothing was updated; the board is free again
        return weight

    def _run_shards(self, batch: ShardedBatch, task: ShardTask) -> Gradients:
        gradients: Gradients = []
        for replica in self.replicas:
            with self.attached(replica):
                gradients = replica.run(batch, task, self.exchange)
        if task.shards > 1:  # with one it is as in a plain loop
            self._refuse_writing(task.step)
        watch = self.replicas[0].watch
        start = watch.now()
        self.exchange.collect(batch.plan)
        watch.note("exchange", "collect", start)
        return gradients

    def _trade_divisors(self, batch: ShardedBatch, task: ShardTask) -> tuple[float, ...] | None:
        """The whole batch's weight of each term of the loss, None if it has one term."""
        found: dict[int, Weighed] = {}
        for replica in self.replicas:
            with self.attached(replica):
                found[replica.number] = replica.weigh_shards(batch, task)
        numbers = {n: {s: [float(len(own[s]))] for s in own} for n, own in found.items()}
        counts = [int(row[0]) for row in self._share_by_shard(batch, numbers, 1)]
        terms = max(counts)
        wrong = next((s for s, c in enumerate(counts) if batch.size_of(s) and c != terms), None)
        if wrong is not None:
            raise LossError(
                f"the loss of step {task.step}, shard {wrong} has {counts[wrong]} terms and "
                f"that of another shard {terms}: expected the same terms for every shard; one in "
                f"which there is nothing to count has the weight 0"
            )
        if terms == 1:
            return None
        # Of each term its weight, and whether it is not divided.
        pairs = {
            n: {s: [x for kind, w in own[s] for x in (w, float(kind == "sum"))] for s in own}
            for n, own in found.items()
        }
        rows = self._share_by_shard(batch, pairs, 2 * terms)
        columns = [[row[place] for row in rows] for place in range(2 * terms)]
        return tuple(
            1.0 if any(undivided) else fold_shards(weights, _add)
            for weights, undivided in zip(columns[::2], columns[1::2], strict=True)
        )

    def _share_by_shard(
        self, batch: ShardedBatch, own: Mapping[int, Mapping[int, Sequence[float]]], numbers: int
    ) -> list[list[float]]:
        """(V, numbers) of all shards on every device, zeros for empty ones."""
        shards = batch.plan.shards
        rows = {}
        for replica in self.replicas:
            table = torch.zeros(shards, numbers, dtype=torch.float64)
            for shard, values in own[replica.number].items():
                table[shard] = torch.tensor(values, dtype=torch.float64)
            rows[replica.number] = table.flatten().to(replica.device)
        # A shard has one device: adding zeros is exact.
        shared: list[list[float]] = (
            self.exchange.transport.share(rows).sum(dim=0).view(shards, -1).tolist()
        )
        return shared

    def _refuse_writing(self, step: int) -> None:
        """Parameters belong to the optimizer while shards run."""
        changed = self._guard.changed(values=self._turns.due)
        if changed:
            raise StateError(
                f"step {step}: {self._guard.name_of(changed)} was written to while the loss was "
                f"computed (max_norm of an embedding, a masked weight, a momentum encoder do so): "
                f"the shards that follow on the same device would see it, and others would not. "
                f"Write to parameters between steps, in `with trainer.changing():`, or keep what "
                f"changes with every batch in a buffer"
            )

    def _follow_first(self) -> None:
        """Bring what the user did to the model since the last step to the other devices."""
        first, *others = self.replicas
        for replica in others:
            replica.buffers.begin_as(first.buffers)
        if others and (self._guard.changed() or self._others_differ()):
            self._give_to_others()
            self._guard.note()

    def _give_to_others(self) -> None:
        """Copy the first device's parameters to the others of this process."""
        first, *others = self.replicas
        for replica in others:
            for mine, theirs in (
                (replica.trained, first.trained),
                (replica.other, first.other),
            ):
                for target, source in zip(mine.sections, theirs.sections, strict=True):
                    target.copy_(source)

    def _others_differ(self) -> bool:
        """Whether a device of this process has other values, as far as it is looked at."""
        due, first = self._turns.due, self._guard.samples
        if not (due or first.on_host):
            return False
        here = first.add_up() if due else first.read()
        return any(here != (s.add_up() if due else s.read()) for s in self._samples)

    def _apply(self, batch: ShardedBatch, weight: StepWeight, step: int) -> None:
        watch = self.replicas[0].watch
        start = watch.now()
        totals = [t for replica in self.replicas for t in self.exchange.totals(replica.number)]
        gave = self.exchange.board.gave
        counts = (gave[0] if len(gave) == 1 else gave.sum(axis=0)).tolist()
        if not any(counts):
            raise LossError(
                f"the loss of step {step} does not depend on any parameter that requires a "
                f"gradient, in any shard: was it computed under no_grad, or detached?"
            )
        self.update.take(totals, counts, shards=batch.plan.shards)
        divisor = batch.divisor(weight.value) if weight.divided else 1.0
        if divisor != weight.value:
            self.update.scale(divisor / weight.value)
        if self.gradient_ready is not None:
            self.gradient_ready(weight.value)
        if self._clip_norm is not None:
            self._clip(self._clip_norm, batch)
        self._updating = True
        self.update.step()
        watch.note("update", "update", start)

    def _clip(self, clip_norm: float, batch: ShardedBatch) -> None:
        if batch.plan.shards == 1:  # as torch.nn.utils.clip_grad_norm_ does, to the last bit
            given = [g for g in self._gradients if g is not None]
            norm = torch.nn.utils.get_total_norm(given) if given else torch.zeros(())
        else:
            norms = self.exchange.transport.share(self.update.squared_norms())
            norm = norms.sum(dim=0).sum().sqrt()  # a piece has one owner: adding zeros is exact
        self.update.scale((clip_norm / (norm + 1e-6)).clamp(max=1.0))

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} was frozen when Trainer was made, so it has no place in the "
                    f"gradient buffers. Make Trainer first and freeze afterwards, or make a new one"
                )

    def _check_finite(self, board: Board, step: int) -> None:
        """On the processor before the update; on a GPU a step later, so that nobody waits."""
        if board.totals.device.type == "cpu":
            _raise_if_not_finite(board.totals, step)
            return
        self.check_last_step()
        self._unread = (step, board.totals.clone())

    def _warn_of_mode(self) -> None:
        if not self._module.training and not self._warned_of_mode:
            self._warned_of_mode = True
            if self.replicas[0].number == 0:
                _log.warning(
                    "the model is in evaluation mode: dropout and batch norm do not train. Modes "
                    "are yours; call model.train() before the steps if that was not meant"
                )

    def _modes_checksum(self) -> int:
        modes = self._parts.modes
        numbers = modes.numbers_checksum().to_bytes(4, "little")
        return checksum(modes.read() + bytes(self._parts.trainable()) + numbers)

    def _look_at_values(self, *, due: bool) -> tuple[int, int]:
        """A parameter that was changed since the call before, and a checksum of what there is."""
        of_all = not self.exchange.memory.is_common  # else all have the same parameters
        return self._guard.look(also=self._buffer_samples, due=due, of_all=of_all)

    def _words_of_change(self, said: Said, head: StepHead) -> str:
        device, changed = next((n, c) for n, c in enumerate(said.changed) if c)
        who = f"device {device}"
        if self.exchange.memory.is_common and changed > len(self._parts.named):
            who = "a device"  # which of them wrote to the common memory cannot be seen
        return (
            f"step {head.step}, {Call(head.call).words}: {self._guard.name_of(changed)} changed "
            f"since the call before, on {who}, outside of `with trainer.changing():`. With several "
            f"devices the order of such changes is left to chance; inside that block, what the "
            f"lead changes becomes everybody's"
        )


@functools.lru_cache(maxsize=16)
def plan_number(plan: Plan) -> int:
    """A plan as one number that devices can compare."""
    return checksum(repr(plan.counts).encode())


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Where one process drives several GPUs, the one that ``device="cuda"`` means."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _raise_if_not_finite(totals: torch.Tensor, step: int) -> None:
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            raise LossError(
                f"the loss of step {step}, shard {shard} is {total}: expected a finite number. "
                f"Look at the samples of that shard: a mean over nothing (targets that are all "
                f"ignored, an empty mask) is not a number, which onefold.losses and onefold.Mean "
                f"get right. Else lower the learning rate, or set clip_norm"
            )


def _add(left: float, right: float) -> float:
    return left + right
