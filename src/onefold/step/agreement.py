"""Opens every call: all devices must begin the same one, in a state that is alike and valid.

`digest_of` describes what a step begins with, which devices compare. `refuse_unfrozen` refuses a
model before the step.

Note: what is compared, and when
--------------------------------
A head (`onefold.core.call_digest.CallDigest`) travels in every call. Settings, modes and sampled
values of parameters and buffers are compared each time; what costs more (all values, the parts of
the model, modules beside it) only when it is due, see `onefold.checks.values.CheckInterval`. One
device alone compares
nothing: what its user changes between two steps is the user's affair.

A process looks at its own state before it meets the others, and never between: with memory in
common, a device that was let go first may already be writing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onefold.checks.values import Samples
from onefold.core.batch import ShardedBatch
from onefold.core.call_digest import (
    Agreed,
    Call,
    CallDigest,
    checksum,
    digest,
    read_agreed,
)
from onefold.core.encoding import from_json
from onefold.errors import DisagreementError, PeerError, PeerLost, PeerTimeout, StateError
from onefold.placement.base import Placement, StepContext
from onefold.shard.model_parts import ExternalModules
from onefold.system.words import listed
from onefold.update.optimizers import name_of, optimizers_in, steps_by_parameter

__all__ = ["Agreement", "digest_of", "refuse_unfrozen"]


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
_OF_ALL = " (if it sums over all parameters, use Trainer(model, None, ...) and trainer.gradient)"


class Agreement:
    """Compares this process's state with that of all others at the beginning of each call.

    Args:
        context: this process's part of the run.
        placement: where the model lies.
        external: modules that the loss uses beside the model.
    """

    def __init__(
        self, context: StepContext, placement: Placement, external: ExternalModules
    ) -> None:
        self._context, self._placement, self._external = context, placement, external
        self._buffers = Samples([context.first.buffers.flat])
        self.settings = GroupSettings(context.update.optimizer)
        """Reads the settings of the optimizer's groups."""
        self.modifying = False
        """Whether the script is inside `with trainer.modifying():`."""
        self.averaged = False
        """Whether it is inside `with trainer.averaged():`."""
        self.note_call: Callable[[int], None] = lambda call: None
        """Called with each of `Call` that this process begins."""
        self.torn = ""
        """The call that broke off while it changed the model; empty if none did."""
        self.left = ""
        """Why the trainer makes no calls any more; empty as long as it does."""

    def start_call(
        self, head: CallDigest, *, function: object = None, stop: bool = False
    ) -> Agreed:
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
        self._context.update.check_groups()
        run_checks = call not in (Call.STEP, Call.GRADIENT) or self._context.checks.run_checks
        if run_checks:
            self._context.first.check_places()
            self._context.parts.check_parts()
            self._context.parts.modes.refresh()
        if not self._context.with_others:
            return Agreed((0,), stop)
        # These make devices alike, so that they may differ before.
        settles = call in (Call.LOAD, Call.CHANGED)
        # Buffers that were replaced lie elsewhere than where the samples are read.
        self._context.first.buffers.absorb()
        changed, values = (0, 0) if settles else self._look_at_values(run_checks=run_checks)
        head = head._replace(
            settings=0 if settles else self.settings.checksum(run_checks=run_checks),
            modes=self._modes_checksum(),
            values=values,
            outside=self._external.checksum(function) if run_checks else 0,
        )
        self.note_call(call)
        # What was changed is compared by nobody but reported to all: every device raises alike, and
        # each can name the one on which it happened.
        try:
            words = self._context.exchange.agree(head.step, head.word(changed=changed, stop=stop))
        except (PeerLost, PeerTimeout) as error:
            if call is Call.STEP:
                raise
            raise self._with_advice(error, call) from error
        agreed = read_agreed(words, self._differing_settings)
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
        if not self._context.with_others:
            return
        changed, _ = self._context.guard.inspect(run_checks=True)
        head = CallDigest(Call.CLOSE, step)
        try:
            agreed = read_agreed(self._context.exchange.agree(step, head.word(changed=changed)))
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
            f"{error}. Device {self._context.first.number} is in {call.words}, which must be "
            f"called on every device, and so not under `if trainer.is_lead:`"
        )
        return type(error)(advice, device=error.device, step=error.step)

    def refuse_inside(self, call: Call) -> None:
        """Refuse a call that is not allowed inside the block that the script has opened.

        Raises:
            RuntimeError: the script is inside `with trainer.modifying():`, or inside `with
                trainer.averaged():` and the call is for the training values; or the trainer has
                left the run.
            StateError: the model is in a state that no run has.
        """
        self.refuse_torn(call)
        if self.modifying and call is not Call.CHANGED:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.modifying():`, where devices may "
                f"differ: expected the block to end first"
            )
        if self.left and call not in (Call.WHOLE, Call.FINGERPRINT):
            raise RuntimeError(f"{call.words} was called after {self.left}")
        if self.averaged and call not in _WITH_AVERAGES:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.averaged():`, where the model holds "
                f"its averages and not the values that are trained: expected the block to end first"
            )

    def refuse_torn(self, call: Call) -> None:
        """Refuse a call where a step or a load broke off while it changed the model.

        Raises:
            StateError: the model is in a state that no run has.
        """
        if self.torn and call not in (Call.LOAD, Call.CLOSE):
            raise StateError(
                f"{call.words} was called after {self.torn} broke off in the middle, so the model "
                f"may be neither what it was before nor what it would be afterwards: go on from a "
                f"checkpoint with trainer.load, or build the model anew"
            )

    def _modes_checksum(self) -> int:
        """Compute a checksum of modes, frozen parameters and numbers such as dropout's."""
        modes = self._context.parts.modes
        numbers = modes.numbers_checksum().to_bytes(4, "little")
        return checksum(modes.read() + bytes(self._context.parts.trainable()) + numbers)

    def _look_at_values(self, *, run_checks: bool) -> tuple[int, int]:
        """Find a parameter changed since the last call; compute a checksum of sampled values."""
        # In common memory all processes read the very same values, and cannot drift apart.
        of_all = not self._context.exchange.memory.is_common
        changed, values = self._context.guard.inspect(
            also=self._buffers, run_checks=run_checks, of_all=of_all
        )
        if not (changed or self.averaged) and self._placement.written():
            # A change that nobody counts, where all parameters are here for a while.
            changed = len(self._context.parts.named) + 1
        return changed, values

    def _differing_settings(self) -> str:
        """Compare the settings one by one; every device calls this once their checksums differ."""
        own = {f"{key} of group {n}": repr(value) for (n, key), value in self.settings.last.items()}
        given = dict.fromkeys(self._context.own, own)
        first, *others = self._context.exchange.transport.all_gather_values(given)
        names = {name for each in others for name, _ in first.items() ^ each.items()}
        optimizer = self._context.update.optimizer
        alone = steps_by_parameter(optimizers_in(optimizer).values())
        return f"{listed(sorted(names))} of {name_of(optimizer)}" + ("" if alone else _OF_ALL)

    def _words_of_change(self, said: Agreed, head: CallDigest) -> str:
        """Say which parameter was changed, and by whom."""
        device, changed = next((n, c) for n, c in enumerate(said.changed) if c)
        who = f"device {device}"
        # PyTorch's counts are each process's own. Values in common memory change for all processes
        # at once, and which of them wrote there cannot be seen.
        if self._context.exchange.memory.is_common and changed > len(self._context.parts.named):
            who = "a device"
        return (
            f"step {head.step}, {Call(head.call).words}: {self._context.guard.name_of(changed)} "
            f"changed since the call before, on {who}, outside of `with trainer.modifying():`. "
            f"With several devices the order of such changes is left to chance; inside that block, "
            f"what the lead changes becomes everybody's"
        )


class GroupSettings:
    """Reads the settings of an optimizer's groups; quick where they have not changed.

    Args:
        optimizer: made by the user.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.last: dict[tuple[int, str], Any] = {}
        """The values by group and name, as of the last call."""
        self._checksum = 0

    def checksum(self, *, run_checks: bool = True) -> int:
        """Compute a checksum of all settings but the parameters.

        Args:
            run_checks: whether to read numbers that lie on a GPU as well, which waits for it.
        """
        # Comparing the values costs far less in every step than writing them out as text.
        now = {
            (n, key): _number(value, run_checks=run_checks) if torch.is_tensor(value) else value
            for n, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        }
        if now != self.last:
            self.last = now
            self._checksum = checksum("".join(sorted(map(repr, now.items()))).encode())
        return self._checksum

    def adopt(self, settings: list[dict[str, Any]]) -> None:
        """Adopt the `settings_of` another device; tensors keep their identity."""
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            for key, value in values.items():
                came, here = from_json(value), group.get(key)
                # In place: a scheduler, or a captured graph, holds the very tensor.
                if isinstance(came, torch.Tensor) and isinstance(here, torch.Tensor):
                    here.copy_(came)
                else:
                    group[key] = came


def _number(value: torch.Tensor, *, run_checks: bool) -> object:
    return value.tolist() if run_checks or value.device.type == "cpu" else "on a device"


def digest_of(batch: ShardedBatch, step: int, call: Call, *, loss: int) -> CallDigest:
    """Describe a step by its batch, as far as this process knows it, and its loss's number."""
    return CallDigest(
        call=call,
        step=step,
        loss=loss,
        samples=batch.samples,
        shares=digest(batch.shares.counts),
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
