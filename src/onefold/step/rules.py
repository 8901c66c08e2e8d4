"""From a step's totals to the gradient that the optimizer gets, if all of it is finite.

`GradientRules` divides, scales and clips. `FiniteCheck` decides whether a step may be used, and
`bad_gradient` names the shard, its samples and the parameter. A gradient that is not finite is seen
in the sum of all shards, which does not show the shard that it came from. The shards are then
computed once more: they are pure functions of what the step began with, and nothing is updated yet.
`write_gradient` leaves the gradient of a batch in ``.grad`` of the user's parameters, on every
device.

Note: the order
---------------
Totals are first divided by what backward could not know yet, and by the scale of the loss. Then the
norm of the whole gradient is added up, segment by segment in float64, and every device has it: a
single value that is not finite makes the norm not finite, so one number decides for all devices
whether anything is updated (`onefold.step.finite`). Only then is the gradient clipped, first by
norm and then by value.

Note: when a GPU is asked
-------------------------
To read a number of a GPU is to wait for everything that it has been given to do, and while the host
waits, the GPU runs out of work. So loss and norm are copied to the host behind the step's own
kernels, and looked at when the shards of the next step have been handed to the GPU. The error then
comes one step late, but still before another update, and no GPU has waited for it. Where they
decide whether the step is skipped, the host waits once for both, when the norm has been queued.

Note: whose memory it is
------------------------
What shards and fold have made belongs to the exchange, which writes to it again in the next step.
So each call makes new memory for the whole gradient, and ``.grad`` are views of it: it is the
script's, lives as long as one of them does, and no later call overwrites it. A later call replaces
``.grad`` by other tensors, as ``zero_grad`` and ``backward`` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from onefold.core.flat import FlatTensors, all_finite
from onefold.core.late import load
from onefold.core.results import StepWeight
from onefold.core.settings import LossScale, Settings
from onefold.errors import GradientError, LossError
from onefold.exchange.shard_table import ShardTable
from onefold.placement.base import Done, StepContext, StepTotals
from onefold.shard.replica import Replica, ShardTask
from onefold.system.accelerator import HostCopy
from onefold.update.norms import Share, exact_norms, exact_total, plain_norm
from onefold.update.optimizer import PartitionedOptimizer

__all__ = ["FiniteCheck", "GradientRules", "bad_gradient", "check_gradient", "write_gradient"]


class GradientRules:
    """What is done to every gradient before the update.

    Args:
        settings: the settings of the run.
        update: holds the gradients of this process's segments.
    """

    def __init__(self, settings: Settings, update: PartitionedOptimizer) -> None:
        self.scale = LossScale() if settings.precision.is_scaled else None
        """The factor of the losses; None where they are not scaled."""
        self._clip_norm = settings.clip_norm
        self._clip_value = settings.clip_value
        self._update = update

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return 1.0 if self.scale is None else self.scale.value

    def load_totals(self, weight: StepWeight, totals: StepTotals, task: ShardTask) -> None:
        """Take the totals of a step, divided as the loss is.

        Args:
            weight: the weight of the whole batch.
            totals: of all shards.
            task: what all shards of the step have in common.

        Raises:
            LossError: no shard gave any parameter a gradient.
        """
        update = self._update
        if not any(totals.gave):
            raise LossError(
                f"the loss of step {task.step} does not depend on any parameter that requires a "
                f"gradient, in any shard: was it computed under no_grad, or detached?"
            )
        update.load_gradients(totals.segments, totals.gave, shards=task.shards)
        divisor = task.divisor(weight.value) if weight.divided else 1.0
        factor = divisor / weight.value / self.loss_scale
        if factor != 1.0:
            update.scale(factor)

    def norm(self, shards: int, totals: StepTotals, share: Share, *, widened: bool) -> torch.Tensor:
        """Compute the norm of the whole gradient, (), the same on every device.

        Args:
            shards: how many shards every batch is cut into.
            totals: of all shards.
            share: brings rows of numbers to all devices.
            widened: whether gradients are in the dtype in which sums are.
        """
        update = self._update
        if shards > 1:
            return update.norms.squared(update.owned_gradients, share).sqrt()
        # As torch.nn.utils.clip_grad_norm_ does, to the last bit.
        if totals.whole is None:
            return update.norms.of_one_shard(update.gradients, totals.gave, share, widened=widened)
        given = [gradient for gradient in totals.whole if gradient is not None]
        norm = plain_norm(given)
        # Of large gradients in low precision the norm itself overflows: then it is exact.
        if given and norm.device.type == "cpu" and not math.isfinite(norm.item()):
            return exact_total(exact_norms(given, norm.device))
        return norm

    def clip(self, norm: torch.Tensor) -> None:
        """Limit the gradient, whose norm is given, in norm and then in the size of its elements."""
        if self._clip_norm is not None:
            self._update.scale((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self._clip_value is not None:
            self._update.limit(self._clip_value)

    def overflows(self, norm: float) -> bool:
        """Whether a step is skipped for its gradient alone, as a smaller scale may mend it."""
        return self.scale is not None and self.scale.can_shrink and not math.isfinite(norm)

    def end_step(self, *, overflow: bool) -> None:
        """Note how a step of scaled losses ended that had a gradient."""
        assert self.scale is not None
        self.scale = self.scale.after(overflow=overflow)


def write_gradient(context: StepContext) -> None:
    """Set ``.grad`` from the gradients that were taken, in every process; called on all devices.

    Parameters to which no shard gave a gradient have None.
    """
    update, first = context.update, context.first
    whole = FlatTensors(update.storage.gradients, device=first.device)
    for item, gradient in zip(update.updated, update.gradients, strict=True):
        if gradient is not None:
            whole.segment(item.segment).copy_(gradient)
    # Read before the exchange is over: from then on the table is no longer ours to read.
    gave = context.table.times_given()
    context.exchange.all_gather_gradient(whole)
    update.drop()
    trained = first.parts.trained.values()
    for parameter, view, given in zip(trained, whole.views, gave, strict=True):
        # Rounded only now, where the model is in low precision: sums are in float32.
        parameter.grad = view.to(parameter.dtype) if given else None


def check_gradient(update: PartitionedOptimizer) -> None:
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


_ADVICE = (
    "Look at these samples: a mean over nothing (targets that are all ignored, an empty mask) is "
    "not a number, which onefold.losses and onefold.Mean get right. Else lower the learning rate, "
    'set clip_norm, or leave such steps out with Trainer(on_nonfinite="skip")'
)


@dataclass(frozen=True, slots=True)
class _Unread:
    """What nobody has looked at yet, so as not to wait for a GPU."""

    task: ShardTask
    totals: HostCopy
    now: bool
    """Whether they are read in the same step, with the norm."""
    norm: HostCopy | None = None

    def bad_loss(self) -> str:
        return _bad_loss(self.totals.read(), self.task)


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

    def of_loss(self, task: ShardTask, *, now: bool, alone: bool) -> str:
        """Describe the first loss that is not finite, if the step is to be skipped for it.

        Args:
            task: what all shards of the step have in common.
            now: look in this step, at gradient as well, though that waits for a GPU.
            alone: whether there will be no gradient, beside which a GPU's losses could be read.

        Raises:
            LossError: there is one, and it is not to be skipped.
        """
        totals = self._table.totals
        if totals.device.type == "cpu" and not self._is_late:
            return self._checked(_bad_loss(totals, task))
        now = now or not self._is_late
        unread = _Unread(task, HostCopy(totals), now)
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
                    f"the gradient of step {last.task.step} is not finite, and has been used for "
                    f"its update: go on from a checkpoint. {_ADVICE}"
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


def _bad_loss(totals: torch.Tensor, task: ShardTask) -> str:
    """Describe the first loss that is not finite; empty if all are.

    Args:
        totals: (V,) float64, the shards' parts of the loss.
        task: what all shards of the step have in common.
    """
    batch = task.batch
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            advice = load("shard.advice").ONE_SAMPLE
            alone = f". {advice}" if batch.size_of(shard) == 1 < batch.samples else ""
            return (
                f"the loss of step {task.step}, shard {shard} is {total}: expected a finite number "
                f"for {batch.describe(shard)}{alone}"
            )
    return ""


def bad_gradient(context: StepContext, task: ShardTask, done: Done) -> str:
    """Describe the first gradient that is not finite; called on every device.

    Args:
        context: this process's part of the run.
        task: what all shards of the step have in common.
        done: the results of shards that have been computed again already.
    """
    found = {}
    for replica in context.replicas:
        with context.attached(replica):
            found[replica.number] = _of_shards(replica, task, done)
    rows = context.exchange.transport.all_gather_values(found)
    first = min(filter(None, rows), default=None)
    if first is None:
        return (
            f"the gradient of step {task.step} is not finite, though no shard's is when it is "
            f"computed again: their sum overflows, or the loss does not repeat itself"
        )
    _, name, where = first
    return f"{where}: the gradient of {name} is not finite"


def _of_shards(replica: Replica, task: ShardTask, done: Done) -> tuple[int, str, str] | None:
    """Find the first of a device's shards with such a gradient, and name the parameter."""
    batch = task.batch
    replica.start_step(task)
    try:
        for shard in batch.shares.shards_of(replica.number):
            if shard not in batch.shards:
                continue
            gradients = (done.get(shard) or replica.compute(shard, task)).gradients
            for name, gradient in zip(replica.parts.trained, gradients, strict=True):
                if gradient is not None and not all_finite(gradient):
                    where = f"step {task.step}, shard {shard} ({batch.describe(shard)})"
                    return shard, name, where
    finally:
        replica.end()
    return None
