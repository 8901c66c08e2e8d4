"""Turns the totals of a step into the gradient for the optimizer, if all of it is finite.

`GradientRules` divides, scales and clips. `FiniteCheck` decides whether a step may be used, and
`bad_gradient` names the shard, its samples and the parameter. `write_gradient` writes the gradient
of a batch to ``.grad`` of the user's parameters, on every device.

Note: the order
---------------
Totals are divided by the part of the denominator that backward did not know yet, and by the scale
of the loss. Then the norm of the whole gradient is computed on every device, segment by segment in
float64. One value that is not finite makes the norm not finite, so this number decides for all
devices whether to update. Clipping comes last, first by norm and then by value.

Note: when the host blocks on a GPU
-----------------------------------
Reading a number from a GPU blocks the host until all work queued there is finished, and the GPU
then runs out of work. So loss and norm are copied to the host behind the kernels of the step, and
checked after the shards of the next step are queued. The error is raised one step late, but before
another update, and no GPU becomes idle for it. If these numbers decide whether the step is skipped,
the host blocks once for both, after the norm is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from onefold.core.flat import FlatTensors
from onefold.core.late import load
from onefold.core.results import StepWeight
from onefold.core.settings import LossScale, Settings
from onefold.errors import GradientError, LossError
from onefold.exchange.shard_table import ShardTable
from onefold.placement.base import Done, StepContext, StepTotals
from onefold.shard.replica import ShardTask
from onefold.system.accelerator import HostCopy
from onefold.update.norms import Share, exact_norms, exact_total, plain_norm
from onefold.update.optimizer import PartitionedOptimizer

__all__ = ["FiniteCheck", "GradientRules", "bad_gradient", "write_gradient"]


class GradientRules:
    """Divides, scales and clips every gradient before the update.

    Args:
        settings: the settings of the run.
        update: holds the gradients of this process's segments.
    """

    def __init__(self, settings: Settings, update: PartitionedOptimizer) -> None:
        self.scale = LossScale() if settings.precision.is_scaled else None
        """Loss scale; None if losses are not scaled."""
        self._clip_norm = settings.clip_norm
        self._clip_value = settings.clip_value
        self._update = update

    @property
    def loss_scale(self) -> float:
        """Factor of losses in backward."""
        return 1.0 if self.scale is None else self.scale.value

    def load_totals(self, weight: StepWeight, totals: StepTotals, task: ShardTask) -> None:
        """Load the totals of a step as gradients, divided as the loss is.

        Args:
            weight: the weight of the whole batch.
            totals: the totals of all shards.
            task: the task that all shards of the step share.

        Raises:
            LossError: no shard produced a gradient for any parameter.
        """
        update = self._update
        if not any(totals.gave):
            raise LossError(
                f"the loss of step {task.step} does not depend on any parameter that requires a "
                f"gradient, in any shard. Check that it is not computed under no_grad or from "
                f"detached tensors"
            )
        update.load_gradients(totals.segments, totals.gave, shards=task.shards)
        # Backward divided by the number of samples, because the batch's weight was not known yet:
        # correct for it here.
        divisor = task.divisor(weight.value) if weight.divided else 1.0
        factor = divisor / weight.value / self.loss_scale
        if factor != 1.0:
            update.scale(factor)

    def norm(self, shards: int, totals: StepTotals, share: Share, *, widened: bool) -> torch.Tensor:
        """Compute the norm of the whole gradient, (), the same on every device.

        Args:
            shards: number of shards of every batch.
            totals: the totals of all shards.
            share: gathers rows of numbers from all devices.
            widened: whether gradients have the dtype of sums.
        """
        update = self._update
        if shards > 1:
            return update.norms.squared(update.owned_gradients, share).sqrt()
        # Keep the bits of torch.nn.utils.clip_grad_norm_, because one shard equals a plain loop.
        if totals.whole is None:
            return update.norms.of_one_shard(update.gradients, totals.gave, share, widened=widened)
        given = [gradient for gradient in totals.whole if gradient is not None]
        norm = plain_norm(given)
        # The norm of large gradients in low precision may itself overflow. Compute it exactly then.
        if given and norm.device.type == "cpu" and not math.isfinite(norm.item()):
            return exact_total(exact_norms(given, norm.device))
        return norm

    def clip(self, norm: torch.Tensor) -> None:
        """Clip the gradient by norm, then by value; ``norm`` is the norm before clipping."""
        # Scale on the device: reading the norm, to skip a factor of 1, would block on a GPU.
        if self._clip_norm is not None:
            self._update.scale((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self._clip_value is not None:
            self._update.limit(self._clip_value)

    def overflows(self, norm: float) -> bool:
        """Whether to skip a step for this gradient alone, because a smaller loss scale may help."""
        return self.scale is not None and self.scale.can_shrink and not math.isfinite(norm)

    def end_step(self, *, overflow: bool) -> None:
        """Update the loss scale after a step that had a gradient."""
        assert self.scale is not None
        self.scale = self.scale.after(overflow=overflow)


def write_gradient(context: StepContext) -> None:
    """Write the loaded gradients to ``.grad`` in every process. Call it on all devices.

    ``.grad`` of a parameter is None if no shard gave it a gradient.
    """
    update, first = context.update, context.first
    # Allocate new memory in every call: ``.grad`` are views of it, and belong to the script. The
    # partial sums and totals belong to the exchange, which overwrites them in the next step.
    whole = FlatTensors(update.storage.gradients, device=first.device)
    for item, gradient in zip(update.updated, update.gradients, strict=True):
        if gradient is not None:
            whole.segment(item.segment).copy_(gradient)
    # Read the table before the exchange ends: afterwards other devices may write to it.
    gave = context.table.times_given()
    context.exchange.all_gather_gradient(whole)
    update.drop()
    trained = first.parts.trained.values()
    for parameter, view, given in zip(trained, whole.views, gave, strict=True):
        # Sums are in float32. If the model is in low precision, round only now.
        parameter.grad = view.to(parameter.dtype) if given else None


@dataclass(frozen=True, slots=True)
class _Unread:
    """Numbers that are not read yet, so that the host does not block on a GPU."""

    task: ShardTask
    totals: HostCopy
    now: bool
    """Whether to read them in the same step, together with the norm."""
    norm: HostCopy | None = None

    def bad_loss(self) -> str:
        return _bad_loss(self.totals.read(), self.task)


class FiniteCheck:
    """Checks the loss and the gradient of each step before the update.

    On a GPU it checks a step after the shards of the next one are queued, unless the result decides
    whether the step is skipped; see the note at the head of this file.

    Args:
        settings: decide whether a bad step is refused or skipped.
        rules: provide the loss scale.
        table: holds the losses of all shards.
    """

    def __init__(self, settings: Settings, rules: GradientRules, table: ShardTable) -> None:
        self._skips = settings.on_nonfinite == "skip"
        self._rules = rules
        self._table = table
        on_host = self._table.totals.device.type == "cpu"
        # Skipping a step requires its numbers before its update, whatever that costs.
        self._is_late = not on_host and not self._skips and rules.scale is None
        self._unread: _Unread | None = None

    def of_loss(self, task: ShardTask, *, now: bool, alone: bool) -> str:
        """Describe the first loss that is not finite, if the step is skipped because of it.

        Args:
            task: the task that all shards of the step share.
            now: whether to check in this step, with the gradient; this blocks on a GPU.
            alone: whether no gradient norm follows; if one does, the losses are read with it.

        Raises:
            LossError: a loss is not finite, and the step is not skipped.
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
        """Describe what is not finite, if the step is skipped because of it.

        Args:
            norm: (), norm of the whole gradient.
            step: the number of the step.
            name: names the shard and parameter; runs collectively, so it is called on all devices.

        Returns:
            The description, and the norm; None instead of the norm if a loss is not finite.

        Raises:
            LossError, GradientError: the loss or the gradient is not finite, and the step is not
                skipped.
        """
        unread = self._unread
        if unread is None:
            return self._checked_norm(float(norm), step, name), norm
        # Queue the copy now; nothing waits for it here.
        copied = HostCopy(norm)
        if not unread.now:
            self._unread = replace(unread, norm=copied)
            return "", norm
        self._unread = None
        # Read the norm first: it was copied last, so the losses have arrived by then.
        value = float(copied.read())
        if failure := self._checked(unread.bad_loss()):
            return failure, None
        return self._checked_norm(value, step, name), norm

    def _checked_norm(self, value: float, step: int, name: Callable[[], str]) -> str:
        if math.isfinite(value):
            return ""
        # Do not recompute: such an overflow is expected, and a smaller loss scale is the remedy.
        if self._rules.overflows(value):
            return f"a gradient overflowed with losses scaled by {self._rules.loss_scale:.0f}"
        if self._skips:
            return f"the gradient of step {step} is not finite"
        raise GradientError(f"{name()}. {load('shard.advice').NOT_FINITE}")

    def check_last(self) -> None:
        """Check the last step's loss and gradient, if they are still unread.

        Raises:
            LossError, GradientError: the loss or the gradient is not finite.
        """
        if self._unread is not None:
            # Clear it before raising: the next call must not report this step again.
            last, self._unread = self._unread, None
            self._checked(last.bad_loss())
            if last.norm is not None and not math.isfinite(float(last.norm.read())):
                raise GradientError(
                    f"the gradient of step {last.task.step} is not finite, and its update was "
                    f"already made. Resume from a checkpoint. {load('shard.advice').NOT_FINITE}"
                )

    def __enter__(self) -> None:
        """Surround a step's shards, and check the last step after they are queued.

        Raises:
            LossError, GradientError: a value of the last step is not finite. This error replaces a
                shard's error, because the shard computed with the results of that step.
        """

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A failed shard computed with the last step's update. If that was not finite, it is the
        # cause.
        if kind is None or issubclass(kind, Exception):
            self.check_last()

    def _checked(self, failure: str) -> str:
        if failure and not self._skips:
            raise LossError(f"{failure}. {load('shard.advice').NOT_FINITE}")
        return failure


def _bad_loss(totals: torch.Tensor, task: ShardTask) -> str:
    """Describe the first loss that is not finite; empty if all are finite.

    Args:
        totals: (V,) float64, the shards' parts of the loss.
        task: the task that all shards of the step share.
    """
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            words: str = load("shard.advice").words_of_loss(task, shard, total)
            return words
    return ""


def bad_gradient(context: StepContext, task: ShardTask, done: Done) -> str:
    """Describe the first gradient that is not finite. Call it on every device.

    Args:
        context: this process's part of the run.
        task: the task that all shards of the step share.
        done: results of shards that were already recomputed.
    """
    # The sum does not show which shard the value came from, so compute the shards again: they are
    # pure functions of the state before the step, and nothing is updated yet.
    found, find_bad = {}, load("shard.advice").bad_gradient_of
    for replica in context.replicas:
        with context.attached(replica):
            found[replica.number] = find_bad(replica, task, done)
    # All devices take part, even those whose shards are finite, so that all raise the same error.
    rows = context.exchange.transport.all_gather_values(found)
    first = min(filter(None, rows), default=None)
    if first is None:
        return (
            f"the gradient of step {task.step} is not finite, but every shard's gradient is finite "
            f"when recomputed: their sum overflows, or the loss is not deterministic"
        )
    _, name, where = first
    return f"{where}: the gradient of {name} is not finite"
