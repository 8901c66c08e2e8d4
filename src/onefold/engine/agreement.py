"""Opens every call: all devices must begin the same one, in a state that is alike and valid.

`head_of` describes what a step begins with, which devices compare. `refuse_unfrozen` and
`ModeWarning` refuse a model, or warn of its mode, before the step.

Note: what is compared, and when
--------------------------------
A head (`onefold.core.head.StepHead`) travels in every call. Settings, modes and sampled values of
parameters and buffers are compared each time; what costs more (all values, the parts of the model,
modules beside it) only when it is due, see `onefold.engine.guard.Turns`. One device alone compares
nothing: what its user changes between two steps is the user's affair.

A process looks at its own state before it meets the others, and never between: with memory in
common, a device that was let go first may already be writing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.head import Call, Said, StepHead, checksum, plan_number, read_said
from onefold.core.jsonvalue import from_json, to_json
from onefold.engine.guard import Samples, Turns, ValueGuard
from onefold.engine.modelparts import OutsideModules
from onefold.engine.replica import Replica
from onefold.engine.update import SpanOptimizer
from onefold.engine.visits import shown_otherwise
from onefold.errors import DisagreementError, PeerError, PeerLost, PeerTimeout
from onefold.exchange.exchange import Exchange

__all__ = ["Agreement", "ModeWarning", "Siblings", "head_of", "refuse_unfrozen"]

_log = logging.getLogger("onefold")


_WITH_AVERAGES = (
    Call.EVALUATE,
    Call.PREDICT,
    Call.GATHER,
    Call.SAVE,
    Call.BARRIER,
    Call.BROADCAST,
    Call.UPDATE_BN,
    Call.AVERAGED_END,
)
"""The calls that are allowed while the model holds its averages."""


class Agreement:
    """Compares this process's state with that of all others at the beginning of each call.

    Args:
        replicas: the model on each device of this process.
        exchange: with all devices.
        update: the optimizer, whose settings must be alike everywhere.
        outside: modules that the loss uses beside the model.
        turns: decides when costly checks are due.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        exchange: Exchange,
        update: SpanOptimizer,
        outside: OutsideModules,
        turns: Turns,
    ) -> None:
        self._first = first = replicas[0]
        self._exchange = exchange
        self._update = update
        self._outside = outside
        self._turns = turns
        self._parts = first.parts
        self._with_others = len(replicas) < exchange.board.shape.devices
        self._buffers = Samples([first.buffers.flat])
        # Where this device has its span alone, nobody else can write to what it does not have.
        lent = exchange.memory.is_lent
        self.guard = ValueGuard(
            self._parts.named, [first.other] if lent else [first.trained, first.other]
        )
        """Remembers the parameters as the last call left them."""
        self.settings = GroupSettings(update.optimizer)
        """Reads the settings of the optimizer's groups."""
        self.changing = False
        """Whether the script is inside `with trainer.changing():`."""
        self.averaged = False
        """Whether it is inside `with trainer.averaged():`."""
        self.left = ""
        """Why the trainer makes no calls any more; empty as long as it does."""

    def begin(self, head: StepHead, *, function: object = None, stop: bool = False) -> Said:
        """Wait for all devices to have begun the same call, in the same state.

        Args:
            head: the call's; what this process knows of its own state is added here.
            function: what is to be computed, if it is not the loss.
            stop: whether this process has been asked to stop.

        Returns:
            What all devices reported, which is the same everywhere.

        Raises:
            DisagreementError: a device has begun another call or is in another state, or its
                parameters were changed since the last call.
            RuntimeError: the script is inside a block that the call is not allowed in.
        """
        call = Call(head.call)
        self.refuse_inside(call)
        # Local checks come before devices meet: a process that fails here reports that, and nobody
        # waits for its word.
        self._update.check_groups()
        due = call not in (Call.STEP, Call.GRADIENT) or self._turns.due
        if due:
            self._first.check_places()
            self._parts.check_parts()
            self._parts.modes.refresh()
        if not self._with_others:
            return Said((0,), stop)
        # These make devices alike, so that they may differ before.
        settles = call in (Call.LOAD, Call.CHANGED)
        # Buffers that were replaced lie elsewhere than where the samples are read.
        self._first.buffers.absorb()
        changed, values = (0, 0) if settles else self._look_at_values(due=due)
        head = head._replace(
            settings=0 if settles else self.settings.checksum(due=due),
            modes=self._modes_checksum(),
            values=values,
            outside=self._outside.checksum(function) if due else 0,
        )
        # What was changed is compared by nobody but reported to all: every device raises alike, and
        # each can name the one on which it happened.
        try:
            words = self._exchange.agree(head.step, head.word(changed=changed, stop=stop))
        except (PeerLost, PeerTimeout) as error:
            if call is Call.STEP:
                raise
            raise self._with_advice(error, call) from error
        agreed = read_said(words)
        if any(agreed.changed):
            raise DisagreementError(self._words_of_change(agreed, head))
        return agreed

    def end(self, step: int) -> None:
        """Wait for all devices to leave the run; called on all of them, of which some may be gone.

        The model may have other parts by now.

        Args:
            step: number of the next step.

        Raises:
            DisagreementError: a device is in another call, or parameters were changed since the
                last one.
        """
        if not self._with_others:
            return
        changed, _ = self.guard.look(due=True)
        head = StepHead(Call.CLOSE, step)
        try:
            agreed = read_said(self._exchange.agree(step, head.word(changed=changed)))
        except PeerLost:
            return  # its script has ended without this call, or its failure is reported there
        if any(agreed.changed):
            raise DisagreementError(
                f"{self._words_of_change(agreed, head)}; after trainer.close(), the model is the "
                f"script's again"
            )

    def _with_advice(self, error: PeerError, call: Call) -> PeerError:
        """Say for which call a device did not come: the script may make it on the lead alone."""
        advice = (
            f"{error}. Device {self._first.number} is in {call.words}, which must be "
            f"called on every device, and so not under `if trainer.is_lead:`"
        )
        return type(error)(advice, device=error.device, step=error.step)

    def refuse_inside(self, call: Call) -> None:
        """Refuse a call that is not allowed inside the block that the script has opened.

        Raises:
            RuntimeError: the script is inside `with trainer.changing():`, or inside `with
                trainer.averaged():` and the call is for the training values; or the trainer has
                left the run.
        """
        if self.changing and call is not Call.CHANGED:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.changing():`, where devices may "
                f"differ: expected the block to end first"
            )
        if self.left and call is not Call.WHOLE:
            raise RuntimeError(f"{call.words} was called after {self.left}")
        if self.averaged and call not in _WITH_AVERAGES:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.averaged():`, where the model holds "
                f"its averages and not the values that are trained: expected the block to end first"
            )

    def _modes_checksum(self) -> int:
        """Compute a checksum of modes, frozen parameters and numbers such as dropout's."""
        modes = self._parts.modes
        numbers = modes.numbers_checksum().to_bytes(4, "little")
        return checksum(modes.read() + bytes(self._parts.trainable()) + numbers)

    def _look_at_values(self, *, due: bool) -> tuple[int, int]:
        """Find a parameter changed since the last call; compute a checksum of sampled values."""
        # In common memory all processes read the very same values, and cannot drift apart.
        of_all = not self._exchange.memory.is_common
        changed, values = self.guard.look(also=self._buffers, due=due, of_all=of_all)
        return changed or self._look_where_lent(), values

    def _look_where_lent(self) -> int:
        """Find a change that nobody counts, where all parameters are here for a while."""
        update = self._update
        if not self._exchange.memory.is_lent or not update.is_whole or self.averaged:
            return 0
        found = shown_otherwise(update.owned, update.values_of)
        return 0 if found is None else len(self._parts.named) + 1

    def _words_of_change(self, said: Said, head: StepHead) -> str:
        """Say which parameter was changed, and by whom."""
        device, changed = next((n, c) for n, c in enumerate(said.changed) if c)
        who = f"device {device}"
        # PyTorch's counts are each process's own. Values in common memory change for all processes
        # at once, and which of them wrote there cannot be seen.
        if self._exchange.memory.is_common and changed > len(self._parts.named):
            who = "a device"
        return (
            f"step {head.step}, {Call(head.call).words}: {self.guard.name_of(changed)} changed "
            f"since the call before, on {who}, outside of `with trainer.changing():`. With several "
            f"devices the order of such changes is left to chance; inside that block, what the "
            f"lead changes becomes everybody's"
        )


_KEPT = ("params", "param_names")
"""Keys of a group that belong to each process itself."""


class GroupSettings:
    """Reads the settings of an optimizer's groups; quick where they have not changed.

    Args:
        optimizer: the user's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._last: list[Any] = []
        self._checksum = 0

    def checksum(self, *, due: bool = True) -> int:
        """Compute a checksum of all settings but the parameters.

        Args:
            due: whether to read numbers that lie on a GPU as well, which waits for it.
        """
        # Comparing the values costs far less in every step than writing them out as text.
        now = [
            value if not isinstance(value, torch.Tensor) else _number(value, due=due)
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        ]
        if now != self._last:
            self._last = now
            self._checksum = checksum(repr(now).encode())
        return self._checksum

    def as_json(self) -> list[dict[str, Any]]:
        """Return the settings that a script may change, for other devices to adopt."""
        return [
            {
                key: to_json(value, f"{key} of the optimizer's group {number}")
                for key, value in group.items()
                if key not in _KEPT
            }
            for number, group in enumerate(self._optimizer.param_groups)
        ]

    def adopt(self, settings: list[dict[str, Any]]) -> None:
        """Adopt what `as_json` returned on another device; tensors keep their identity."""
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            for key, value in values.items():
                came, here = from_json(value), group.get(key)
                # In place: a schedule, or a captured graph, holds the very tensor.
                if isinstance(came, torch.Tensor) and isinstance(here, torch.Tensor):
                    here.copy_(came)
                else:
                    group[key] = came


def _number(value: torch.Tensor, *, due: bool) -> object:
    return value.tolist() if due or value.device.type == "cpu" else "on a device"


class Siblings:
    """The first device of a process, and the others, which must have the same values.

    Args:
        replicas: the model on each device of this process.
        guard: remembers the parameters of the first one.
        turns: decides when costly checks are due.
    """

    def __init__(self, replicas: Sequence[Replica], guard: ValueGuard, turns: Turns) -> None:
        self._first, *self._others = replicas
        self._guard = guard
        self._turns = turns
        self._samples = [Samples([r.trained, r.other]) for r in self._others]

    def follow_first(self) -> None:
        """Bring what the user did to the model since the last step to the other devices."""
        # Buffers are few and change in most steps, so they are copied without looking; parameters
        # were brought by the exchange, and are copied only if somebody has written to them since.
        for replica in self._others:
            replica.buffers.begin_as(self._first.buffers)
        if self._others and (self._guard.changed() or self._differ()):
            self.copy_first()
            # Or what the script has changed would count as changed by the shards that run next.
            self._guard.note()

    def copy_first(self) -> None:
        """Copy the first device's parameters to the others of this process."""
        for replica in self._others:
            for mine, theirs in (
                (replica.trained, self._first.trained),
                (replica.other, self._first.other),
            ):
                for target, source in zip(mine.sections, theirs.sections, strict=True):
                    target.copy_(source)

    def _differ(self) -> bool:
        """Whether a device of this process has other values, as far as values are looked at."""
        due, first = self._turns.due, self._guard.samples
        # The guard keeps no values of a GPU, and cannot see what was changed there through .data.
        if not (due or first.on_host):
            return False
        here = first.add_up() if due else first.read()
        return any(here != (s.add_up() if due else s.read()) for s in self._samples)


def head_of(batch: ShardedBatch, step: int, call: Call, *, loss: int) -> StepHead:
    """Describe a step by its batch, as far as this process knows it, and its loss's number."""
    return StepHead(
        call=call,
        step=step,
        loss=loss,
        samples=batch.samples,
        plan=plan_number(batch.plan),
        loader=batch.loader,
        data_pass=batch.pass_number,
        place=batch.stop,
        data=batch.data_digest,
        batch=batch.digest,
        arguments=batch.dim,
    )


def refuse_unfrozen(frozen: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that were frozen when Trainer was made, and are not any more.

    Raises:
        ValueError: there is one.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise ValueError(
                f"parameter {name} was frozen when Trainer was made, so it has no place in the "
                f"gradient buffers. If it is to be trained later, let it require a gradient "
                f"until Trainer is made, and freeze it then, before the first step"
            )


class ModeWarning:
    """Warns once where a model is trained in evaluation mode.

    Args:
        module: the user's.
        on_lead: whether this process has device 0, which alone warns.
    """

    def __init__(self, module: torch.nn.Module, *, on_lead: bool) -> None:
        self._module = module
        self._on_lead = on_lead
        self._given = False

    def give(self) -> None:
        """Warn, if there is reason to, for the first time."""
        if not self._module.training and not self._given:
            self._given = True
            if self._on_lead:
                _log.warning(
                    "the model is in evaluation mode: dropout and batch norm do not train. Modes "
                    "are yours; call model.train() before the steps if that was not meant"
                )
