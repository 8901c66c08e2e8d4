"""Leaves the whole gradient of a batch in ``.grad`` of the user's parameters, on every device.

Note: whose memory it is
------------------------
What shards and fold have made belongs to the exchange, which writes to it again in the next step.
So each call makes new memory for the whole gradient, and ``.grad`` are views of it: it is the
script's, lives as long as one of them does, and no later call overwrites it. A later call replaces
``.grad`` by other tensors, as ``zero_grad`` and ``backward`` do.
"""

from __future__ import annotations

from onefold.core.flat import FlatTensors
from onefold.engine.replica import Replica
from onefold.engine.update import SpanOptimizer
from onefold.exchange.exchange import Exchange

__all__ = ["WholeGradient", "check_gradient"]


class WholeGradient:
    """Brings the gradients of all spans together in every process.

    Args:
        first: the first device of this process, whose parameters are the user's.
        update: holds the gradients of this process's pieces.
        exchange: with all devices.
    """

    def __init__(self, first: Replica, update: SpanOptimizer, exchange: Exchange) -> None:
        self._first = first
        self._update = update
        self._exchange = exchange

    def hand_out(self) -> None:
        """Set ``.grad`` from the gradients that were taken; called on all devices.

        Parameters to which no shard gave a gradient have None.
        """
        update, first = self._update, self._first
        whole = FlatTensors(update.storage.gradients, device=first.device)
        for item, gradient in zip(update.owned, update.gradients, strict=True):
            if gradient is not None:
                whole.piece(item.piece).copy_(gradient)
        # Read before the exchange is over: from then on the board is no longer ours to read.
        gave = self._exchange.board.gave.sum(axis=0).tolist()
        self._exchange.share_gradient(whole)
        update.drop()
        trained = first.parts.trained.values()
        for parameter, view, given in zip(trained, whole.views, gave, strict=True):
            # Rounded only now, where the model is in low precision: sums are in float32.
            parameter.grad = view.to(parameter.dtype) if given else None


def check_gradient(update: SpanOptimizer) -> None:
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
