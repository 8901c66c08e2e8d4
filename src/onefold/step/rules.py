"""From a step's totals to the gradient that the optimizer gets.

Note: the order
---------------
Totals are first divided by what backward could not know yet, and by the scale of the loss. Then the
norm of the whole gradient is added up, segment by segment in float64, and every device has it: a
single value that is not finite makes the norm not finite, so one number decides for all devices
whether anything is updated (`onefold.step.finite`). Only then is the gradient clipped, first by
norm and then by value.
"""

from __future__ import annotations

import math

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.flat import FlatTensors
from onefold.core.results import StepWeight
from onefold.core.settings import LossScale, Settings
from onefold.errors import LossError
from onefold.placement.base import StepTotals
from onefold.placement.context import StepContext
from onefold.shard.replica import ShardTask
from onefold.update.norms import Share, exact_norms, exact_total, plain_norm
from onefold.update.optimizer import PartitionedOptimizer

__all__ = ["GradientRules", "check_gradient", "write_gradient"]


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

    def load_totals(
        self, batch: ShardedBatch, weight: StepWeight, totals: StepTotals, task: ShardTask
    ) -> None:
        """Take the totals of a step, divided as the loss is.

        Args:
            batch: the batch of the step.
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
        update.load_gradients(totals.segments, totals.gave, shards=batch.shares.shards)
        divisor = task.divisor(batch, weight.value) if weight.divided else 1.0
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
        """Note how a step ended that had a gradient."""
        if self.scale is not None:
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
