"""Opens every call: all devices must start the same call, in the same valid state.

`digest_of` describes what a step starts with, and devices compare these descriptions.
`refuse_unfrozen` rejects a model before the step.

Note: what is compared, and when
--------------------------------
Each process sends a head with every call (`onefold.core.call_digest.CallDigest`). Settings, modes
and sampled values of parameters and buffers are compared each time. More expensive checks (all
values, the parts of the model, modules outside of it) run at the interval of
`onefold.checks.values.CheckInterval`. A single device compares nothing: its user may change
anything between two steps.
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
    StepRequests,
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
"""Calls that are allowed while the model holds its averages."""
_OF_ALL = " (if it sums over all parameters, use Trainer(model, None, ...) and trainer.gradient)"


class Agreement:
    """Compares this process's state with all other processes at the start of each call.

    Args:
        context: this process's part of the run.
        placement: where the model is stored.
        external: modules that the loss uses in addition to the model.
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
        """Whether the script is inside `with trainer.averaged():`."""
        self.note_call: Callable[[int], None] = lambda call: None
        """Called with each `Call` that this process starts."""
        self.torn = ""
        """The call that was interrupted while it changed the model; empty if none was."""
        self.left = ""
        """Why the trainer accepts no more calls; empty while it does."""

    def start_call(self, head: CallDigest, *, function: object = None, requests: int = 0) -> Agreed:
        """Wait until all devices have started the same call, in the same state.

        Args:
            head: the head of the call; this process's own state is added here.
            function: the function to compute, if it is not the loss.
            requests: `StepRequests` of this process to all devices.

        Returns:
            What all devices reported; the same on every device.

        Raises:
            DisagreementError: a device started another call or is in another state, or its
                parameters changed since the last call.
            RuntimeError: the script is inside a block that does not allow the call.
        """
        call = Call(head.call)
        self.note_call(call)
        self.refuse_inside(call)
        # Run local checks before devices meet: a process that fails here then raises its own error,
        # and does not first wait for the others.
        self._context.update.check_groups()
        run_checks = call not in (Call.STEP, Call.GRADIENT) or self._context.checks.run_checks
        if run_checks:
            self._context.first.check_places()
            self._context.parts.check_parts()
            self._context.parts.modes.refresh()
        if not self._context.with_others:
            return Agreed((0,), StepRequests(requests))
        # Both calls make the state of all devices equal, so it may differ before them.
        settles = call in (Call.LOAD, Call.CHANGED)
        # Samples are read from flat memory, so first copy buffers that the script replaced into it.
        self._context.first.buffers.absorb()
        # Read local state before `exchange.agree`, never after: in shared memory, a device that has
        # passed it may already be writing.
        changed, values = (0, 0) if settles else self._look_at_values(run_checks=run_checks)
        head = head._replace(
            settings=0 if settles else self.settings.checksum(run_checks=run_checks),
            modes=self._modes_checksum(),
            values=values,
            # Walking the modules outside the model is expensive, so do it only if checks are due.
            outside=self._external.checksum(function) if run_checks else 0,
        )
        # Changes are reported instead of compared, so that all devices raise the same error and
        # each can name the device that changed something.
        try:
            words = self._context.exchange.agree(
                head.step, head.word(changed=changed, requests=requests)
            )
        except (PeerLost, PeerTimeout) as error:
            if call is Call.STEP:
                # The step is the one call that no script puts under `if trainer.is_lead`.
                raise
            raise self._with_advice(error, call) from error
        agreed = read_agreed(words, self._differing_settings)
        if any(agreed.changed):
            raise DisagreementError(self._words_of_change(agreed, head))
        return agreed

    def end(self, step: int) -> None:
        """Wait until all devices leave the run. Call it on all of them; some may have left already.

        The model's parts may have changed by now, so they are not compared.

        Args:
            step: the number of the next step.

        Raises:
            DisagreementError: a device is in another call, or parameters were changed since the
                last call.
        """
        if not self._context.with_others:
            return
        changed, _ = self._context.guard.inspect(run_checks=True)
        head = CallDigest(Call.CLOSE, step)
        try:
            agreed = read_agreed(self._context.exchange.agree(step, head.word(changed=changed)))
        except PeerLost:
            # The peer's script ended without this call, or the peer raises its own error.
            return
        if any(agreed.changed):
            raise DisagreementError(
                f"{self._words_of_change(agreed, head)}; after trainer.close(), the model is the "
                f"script's again"
            )

    def _with_advice(self, error: PeerError, call: Call) -> PeerError:
        """Name the call in the error, because the script may make it on the lead only."""
        advice = (
            f"{error}. Device {self._context.first.number} is at {call.words}, which must be "
            f"called on every device, and so not under `if trainer.is_lead:`"
        )
        return type(error)(advice, device=error.device, step=error.step)

    def refuse_inside(self, call: Call) -> None:
        """Refuse a call that is not allowed inside the block that the script opened.

        Raises:
            RuntimeError: the script is inside `with trainer.modifying():`, or inside `with
                trainer.averaged():` and the call needs the training values; or the trainer left the
                run.
            StateError: an interrupted call left the model in an inconsistent state.
        """
        self.refuse_torn(call)
        if self.modifying and call is not Call.CHANGED:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.modifying():`, where devices may "
                f"differ. End the block first"
            )
        if self.left and call not in (Call.WHOLE, Call.FINGERPRINT):
            raise RuntimeError(f"{call.words} was called after {self.left}")
        if self.averaged and call not in _WITH_AVERAGES:
            raise RuntimeError(
                f"{call.words} was called inside `with trainer.averaged():`, where the model holds "
                f"its averages instead of the training values. End the block first"
            )

    def refuse_torn(self, call: Call) -> None:
        """Refuse a call after a step or a load was interrupted while it changed the model.

        Raises:
            StateError: the model is in an inconsistent state.
        """
        if self.torn and call not in (Call.LOAD, Call.CLOSE):
            raise StateError(
                f"{call.words} was called after {self.torn} was interrupted, so the model may be "
                f"inconsistent. Restore a checkpoint with trainer.load, or rebuild the model"
            )

    def _modes_checksum(self) -> int:
        """Compute a checksum of modes, frozen parameters and numbers such as dropout's."""
        modes = self._context.parts.modes
        numbers = modes.numbers_checksum().to_bytes(4, "little")
        return checksum(modes.read() + bytes(self._context.parts.trainable()) + numbers)

    def _look_at_values(self, *, run_checks: bool) -> tuple[int, int]:
        """Find a parameter changed since the last call; compute a checksum of sampled values."""
        # Processes that share memory read the same values, which therefore cannot differ.
        of_all = not self._context.exchange.memory.is_common
        changed, values = self._context.guard.inspect(
            also=self._buffers, run_checks=run_checks, of_all=of_all
        )
        if not (changed or self.averaged) and self._placement.written():
            # Version counters miss this write: the script wrote to gathered copies, not to the
            # owners' memory. The number after the last parameter stands for an unknown one.
            changed = len(self._context.parts.named) + 1
        return changed, values

    def _differing_settings(self) -> str:
        """Compare the settings one by one; called on every device if their checksums differ."""
        own = {f"{key} of group {n}": repr(value) for (n, key), value in self.settings.last.items()}
        given = dict.fromkeys(self._context.own, own)
        first, *others = self._context.exchange.transport.all_gather_values(given)
        names = {name for each in others for name, _ in first.items() ^ each.items()}
        optimizer = self._context.update.optimizer
        alone = steps_by_parameter(optimizers_in(optimizer).values())
        return f"{listed(sorted(names))} of {name_of(optimizer)}" + ("" if alone else _OF_ALL)

    def _words_of_change(self, said: Agreed, head: CallDigest) -> str:
        """Name the changed parameter, and its device."""
        device, changed = next((n, c) for n, c in enumerate(said.changed) if c)
        who = f"device {device}"
        # PyTorch's version counters are per process. Values in shared memory change for all
        # processes at once, so it is not known which process wrote there.
        if self._context.exchange.memory.is_common and changed > len(self._context.parts.named):
            who = "a device"
        return (
            f"step {head.step}, {Call(head.call).words}: {self._context.guard.name_of(changed)} "
            f"changed since the previous call, on {who}, outside of `with trainer.modifying():`. "
            f"With several devices the order of such changes is random. Make the change inside "
            f"that block, which broadcasts the lead's values"
        )


class GroupSettings:
    """Reads the settings of an optimizer's groups; fast if they have not changed.

    Args:
        optimizer: the user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.last: dict[tuple[int, str], Any] = {}
        """Values by group and name, as of the last call."""
        self._checksum = 0

    def checksum(self, *, run_checks: bool = True) -> int:
        """Compute a checksum of all settings except the parameters.

        Args:
            run_checks: whether to read numbers on a GPU too, which blocks on it.
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
        """Adopt the `settings_of` another device. Tensors keep their identity."""
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            for key, value in values.items():
                came, here = from_json(value), group.get(key)
                # Copy in place, because a scheduler or a captured graph holds this tensor object.
                if isinstance(came, torch.Tensor) and isinstance(here, torch.Tensor):
                    here.copy_(came)
                else:
                    group[key] = came


def _number(value: torch.Tensor, *, run_checks: bool) -> object:
    return value.tolist() if run_checks or value.device.type == "cpu" else "on a device"


def digest_of(batch: ShardedBatch, step: int, call: Call, *, loss: int) -> CallDigest:
    """Describe a step by its batch, as far as this process knows it, and by its loss's number."""
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
    """Refuse parameters that were frozen when Trainer was created, and no longer are.

    Raises:
        ValueError: there is such a parameter.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise ValueError(
                f"parameter {name} was frozen when Trainer was created, so it has no place in the "
                f"gradient buffers. To train it later, let it require a gradient until Trainer is "
                f"created, then freeze it before the first step"
            )
