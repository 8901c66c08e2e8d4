"""Finds what is not finite in a step, and names the shard, its samples and the parameter.

A gradient that is not finite is seen in the sum of all shards, where nobody can tell any more which
of them it came from. The shards are then computed once more: they are pure functions of what the
step began with, and nothing has been updated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.finite import all_finite
from onefold.core.result import ShardResult
from onefold.core.settings import Settings
from onefold.engine.gradientrules import GradientRules
from onefold.engine.replica import Replica, ShardTask
from onefold.errors import GradientError, LossError
from onefold.exchange.exchange import Exchange

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
    totals: torch.Tensor
    norm: torch.Tensor | None = None


class FiniteCheck:
    """Looks at the loss and the gradient of each step before anything is updated.

    On a GPU it looks when the next step begins, so that nobody waits, unless what it finds decides
    whether the step is skipped.

    Args:
        settings: say whether a step is refused or skipped.
        rules: know the scale of the losses.
        exchange: with all devices.
    """

    def __init__(self, settings: Settings, rules: GradientRules, exchange: Exchange) -> None:
        self._skips = settings.on_nonfinite == "skip"
        self._rules = rules
        self._board = exchange.board
        on_host = self._board.totals.device.type == "cpu"
        self._is_late = not on_host and not self._skips and rules.scale is None
        self._unread: _Unread | None = None

    def of_loss(self, batch: ShardedBatch, step: int) -> str:
        """Describe the first loss that is not finite, if the step is to be skipped for it.

        Raises:
            LossError: there is one, and it is not to be skipped.
        """
        totals = self._board.totals
        if self._is_late:
            self._unread = _Unread(step, batch, totals.clone())
            return ""
        return self._checked(_bad_loss(totals.cpu(), batch, step))

    def of_gradient(self, norm: torch.Tensor, step: int, name: Callable[[], str]) -> str:
        """Describe a gradient that is not finite, if the step is to be skipped for it.

        Args:
            norm: (), of the whole gradient.
            step: number of the step.
            name: computes which shard and parameter it is; called alike on all devices.

        Raises:
            GradientError: it is not finite, and not to be skipped.
        """
        if self._unread is not None:
            self._unread = replace(self._unread, norm=norm)
            return ""
        value = float(norm)
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
            self._checked(_bad_loss(last.totals.cpu(), last.batch, last.step))
            if last.norm is not None and not math.isfinite(float(last.norm)):
                raise GradientError(
                    f"the gradient of step {last.step} is not finite, and has been used for its "
                    f"update: go on from a checkpoint. {_ADVICE}"
                )

    def _checked(self, failure: str) -> str:
        if failure and not self._skips:
            raise LossError(f"{failure}. {_ADVICE}")
        return failure


def _bad_loss(totals: torch.Tensor, batch: ShardedBatch, step: int) -> str:
    """Describe the first loss that is not finite; empty if all are.

    Args:
        totals: (V,) float64, the shards' parts of the loss.
        batch: the step's.
        step: number of the step.
    """
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            return (
                f"the loss of step {step}, shard {shard} is {total}: expected a finite number for "
                f"{batch.describe(shard)}"
            )
    return ""


def bad_gradient(
    replicas: Sequence[Replica],
    attached: Callable[[Replica], AbstractContextManager[object]],
    batch: ShardedBatch,
    task: ShardTask,
    exchange: Exchange,
    done: Mapping[int, ShardResult],
) -> str:
    """Describe the first gradient that is not finite; called on every device.

    Args:
        replicas: those of this process.
        attached: has the module compute on one of them.
        batch: the step's.
        task: the step's.
        exchange: with all devices.
        done: the results of shards that have been computed again already.
    """
    found = {}
    for replica in replicas:
        with attached(replica):
            found[replica.number] = json.dumps(_of_shards(replica, batch, task, done)).encode()
    rows = [json.loads(text) for text in exchange.transport.gather_bytes(found)]
    first = min((row for row in rows if row), default=None)
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
    replica.begin(task)
    try:
        for shard in batch.plan.shards_of(replica.number):
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
