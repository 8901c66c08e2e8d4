"""What `onefold.gather` does inside a shard, in each of the two runs of a step.

Note: what is put aside
-----------------------
A shard that stops in the middle shares the module and the generators with those that go on. What it
finds afterwards must be what it left, whoever ran in between, or its bits would depend on the
shares: gradients, buffers, modes and other attributes of the model's modules, frozen parameters,
random numbers. Not covered is what a loss keeps elsewhere, in an object of its own.

Note: threads that take turns
-----------------------------
A loss stops inside a call of the user's function, and later inside autograd's backward, whose
C++ frames only a thread can keep. Two threads never compute at the same time: whoever resumes one
waits for its next stop. So the order of all computing is fixed, and nothing needs a lock. A thread
ends before `end` returns: at its next stop an exception is raised in it, which unwinds its frames.
"""

from __future__ import annotations

import contextvars
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from onefold.core.gatherer import GATHERER, GatheredRows, Gatherer
from onefold.core.randomness import GeneratorStates
from onefold.core.results import ShardResult
from onefold.errors import LossError
from onefold.shard.gradients import gradients_of, put_gradients
from onefold.shard.replica import Replica
from onefold.system.accelerator import same_stream
from onefold.system.internals import buffers_of

__all__ = ["GatherCall", "GatherPosition", "GatherReplay", "JointShard"]


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
class GatherPosition:
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
class GatherCall:
    """One call of `gather` in one shard, once all is known of it."""

    joined: GatheredRows
    gradient: torch.Tensor | None
    """(n, ...) of the whole batch's loss in what this shard has gathered; None without one."""


class JointShard(Gatherer):
    """A shard that runs in turns with others: it stops wherever it needs them.

    It has a thread of its own: see the note on threads at the head of this file.

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
        self._settings = thread_settings(replica.device)
        self._compute = compute
        self._alone = alone
        self._calls = 0
        self._forward_is_over = False
        self._outputs: list[torch.Tensor] = []
        # So that what is gathered has a gradient also where parameters are frozen for the time.
        self._anchor = torch.zeros((), requires_grad=True)
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._stops: SimpleQueue[GatherPosition | BaseException] = SimpleQueue()
        self._ended = False
        # What a library keeps in context variables (the compiler does) holds in the thread as well.
        run, name = contextvars.copy_context().run, f"onefold shard {shard}"
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    def gather(self, tensor: torch.Tensor) -> GatheredRows:
        if self._forward_is_over:
            raise LossError(_AGAIN)
        has_gradient = tensor.is_floating_point() or tensor.is_complex()
        differentiable = torch.is_grad_enabled() and has_gradient
        call, self._calls = self._calls, self._calls + 1
        joined: GatheredRows = self.stop(
            GatherPosition("gather", call, tensor.detach(), differentiable)
        )
        if not differentiable:
            return joined._replace(whole=joined.whole.clone())
        whole = _Join.apply(tensor, self._anchor, joined.whole, self, call)  # type: ignore[no-untyped-call]
        self._outputs.append(whole)
        return joined._replace(whole=whole)

    def end_forward(self, terms: Sequence[tuple[str, float]]) -> Sequence[float] | None:
        self._forward_is_over = True
        divisors: Sequence[float] | None = self.stop(GatherPosition("end", terms=tuple(terms)))
        return divisors

    @property
    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Without values: only so that backward comes to every call in every shard, also where the
        # loss of this one does not depend on it. Autograd takes later calls first.
        return [(output, torch.zeros_like(output)) for output in self._outputs]

    def resume(self, answer: Any = None) -> GatherPosition:
        """Start the shard, or go on with the answer to its last stop; return the next one.

        Raises:
            BaseException: whatever the shard has raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        stop = self._stops.get()
        if isinstance(stop, BaseException):
            raise stop
        return stop

    def stop(self, stop: GatherPosition) -> Any:
        """Let others run; return what the driver answers.

        Raises:
            ShardEnded: the shard is not to go on.
        """
        # Values of low precision that were made before are made anew, whoever ran in between.
        torch.clear_autocast_cache()
        put_back = None if self._alone else put_aside(self.replica)
        # Also where the loss has caught the exception and stops once more.
        if self._ended:
            raise ShardEnded
        self._stops.put(stop)
        answer = self._answers.get()
        if self._ended:
            raise ShardEnded
        if put_back is not None:
            put_back()
        GATHERER.gatherer = self
        return answer

    def end(self) -> None:
        """End the shard at its next stop, if it has not come to its end, and wait for that."""
        self._ended = True
        if self._thread.ident is not None:
            self._answers.put(None)
            self._thread.join()

    def _run(self) -> None:
        stop: GatherPosition | BaseException
        try:
            with self._settings():
                stop = GatherPosition("over", result=self._compute())
        except BaseException as error:  # raised again by whoever waits in `resume`
            stop = error
        # They hold the graph that they are of, which holds this shard and its samples: a circle
        # through PyTorch, which nobody else would break.
        self._outputs.clear()
        self._stops.put(stop)


class _Join(torch.autograd.Function):
    """What was gathered, as a function of what this shard has put in."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        anchor: torch.Tensor,
        whole: torch.Tensor,
        turn: JointShard,
        call: int,
    ) -> torch.Tensor:
        ctx.turn, ctx.call = turn, call
        # A copy: what one shard writes into it, no other may see.
        return whole.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        rows = ctx.turn.stop(GatherPosition("backward", ctx.call, gradient))
        return rows, None, None, None, None


class GatherReplay(Gatherer):
    """A shard that runs a second time: all that it gathers is known, and so are the gradients.

    Args:
        calls: in the order in which the shard makes them.
    """

    def __init__(self, calls: Sequence[GatherCall]) -> None:
        self._calls = calls
        self._made = 0
        self._forward_is_over = False
        self._roots: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gather(self, tensor: torch.Tensor) -> GatheredRows:
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


def put_aside(replica: Replica) -> Callable[[], None]:
    """Take away what a shard has made so far; the result puts it back.

    Args:
        replica: computes the shard; attached now, and again when it is put back.
    """
    parameters, buffers = list(replica.parts.named.values()), replica.buffers
    gradients = gradients_of(parameters)
    put_gradients(parameters, [None] * len(gradients))
    # Before `absorb`, which writes what has come in place of a buffer into its memory: the graph
    # of this shard may hold that memory, and what was there must be there again for backward.
    before = buffers.flat.clone()
    homes = [(buffers_of(o), name) for each in buffers.places.homes for o, name in each]
    held = [table.get(name) for table, name in homes]
    buffers.absorb()
    # Shallow: the tables in which a module holds its parameters and parts stay the same objects.
    modules = [(part, dict(part.__dict__)) for part in replica.module.modules()]
    trainable = replica.parts.trainable()
    generators, own = GeneratorStates(replica.device), replica.own_generators
    states = own.states()

    def put_back() -> None:
        for part, attributes in modules:
            if not _same(part.__dict__, attributes):
                part.__dict__.clear()
                part.__dict__.update(attributes)
        buffers.absorb()
        buffers.flat.copy_(before)
        for (table, name), value in zip(homes, held, strict=True):
            table[name] = value
        replica.parts.restore_frozen(trainable)
        put_gradients(parameters, gradients)
        generators.restore()
        own.put_back(states)

    return put_back


def _same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two tables hold the very same objects."""
    # Not by ==, which compares tensors element by element.
    return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))


class ShardEnded(BaseException):
    """Raised inside a thread that is no longer needed; never reaches a script."""

    # Not an Exception: a loss may well catch those.


def thread_settings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Read those of PyTorch's settings of the current thread that decide what a model computes.

    Args:
        device: where a thread will compute.

    Returns:
        A context that gives the thread that enters it the same settings. Backward computes in that
        thread as well, and not in one that PyTorch has for each GPU: it could not stop there.
    """
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted({device.type, "cpu"})
        if torch.is_autocast_enabled(kind)
    ]
    made_on = torch.get_default_device()
    stream = same_stream(device)

    @contextmanager
    def here() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
            if made_on.type != "cpu":
                stack.enter_context(made_on)
            stack.enter_context(stream)
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return here
