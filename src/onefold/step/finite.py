"""Looks for losses and gradients that are not finite, and names where they come from.

`FiniteCheck` decides whether a step may be used. `bad_gradient` names the shard, its samples and
the parameter. A gradient that is not finite is seen in the sum of all shards, where nobody can tell
any more which of them it came from. The shards are then computed once more: they are pure functions
of what the step began with, and nothing has been updated.

Note: when a GPU is asked
-------------------------
To read a number of a GPU is to wait for everything that it has been given to do, and while the host
waits, the GPU runs out of work. So loss and norm are copied to the host behind the step's own
kernels, and looked at when the shards of the next step have been handed to the GPU. The error then
comes one step late, but still before another update, and no GPU has waited for it. Where they
decide whether the step is skipped, the host waits once for both, when the norm has been queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import all_finite
from onefold.core.late import load
from onefold.core.results import ShardResult
from onefold.core.settings import Settings
from onefold.errors import GradientError, LossError
from onefold.exchange.shard_table import ShardTable
from onefold.placement.context import StepContext
from onefold.shard.replica import Replica, ShardTask
from onefold.step.rules import GradientRules
from onefold.system.accelerator import HostCopy

__all__ = ["FiniteCheck", "bad_gradient"]


_ADVICE = (
    "Look at these samples: a mean over nothing (targets that are all ignored, an empty mask) is "
    "not a number, which onefold.losses and onefold.Mean get right. Else lower the learning rate, "
    'set clip_norm, or leave such steps out with Trainer(on_nonfinite="skip")'
)


@dataclass(frozen=True, slots=True)
class _Unread:
    """What nobody has looked at yet, so as not to wait for a GPU."""

    step: int
    batch: ShardedBatch
    totals: HostCopy
    now: bool
    """Whether they are read in the same step, with the norm."""
    norm: HostCopy | None = None

    def bad_loss(self) -> str:
        return _bad_loss(self.totals.read(), self.batch, self.step)


class FiniteCheck:
    """Looks at the loss and the gradient of each step before anything is updated.

    On a GPU it looks once the shards of the next step are under way, unless what it finds decides
    whether the step is skipped; see the note at the head of this file.

    Args:
        settings: say whether a step is refused or skipped.
        rules: know the scale of the losses.
        table: holds the losses of all shards.
    """

    def __init__(self, settings: Settings, rules: GradientRules, table: ShardTable) -> None:
        self._skips = settings.on_nonfinite == "skip"
        self._rules = rules
        self._table = table
        on_host = self._table.totals.device.type == "cpu"
        self._is_late = not on_host and not self._skips and rules.scale is None
        self._unread: _Unread | None = None

    def of_loss(
        self, batch: ShardedBatch, step: int, *, now: bool = False, alone: bool = False
    ) -> str:
        """Describe the first loss that is not finite, if the step is to be skipped for it.

        Args:
            batch: of the step.
            step: its number.
            now: look in this step, at gradient as well, though that waits for a GPU.
            alone: whether there will be no gradient, beside which a GPU's losses could be read.

        Raises:
            LossError: there is one, and it is not to be skipped.
        """
        totals = self._table.totals
        if totals.device.type == "cpu" and not self._is_late:
            return self._checked(_bad_loss(totals, batch, step))
        now = now or not self._is_late
        unread = _Unread(step, batch, HostCopy(totals), now)
        if now and alone:
            return self._checked(unread.bad_loss())
        self._unread = unread
        return ""

    def of_gradient(
        self, norm: torch.Tensor, step: int, name: Callable[[], str]
    ) -> tuple[str, torch.Tensor | None]:
        """Describe what is not finite, if the step is to be skipped for it.

        Args:
            norm: (), of the whole gradient.
            step: number of the step.
            name: computes which shard and parameter it is; called alike on all devices.

        Returns:
            That, and the norm; None if a loss is not finite already.

        Raises:
            LossError, GradientError: the loss or the gradient is not finite, and is not to be
                skipped.
        """
        unread = self._unread
        if unread is None:
            return self._checked_norm(float(norm), step, name), norm
        copied = HostCopy(norm)
        if not unread.now:
            self._unread = replace(unread, norm=copied)
            return "", norm
        self._unread = None
        # The norm first, which was copied last: for the losses nobody waits again.
        value = float(copied.read())
        if failure := self._checked(unread.bad_loss()):
            return failure, None
        return self._checked_norm(value, step, name), norm

    def _checked_norm(self, value: float, step: int, name: Callable[[], str]) -> str:
        if math.isfinite(value):
            return ""
        if self._rules.overflows(value):
            return f"a gradient overflowed with losses scaled by {self._rules.loss_scale:.0f}"
        if self._skips:
            return f"the gradient of step {step} is not finite"
        raise GradientError(f"{name()}. {_ADVICE}")

    def check_last(self) -> None:
        """Look at the last step's loss and gradient, if nobody has.

        Raises:
            LossError, GradientError: the loss or the gradient is not finite.
        """
        if self._unread is not None:
            last, self._unread = self._unread, None
            self._checked(last.bad_loss())
            if last.norm is not None and not math.isfinite(float(last.norm.read())):
                raise GradientError(
                    f"the gradient of step {last.step} is not finite, and has been used for its "
                    f"update: go on from a checkpoint. {_ADVICE}"
                )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Surround a step's shards; look at the last step once they are under way.

        Raises:
            LossError, GradientError: something in the last step is not finite; also in place of an
                error of a shard, which then computed with what that step had left.
        """
        try:
            yield
        except Exception:
            self.check_last()
            raise
        self.check_last()

    def _checked(self, failure: str) -> str:
        if failure and not self._skips:
            raise LossError(f"{failure}. {_ADVICE}")
        return failure


def _bad_loss(totals: torch.Tensor, batch: ShardedBatch, step: int) -> str:
    """Describe the first loss that is not finite; empty if all are.

    Args:
        totals: (V,) float64, the shards' parts of the loss.
        batch: the batch of the step.
        step: number of the step.
    """
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            advice = load("shard.advice").ONE_SAMPLE
            alone = f". {advice}" if batch.size_of(shard) == 1 < batch.samples else ""
            return (
                f"the loss of step {step}, shard {shard} is {total}: expected a finite number for "
                f"{batch.describe(shard)}{alone}"
            )
    return ""


def bad_gradient(
    context: StepContext, batch: ShardedBatch, task: ShardTask, done: Mapping[int, ShardResult]
) -> str:
    """Describe the first gradient that is not finite; called on every device.

    Args:
        context: this process's part of the run.
        batch: the batch of the step.
        task: what all shards of the step have in common.
        done: the results of shards that have been computed again already.
    """
    found = {}
    for replica in context.replicas:
        with context.attached(replica):
            found[replica.number] = _of_shards(replica, batch, task, done)
    rows = context.exchange.transport.all_gather_values(found)
    first = min(filter(None, rows), default=None)
    if first is None:
        return (
            f"the gradient of step {task.step} is not finite, though no shard's is when it is "
            f"computed again: their sum overflows, or the loss does not repeat itself"
        )
    _, name, where = first
    return f"{where}: the gradient of {name} is not finite"


def _of_shards(
    replica: Replica, batch: ShardedBatch, task: ShardTask, done: Mapping[int, ShardResult]
) -> tuple[int, str, str] | None:
    """Find the first of a device's shards with such a gradient, and name the parameter."""
    replica.start_step(task)
    try:
        for shard in batch.shares.shards_of(replica.number):
            if shard not in batch.shards:
                continue
            gradients = (done.get(shard) or replica.compute(shard, batch, task)).gradients
            for name, gradient in zip(replica.parts.trained, gradients, strict=True):
                if gradient is not None and not all_finite(gradient):
                    where = f"step {task.step}, shard {shard} ({batch.describe(shard)})"
                    return shard, name, where
    finally:
        replica.end()
    return None
