"""Has a model begin and end in its midst, where a pipeline cuts it.

Every device of a pipeline runs the script's loss. What the stages before its own give is without
values (see `onefold.placement.pipeline.shape_stages`). When its first stage is called, what that is
called with is replaced by what the device before has sent. When a stage of the next device is
called, what that is called with is sent on, and the loss is left. So whatever lies between two
stages is computed, by the device that has the first of them; what a script carries past a cut is
refused, as are stages that come in another order.

Note: backward hooks of a script
--------------------------------
PyTorch puts hooks of modules into the graph of what a module is called with and of what it gives.
What is without values has no graph, so on a device that computes a stage in shape alone they are
hidden; a module that more than one device has a part of cannot have any.

Note: the state of a shard
--------------------------
On one device the random generators and the buffers of the model stand where the stages before have
left them, in the forward pass and in backward. So they do in a pipeline: whoever goes on with a
shard begins with the state in which the device before has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onefold.core.flat import same_bits, storage_order
from onefold.core.mean import Contribution
from onefold.core.randomness import packed_generators, put_generators, redo_generators
from onefold.core.stages import ROOT
from onefold.core.structure import put_tensors, tensors_of
from onefold.core.values import ShardValues
from onefold.errors import PipelineError
from onefold.placement.base import ResidentParameters
from onefold.placement.pipeline.shape_stages import (
    LossProgress,
    ShapeStages,
    ShapeTensor,
    call_in_words,
    in_common,
    times_written,
    unlike,
)
from onefold.shard.buffers import BufferSet
from onefold.shard.replica import Replica
from onefold.shard.stage_modules import StageModules
from onefold.system.compat import is_in_function, is_transformed
from onefold.system.internals import has_backward_hooks, hide_backward_hooks, watch_differentiation

__all__ = [
    "PipelineContext",
    "ShardState",
    "StageBoundary",
    "StageHandover",
    "StageInputs",
    "StageOutputs",
]


_OF_PYTORCH = {"_is_buffer", "_is_param"}
"""Attributes that PyTorch itself gives to tensors."""


@dataclass(frozen=True, slots=True)
class StageOutputs:
    """What a stage of the next device is called with."""

    stage: int
    tensors: Sequence[torch.Tensor]
    """Those among its arguments, each once."""
    order: Sequence[int]
    """Which of them is at which place, in the order of `tensors_of`."""
    shared: Sequence[bool]
    """Which of them have memory in common with others."""
    words: Sequence[str]
    """All arguments in words, see `onefold.placement.pipeline.shape_stages`."""
    with_gradient: Sequence[bool]
    """Which of the tensors want a gradient."""


class StageHandover(BaseException):
    """Ends a loss whose rest is another device's; never reaches a script."""

    # Not an Exception: a loss may well catch those.

    def __init__(self, outputs: StageOutputs) -> None:
        super().__init__()
        self.outputs = outputs


@dataclass(slots=True)
class StageInputs:
    """What the device before has sent: what a stage is called with."""

    outputs: StageOutputs
    """As it left the device before, with tensors that are here."""
    state: ShardState
    """The one in which they go on."""
    begun: ShardState | None
    """The one in which the loss began, if it is not the one that a shard begins with."""
    entered: list[torch.Tensor] = field(default_factory=list)
    """The tensors as the stage is called with them."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """What came back for each of them, after backward."""


@dataclass(slots=True)
class PipelineContext:
    """One shard, or a microbatch of one, on its way forth and back through a device."""

    progress: LossProgress
    inputs: StageInputs | None
    """None on the first device of a pipeline."""
    shard: int
    replica: Replica
    """The model on the device."""
    drawn: torch.Tensor | None = None
    """The generators' state before the first stage of another device."""
    noted: torch.Tensor | None = None
    """Their state when values arrived."""
    early: Sequence[int] = ()
    """The buffers that were changed before values arrived."""
    backward: ShardState | None = None
    """The state in which backward begins."""
    watched: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Tensors that must not be written to in place, and how often they have been as they came."""
    outputs: Sequence[torch.Tensor] = ()
    """What the next device was sent, with the graph that it comes from."""
    part: Contribution | None = None
    """The loss, on the last device."""
    values: ShardValues | None = None
    """What the loss returned beside itself there."""
    ended: ShardState | None = None
    """The state after the loss, there."""

    @property
    def again(self) -> bool:
        """Whether this is backward, in which layers may be computed once more."""
        return self.backward is not None


class StageBoundary:
    """Cuts a model for the device at one place of a pipeline.

    Args:
        modules: the stages.
        place: of the device, from 0.
        parameters: has the parameters of the device's stages there.
    """

    def __init__(self, modules: StageModules, place: int, parameters: ResidentParameters) -> None:
        self._parameters = parameters
        self._modules = modules
        self._names = modules.stages.names
        self._places = modules.stages.places
        self._place = place
        self._place_of = {
            part: self._places[stage]
            for stage, module in enumerate(modules.modules, start=ROOT + 1)
            for part in module.modules()
        }
        self._shapes = ShapeStages(modules)

    @contextmanager
    def followed(self, context: PipelineContext) -> Iterator[None]:
        """Surround a loss, or a backward, of one shard.

        Raises:
            StageHandover: a stage of the next device is called.
            PipelineError: the model cannot be computed by a pipeline.
        """
        with ExitStack() as put:
            self._parameters.progress = context.progress
            put.callback(setattr, self._parameters, "progress", None)
            self._put_hooks(context, put)
            if context.inputs is not None and not context.again:
                put.enter_context(watch_differentiation(partial(self._refuse_grad, context)))
            for stage, module in enumerate(self._modules.modules, start=ROOT + 1):
                place = self._places[stage]
                if place < self._place:
                    put.enter_context(_called_instead(module, self._before(stage, context)))
                    continue
                hook = self._own if place == self._place else self._after
                handle = module.register_forward_pre_hook(
                    partial(hook, stage, context), prepend=True, with_kwargs=True
                )
                put.callback(handle.remove)
            yield

    def _put_hooks(self, context: PipelineContext, put: ExitStack) -> None:
        """Hide the backward hooks that are not this device's, and refuse those of no device."""
        progress = context.progress
        for name, part in context.replica.module.named_modules():
            if not has_backward_hooks(part):
                continue
            places = {self._place_of[of] for of in part.modules() if of in self._place_of}
            if len(places) > 1:
                raise PipelineError(
                    f"{progress.where}: {name or 'the model'} has a backward hook, and stages on "
                    f"several devices of a pipeline, none of which sees both ends of it: expected "
                    f"backward hooks on stages, or on parts of them. Use --placement partition"
                )
            if places and min(places) < self._place:
                put.enter_context(hide_backward_hooks(part))
            elif part not in self._place_of:
                check = partial(_refuse_shapes, name, progress)
                put.callback(part.register_forward_pre_hook(check, with_kwargs=True).remove)

    def _before(self, stage: int, context: PipelineContext) -> Callable[..., Any]:
        """What is called in the place of a stage of an earlier device."""
        forward = self._modules.modules[stage - 1].forward

        def call(*args: Any, **kwargs: Any) -> Any:
            progress = context.progress
            if progress.arrived:
                raise self._out_of_order(stage, progress)
            if context.drawn is None and not context.again:
                context.drawn = packed_generators(progress.device)
            result = self._shapes.given(stage, forward, (args, kwargs), progress)
            # What it has left there arrives later, with all else.
            left = self._modules.modules[stage - 1].buffers()
            context.replica.buffers.replace(left, partial(ShapeTensor.apart, progress=progress))
            return result

        return call

    def _own(
        self, stage: int, context: PipelineContext, _: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Have the values arrive if this is the stage that they were sent for."""
        progress, inputs = context.progress, context.inputs
        if inputs is None or progress.arrived:
            return None
        found = list(tensors_of((args, kwargs)))
        if context.again and not any(isinstance(tensor, ShapeTensor) for tensor in found):
            return None  # a layer that is computed once more has its own arguments
        outputs = inputs.outputs
        if stage != outputs.stage:
            raise self._out_of_order(stage, progress, expected=outputs.stage)
        differing = unlike(outputs.words, call_in_words(args, kwargs))
        if differing is not None:
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} was called with something else on "
                f"the device before than on this one: {differing[0]} there, and {differing[1]} "
                f"here. The values of tensors are passed on; all else must be alike on all "
                f"devices of a pipeline. Make it a tensor, or use --placement partition"
            )
        if context.again:
            self._redo(stage, context)
        else:
            self._refuse_function(stage, progress)
            self._enter(context, inputs, found)
        progress.arrived = self._names[stage]
        tensors = iter([inputs.entered[number] for number in outputs.order])
        given: tuple[Any, Any] = put_tensors((args, kwargs), lambda _: next(tensors))
        return given

    def _enter(
        self, context: PipelineContext, inputs: StageInputs, found: Sequence[torch.Tensor]
    ) -> None:
        """Begin to compute with what has arrived."""
        progress, replica, outputs = context.progress, context.replica, inputs.outputs
        context.noted = packed_generators(progress.device)
        if context.drawn is not None and not torch.equal(context.drawn, context.noted):
            raise PipelineError(
                f"{progress.where}: the script draws random numbers between two stages of earlier "
                f"devices, or before the first stage of this one; they would be others than on the "
                f"device that has those stages. Draw them before the model is called or inside of "
                f"a stage, or use --placement partition"
            )
        replica.buffers.discard(ShapeTensor)
        context.early = replica.buffers.changed_numbers()
        inputs.state.put(replica, context.shard)
        inputs.entered = [_entered(inputs, number) for number in range(len(outputs.tensors))]
        pairs = zip(outputs.order, found, strict=True)
        watched = {number for number, tensor in pairs if progress.has_values(tensor)}
        watched |= {number for number, shared in enumerate(outputs.shared) if shared}
        context.watched = [
            (tensor, times_written(tensor))
            for tensor in (inputs.entered[number] for number in sorted(watched))
        ]

    def _redo(self, stage: int, context: PipelineContext) -> None:
        """Compute once more with what has arrived."""
        progress, buffers = context.progress, context.replica.buffers
        backward, inputs = context.backward, context.inputs
        assert inputs is not None
        assert backward is not None
        assert context.noted is not None
        # What an earlier device computes once more would draw before this one and not after it.
        if progress.is_shaped and not torch.equal(
            context.noted, packed_generators(progress.device)
        ):
            raise PipelineError(
                f"{progress.where}: torch.utils.checkpoint was called with stages of two devices, "
                f"and computes them once more with other random numbers (those of Python and "
                f"NumPy, or any with preserve_rng_state=False): a pipeline would draw them "
                f"in another order. Call it with one stage at a time, or use --placement partition"
            )
        # A checkpoint around this stage has noted where they stood before.
        redo_generators(context.noted, inputs.state.generators, progress.device)
        buffers.discard(ShapeTensor)
        if backward.differing(buffers, context.early):
            raise PipelineError(
                f"{progress.where}: the script changes a buffer of the model before stage "
                f"{self._names[stage]}, and once more in backward (inside of "
                f"torch.utils.checkpoint): a pipeline cannot follow that. Call checkpoint "
                f"with one stage at a time, or use --placement partition"
            )

    def refuse_written(self, context: PipelineContext) -> None:
        """Refuse what was written to in place where others look at it; after the forward pass.

        Raises:
            PipelineError: this is so.
        """
        for tensor, version in context.watched:
            if times_written(tensor) != version:
                raise PipelineError(
                    f"{context.progress.where}: a stage, or what follows it, writes in place to a "
                    f"tensor of shape {tuple(tensor.shape)} that it was called with, and that "
                    f"shares memory with the batch or with another tensor: a pipeline has "
                    f"copies of it. Write to a clone (x = x.clone()), or use --placement partition"
                )

    def _refuse_function(self, stage: int, progress: LossProgress) -> None:
        if is_in_function():
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} is called inside of "
                f"torch.utils.checkpoint with use_reentrant=True (or another "
                f"torch.autograd.Function), through which no gradient reaches other devices: use "
                f"use_reentrant=False, or --placement partition"
            )

    def _refuse_grad(
        self, context: PipelineContext, outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Refuse a backward of the script that would have to go on on another device."""
        # What they are used for lies on this device alone.
        own = {
            id(p)
            for stage, place in enumerate(self._places)
            if place == self._place and stage
            for p in context.replica.of_stages[stage].parameters
        }
        if (inputs and all(id(each) in own for each in inputs)) or not _comes_from_before(
            outputs, inputs
        ):
            return
        raise PipelineError(
            f"{context.progress.where}: the loss differentiates something itself "
            f"(torch.autograd.grad or backward) that comes from stages of other devices: a "
            f"pipeline goes backward once, after the loss. Use --placement partition"
        )

    def _after(
        self, stage: int, context: PipelineContext, _: torch.nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Leave the loss: the rest is the next device's."""
        progress = context.progress
        if context.again:
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} would be computed once more on a "
                f"device that does not have it, as torch.utils.checkpoint was called with stages "
                f"of two devices and without stopping early. Call it with one stage at a time, or "
                f"use --placement partition"
            )
        if context.inputs is not None and not progress.arrived:
            raise self._out_of_order(stage, progress, expected=context.inputs.outputs.stage)
        if self._places[stage] > self._place + 1:
            raise self._out_of_order(
                stage, progress, expected=self._places.index(self._place + 1, 1)
            )
        self._refuse_function(stage, progress)
        found = list(tensors_of((args, kwargs)))
        if any(isinstance(tensor, ShapeTensor) for tensor in found):
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} is called with something made "
                f"before stage {progress.arrived}: a pipeline passes on what each stage is called "
                f"with, and nothing past it. Use --placement partition"
            )
        if any(map(is_transformed, found)):
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} is called inside of torch.vmap or a "
                f"function of torch.func, which a pipeline cannot cut. Call it with whole "
                f"tensors, or use --placement partition"
            )
        tensors = list({id(tensor): tensor for tensor in found}.values())
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        order = [places[id(tensor)] for tensor in found]
        for tensor in tensors:
            self._refuse_kind(stage, tensor, progress)
        shared = in_common(tensors, [tensor for tensor, _ in context.watched])
        words, with_gradient = call_in_words(args, kwargs), [each.requires_grad for each in tensors]
        raise StageHandover(StageOutputs(stage, tensors, order, shared, words, with_gradient))

    def _refuse_kind(self, stage: int, tensor: torch.Tensor, progress: LossProgress) -> None:
        """Refuse what would be less on the next device than it is on this one."""
        kind = type(tensor)
        if tensor.is_sparse or tensor.layout is not torch.strided or tensor.is_quantized:
            what = f"a tensor of layout {tensor.layout}"
        elif kind is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            what = f"a {kind.__name__}"
        elif kind is torch.Tensor and vars(tensor).keys() - _OF_PYTORCH:
            what = f"a tensor that has an attribute {min(vars(tensor).keys() - _OF_PYTORCH)}"
        else:
            return
        raise PipelineError(
            f"{progress.where}: stage {self._names[stage]} is called with {what}: a pipeline "
            f"passes on dense tensors, their values and nothing else of them. Give the stage what "
            f"it needs as arguments of their own, or use --placement partition"
        )

    def _out_of_order(
        self, stage: int, progress: LossProgress, expected: int | None = None
    ) -> PipelineError:
        after = f"after stage {progress.arrived}" if progress.arrived else "first"
        wanted = "" if expected is None else f", where {self._names[expected]} was expected"
        instead = "List them in the order of their calls (Trainer(stages=[...]))"
        if expected is not None and expected < stage:
            instead = (
                "A layer that is left out in some shards must be called all the same, and give "
                "back what it is called with; one that is called elsewhere is listed there "
                "(Trainer(stages=[...]))"
            )
        return PipelineError(
            f"{progress.where}: stage {self._names[stage]} is called {after}{wanted}: a pipeline "
            f"needs stages that follow each other as they are listed, each once. "
            f"{instead}; or use --placement partition"
        )


@contextmanager
def _called_instead(module: torch.nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Have something else called in the place of a module's own forward."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = call
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


class _Entering(torch.autograd.Function):
    """Where backward ends on this device: notes the gradient of what has arrived."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, inputs: StageInputs, number: int) -> torch.Tensor:
        ctx.inputs, ctx.number = inputs, number
        # Not an argument: what is returned may then be written to in place, as in a plain loop.
        return inputs.outputs.tensors[number]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.inputs.gradients[ctx.number] = gradient
        return None, None, None


def _comes_from_before(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether what has arrived lies between outputs and what they are differentiated by."""
    nodes = [_node_of(each) for each in outputs]
    seen = {None, *(_node_of(each) for each in inputs)}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        if node.name() == f"{_Entering.__name__}Backward":
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def _node_of(value: Any) -> Any:
    """Where a tensor, or an edge of a graph, comes from; None for a leaf."""
    return value.grad_fn if isinstance(value, torch.Tensor) else value.node


def _entered(inputs: StageInputs, number: int) -> torch.Tensor:
    tensor = inputs.outputs.tensors[number]
    if not inputs.outputs.with_gradient[number]:
        return tensor
    handle = torch.empty((), requires_grad=True)
    entered: torch.Tensor = _Entering.apply(handle, inputs, number)  # type: ignore[no-untyped-call]
    return entered


def _refuse_shapes(
    name: str, progress: LossProgress, _: torch.nn.Module, args: Any, kwargs: Any
) -> None:
    if any(isinstance(tensor, ShapeTensor) for tensor in tensors_of((args, kwargs))):
        raise PipelineError(
            f"{progress.where}: {name} has a backward hook and is no stage nor part of one, and is "
            f"called with what a stage on another device gives: expected backward hooks on "
            f"stages, or on parts of them. Name it as a stage (Trainer(stages=[...])), or use "
            f"--placement partition"
        )


@dataclass(frozen=True, slots=True)
class ShardState:
    """Where the generators stand, and the buffers that are no longer as the step began."""

    generators: torch.Tensor  # (n,) uint8
    indices: Sequence[int] = ()
    """Numbers of the changed buffers."""
    values: Sequence[torch.Tensor] = ()
    """The buffers left by the shard, each (numel,)."""

    @classmethod
    def of(cls, replica: Replica) -> ShardState:
        """Copy the state that a device is in.

        Raises:
            StateError: a buffer has been resized, or is new.
        """
        generators = packed_generators(replica.device)
        changed = replica.buffers.changed(exactly=True)
        if changed is None:
            return cls(generators)
        views = [storage_order(changed.flat.views[number]) for number in changed.indices]
        return cls(generators, changed.indices, views)

    @property
    def parts(self) -> tuple[object, ...]:
        """What another device makes it of, as `onefold.core.encoding` knows it."""
        return self.generators, list(self.indices), list(self.values)

    def put(self, replica: Replica, shard: int) -> None:
        """Have a device go on in this state, whatever it has changed itself."""
        put_generators(self.generators, replica.device)
        buffers = replica.buffers
        # What a stage of another device gives may have taken their places.
        buffers.discard(ShapeTensor)
        buffers.restore(shard)
        for number, values in zip(self.indices, self.values, strict=True):
            storage_order(buffers.flat.views[number]).copy_(values)

    def differing(self, buffers: BufferSet, numbers: Sequence[int]) -> bool:
        """Whether some of these buffers have other values by now."""
        here = dict(zip(self.indices, self.values, strict=True))
        views = {number: storage_order(buffers.flat.views[number]) for number in numbers}
        return any(
            number not in here or not same_bits(here[number].to(view.device), view)
            for number, view in views.items()
        )
