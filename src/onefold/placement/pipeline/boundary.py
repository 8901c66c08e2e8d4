"""Starts and ends a device's part of the model where a pipeline cuts it.

Every device of a pipeline runs the script's loss. Outputs of the stages before its own have no
values (see `onefold.placement.pipeline.shape_stages`). When its first stage is called, the
arguments are replaced by those that the previous device sent. When a stage of the next device is
called, its arguments are sent, and the loss is interrupted. So code between two stages runs on the
device of the first one. Values that a script carries past a cut raise an error, and so do stages
that are called out of order.

Note: backward hooks of a script
--------------------------------
PyTorch inserts module hooks into the graph of the module's inputs and outputs. Tensors without
values have no graph, so hooks are hidden on devices that only infer the shapes of a stage. A module
whose stages are on several devices cannot have backward hooks.

Note: the state of a shard
--------------------------
On one device, a stage starts with the random generators and buffers that the previous stages left,
in forward and in backward. A pipeline does the same: each device starts from the state in which the
previous one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onefold.core.flat import same_bits, storage_order
from onefold.core.mean import Contribution
from onefold.core.packed_generators import packed_generators, put_generators, redo_generators
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
from onefold.system.compat import CallModes, is_in_function, is_transformed
from onefold.system.internals import has_backward_hooks, hide_backward_hooks, watch_differentiation
from onefold.system.process import Replaced

__all__ = [
    "PipelineContext",
    "ShardState",
    "StageBoundary",
    "StageHandover",
    "StageInputs",
    "StageOutputs",
]


_OF_PYTORCH = {"_is_buffer", "_is_param"}
"""Attributes that PyTorch itself sets on tensors."""


@dataclass(frozen=True, slots=True)
class StageOutputs:
    """Arguments of a stage on the next device."""

    stage: int
    tensors: Sequence[torch.Tensor]
    """Tensors among the arguments, each once."""
    order: Sequence[int]
    """Index into ``tensors`` at each position, in the order of `tensors_of`."""
    shared: Sequence[bool]
    """Whether each tensor shares memory with others."""
    words: Sequence[str]
    """Description of all arguments, see `onefold.placement.pipeline.shape_stages`."""
    with_gradient: Sequence[bool]
    """Whether each tensor requires grad."""


class StageHandover(BaseException):
    """Ends a loss that continues on another device; never reaches the script."""

    # Derive from BaseException, because a loss may catch every Exception.

    def __init__(self, outputs: StageOutputs) -> None:
        super().__init__()
        self.outputs = outputs


@dataclass(slots=True)
class StageInputs:
    """Message of the previous device: the arguments of a stage."""

    outputs: StageOutputs
    """Outputs of the previous device, with tensors on this device."""
    state: ShardState
    """State in which the previous device stopped."""
    begun: ShardState | None
    """State in which the loss began, if it is not the initial state of a shard."""
    entered: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the stage is called with."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of these tensors after backward, by number."""


@dataclass(slots=True)
class PipelineContext:
    """A shard or microbatch, on its way through a device and back."""

    progress: LossProgress
    inputs: StageInputs | None
    """None on the first device of a pipeline."""
    shard: int
    replica: Replica
    """The model on the device."""
    drawn: torch.Tensor | None = None
    """State of the generators before the first stage of another device."""
    noted: torch.Tensor | None = None
    """State of the generators when values arrived."""
    early: Sequence[int] = ()
    """Buffers that changed before values arrived."""
    backward: ShardState | None = None
    """State in which backward begins."""
    watched: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Tensors that must not be written to in place, with their numbers of writes on arrival."""
    outputs: Sequence[torch.Tensor] = ()
    """Tensors sent to the next device, attached to their graph."""
    part: Contribution | None = None
    """Loss, on the last device."""
    values: ShardValues | None = None
    """Metrics that the loss returned, on the last device."""
    ended: ShardState | None = None
    """State after the loss, on the last device."""

    @property
    def again(self) -> bool:
        """Whether this is backward, in which layers may be recomputed."""
        return self.backward is not None


class StageBoundary:
    """Cuts a model for the device at one position of a pipeline.

    Args:
        modules: the stages.
        place: position of the device, from 0.
        parameters: the parameters of the device's stages.
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
        self._changes: list[AbstractContextManager[object]] = []

    @contextmanager
    def followed(self, context: PipelineContext) -> Iterator[None]:
        """Surround the forward pass, or the backward pass, of one shard.

        Raises:
            StageHandover: a stage of the next device is called.
            PipelineError: a pipeline cannot compute the model.
        """
        try:
            self._changes.append(CallModes())
            self._change(Replaced(self._parameters, progress=context.progress))
            self._change_hooks(context)
            if context.inputs is not None and not context.again:
                self._change(watch_differentiation(partial(self._refuse_grad, context)))
            for stage, module in enumerate(self._modules.modules, start=ROOT + 1):
                place = self._places[stage]
                if place < self._place:
                    self._change(Replaced(module, forward=self._before(stage, context)))
                    continue
                hook = partial(self._own if place == self._place else self._after, stage, context)
                # Before hooks of the script, which must see the received tensors.
                self._add_hook(module, hook, prepend=True)
            yield
        finally:
            self.undo()

    def _change(self, change: Replaced) -> None:
        """Make a change that may be undone more than once."""
        self._changes.append(change)
        change.__enter__()

    def _add_hook(
        self, part: torch.nn.Module, hook: Callable[..., Any], *, prepend: bool = False
    ) -> None:
        """Call a function before a module's forward."""
        register = partial(part.register_forward_pre_hook, prepend=prepend, with_kwargs=True)
        # In one line, so that Ctrl-C does not come between registering and noting.
        self._changes.append(register(hook))

    def undo(self) -> None:
        """Undo the changes of `followed`; call it again if it was interrupted."""
        for change in reversed(self._changes):
            change.__exit__(None, None, None)
        self._changes.clear()

    def _change_hooks(self, context: PipelineContext) -> None:
        """Hide backward hooks of other devices, and reject hooks that span several devices."""
        progress = context.progress
        for name, part in context.replica.module.named_modules():
            if not has_backward_hooks(part):
                continue
            # A module with stages on several devices has its inputs on one and its outputs on
            # another.
            places = {self._place_of[of] for of in part.modules() if of in self._place_of}
            if len(places) > 1:
                raise PipelineError(
                    f"{progress.where}: {name or 'the model'} has a backward hook, and stages on "
                    f"several devices of a pipeline, so no device has both its inputs and outputs. "
                    f"Put backward hooks on stages or parts of stages, or use --placement partition"
                )
            if places and min(places) < self._place:
                self._change(hide_backward_hooks(part))
            elif part not in self._place_of:
                check = partial(_refuse_shapes, name, progress)
                self._add_hook(part, check)

    def _before(self, stage: int, context: PipelineContext) -> Callable[..., Any]:
        """Return the replacement of a stage of an earlier device."""
        forward = self._modules.modules[stage - 1].forward

        def call(*args: Any, **kwargs: Any) -> Any:
            progress = context.progress
            if progress.arrived:
                raise self._out_of_order(stage, progress)
            if context.drawn is None and not context.again:
                context.drawn = packed_generators(progress.device)
            result = self._shapes.given(stage, forward, (args, kwargs), progress)
            # Changes that the stage makes to its buffers arrive later, with the shard's state.
            left = self._modules.modules[stage - 1].buffers()
            context.replica.buffers.replace(left, partial(ShapeTensor.apart, progress=progress))
            return result

        return call

    def _own(
        self, stage: int, context: PipelineContext, _: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Substitute the received inputs if they were sent for this stage."""
        progress, inputs = context.progress, context.inputs
        if inputs is None or progress.arrived:
            return None
        found = list(tensors_of((args, kwargs)))
        if context.again and not any(isinstance(tensor, ShapeTensor) for tensor in found):
            return None  # a recomputed layer has its own arguments
        outputs = inputs.outputs
        if stage != outputs.stage:
            raise self._out_of_order(stage, progress, expected=outputs.stage)
        differing = unlike(outputs.words, call_in_words(args, kwargs))
        if differing is not None:
            raise PipelineError(
                f"{progress.where}: the arguments of stage {self._names[stage]} differ between the "
                f"previous device and this one: {differing[0]} there, and {differing[1]} here. A "
                f"pipeline sends the values of tensors; all other arguments must be the same on "
                f"all of its devices. Make it a tensor, or use --placement partition"
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
        """Start to compute with the received inputs."""
        progress, replica, outputs = context.progress, context.replica, inputs.outputs
        context.noted = packed_generators(progress.device)
        if context.drawn is not None and not torch.equal(context.drawn, context.noted):
            raise PipelineError(
                f"{progress.where}: the script draws random numbers between two stages of earlier "
                f"devices, or before the first stage of this one. They would differ from the "
                f"numbers on the device of those stages. Draw them before calling the model or "
                f"inside a stage, or use --placement partition"
            )
        replica.buffers.discard(ShapeTensor)
        context.early = replica.buffers.changed_numbers()
        inputs.state.put(replica, context.shard)
        inputs.entered = [_entered(inputs, number) for number in range(len(outputs.tensors))]
        pairs = zip(outputs.order, found, strict=True)
        watched = {number for number, tensor in pairs if progress.has_values(tensor)}
        watched |= {number for number, shared in enumerate(outputs.shared) if shared}
        entered = [inputs.entered[number] for number in sorted(watched)]
        context.watched = [(tensor, times_written(tensor)) for tensor in entered]

    def _redo(self, stage: int, context: PipelineContext) -> None:
        """Recompute with the received inputs."""
        progress, buffers = context.progress, context.replica.buffers
        backward, inputs = context.backward, context.inputs
        assert inputs is not None
        assert backward is not None
        assert context.noted is not None
        # An earlier device would recompute, and draw, before this one and not after it.
        if progress.is_shaped and not torch.equal(
            context.noted, packed_generators(progress.device)
        ):
            raise PipelineError(
                f"{progress.where}: torch.utils.checkpoint was called with stages of two devices, "
                f"and recomputes them with other random numbers (those of Python and NumPy, or any "
                f"with preserve_rng_state=False). A pipeline would draw them in another order. "
                f"Call it with one stage at a time, or use --placement partition"
            )
        # A checkpoint around this stage has saved, and restored, the state from before values
        # arrived.
        redo_generators(context.noted, inputs.state.generators, progress.device)
        buffers.discard(ShapeTensor)
        if backward.differing(buffers, context.early):
            raise PipelineError(
                f"{progress.where}: the script changes a buffer of the model before stage "
                f"{self._names[stage]}, and again in backward (inside torch.utils.checkpoint), "
                f"which a pipeline does not support. Call checkpoint with one stage at a time, or "
                f"use --placement partition"
            )

    def refuse_written(self, context: PipelineContext) -> None:
        """Check, after the forward pass, that no shared tensor was written to in place.

        Raises:
            PipelineError: one was.
        """
        for tensor, version in context.watched:
            if times_written(tensor) != version:
                raise PipelineError(
                    f"{context.progress.where}: a stage, or code after it, writes in place to a "
                    f"tensor of shape {tuple(tensor.shape)}, an argument that shares memory with "
                    f"the batch or another tensor, but a pipeline has copies of it. Write to a "
                    f"clone (x = x.clone()), or use --placement partition"
                )

    def _refuse_function(self, stage: int, progress: LossProgress) -> None:
        if is_in_function():
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} is called inside "
                f"torch.utils.checkpoint with use_reentrant=True (or another "
                f"torch.autograd.Function), which passes no gradient to other devices. Use "
                f"use_reentrant=False, or --placement partition"
            )

    def _refuse_grad(
        self, context: PipelineContext, outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Reject a backward call of the script that would have to continue on another device."""
        # Gradients of this device's parameters do not need other devices.
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
            f"{context.progress.where}: the loss calls torch.autograd.grad or backward on a value "
            f"that depends on stages of other devices, but a pipeline runs backward only once, "
            f"after the loss. Use --placement partition"
        )

    def _after(
        self, stage: int, context: PipelineContext, _: torch.nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Interrupt the loss, which continues on the next device."""
        progress = context.progress
        if context.again:
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} would be recomputed on a device "
                f"that does not have it, because torch.utils.checkpoint was called with stages of "
                f"two devices and without early stopping. Call it with one stage at a time, or use "
                f"--placement partition"
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
                f"{progress.where}: stage {self._names[stage]} is called with a value made before "
                f"stage {progress.arrived}, but a pipeline sends only the arguments of each stage. "
                f"Use --placement partition"
            )
        if any(map(is_transformed, found)):
            raise PipelineError(
                f"{progress.where}: stage {self._names[stage]} is called inside torch.vmap or a "
                f"function of torch.func, which a pipeline cannot cut. Call it with whole tensors, "
                f"or use --placement partition"
            )
        # Send a tensor once, even if several arguments refer to it.
        tensors = list({id(tensor): tensor for tensor in found}.values())
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        order = [places[id(tensor)] for tensor in found]
        for tensor in tensors:
            self._refuse_kind(stage, tensor, progress)
        shared = in_common(tensors, [tensor for tensor, _ in context.watched])
        words, with_gradient = call_in_words(args, kwargs), [each.requires_grad for each in tensors]
        raise StageHandover(StageOutputs(stage, tensors, order, shared, words, with_gradient))

    def _refuse_kind(self, stage: int, tensor: torch.Tensor, progress: LossProgress) -> None:
        """Reject a tensor that would lose something on its way to the next device."""
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
            f"{progress.where}: stage {self._names[stage]} is called with {what}, but a pipeline "
            f"sends only dense tensors and their values. Pass the other data to the stage as "
            f"separate arguments, or use --placement partition"
        )

    def _out_of_order(
        self, stage: int, progress: LossProgress, expected: int | None = None
    ) -> PipelineError:
        after = f"after stage {progress.arrived}" if progress.arrived else "first"
        wanted = "" if expected is None else f", but {self._names[expected]} should be called"
        instead = "List stages in the order of their calls (Trainer(stages=[...]))"
        if expected is not None and expected < stage:
            instead = (
                "A layer that some shards skip must still be called, and return its input; list a "
                "layer that is called elsewhere at that position (Trainer(stages=[...]))"
            )
        return PipelineError(
            f"{progress.where}: stage {self._names[stage]} is called {after}{wanted}. A pipeline "
            f"requires that each stage is called once, in the order of the list. {instead}, or use "
            f"--placement partition"
        )


class _Entering(torch.autograd.Function):
    """End of backward on this device: stores the gradient of a received tensor."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, inputs: StageInputs, number: int) -> torch.Tensor:
        ctx.inputs, ctx.number = inputs, number
        # The result is not an argument, so that it may be written to in place, as in a plain loop.
        return inputs.outputs.tensors[number]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.inputs.gradients[ctx.number] = gradient
        return None, None, None


def _comes_from_before(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Return whether the graph between outputs and inputs contains a received tensor."""
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
    """Return the graph node of a tensor, or of an edge; None for a leaf."""
    return value.grad_fn if isinstance(value, torch.Tensor) else value.node


def _entered(inputs: StageInputs, number: int) -> torch.Tensor:
    tensor = inputs.outputs.tensors[number]
    if not inputs.outputs.with_gradient[number]:
        return tensor
    # Backward stops at this leaf: `_Entering` stores the gradient and returns none for it.
    handle = torch.empty((), requires_grad=True)
    entered: torch.Tensor = _Entering.apply(handle, inputs, number)  # type: ignore[no-untyped-call]
    return entered


def _refuse_shapes(
    name: str, progress: LossProgress, _: torch.nn.Module, args: Any, kwargs: Any
) -> None:
    if any(isinstance(tensor, ShapeTensor) for tensor in tensors_of((args, kwargs))):
        raise PipelineError(
            f"{progress.where}: {name} has a backward hook, is neither a stage nor part of one, "
            f"and is called with the output of a stage on another device. Put backward hooks on "
            f"stages or parts of stages, make it a stage (Trainer(stages=[...])), or use "
            f"--placement partition"
        )


@dataclass(frozen=True, slots=True)
class ShardState:
    """State of the generators, and buffers that changed since the step began."""

    generators: torch.Tensor  # (n,) uint8
    indices: Sequence[int] = ()
    """Numbers of the changed buffers."""
    values: Sequence[torch.Tensor] = ()
    """Values of the changed buffers, each (numel,)."""

    @classmethod
    def of(cls, replica: Replica) -> ShardState:
        """Copy the state of a device.

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
        """Fields of the state, of types that `onefold.core.encoding` supports."""
        return self.generators, list(self.indices), list(self.values)

    def put(self, replica: Replica, shard: int) -> None:
        """Set a device to this state, whatever it has changed itself."""
        put_generators(self.generators, replica.device)
        buffers = replica.buffers
        # Outputs of a stage of another device may have replaced buffers.
        buffers.discard(ShapeTensor)
        buffers.restore(shard)
        for number, values in zip(self.indices, self.values, strict=True):
            storage_order(buffers.flat.views[number]).copy_(values)

    def differing(self, buffers: BufferSet, numbers: Sequence[int]) -> bool:
        """Return whether some of these buffers have other values now."""
        here = dict(zip(self.indices, self.values, strict=True))
        views = {number: storage_order(buffers.flat.views[number]) for number in numbers}
        return any(
            number not in here or not same_bits(here[number].to(view.device), view)
            for number, view in views.items()
        )
