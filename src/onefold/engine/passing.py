"""Has a model begin and end in its midst, where a line of devices cuts it.

Every device of a line runs the script's loss. What the stages before its own give is hollow (see
`onefold.engine.hollow`). When its first stage is called, what that is called with is replaced by
what the device before has sent. When a stage of the next device is called, what that is called with
is sent on, and the loss is left. So whatever lies between two stages is computed, by the device
that has the first of them; what a script carries past a cut is refused, as are stages that come in
another order.

Note: backward hooks of a script
--------------------------------
PyTorch puts hooks of modules into the graph of what a module is called with and of what it gives.
What is hollow has no graph, so on a device that computes a stage in shape alone they are hidden; a
module that more than one device has a part of cannot have any.

Note: the state of a shard
--------------------------
On one device the random generators and the buffers of the model stand where the stages before have
left them, in the forward pass and in backward. So they do in a line: whoever goes on with a shard
begins with the state in which the device before has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onefold.core.flat import same_bits
from onefold.core.randomness import packed_generators, put_generators, redo_generators
from onefold.core.stages import ROOT
from onefold.engine.buffers import BufferSet
from onefold.engine.hollow import Hollow, Reach, in_common, put_tensors, tensors_of, times_written
from onefold.engine.hollowstages import HollowStages, call_in_words, unlike
from onefold.engine.lentparameter import Lending
from onefold.engine.replica import Replica
from onefold.engine.stagemodules import StageModules
from onefold.errors import LineError
from onefold.system.compat import is_in_function, is_transformed
from onefold.system.hooks import has_backward_hooks, hide_backward_hooks, watch_differentiation

__all__ = ["Arrival", "Leaving", "Passage", "Passed", "Passing", "ShardState"]


_OF_PYTORCH = {"_is_buffer", "_is_param"}
"""Attributes that PyTorch itself gives to tensors."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a stage of the next device is called with."""

    stage: int
    tensors: Sequence[torch.Tensor]
    """Those among its arguments, each once."""
    order: Sequence[int]
    """Which of them is at which place, in the order of `tensors_of`."""
    shared: Sequence[bool]
    """Which of them have memory in common with others."""
    words: Sequence[str]
    """All arguments in words, see `onefold.engine.hollowstages`."""


class Passed(BaseException):
    """Ends a loss whose rest is another device's; never reaches a script."""

    # Not an Exception: a loss may well catch those.

    def __init__(self, leaving: Leaving) -> None:
        super().__init__()
        self.leaving = leaving


@dataclass(slots=True)
class Arrival:
    """What the device before has sent: what a stage is called with."""

    leaving: Leaving
    """As it left the device before, with tensors that are here."""
    with_gradient: Sequence[bool]
    """Which of them want a gradient."""
    state: ShardState
    """The one in which they go on."""
    begun: ShardState | None
    """The one in which the loss began, if it is not the one that a shard begins with."""
    entered: list[torch.Tensor] = field(default_factory=list)
    """The tensors as the stage is called with them."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """What came back for each of them, after backward."""


@dataclass(slots=True)
class Passage:
    """One shard, or a piece of one, on its way through a device."""

    reach: Reach
    arrival: Arrival | None
    """None on the first device of a line."""
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

    @property
    def again(self) -> bool:
        """Whether this is backward, in which layers may be computed once more."""
        return self.backward is not None


class Passing:
    """Cuts a model for the device at one place of a line.

    Args:
        modules: the stages.
        place: of the device, from 0.
        lending: has the parameters of the device's stages there.
    """

    def __init__(self, modules: StageModules, place: int, lending: Lending) -> None:
        self._lending = lending
        self._modules = modules
        self._names = modules.stages.names
        self._places = modules.stages.places
        self._place = place
        self._place_of = {
            part: self._places[stage]
            for stage, module in enumerate(modules.modules, start=ROOT + 1)
            for part in module.modules()
        }
        self._hollow = HollowStages(modules)

    @contextmanager
    def followed(self, passage: Passage) -> Iterator[None]:
        """Surround a loss, or a backward, of one shard.

        Raises:
            Passed: a stage of the next device is called.
            LineError: the model cannot be computed by a line of devices.
        """
        model, reach = passage.replica.module, passage.reach
        with ExitStack() as put:
            put.enter_context(self._lending.on_the_way(reach))
            put.enter_context(hooks_in_place(model, self._place_of, self._place, reach))
            if passage.arrival is not None and not passage.again:
                put.enter_context(watch_differentiation(partial(self._refuse_grad, passage)))
            for stage, module in enumerate(self._modules.modules, start=ROOT + 1):
                place = self._places[stage]
                if place < self._place:
                    put.enter_context(_called_instead(module, self._before(stage, passage)))
                    continue
                hook = self._own if place == self._place else self._after
                handle = module.register_forward_pre_hook(
                    partial(hook, stage, passage), prepend=True, with_kwargs=True
                )
                put.callback(handle.remove)
            yield

    def _before(self, stage: int, passage: Passage) -> Callable[..., Any]:
        """What is called in the place of a stage of an earlier device."""
        forward = self._modules.modules[stage - 1].forward

        def call(*args: Any, **kwargs: Any) -> Any:
            reach = passage.reach
            if reach.arrived:
                raise self._out_of_order(stage, reach)
            if passage.drawn is None and not passage.again:
                passage.drawn = packed_generators(reach.device)
            result = self._hollow.given(stage, forward, (args, kwargs), reach)
            # What it has left there arrives later, with all else.
            left = self._modules.modules[stage - 1].buffers()
            passage.replica.buffers.replace(left, partial(Hollow.apart, reach=reach))
            return result

        return call

    def _own(
        self, stage: int, passage: Passage, _: torch.nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Have the values arrive if this is the stage that they were sent for."""
        reach, arrival = passage.reach, passage.arrival
        if arrival is None or reach.arrived:
            return None
        found = list(tensors_of((args, kwargs)))
        if passage.again and not any(isinstance(tensor, Hollow) for tensor in found):
            return None  # a layer that is computed once more has its own arguments
        leaving = arrival.leaving
        if stage != leaving.stage:
            raise self._out_of_order(stage, reach, expected=leaving.stage)
        differing = unlike(leaving.words, call_in_words(args, kwargs))
        if differing is not None:
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} was called with something else on the "
                f"device before than on this one: {differing[0]} there, and {differing[1]} here. "
                f"The values of tensors are passed on; all else must be alike on all devices of a "
                f"line. Make it a tensor, or use --keep span"
            )
        if passage.again:
            self._redo(stage, passage)
        else:
            self._refuse_function(stage, reach)
            self._enter(passage, arrival, found)
        reach.arrived = self._names[stage]
        tensors = iter([arrival.entered[number] for number in leaving.order])
        given: tuple[Any, Any] = put_tensors((args, kwargs), lambda _: next(tensors))
        return given

    def _enter(self, passage: Passage, arrival: Arrival, found: Sequence[torch.Tensor]) -> None:
        """Begin to compute with what has arrived."""
        reach, replica, leaving = passage.reach, passage.replica, arrival.leaving
        passage.noted = packed_generators(reach.device)
        self._refuse_draws(passage, passage.noted)
        replica.buffers.discard(Hollow)
        passage.early = replica.buffers.changed_numbers()
        arrival.state.put(replica, passage.shard)
        arrival.entered = [_entered(arrival, number) for number in range(len(leaving.tensors))]
        pairs = zip(leaving.order, found, strict=True)
        watched = {number for number, tensor in pairs if reach.has_values(tensor)}
        watched |= {number for number, shared in enumerate(leaving.shared) if shared}
        passage.watched = [
            (tensor, times_written(tensor))
            for tensor in (arrival.entered[number] for number in sorted(watched))
        ]

    def _redo(self, stage: int, passage: Passage) -> None:
        """Compute once more with what has arrived."""
        reach, buffers = passage.reach, passage.replica.buffers
        backward, arrival = passage.backward, passage.arrival
        assert arrival is not None
        assert backward is not None
        assert passage.noted is not None
        # What an earlier device computes once more would draw before this one and not after it.
        if reach.is_shaped and not torch.equal(passage.noted, packed_generators(reach.device)):
            raise LineError(
                f"{reach.where}: torch.utils.checkpoint was called with stages of two devices, "
                f"and computes them once more with other random numbers (those of Python and "
                f"NumPy, or any with preserve_rng_state=False): a line of devices would draw them "
                f"in another order. Call it with one stage at a time, or use --keep span"
            )
        # A checkpoint around this stage has noted where they stood before.
        redo_generators(passage.noted, arrival.state.generators, reach.device)
        buffers.discard(Hollow)
        if backward.differing(buffers, passage.early):
            raise LineError(
                f"{reach.where}: the script changes a buffer of the model before stage "
                f"{self._names[stage]}, and once more in backward (inside of "
                f"torch.utils.checkpoint): a line of devices cannot follow that. Call checkpoint "
                f"with one stage at a time, or use --keep span"
            )

    def refuse_written(self, passage: Passage) -> None:
        """Refuse what was written to in place where others look at it; after the forward pass.

        Raises:
            LineError: this is so.
        """
        for tensor, version in passage.watched:
            if times_written(tensor) != version:
                raise LineError(
                    f"{passage.reach.where}: a stage, or what follows it, writes in place to a "
                    f"tensor of shape {tuple(tensor.shape)} that it was called with, and that "
                    f"shares memory with the batch or with another tensor: a line of devices has "
                    f"copies of it. Write to a clone (x = x.clone()), or use --keep span"
                )

    def _refuse_function(self, stage: int, reach: Reach) -> None:
        if is_in_function():
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} is called inside of "
                f"torch.utils.checkpoint with use_reentrant=True (or another "
                f"torch.autograd.Function), through which no gradient reaches other devices: use "
                f"use_reentrant=False, or --keep span"
            )

    def _refuse_grad(self, passage: Passage, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Refuse a backward of the script that would have to go on on another device."""
        # What they are used for lies on this device alone.
        own = {
            id(p)
            for stage, place in enumerate(self._places)
            if place == self._place and stage
            for p in passage.replica.of_stages[stage].parameters
        }
        if (inputs and all(id(each) in own for each in inputs)) or not _comes_from_before(
            outputs, inputs
        ):
            return
        raise LineError(
            f"{passage.reach.where}: the loss differentiates something itself (torch.autograd.grad "
            f"or backward) that comes from stages of other devices: a line of devices goes "
            f"backward once, after the loss. Use --keep span"
        )

    def _refuse_draws(self, passage: Passage, now: torch.Tensor) -> None:
        if passage.drawn is not None and not torch.equal(passage.drawn, now):
            raise LineError(
                f"{passage.reach.where}: the script draws random numbers between two stages of "
                f"earlier devices, or before the first stage of this one; they would be others "
                f"than on the device that has those stages. Draw them before the model is called "
                f"or inside of a stage, or use --keep span"
            )

    def _after(
        self, stage: int, passage: Passage, _: torch.nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Leave the loss: the rest is the next device's."""
        reach = passage.reach
        if passage.again:
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} would be computed once more on a "
                f"device that does not have it, as torch.utils.checkpoint was called with stages "
                f"of two devices and without stopping early. Call it with one stage at a time, or "
                f"use --keep span"
            )
        if passage.arrival is not None and not reach.arrived:
            raise self._out_of_order(stage, reach, expected=passage.arrival.leaving.stage)
        if self._places[stage] > self._place + 1:
            raise self._out_of_order(stage, reach, expected=self._places.index(self._place + 1, 1))
        self._refuse_function(stage, reach)
        found = list(tensors_of((args, kwargs)))
        if any(isinstance(tensor, Hollow) for tensor in found):
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} is called with something made before "
                f"stage {reach.arrived}: a line of devices passes on what each stage is called "
                f"with, and nothing past it. Use --keep span"
            )
        if any(map(is_transformed, found)):
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} is called inside of torch.vmap or a "
                f"function of torch.func, which a line of devices cannot cut. Call it with whole "
                f"tensors, or use --keep span"
            )
        tensors = list({id(tensor): tensor for tensor in found}.values())
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        order = [places[id(tensor)] for tensor in found]
        for tensor in tensors:
            self._refuse_kind(stage, tensor, reach)
        shared = in_common(tensors, [tensor for tensor, _ in passage.watched])
        raise Passed(Leaving(stage, tensors, order, shared, call_in_words(args, kwargs)))

    def _refuse_kind(self, stage: int, tensor: torch.Tensor, reach: Reach) -> None:
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
        raise LineError(
            f"{reach.where}: stage {self._names[stage]} is called with {what}: a line of devices "
            f"passes on dense tensors, their values and nothing else of them. Give the stage what "
            f"it needs as arguments of their own, or use --keep span"
        )

    def _out_of_order(self, stage: int, reach: Reach, expected: int | None = None) -> LineError:
        after = f"after stage {reach.arrived}" if reach.arrived else "first"
        wanted = "" if expected is None else f", where {self._names[expected]} was expected"
        instead = "List them in the order of their calls (Trainer(stages=[...]))"
        if expected is not None and expected < stage:
            instead = (
                "A layer that is left out in some shards must be called all the same, and give "
                "back what it is called with; one that is called elsewhere is listed there "
                "(Trainer(stages=[...]))"
            )
        return LineError(
            f"{reach.where}: stage {self._names[stage]} is called {after}{wanted}: a line of "
            f"devices needs stages that follow each other as they are listed, each once. "
            f"{instead}; or use --keep span"
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
    def forward(ctx: Any, handle: torch.Tensor, arrival: Arrival, number: int) -> torch.Tensor:
        ctx.arrival, ctx.number = arrival, number
        # Not an argument: what is returned may then be written to in place, as in a plain loop.
        return arrival.leaving.tensors[number]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradients[ctx.number] = gradient
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


def _entered(arrival: Arrival, number: int) -> torch.Tensor:
    tensor = arrival.leaving.tensors[number]
    if not arrival.with_gradient[number]:
        return tensor
    handle = torch.empty((), requires_grad=True)
    entered: torch.Tensor = _Entering.apply(handle, arrival, number)  # type: ignore[no-untyped-call]
    return entered


@contextmanager
def hooks_in_place(
    model: torch.nn.Module, place_of: Mapping[torch.nn.Module, int], place: int, reach: Reach
) -> Iterator[None]:
    """Surround a loss, or a backward, of one shard on a device of a line.

    Args:
        model: the whole.
        place_of: the place in the line of each module that is a part of a stage.
        place: of the device.
        reach: how far the device has come.

    Raises:
        LineError: a module has hooks that no device alone could call.
    """
    with ExitStack() as put:
        for name, part in model.named_modules():
            if not has_backward_hooks(part):
                continue
            places = {place_of[inner] for inner in part.modules() if inner in place_of}
            if len(places) > 1:
                raise LineError(
                    f"{reach.where}: {name or 'the model'} has a backward hook, and stages on "
                    f"several devices of a line, none of which sees both ends of it: expected "
                    f"backward hooks on stages, or on parts of them. Use --keep span"
                )
            if places and min(places) < place:
                put.enter_context(hide_backward_hooks(part))
            elif part not in place_of:
                check = _refusing(name, reach)
                put.callback(part.register_forward_pre_hook(check, with_kwargs=True).remove)
        yield


def _refusing(name: str, reach: Reach) -> Callable[..., None]:
    def check(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if any(isinstance(tensor, Hollow) for tensor in tensors_of((args, kwargs))):
            raise LineError(
                f"{reach.where}: {name} has a backward hook and is no stage nor part of one, and "
                f"is called with what a stage on another device gives: expected backward hooks on "
                f"stages, or on parts of them. Name it as a stage (Trainer(stages=[...])), or use "
                f"--keep span"
            )

    return check


@dataclass(frozen=True, slots=True)
class ShardState:
    """Where the generators stand, and the buffers that are no longer as the step began."""

    generators: torch.Tensor  # (n,) uint8
    indices: Sequence[int] = ()
    """Numbers of the changed buffers."""
    values: Sequence[torch.Tensor] = ()
    """Theirs, each (numel,)."""

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
        views = [replica.buffers.view_of(changed.sections, number) for number in changed.indices]
        return cls(generators, changed.indices, views)

    @classmethod
    def read(cls, indices: Sequence[int], tensors: Iterator[torch.Tensor | None]) -> ShardState:
        """Read what another device has sent: `tensors` of its state, and perhaps more behind."""
        found = [next(tensors) for _ in range(1 + len(indices))]
        generators, *values = [tensor for tensor in found if tensor is not None]
        return cls(generators, indices, values)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is to be sent, beside the indices."""
        return [self.generators, *self.values]

    def put(self, replica: Replica, shard: int) -> None:
        """Have a device go on in this state, whatever it has changed itself."""
        put_generators(self.generators, replica.device)
        self.put_buffers(replica.buffers, shard)

    def put_buffers(self, buffers: BufferSet, shard: int) -> None:
        """Have a device go on with these buffers alone."""
        # What a stage of another device gives may have taken their places.
        buffers.discard(Hollow)
        buffers.restore(shard)
        for number, values in zip(self.indices, self.values, strict=True):
            buffers.view_of(buffers.flat.sections, number).copy_(values)

    def differing(self, buffers: BufferSet, numbers: Sequence[int]) -> bool:
        """Whether some of these buffers have other values by now."""
        here = dict(zip(self.indices, self.values, strict=True))
        views = {number: buffers.view_of(buffers.flat.sections, number) for number in numbers}
        return any(
            number not in here or not same_bits(here[number].to(view.device), view)
            for number, view in views.items()
        )
