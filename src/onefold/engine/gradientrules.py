"""From the totals of a step to the gradient that the optimizer gets, and whether it gets one.

Note: the order
---------------
Totals are first divided by what backward could not know yet, and by the scale of the loss. Then the
norm of the whole gradient is added up, piece by piece in float64, and every device has it: a single
value that is not finite makes the norm not finite, so one number decides for all devices whether
anything is updated. Only then is the gradient clipped, first by norm and then by value.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from onefold.core.batch import ShardedBatch
from onefold.core.lossscale import LossScale
from onefold.core.settings import Settings
from onefold.core.weights_of_step import StepWeight
from onefold.engine.gradients import Gradients, exact_norm
from onefold.engine.norms import exact_total, plain_norm
from onefold.engine.replica import ShardTask
from onefold.engine.update import SpanOptimizer
from onefold.errors import LossError
from onefold.exchange.exchange import Exchange

__all__ = ["GradientRules"]


class GradientRules:
    """What is done to every gradient before the update.

    Args:
        settings: the run's.
        update: holds the gradients of this process's pieces.
        exchange: with all devices.
    """

    def __init__(self, settings: Settings, update: SpanOptimizer, exchange: Exchange) -> None:
        self.scale = LossScale() if settings.precision.is_scaled else None
        """The factor of the losses; None where they are not scaled."""
        self._clip_norm = settings.clip_norm
        self._clip_value = settings.clip_value
        self._update = update
        self._exchange = exchange

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return 1.0 if self.scale is None else self.scale.value

    def take(
        self, batch: ShardedBatch, weight: StepWeight, numbers: range, task: ShardTask
    ) -> None:
        """Take the totals of a step, divided as the loss is.

        Args:
            batch: the step's.
            weight: the whole batch's.
            numbers: this process's devices.
            task: the step's.

        Raises:
            LossError: no shard gave any parameter a gradient.
        """
        update, exchange = self._update, self._exchange
        totals = [total for number in numbers for total in exchange.totals(number)]
        gave = exchange.board.gave
        counts = (gave[0] if len(gave) == 1 else np.add.reduce(gave)).tolist()
        if not any(counts):
            raise LossError(
                f"the loss of step {task.step} does not depend on any parameter that requires a "
                f"gradient, in any shard: was it computed under no_grad, or detached?"
            )
        update.take(totals, counts, shards=batch.plan.shards)
        divisor = task.divisor(batch, weight.value) if weight.divided else 1.0
        factor = divisor / weight.value / self.loss_scale
        if factor != 1.0:
            update.scale(factor)

    def norm(self, shards: int, last_block: Gradients, *, widened: bool) -> torch.Tensor:
        """Compute the norm of the whole gradient, (), the same on every device.

        Args:
            shards: how many shards every batch is cut into.
            last_block: with one shard, the gradients of the whole batch, if they are published.
            widened: whether gradients are in the dtype in which sums are.
        """
        update, exchange = self._update, self._exchange
        share = exchange.transport.share
        if shards > 1:
            return update.norms.squared(update.gradients, share).sqrt()
        # As torch.nn.utils.clip_grad_norm_ does, to the last bit.
        if exchange.stages is not None:
            gave = exchange.board.gave.sum(axis=0).tolist()
            return update.norms.of_one_shard(
                update.owned, update.gradients, gave, share, widened=widened
            )
        given = [gradient for gradient in last_block if gradient is not None]
        norm = plain_norm(given)
        # Of large gradients in low precision the norm itself overflows: then it is exact.
        if given and norm.device.type == "cpu" and not math.isfinite(norm.item()):
            return exact_total([*map(exact_norm, given)])
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
