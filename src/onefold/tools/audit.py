"""Computes some shards once more on another device, and compares all bits.

Note: who is believed
---------------------
Of an audited shard, its owner has digested the whole gradient when it computed the step. Another
device computes it once more. Where the two differ, both do so again, and a third device, if there
is one. If owner and auditor agree now, the first result that differs from theirs was a *transient*
fault. If they do not, the third device decides which of them has a *persistent* one; without a
third, both are named.

Note: one device
----------------
A processor that is the only device has a child of this process be the other one: a `Child` computes
the shard on another core and in other memory. Where there are idle cores it begins with the step
and computes beside it; else it computes when the step's shards are done. If the two differ, this
process and a second child compute it again. Three of four equal results are right, and the fourth
is a transient fault; with fewer nobody is believed.

An accelerator cannot be used in a forked process. There, and after a child that gave no result,
this process computes the shard again itself.

Note: what an audit does not see
--------------------------------
A result that all devices compute alike, such as that of a kernel with a fault. Not audited are
single shards, which may leave something behind as in a plain loop; losses that gather over the
batch; and payloads that the loss changes, or that hold anything but tensors, numbers and text in
lists, tuples and dicts.

Note: memory
------------
Kernels may choose by strides and by where memory begins. So a payload that another process computes
lies there as it lies here: with the same strides, at the same distance from a multiple of 64 bytes.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from onefold.core.batch import ShardedBatch, map_parts
from onefold.core.encoding import decode, encode
from onefold.core.flat import same_bits
from onefold.core.options import RunOptions
from onefold.core.randomness import derive_seed
from onefold.errors import AuditError
from onefold.placement.base import StepContext
from onefold.record.entries import AuditEntry, Found, SameProcessEntry
from onefold.session.run import RunSetup, RunView
from onefold.shard.task import ShardTask
from onefold.step.engine import Engine
from onefold.step.hook import Attempt, Hook, Update
from onefold.system.background import Child, ChildError, has_idle_cores, on_other_cores
from onefold.system.internals import has_own_step
from onefold.tools.digests import WholeDigest

__all__ = ["Auditor", "packed", "prepare", "unpacked"]

_log = logging.getLogger("onefold")
_Value = TypeVar("_Value")
_WHOLE = 1 << 64
_ALIGNED = 64
_LIMIT_STEPS = 5
"""A child may take so many times as long as all shards of the step took."""
Results = Mapping[int, Mapping[int, str]]
"""For each device, the result of each shard that it computed."""


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Audit a share of the shards of a run."""
    return lambda run: Auditor(run.engine, start.context.options, run.found)


class Auditor(Hook):
    """Audits a share of all shards; all devices make the same calls.

    Args:
        engine: the devices of this process.
        options: say how large a share, and whether a run goes on after a transient fault.
        found: called with an entry of the record for each fault, and once if the run's own process
            takes over. The recording tool may add itself later.
    """

    least_limit_s = 10.0
    """The shortest time that a child is waited for."""

    def __init__(
        self, engine: Engine, options: RunOptions, found: Sequence[Callable[[Found], None]]
    ) -> None:
        self._engine, self._found = engine, found
        self._rate, self._heals = options.audit, options.on_corruption == "heal"
        self._step = 0
        self._digests = WholeDigest(())
        """Of the step."""
        self._kept: dict[int, bytes | None] = {}
        self._healed = -1
        """The last step that was computed again."""
        self._warned = False
        self._child_failed = False
        self._early: Child | None = None
        """Computes the audited shards of the step while this process does."""
        self._began, self._limit_s = 0.0, self.least_limit_s

    @property
    def _context(self) -> StepContext:
        return self._engine.context

    @property
    def _forks(self) -> bool:
        """Whether a child of this process is the other device."""
        alone = self._context.alone and self._context.first.device.type == "cpu"
        return alone and not self._child_failed

    def task(self, task: ShardTask) -> ShardTask:
        """Digest all gradients of the audited shards."""
        self._digests = WholeDigest(self.chosen(task.step, task.shards))
        return replace(task, notes=(*task.notes, self._digests)) if self._digests.shards else task

    @contextmanager
    def around_compute(self, attempt: Attempt) -> Iterator[None]:
        """Keep the payloads of audited shards as they are before, and audit a whole computation.

        If there is one device, and other cores are idle, they compute these shards meanwhile.
        """
        task, batch = attempt.task, attempt.task.batch
        self._step, self._began = task.step, time.monotonic()
        own = [shard for shard in self._digests.shards if shard in batch.shards]
        self._kept = {shard: self._written(batch.shards[shard]) for shard in own}
        who = {shard: 0 for shard, kept in self._kept.items() if kept is not None}
        self._end_early()  # if the step is begun again
        # Compiled code is there once this process has made it.
        ready = task.gatherers is None and not self._context.compilers.compiled
        if who and ready and self._forks and has_idle_cores():
            self._early = self._in_child(who, task)
        try:
            yield
        except BaseException:
            self._end_early()
            raise
        if attempt.whole and self._digests.shards:
            with self._context.timed("exchange", "audit"):
                attempt.again |= not self._is_sound(task)

    def chosen(self, step: int, shards: int) -> frozenset[int]:
        """The shards of a step that are audited: the same on all devices."""
        if shards == 1:
            return frozenset()
        drawn = derive_seed("audit", self._context.settings.seed, step)
        count = int(self._rate * shards + drawn / _WHOLE)
        first = derive_seed("audit first", self._context.settings.seed, step)
        return frozenset((first + place) % shards for place in range(min(count, shards)))

    def _is_sound(self, task: ShardTask) -> bool:
        """Audit the shards of a step that were chosen; whether the step may be used as it is.

        Args:
            task: what all shards have in common.

        Raises:
            AuditError: a device is at fault, and the run is not to go on.
        """
        if task.gatherers is not None:
            return True
        shared, batch = self._shared(task.batch), task.batch
        first = {number: dict(each["results"]) for number, each in enumerate(shared)}
        payloads = {shard: unpacked(text) for each in shared for shard, text in each["payloads"]}
        # Of a shard whose payload cannot be sent, or was changed, there is nothing here.
        found = [shard for shard in sorted(self._digests.shards) if shard in payloads]
        if not found:
            self._end_early()
            return True
        task = replace(task, batch=replace(batch, shards={**payloads, **batch.shards}))
        owners = {shard: _owner_of(batch, shard) for shard in found}
        others = {shard: self._auditor_of(shard, owners[shard], task) for shard in found}
        self._limit_s = self.least_limit_s + _LIMIT_STEPS * (time.monotonic() - self._began)
        second = self._again(others, task, apart=True)
        sound = True
        for shard in found:
            owner, other = owners[shard], others[shard]
            if first[owner][shard] == second[other][shard]:
                continue
            fault = self._judged(shard, owner, other, first, second, task)
            self._report(fault)
            sound &= fault.devices != [owner]
        self._healed = self._healed if sound else task.step
        return sound

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.end()
            self._early = None

    def _shared(self, batch: ShardedBatch) -> list[dict[str, Any]]:
        """What each device has computed of the chosen shards, and their payloads."""
        own = {}
        for replica in self._context.replicas:
            here, found = batch.shares.shards_of(replica.number), self._digests.results
            results = [(shard, result) for shard, result in found.items() if shard in here]
            sent = [(shard, self._unchanged(shard, batch)) for shard, _ in results]
            sent = [each for each in sent if each[1] is not None]
            own[replica.number] = {"results": results, "payloads": sent}
        return self._context.exchange.transport.all_gather_values(own)

    def _unchanged(self, shard: int, batch: ShardedBatch) -> bytes | None:
        """The payload of a shard, if the step has left it as it was; else None."""
        kept = self._kept.get(shard)
        if kept is not None and kept != self._written(batch.shards[shard]):
            self._skip("the loss changes its batch in place")
            return None
        return kept

    def _written(self, payload: object) -> bytes | None:
        try:
            return packed(payload)
        except TypeError as error:
            self._skip(str(error))
            return None

    def _skip(self, why: str) -> None:
        """Warn once of shards that are not audited."""
        if not self._warned:
            self._warned = True
            _log.warning("shards are not audited: %s", why)

    def _auditor_of(self, shard: int, owner: int, task: ShardTask) -> int:
        distance = 1 + derive_seed("auditor", task.step, shard) % max(1, self._context.devices - 1)
        return (owner + distance) % self._context.devices

    def _again(self, who: Mapping[int, int], task: ShardTask, *, apart: bool = False) -> Results:
        """Compute shards once more, each on one device; return what all devices have computed.

        Args:
            who: for each shard, the device.
            task: what all shards have in common.
            apart: whether a child computes them, if there is only one device.
        """
        if apart and self._forks:
            early, self._early = self._early, None
            child = early or self._in_child(who, task)
            own = None if child is None else self._tried(lambda: child.result(self._limit_s))
            if own is not None:
                return {0: dict(decode(own))}
        rows = self._context.exchange.transport.all_gather_values(self._here(who, task))
        return {number: dict(row) for number, row in enumerate(rows)}

    def _here(self, who: Mapping[int, int], task: ShardTask) -> dict[int, list[tuple[int, str]]]:
        """What each device of this process computes of its share of some shards."""
        own = {}
        with self._engine.placement.gathered():
            for replica in self._context.replicas:
                shards = [shard for shard, device in who.items() if device == replica.number]
                again = WholeDigest(shards)
                with self._context.attached(replica):
                    replica.start_step(task)
                    for shard in shards:
                        replica.compute(shard, replace(task, notes=(again,)))
                    replica.end()
                own[replica.number] = [*again.results.items()]
        return own

    def _in_child(self, who: Mapping[int, int], task: ShardTask) -> Child | None:
        """Have a child compute some shards; None if there is none."""
        return self._tried(lambda: Child(lambda: encode(self._here(who, task)[0], "an audit")))

    def _tried(self, call: Callable[[], _Value]) -> _Value | None:
        """Call something of a child; None, and no child from here on, if that fails."""
        try:
            return call()
        except ChildError as error:
            self._child_failed = True
            self._tell(SameProcessEntry(step=self._step, why=str(error)))
            return None

    def _judged(
        self,
        shard: int,
        owner: int,
        other: int,
        first: Results,
        second: Results,
        task: ShardTask,
    ) -> AuditEntry:
        """Find out who is at fault, where two results of a shard differ."""
        # What was healed a moment ago is not healed again.
        heals = self._heals and self._healed != task.step
        once, twice = first[owner][shard], second[other][shard]
        of_owner = self._again({shard: owner}, task)[owner][shard]
        of_other = self._again({shard: other}, task, apart=True)[other][shard]
        if owner == other:
            _, times = Counter([once, twice, of_owner, of_other]).most_common(1)[0]
            sound = times > 2
            return self._fault(shard, owner, persistent=not sound, healed=sound and heals)
        if of_owner == of_other:
            # Both agree now: whoever had another result before was at fault, once.
            return self._fault(shard, owner if once != of_owner else other, healed=heals)
        third = next((d for d in range(self._context.devices) if d not in (owner, other)), None)
        if third is None:
            return self._fault(shard, owner, other, persistent=True)
        truth = self._again({shard: third}, task)[third][shard]
        wrong = [d for d, result in ((owner, of_owner), (other, of_other)) if result != truth]
        return self._fault(shard, *wrong, persistent=True)

    def around_update(
        self,
        task: ShardTask,
        optimizer: torch.optim.Optimizer,
        segments: Sequence[torch.Tensor],
        update: Update,
    ) -> None:
        """Make the update of one of the segments twice, in a step of which shards were audited.

        Raises:
            AuditError: two updates of the segment differ, and the run is not to go on.
        """
        gradients = [(each, each.grad) for each in segments if each.grad is not None]
        # Another optimizer's step may do more than update each segment by itself.
        known = type(optimizer).__module__.startswith("torch.optim.")
        if not (self._digests.shards and gradients and known) or has_own_step(optimizer):
            update()
            return
        drawn = derive_seed("audit piece", self._context.settings.seed, self._step)
        segment, own = gradients[(drawn + self._context.first.number) % len(gradients)]
        gradient = own.clone()
        values, state = segment.detach().clone(), copy.deepcopy(optimizer.state.get(segment))
        update()
        updated = segment.detach().clone()
        # Once more, of this segment alone.
        for each, _ in gradients:
            each.grad = None
        segment.grad = gradient
        with torch.no_grad():
            segment.copy_(values)
        optimizer.state.pop(segment, None)
        if state is not None:
            optimizer.state[segment] = state
        with on_other_cores() if self._context.first.device.type == "cpu" else nullcontext():
            update()
        for each, kept in gradients:
            each.grad = kept
        if not same_bits(updated, segment.detach()):
            # What it has made of the other segments nobody knows, so this is not healed.
            self._report(self._fault(-1, self._context.first.number))

    def _fault(
        self, shard: int, *devices: int, persistent: bool = False, healed: bool = False
    ) -> AuditEntry:
        return AuditEntry(
            step=self._step,
            shard=shard,
            devices=[*devices],
            persistent=persistent,
            healed=healed,
        )

    def _report(self, fault: AuditEntry) -> None:
        """Tell of a fault; end the run if it is not healed."""
        self._tell(fault, shown=self._context.leads or fault.shard < 0)
        if not fault.healed:
            raise AuditError(f"{_words_of(fault)}. {_ADVICE}")

    def _tell(self, entry: Found, *, shown: bool = True) -> None:
        for note in self._found:
            note(entry)
        if shown:
            _log.warning("%s", _words_of(entry))


def _words_of(entry: Found) -> str:
    if isinstance(entry, SameProcessEntry):
        return (
            f"step {entry.step}: a child process could not compute an audit: {entry.why}. From "
            f"here on the run's own process computes audits again"
        )
    who = " or ".join(f"device {device}" for device in entry.devices)
    kind = "again and again" if entry.persistent else "once"
    what = f"shard {entry.shard}" if entry.shard >= 0 else "the update of a segment"
    return f"step {entry.step}, {what}: {who} computed wrong bits {kind}"


_ADVICE = (
    "Go on from the last checkpoint without that device. If other devices are named as well, the "
    "loss does not repeat itself: look for random numbers that it draws from a generator of its own"
)


def packed(payload: object) -> bytes:
    """Write a payload for another process, with how its tensors lie in memory.

    Raises:
        TypeError: it holds something that another process would not have as it is here.
    """
    layouts: list[tuple[tuple[int, ...], int, bool]] = []

    def plain(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            sparse = part.layout is not torch.strided
            if sparse or any(
                n > 1 and not s for n, s in zip(part.shape, part.stride(), strict=True)
            ):
                raise TypeError("a tensor of the batch is sparse, or expanded")
            place = part.data_ptr() % _ALIGNED if part.device.type == "cpu" else 0
            layouts.append((part.stride(), place, part.requires_grad))
            return part.detach().contiguous()
        if type(part) in (list, tuple):
            return type(part)([plain(each) for each in part])
        if type(part) is dict:
            return {key: plain(each) for key, each in part.items()}
        if part is None or type(part) in (bool, int, float, str):
            return part
        raise TypeError(f"the batch holds a {type(part).__name__}")

    return encode((plain(payload), layouts), "a shard")


def unpacked(text: bytes) -> Any:
    """Read what `packed` has written; tensors lie on the host."""
    payload, layouts = decode(text)
    each = iter(layouts)
    return map_parts(payload, lambda values: _laid(values, *next(each)))


def _laid(
    values: torch.Tensor, strides: Sequence[int], place: int, has_gradient: bool
) -> torch.Tensor:
    """Copy values to memory of these strides, so far behind a multiple of 64 bytes."""
    if not values.numel():
        return torch.empty_strided(values.shape, strides, dtype=values.dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    nbytes = extent * values.element_size()
    memory = torch.empty(nbytes + _ALIGNED, dtype=torch.uint8)
    start = (place - memory.data_ptr()) % _ALIGNED
    laid = memory[start : start + nbytes].view(values.dtype).as_strided(values.shape, strides)
    return laid.copy_(values).requires_grad_(has_gradient)


def _owner_of(batch: ShardedBatch, shard: int) -> int:
    shares = batch.shares
    return next(device for device in range(shares.devices) if shard in shares.shards_of(device))
