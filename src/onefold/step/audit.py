"""Computes some shards once more on another device, and compares all bits.

Note: who is believed
---------------------
Of an audited shard, its owner has digested the whole gradient when it computed the step. Another
device computes it once more. Where the two differ, both do so again, and a third device, if there
is one. If owner and auditor agree now, the first result that differs from theirs was a *transient*
fault. If they do not, the third device decides which of them has a *persistent* one; without a
third, both are named.

Note: what an audit does not see
--------------------------------
A result that all devices compute alike, such as that of a kernel with a fault. With one device the
shard is computed again by the same one.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import same_bits
from onefold.core.options import RunOptions
from onefold.core.randomness import derive_seed
from onefold.core.wire import decode, encode
from onefold.errors import AuditError
from onefold.placement.base import Placement
from onefold.placement.context import StepContext
from onefold.shard.replica import Replica
from onefold.shard.task import ShardTask
from onefold.update.optimizers import has_own_step

__all__ = ["Auditor", "WrongResult"]

_log = logging.getLogger("onefold")
_WHOLE = 1 << 64
Results = Mapping[int, Mapping[int, str]]
"""For each device, the result of each shard that it computed."""


class WrongResult(NamedTuple):
    """A result of a shard that its audit has found to be wrong."""

    step: int
    shard: int
    """-1 for the update of a piece."""
    devices: tuple[int, ...]
    """Who is at fault; two where it cannot be told which one."""
    persistent: bool
    healed: bool
    """Whether the run goes on, with the right result."""

    def __str__(self) -> str:
        who = " or ".join(f"device {device}" for device in self.devices)
        kind = "again and again" if self.persistent else "once"
        what = f"shard {self.shard}" if self.shard >= 0 else "the update of a piece"
        return f"step {self.step}, {what}: {who} computed wrong bits {kind}"


class Auditor:
    """Audits a share of all shards; all devices make the same calls.

    Args:
        context: this process's part of the run.
        placement: where the model lies.
        options: say how large a share, and whether a run goes on after a transient fault.
        note: called with each fault.
    """

    def __init__(
        self,
        context: StepContext,
        placement: Placement,
        options: RunOptions,
        note: Callable[[WrongResult], None],
    ) -> None:
        self._context, self._placement = context, placement
        self._rate, self._heals, self._note = options.audit, not options.audit_stops, note
        self._step = 0
        self.audited = 0
        """How many shards were audited so far."""
        self._skipped = False

    def chosen(self, step: int, shards: int) -> frozenset[int]:
        """The shards of a step that are audited: the same on all devices."""
        drawn = derive_seed("audit", self._context.settings.seed, step)
        count = int(self._rate * shards + drawn / _WHOLE)
        first = derive_seed("audit first", self._context.settings.seed, step)
        return frozenset((first + place) % shards for place in range(min(count, shards)))

    def is_sound(self, batch: ShardedBatch, task: ShardTask) -> bool:
        """Audit the shards of a step that were chosen; whether the step may be used as it is.

        Args:
            batch: the batch of the step.
            task: what all shards have in common, with those that were chosen.

        Raises:
            AuditError: a device is at fault, and the run is not to go on.
        """
        self._step = task.step
        shared = self._shared(batch, task)
        first = {number: dict(each["results"]) for number, each in enumerate(shared)}
        payloads = {shard: decode(text) for each in shared for shard, text in each["payloads"]}
        # Of a shard whose loss gathers, or whose payload cannot be sent, there is nothing here.
        found = [shard for shard in sorted(task.audited) if shard in payloads]
        if not found:
            return True
        batch = replace(batch, shards={**payloads, **batch.shards})
        owners = {shard: _owner_of(batch, shard) for shard in found}
        others = {shard: self._auditor_of(shard, owners[shard], task) for shard in found}
        second = self._again(others, batch, task)
        self.audited += len(found)
        sound = True
        for shard in found:
            owner, other = owners[shard], others[shard]
            if first[owner][shard] == second[other][shard]:
                continue
            fault = self._judged(shard, owner, other, first, second, batch, task)
            self._report(fault)
            sound &= fault.devices != (owner,)
        return sound

    def _shared(self, batch: ShardedBatch, task: ShardTask) -> list[dict[str, Any]]:
        """What each device has computed of the chosen shards, and their payloads."""
        own = {}
        for replica in self._context.replicas:
            results = list(replica.audited.items())
            payloads = [(shard, self._written(batch.shards[shard])) for shard, _ in results]
            sent = [each for each in payloads if each[1] is not None]
            own[replica.number] = {"results": results, "payloads": sent}
        return self._context.exchange.transport.all_gather_values(own)

    def _written(self, payload: object) -> bytes | None:
        try:
            return encode(payload, "a shard")
        except TypeError as error:
            if not self._skipped:
                self._skipped = True
                _log.warning("shards are not audited, as their payload cannot be sent: %s", error)
            return None

    def _auditor_of(self, shard: int, owner: int, task: ShardTask) -> int:
        distance = 1 + derive_seed("auditor", task.step, shard) % max(1, self._context.devices - 1)
        return (owner + distance) % self._context.devices

    def _again(self, who: Mapping[int, int], batch: ShardedBatch, task: ShardTask) -> Results:
        """Compute shards once more, each on one device; return what all devices have computed."""
        own: dict[int, list[tuple[int, str]]] = {}
        with self._placement.unsharded():
            for replica in self._context.replicas:
                shards = [shard for shard, device in who.items() if device == replica.number]
                own[replica.number] = self._computed(replica, shards, batch, task)
        rows = self._context.exchange.transport.all_gather_values(own)
        return {number: dict(row) for number, row in enumerate(rows)}

    def _computed(
        self, replica: Replica, shards: Sequence[int], batch: ShardedBatch, task: ShardTask
    ) -> list[tuple[int, str]]:
        with self._context.attached(replica):
            replica.begin(task)
            for shard in shards:
                replica.compute(shard, batch, task)
            replica.end()
            return list(replica.audited.items())

    def _judged(
        self,
        shard: int,
        owner: int,
        other: int,
        first: Results,
        second: Results,
        batch: ShardedBatch,
        task: ShardTask,
    ) -> WrongResult:
        """Find out who is at fault, where two results of a shard differ."""
        once, twice = first[owner][shard], second[other][shard]
        again = {device: self._again({shard: device}, batch, task) for device in (owner, other)}
        of_owner, of_other = (again[device][device][shard] for device in (owner, other))
        if of_owner == of_other or owner == other:
            # Both agree now: whoever had another result before was at fault, once.
            truth = of_owner
            if owner == other:
                truth = Counter([once, twice, of_owner, of_other]).most_common(1)[0][0]
            who = owner if once != truth else other
            return WrongResult(task.step, shard, (who,), persistent=False, healed=self._heals)
        third = next((d for d in range(self._context.devices) if d not in (owner, other)), None)
        if third is None:
            return WrongResult(task.step, shard, (owner, other), persistent=True, healed=False)
        truth = self._again({shard: third}, batch, task)[third][shard]
        wrong = tuple(
            device for device, it in ((owner, of_owner), (other, of_other)) if it != truth
        )
        return WrongResult(task.step, shard, wrong, persistent=True, healed=False)

    def update(self, optimizer: torch.optim.Optimizer, pieces: Sequence[torch.Tensor]) -> None:
        """Make an optimizer's step, and the update of one of its pieces once more.

        Args:
            optimizer: has the gradients.
            pieces: the values that it updates, on this process.

        Raises:
            AuditError: two updates of the piece differ, and the run is not to go on.
        """
        given = [piece for piece in pieces if piece.grad is not None]
        # Another optimizer's step may do more than update each piece by itself.
        known = type(optimizer).__module__.startswith("torch.optim.")
        known = known and not has_own_step(optimizer)
        if not given or not known:
            optimizer.step()
            return
        drawn = derive_seed("audit piece", self._context.settings.seed, self._step)
        piece = given[(drawn + self._context.first.number) % len(given)]
        before = piece.detach().clone(), copy.deepcopy(optimizer.state.get(piece))
        gradients = [(each, each.grad) for each in given]
        gradient = None if piece.grad is None else piece.grad.clone()

        def again() -> torch.Tensor:
            for each, _ in gradients:
                each.grad = None
            piece.grad = None if gradient is None else gradient.clone()
            with torch.no_grad():
                piece.copy_(before[0])
            optimizer.state.pop(piece, None)
            if before[1] is not None:
                optimizer.state[piece] = copy.deepcopy(before[1])
            optimizer.step()
            return piece.detach().clone()

        optimizer.step()
        found = [piece.detach().clone(), again()]
        if not same_bits(*found):
            found.append(again())  # whose values stay
        for each, kept in gradients:
            each.grad = kept
        if len(found) > 2:
            persistent = not any(same_bits(each, found[2]) for each in found[:2])
            healed = self._heals and not persistent
            own = (self._context.first.number,)
            self._report(WrongResult(self._step, -1, own, persistent=persistent, healed=healed))

    def _report(self, fault: WrongResult) -> None:
        """Tell of a fault; end the run if it is not healed."""
        self._note(fault)
        if self._context.leads or fault.shard < 0:
            _log.warning("%s", fault)
        if not fault.healed:
            raise AuditError(f"{fault}. {_ADVICE}")


_ADVICE = "The model may be wrong from here on: go on from the last checkpoint without that device"


def _owner_of(batch: ShardedBatch, shard: int) -> int:
    plan = batch.plan
    return next(device for device in range(plan.devices) if shard in plan.shards_of(device))
