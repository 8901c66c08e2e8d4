"""Implements `onefold.gather` inside a shard, in both runs of a step.

Note: state that a shard restores
---------------------------------
A shard that stops in the middle shares the module and the generators with the other shards. When it
resumes, it must find the state that it left, whichever shard ran in between; otherwise its bits
would depend on the shares. That state is: gradients, buffers, modes and other attributes of the
modules, frozen parameters, and random numbers. State that a loss keeps in its own objects is not
covered.

Note: threads that take turns
-----------------------------
A loss stops inside a call of the user's function, and later inside autograd's backward; only a
thread can keep those C++ frames. Two threads never compute at the same time: the driver resumes one
and waits for its next stop. The order of all computation is therefore fixed, and nothing needs a
lock. A thread ends before `end` returns: its next stop raises an exception, which unwinds its
frames.
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
    "onefold.gather (or onefold.SyncBatchNorm) was called during backward, as happens inside "
    "torch.utils.checkpoint, which reruns layers. Call it in the forward pass only: move it out of "
    "the checkpointed part; a loss that gathers keeps the memory of one shard at a time anyway"
)
_OTHERWISE = (
    "a shard's second run, for its gradients, called onefold.gather differently from its first. "
    "Make the same calls, with tensors of the same shapes, in both runs. A loss may depend on the "
    "model, its samples and random numbers, but not on state that it keeps from call to call"
)


@dataclass(frozen=True, slots=True)
class GatherPosition:
    """The point at which a shard stops and waits for the others."""

    at: Literal["gather", "end", "backward", "over"]
    """Stopped in a call of `gather`, at the end of the loss, in backward through a call of
    `gather`, or after backward."""
    call: int = 0
    """Number of the `gather` call in this shard."""
    tensor: torch.Tensor | None = None
    """Gathered rows, (n, ...); in backward, the gradient of the call's result, (N, ...)."""
    differentiable: bool = False
    """Whether the call may receive a gradient."""
    terms: tuple[tuple[str, float], ...] = ()
    """Kind and weight of each term of the loss, at the end of the loss."""
    result: ShardResult | None = None
    """The shard's result, after backward."""


@dataclass(frozen=True, slots=True)
class GatherCall:
    """A complete call of `gather` in one shard."""

    joined: GatheredRows
    gradient: torch.Tensor | None
    """Gradient of the batch's loss in the shard's rows, (n, ...); None without one."""


class JointShard(Gatherer):
    """A shard that takes turns with others and stops when it needs their values.

    It has its own thread: see the note on threads at the top of this file.

    Args:
        replica: computes the shard.
        shard: the shard's number.
        compute: runs the whole shard, forward and backward, with this gatherer.
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
        # Gives gathered rows a gradient even if all parameters are frozen at the moment.
        self._anchor = torch.zeros((), requires_grad=True)
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._stops: SimpleQueue[GatherPosition | BaseException] = SimpleQueue()
        self._ended = False
        # Copy context variables to the thread: libraries such as the compiler keep settings there.
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
        # Zero gradients make backward reach every call in every shard, even if this shard's loss
        # does not depend on the call. Autograd reaches later calls first.
        return [(output, torch.zeros_like(output)) for output in self._outputs]

    def resume(self, answer: Any = None) -> GatherPosition:
        """Start the shard, or resume it with the answer to its last stop; return the next stop.

        Raises:
            BaseException: any exception that the shard raises.
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
        """Let other shards run; return the driver's answer.

        Raises:
            ShardEnded: the shard is to end.
        """
        # Drop autocast's cached low-precision values, so that a shard never uses another one's.
        torch.clear_autocast_cache()
        put_back = None if self._alone else put_aside(self.replica)
        # Check here too: the loss may have caught the exception, and stops again.
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
        """End the shard at its next stop, unless it is over, and wait for its thread."""
        self._ended = True
        if self._thread.ident is not None:
            self._answers.put(None)
            self._thread.join()

    def _run(self) -> None:
        stop: GatherPosition | BaseException
        try:
            with self._settings():
                stop = GatherPosition("over", result=self._compute())
        except BaseException as error:  # `resume` raises it again
            stop = error
        # The outputs hold their graph, which holds this shard and its samples: a reference cycle
        # through PyTorch's C++ objects, which the garbage collector cannot break.
        self._outputs.clear()
        self._stops.put(stop)


class _Join(torch.autograd.Function):
    """The gathered rows, as a differentiable function of this shard's rows."""

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
        # Return a copy: a shard may write to it, and no other shard may see that.
        return whole.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        rows = ctx.turn.stop(GatherPosition("backward", ctx.call, gradient))
        return rows, None, None, None, None


class GatherReplay(Gatherer):
    """A shard's second run, in which all gathered rows and their gradients are known.

    Args:
        calls: the calls of `gather`, in the order of the shard.
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
    """A scalar 0 whose backward adds a known gradient to a tensor in its present state."""

    # Do not use the tensor itself as a root: the loss may still write to it in place.

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


def put_aside(replica: Replica) -> Callable[[], None]:
    """Set aside the state that a shard has produced so far; the returned function restores it.

    Args:
        replica: computes the shard; attached now, and again when the state is restored.
    """
    parameters, buffers = list(replica.parts.named.values()), replica.buffers
    gradients = gradients_of(parameters)
    put_gradients(parameters, [None] * len(gradients))
    # Clone before `absorb`, which copies replaced buffers into this memory: the shard's graph may
    # hold this memory, and backward needs the values that are in it now.
    before = buffers.flat.clone()
    homes = [(buffers_of(o), name) for each in buffers.places.homes for o, name in each]
    held = [table.get(name) for table, name in homes]
    buffers.absorb()
    # Copy shallowly: a module's tables of parameters and submodules must stay the same objects.
    modules = [(part, dict(part.__dict__)) for part in replica.module.modules()]
    trainable = replica.parts.trainable()
    generators, own = GeneratorStates(replica.device), replica.own_generators
    states = own.states()

    def put_back() -> None:
        # Compare first: nearly no module changes its attributes between two stops.
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
    """Whether two tables hold identical objects in the same order."""
    # Compare by identity: == would compare tensors element by element.
    return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))


class ShardEnded(BaseException):
    """Raised inside a thread that is no longer needed; it never reaches a script."""

    # A BaseException, because a loss may catch Exception.


def thread_settings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Read the thread-local settings of PyTorch that affect a model's results.

    Args:
        device: the device on which a thread will compute.

    Returns:
        A context that applies the settings to the thread that enters it. Backward then runs in that
        thread too, not in PyTorch's own thread for a GPU, in which it could not stop.
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
