"""SDC checks: recomputes some shards on another device and compares all bits.

Note: who is at fault
---------------------
The owner of an audited shard digests the whole gradient when it computes the step. Another device,
the auditor, computes the shard again. If the results differ, both compute it once more. If they now
agree, the earlier result that differs is a *transient* fault. Otherwise a third device decides
which of the two has a *persistent* fault; without a third device, both are reported.

Note: one device
----------------
If a CPU is the only device, a child process replaces the auditor: a `Child` computes the shard on
another core, in other memory. If cores are idle, it starts with the step and computes in parallel;
otherwise it computes after the step's shards. If the results differ, this process and a second
child compute the shard again. If three of the four results are equal, the fourth is a transient
fault; otherwise the fault counts as persistent.

An accelerator cannot be used in a forked process. With an accelerator, and after a child that
failed, this process recomputes the shard itself.

Note: what an audit does not detect
-----------------------------------
An error that all devices make in the same way, such as that of a faulty kernel. Not audited are:
runs with a single shard, which may leave state behind like a plain loop; losses that gather over
the batch; and payloads that the loss changes, or that contain anything but tensors, numbers and
text in lists, tuples and dicts.

Note: memory layout
-------------------
Kernels may choose their algorithm by strides and by alignment. So a payload that another process
computes gets the same layout there: the same strides, and the same offset from a multiple of 64
bytes.
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
"""Time limit of a child, as a multiple of the time of all shards of the step."""
Results = Mapping[int, Mapping[int, str]]
"""Result of each shard that a device computed, by device."""


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Audit a fraction of a run's shards."""
    return lambda run: Auditor(run.engine, start.context.options, run.found)


class Auditor(Hook):
    """Audits a fraction of all shards. All devices make the same calls.

    Args:
        engine: engine of this process's devices.
        options: fraction of shards, and whether the run continues after a transient fault.
        found: functions that get a record entry for each fault, and one if the run's own process
            replaces the child. The recording tool may append itself later.
    """

    least_limit_s = 10.0
    """Minimum time limit of a child, in seconds."""

    def __init__(
        self, engine: Engine, options: RunOptions, found: Sequence[Callable[[Found], None]]
    ) -> None:
        self._engine, self._found = engine, found
        self._rate, self._heals = options.audit, options.on_corruption == "heal"
        self._step = 0
        self._digests = WholeDigest(())
        """Digests of the current step."""
        self._kept: dict[int, bytes | None] = {}
        self._healed = -1
        """Last step that was recomputed after a fault."""
        self._warned = False
        self._child_failed = False
        self._early: Child | None = None
        """Child that computes the step's audited shards while this process computes all shards."""
        self._began, self._limit_s = 0.0, self.least_limit_s

    @property
    def _context(self) -> StepContext:
        return self._engine.context

    @property
    def _forks(self) -> bool:
        """Whether a child process is the auditor."""
        alone = self._context.alone and self._context.first.device.type == "cpu"
        return alone and not self._child_failed

    def task(self, task: ShardTask) -> ShardTask:
        """Digest all gradients of the audited shards."""
        self._digests = WholeDigest(self.chosen(task.step, task.shards))
        return replace(task, notes=(*task.notes, self._digests)) if self._digests.shards else task

    @contextmanager
    def around_compute(self, attempt: Attempt) -> Iterator[None]:
        """Save the payloads of audited shards first, and audit after a complete computation.

        If there is only one device, and other cores are idle, a child computes these shards in
        parallel.
        """
        task, batch = attempt.task, attempt.task.batch
        self._step, self._began = task.step, time.monotonic()
        own = [shard for shard in self._digests.shards if shard in batch.shards]
        self._kept = {shard: self._written(batch.shards[shard]) for shard in own}
        who = {shard: 0 for shard, kept in self._kept.items() if kept is not None}
        self._end_early()  # a child of an earlier attempt at this step
        # Compiled code rules out an early child: forked before this process compiles, it would too.
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
        """Return the audited shards of a step, the same on all devices."""
        if shards == 1:
            return frozenset()
        drawn = derive_seed("audit", self._context.settings.seed, step)
        count = int(self._rate * shards + drawn / _WHOLE)
        first = derive_seed("audit first", self._context.settings.seed, step)
        return frozenset((first + place) % shards for place in range(min(count, shards)))

    def _is_sound(self, task: ShardTask) -> bool:
        """Audit the chosen shards of a step; return whether its results may be used.

        Args:
            task: task that all shards share.

        Raises:
            AuditError: a device is at fault, and the run must not continue.
        """
        if task.gatherers is not None:
            return True
        shared, batch = self._shared(task.batch), task.batch
        first = {number: dict(each["results"]) for number, each in enumerate(shared)}
        payloads = {shard: unpacked(text) for each in shared for shard, text in each["payloads"]}
        # Payloads that cannot be sent, or that the loss changed, are missing here.
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
        """Gather each device's results and payloads of the chosen shards."""
        own = {}
        for replica in self._context.replicas:
            here, found = batch.shares.shards_of(replica.number), self._digests.results
            results = [(shard, result) for shard, result in found.items() if shard in here]
            sent = [(shard, self._unchanged(shard, batch)) for shard, _ in results]
            sent = [each for each in sent if each[1] is not None]
            own[replica.number] = {"results": results, "payloads": sent}
        return self._context.exchange.transport.all_gather_values(own)

    def _unchanged(self, shard: int, batch: ShardedBatch) -> bytes | None:
        """Return the payload of a shard, or None if the step changed it."""
        kept = self._kept.get(shard)
        if kept is not None and kept != self._written(batch.shards[shard]):
            self._skip("the loss modifies its batch in place")
            return None
        return kept

    def _written(self, payload: object) -> bytes | None:
        try:
            return packed(payload)
        except TypeError as error:
            self._skip(str(error))
            return None

    def _skip(self, why: str) -> None:
        """Warn once that shards are not audited."""
        if not self._warned:
            self._warned = True
            _log.warning("shards are not audited: %s", why)

    def _auditor_of(self, shard: int, owner: int, task: ShardTask) -> int:
        distance = 1 + derive_seed("auditor", task.step, shard) % max(1, self._context.devices - 1)
        return (owner + distance) % self._context.devices

    def _again(self, who: Mapping[int, int], task: ShardTask, *, apart: bool = False) -> Results:
        """Recompute shards, each on one device, and return the results of all devices.

        Args:
            who: device of each shard.
            task: task that all shards share.
            apart: whether a child recomputes them if there is only one device.
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
        """Compute some shards on the devices of this process, and return the results."""
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
        """Start a child that computes some shards; None if that fails."""
        return self._tried(lambda: Child(lambda: encode(self._here(who, task)[0], "an audit")))

    def _tried(self, call: Callable[[], _Value]) -> _Value | None:
        """Call a child's function. If it fails, return None and use no child from then on."""
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
        """Find the device at fault after two results of a shard differ."""
        # A step that was just recomputed after a fault is not recomputed again.
        heals = self._heals and self._healed != task.step
        once, twice = first[owner][shard], second[other][shard]
        of_owner = self._again({shard: owner}, task)[owner][shard]
        of_other = self._again({shard: other}, task, apart=True)[other][shard]
        if owner == other:
            _, times = Counter([once, twice, of_owner, of_other]).most_common(1)[0]
            sound = times > 2
            return self._fault(shard, owner, persistent=not sound, healed=sound and heals)
        if of_owner == of_other:
            # Both agree now: the device with a different earlier result had a transient fault.
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
        """Repeat the update of one segment in a step with audited shards.

        Raises:
            AuditError: two updates of the segment differ, and the run must not continue.
        """
        gradients = [(each, each.grad) for each in segments if each.grad is not None]
        # The step of another optimizer may do more than update each segment separately.
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
        # Repeat the update for this segment only.
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
            # Healing is impossible: nothing is known about the other segments of this update.
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
        """Report a fault, and end the run if it is not healed."""
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
            f"step {entry.step}: a child process could not compute an audit: {entry.why}. From now "
            f"on, the run's own process computes audits"
        )
    who = " or ".join(f"device {device}" for device in entry.devices)
    kind = "again and again" if entry.persistent else "once"
    what = f"shard {entry.shard}" if entry.shard >= 0 else "the update of a segment"
    return f"step {entry.step}, {what}: {who} computed wrong bits {kind}"


_ADVICE = (
    "Resume from the last checkpoint without that device. If several devices are reported, the "
    "loss may not be deterministic: check whether it uses a random number generator of its own"
)


def packed(payload: object) -> bytes:
    """Encode a payload for another process, with the memory layout of its tensors.

    Raises:
        TypeError: the payload contains an object that another process could not reproduce exactly.
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
        raise TypeError(f"the batch contains a {type(part).__name__}")

    return encode((plain(payload), layouts), "a shard")


def unpacked(text: bytes) -> Any:
    """Decode the output of `packed`; tensors are on the host."""
    payload, layouts = decode(text)
    each = iter(layouts)
    return map_parts(payload, lambda values: _laid(values, *next(each)))


def _laid(
    values: torch.Tensor, strides: Sequence[int], place: int, has_gradient: bool
) -> torch.Tensor:
    """Copy values to memory with these strides, at this offset from a multiple of 64 bytes."""
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
