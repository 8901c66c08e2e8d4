"""From a step's totals to the optimizer's gradient, if it gets one, and what in it is not finite.

`GradientRules` makes the gradient that the optimizer gets. `FiniteCheck` looks whether it may be
used. `bad_gradient` finds what is not finite in a step, and names the shard, its samples and the
parameter. A gradient that is not finite is seen in the sum of all shards, where nobody can tell any
more which of them it came from. The shards are then computed once more: they are pure functions of
what the step began with, and nothing has been updated.

Note: the order
---------------
Totals are first divided by what backward could not know yet, and by the scale of the loss. Then the
norm of the whole gradient is added up, piece by piece in float64, and every device has it: a single
value that is not finite makes the norm not finite, so one number decides for all devices whether
anything is updated. Only then is the gradient clipped, first by norm and then by value.

Note: when a GPU is asked
-------------------------
To read a number of a GPU is to wait for everything that it has been given to do, and while the host
waits, the GPU runs out of work. So loss and norm are copied to the host behind the step's own
kernels, and looked at when the shards of the next step have been handed to the GPU. The error then
comes one step late, but still before another update, and no GPU has waited for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from onefold.core.batch import ShardedBatch
from onefold.core.finite import all_finite
from onefold.core.precision import LossScale
from onefold.core.settings import Settings
from onefold.core.values import ShardResult
from onefold.core.weights_of_step import StepWeight
from onefold.engine.advice import ONE_SAMPLE
from onefold.engine.gradients import Gradients, exact_norm, exact_total, plain_norm
from onefold.engine.replica import Replica, ShardTask
from onefold.engine.update import SpanOptimizer
from onefold.errors import GradientError, LossError
from onefold.exchange.exchange import Exchange

__all__ = ["FiniteCheck", "GradientRules", "bad_gradient", "named_if_room"]


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


_ADVICE = (
    "Look at these samples: a mean over nothing (targets that are all ignored, an empty mask) is "
    "not a number, which onefold.losses and onefold.Mean get right. Else lower the learning rate, "
    'set clip_norm, or leave such steps out with Trainer(on_nonfinite="skip")'
)


class _OnItsWay:
    """A device's values on their way to the host, where nobody waits until they are read.

    Args:
        values: on any device; they may be overwritten afterwards.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._values = values.clone()
            return
        # Pinned, or the host would wait; PyTorch uses this memory again only after the copy.
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record(torch.cuda.current_stream(values.device))

    def read(self) -> torch.Tensor:
        """Return the values on the host, once they are there."""
        if self._there is not None:
            # For the copy alone, and not for what was queued behind it.
            self._there.synchronize()
        return self._values


@dataclass(frozen=True, slots=True)
class _Unread:
    """What nobody has looked at yet, so as not to wait for a GPU."""

    step: int
    batch: ShardedBatch
    totals: _OnItsWay
    norm: _OnItsWay | None = None


class FiniteCheck:
    """Looks at the loss and the gradient of each step before anything is updated.

    On a GPU it looks once the shards of the next step are under way, unless what it finds decides
    whether the step is skipped; see the note at the head of this file.

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

    def of_loss(self, batch: ShardedBatch, step: int, *, now: bool = False) -> str:
        """Describe the first loss that is not finite, if the step is to be skipped for it.

        Args:
            batch: of the step.
            step: its number.
            now: look at once, at gradient as well, though that waits for a GPU.

        Raises:
            LossError: there is one, and it is not to be skipped.
        """
        totals = self._board.totals
        if self._is_late and not now:
            self._unread = _Unread(step, batch, _OnItsWay(totals))
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
            self._unread = replace(self._unread, norm=_OnItsWay(norm))
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
            self._checked(_bad_loss(last.totals.read(), last.batch, last.step))
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
        batch: the step's.
        step: number of the step.
    """
    for shard, total in enumerate(totals.tolist()):
        if not math.isfinite(total):
            alone = f". {ONE_SAMPLE}" if batch.size_of(shard) == 1 < batch.samples else ""
            return (
                f"the loss of step {step}, shard {shard} is {total}: expected a finite number for "
                f"{batch.describe(shard)}{alone}"
            )
    return ""


def named_if_room(
    name: Callable[[ShardedBatch], str], batch: ShardedBatch, step: int, *, alone: bool
) -> str:
    """Describe the first gradient that is not finite, as far as there is room to find it.

    Args:
        name: finds it, for which it takes all parameters at once.
        batch: the step's.
        step: number of the step.
        alone: whether this is the only device: others would wait for one that gives up.
    """
    try:
        return name(batch)
    except torch.OutOfMemoryError:
        if not alone:
            raise
        return (
            f"the gradient of step {step} is not finite (to name the shard takes room for all "
            f"parameters on the device, which there is not)"
        )


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
