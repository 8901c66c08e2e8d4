"""What `onefold.gather` does inside a shard, in each of the two runs of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.autograd.function import once_differentiable

from onefold.core.gathering import Gatherer, Joined, in_turn
from onefold.core.result import ShardResult
from onefold.engine.aside import put_aside
from onefold.engine.replica import Replica
from onefold.engine.shardthread import ShardThread, ThreadSettings
from onefold.errors import LossError

__all__ = ["Call", "Known", "Stop", "Turn"]

_AGAIN = (
    "onefold.gather (or onefold.SyncBatchNorm) was called while gradients are computed, as it is "
    "inside of torch.utils.checkpoint, which runs a layer once more: expected calls in the forward "
    "pass alone. Take it out of the checkpointed part; a loss that gathers keeps the memory of one "
    "shard at a time anyway"
)
_OTHERWISE = (
    "a shard that ran a second time, for its gradients, does not call onefold.gather as it did the "
    "first time: expected the same calls with tensors of the same shapes. A loss may depend on "
    "the model, its samples and random numbers, and on nothing that it keeps from call to call"
)


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a shard waits for the others."""

    at: Literal["gather", "end", "backward", "over"]
    """A call of `gather`; the end of the loss; backward through such a call; the end of it all."""
    call: int = 0
    """Number of the call of `gather` in this shard."""
    tensor: torch.Tensor | None = None
    """What is gathered, (n, ...); in backward the gradient of what was returned, (N, ...)."""
    differentiable: bool = False
    """Whether a gradient may come back."""
    terms: tuple[tuple[str, float], ...] = ()
    """At the end of the loss, kind and weight of each of its terms."""
    result: ShardResult | None = None
    """When it is over."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `gather` in one shard, once all is known of it."""

    joined: Joined
    gradient: torch.Tensor | None
    """(n, ...) of the whole batch's loss in what this shard has gathered; None without one."""


class Turn(Gatherer):
    """A shard that runs in turns with others: it stops wherever it needs them.

    Args:
        replica: computes it.
        shard: its number.
        compute: the whole shard, forward and backward, with this gatherer.
        alone: whether no other shard of this process runs in between.
    """

    takes_turns = True

    def __init__(
        self, replica: Replica, shard: int, compute: Callable[[], ShardResult], *, alone: bool
    ) -> None:
        self.replica = replica
        self._settings = ThreadSettings(replica.device)
        self._compute = compute
        self._alone = alone
        self._calls = 0
        self._forward_is_over = False
        self._outputs: list[torch.Tensor] = []
        # So that what is gathered has a gradient also where parameters are frozen for the time.
        self._anchor = torch.zeros((), requires_grad=True)
        self.thread = ShardThread[Stop, Any](f"onefold shard {shard}", self._work)

    def gather(self, tensor: torch.Tensor) -> Joined:
        if self._forward_is_over:
            raise LossError(_AGAIN)
        has_gradient = tensor.is_floating_point() or tensor.is_complex()
        differentiable = torch.is_grad_enabled() and has_gradient
        call, self._calls = self._calls, self._calls + 1
        joined = cast(Joined, self.stop(Stop("gather", call, tensor.detach(), differentiable)))
        if not differentiable:
            return joined._replace(whole=joined.whole.clone())
        whole = _Join.apply(tensor, self._anchor, joined.whole, self, call)  # type: ignore[no-untyped-call]
        self._outputs.append(whole)
        return joined._replace(whole=whole)

    def end_forward(self, terms: Sequence[tuple[str, float]]) -> Sequence[float] | None:
        self._forward_is_over = True
        return cast(Sequence[float] | None, self.stop(Stop("end", terms=tuple(terms))))

    @property
    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Without values: only so that backward comes to every call in every shard, also where the
        # loss of this one does not depend on it. Autograd takes later calls first.
        return [(output, torch.zeros_like(output)) for output in self._outputs]

    def stop(self, stop: Stop) -> Any:
        """Let others run; return what the driver answers."""
        # Values of low precision that were made before are made anew, whoever ran in between.
        torch.clear_autocast_cache()
        put_back = None if self._alone else put_aside(self.replica)
        answer = self.thread.stop(stop)
        if put_back is not None:
            put_back()
        in_turn(self)
        return answer

    def _work(self) -> Stop:
        try:
            with self._settings.here():
                return Stop("over", result=self._compute())
        finally:
            # They hold the graph that they are of, which holds this shard and its samples: a circle
            # through PyTorch, which nobody else would break.
            self._outputs.clear()


class _Join(torch.autograd.Function):
    """What was gathered, as a function of what this shard has put in."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        anchor: torch.Tensor,
        whole: torch.Tensor,
        turn: Turn,
        call: int,
    ) -> torch.Tensor:
        ctx.turn, ctx.call = turn, call
        # A copy: what one shard writes into it, no other may see.
        return whole.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        rows = ctx.turn.stop(Stop("backward", ctx.call, gradient))
        return rows, None, None, None, None


class Known(Gatherer):
    """A shard that runs a second time: all that it gathers is known, and so are the gradients.

    Args:
        calls: in the order in which the shard makes them.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._made = 0
        self._forward_is_over = False
        self._roots: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gather(self, tensor: torch.Tensor) -> Joined:
        if self._forward_is_over:
            raise LossError(_AGAIN)
        call = self._calls[self._made] if self._made < len(self._calls) else None
        self._made += 1
        if call is None or call.joined.whole[call.joined.own].shape != tensor.shape:
            raise LossError(_OTHERWISE)
        if call.gradient is not None and tensor.requires_grad:
            root = _Pull.apply(tensor, call.gradient)  # type: ignore[no-untyped-call]
            self._roots.append((root, torch.ones_like(root)))
        return call.joined._replace(whole=call.joined.whole.clone())

    def end_forward(self, terms: Sequence[tuple[str, float]]) -> None:
        self._forward_is_over = True
        if self._made != len(self._calls):
            raise LossError(_OTHERWISE)

    @property
    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._roots


class _Pull(torch.autograd.Function):
    """Nothing, from which backward brings a known gradient to a tensor as it is now."""

    # Not the tensor itself as a root: the loss may still write into it.

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None
