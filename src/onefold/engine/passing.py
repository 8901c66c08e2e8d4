"""Has a model begin and end in its midst, where a line of devices cuts it.

Every device of a line runs the script's loss. What the stages before its own give is hollow (see
`onefold.engine.hollow`). When its first stage is called, what that is called with is replaced by
what the device before has sent. When a stage of the next device is called, what that is called with
is sent on, and the loss is left. So whatever lies between two stages is computed, by the device
that has the first of them; what a script carries past a cut is refused, as are stages that come in
another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onefold.core.generatorstates import packed_generators, put_generators
from onefold.core.randomness import forked_generators
from onefold.core.stages import ROOT
from onefold.core.structure import parts_of
from onefold.engine.hollow import Hollow, Reach, followed, tensors_of, with_tensors
from onefold.engine.stagemodules import StageModules
from onefold.errors import LineError

__all__ = ["Arrival", "Passage", "Passed", "Passing"]

_NO_VALUES = torch.empty(0)
"""Stands for any tensor."""


class Passed(BaseException):
    """Ends a loss whose rest is another device's; never reaches a script."""

    # Not an Exception: a loss may well catch those.

    def __init__(self, stage: int, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.stage = stage
        self.tensors = tensors


@dataclass(slots=True)
class Arrival:
    """What the device before has sent: what a stage is called with."""

    stage: int
    tensors: Sequence[torch.Tensor]
    """Those among its arguments, in the order of `tensors_of`."""
    with_gradient: Sequence[bool]
    """Which of them want a gradient."""
    generators: torch.Tensor
    """The state in which they go on, as `packed_generators` gives it."""
    begun: torch.Tensor | None
    """That in which the loss began, if it is not the one that a shard begins with."""
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
    drawn: torch.Tensor | None = None
    """The generators' state before the first stage of another device."""
    again: bool = False
    """Whether this is backward, in which layers may be computed once more."""


class Passing:
    """Cuts a model for the device at one place of a line.

    Args:
        modules: the stages.
        place: of the device, from 0.
    """

    def __init__(self, modules: StageModules, place: int) -> None:
        self._modules = modules
        self._names = modules.stages.names
        self._places = modules.stages.places
        self._place = place
        self._known: dict[object, Any] = {}
        """What a stage of another device gives, by what it is called with."""

    @contextmanager
    def followed(self, passage: Passage) -> Iterator[None]:
        """Surround a loss, or a backward, of one shard.

        Raises:
            Passed: a stage of the next device is called.
            LineError: the model cannot be computed by a line of devices.
        """
        with ExitStack() as put:
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
        module = self._modules.modules[stage - 1]
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            reach = passage.reach
            if reach.arrived:
                raise self._out_of_order(stage, reach)
            key = _form_of(stage, module.training, args, kwargs)
            result = self._known.get(key)
            if passage.drawn is None and not passage.again:
                passage.drawn = packed_generators(reach.device)
            if result is None:
                with followed(reach), forked_generators(reach.device):
                    result = forward(*args, **kwargs)
                if key is not None and all(isinstance(t, Hollow) for t in tensors_of(result)):
                    self._known[key] = with_tensors(result, _emptied)
            return with_tensors(result, partial(_hollow_of, reach))

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
        if stage != arrival.stage:
            raise self._out_of_order(stage, reach, expected=arrival.stage)
        shapes, came = [t.shape for t in found], [t.shape for t in arrival.tensors]
        if shapes != came:
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} was called with tensors of the shapes "
                f"{_listed(came)} on the device before, and is with {_listed(shapes)} on this one: "
                f"a loss must call it alike on all devices of a line. Use --keep span"
            )
        self._refuse_draws(passage)
        reach.arrived = self._names[stage]
        # Once more as well: a checkpoint around this stage has noted where they stood before.
        put_generators(arrival.generators, reach.device)
        if not passage.again:
            arrival.entered = [_entered(arrival, number) for number in range(len(arrival.tensors))]
        tensors = iter(arrival.entered)
        given: tuple[Any, Any] = with_tensors((args, kwargs), lambda _: next(tensors))
        return given

    def _refuse_draws(self, passage: Passage) -> None:
        if passage.again or passage.drawn is None:
            return
        if not torch.equal(passage.drawn, packed_generators(passage.reach.device)):
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
            raise self._out_of_order(stage, reach, expected=passage.arrival.stage)
        tensors = list(tensors_of((args, kwargs)))
        if any(isinstance(tensor, Hollow) for tensor in tensors):
            raise LineError(
                f"{reach.where}: stage {self._names[stage]} is called with something made before "
                f"stage {reach.arrived}: a line of devices passes on what each stage is called "
                f"with, and nothing past it. Use --keep span"
            )
        raise Passed(stage, tensors)

    def _out_of_order(self, stage: int, reach: Reach, expected: int | None = None) -> LineError:
        after = f"after stage {reach.arrived}" if reach.arrived else "first"
        wanted = "" if expected is None else f", where {self._names[expected]} was expected"
        return LineError(
            f"{reach.where}: stage {self._names[stage]} is called {after}{wanted}: a line of "
            f"devices needs stages that follow each other as they are listed, each once. List them "
            f"in the order of their calls (Trainer(stages=[...])), or use --keep span"
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
        return arrival.tensors[number]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradients[ctx.number] = gradient
        return None, None, None


def _entered(arrival: Arrival, number: int) -> torch.Tensor:
    tensor = arrival.tensors[number]
    if not arrival.with_gradient[number]:
        return tensor
    handle = torch.empty((), requires_grad=True)
    entered: torch.Tensor = _Entering.apply(handle, arrival, number)  # type: ignore[no-untyped-call]
    return entered


def _form_of(stage: int, training: bool, args: Any, kwargs: Any) -> object:
    """What the form of a stage's result depends on; None if that cannot be said."""
    forms = [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        for tensor in tensors_of((args, kwargs))
    ]
    plain = with_tensors((args, kwargs), lambda _: _NO_VALUES)
    return (stage, training, *forms, repr(plain)) if _is_plain(plain) else None


def _is_plain(value: object) -> bool:
    """Whether a value is made of nothing but what its text tells."""
    if value is None or value is _NO_VALUES or isinstance(value, bool | int | float | str):
        return True
    parts = parts_of(value)
    return parts is not None and all(_is_plain(part) for _, part in parts)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form on the meta device."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _hollow_of(reach: Reach, tensor: torch.Tensor) -> torch.Tensor:
    """What a stage gives this time: anew, as the script may write to it in place."""
    if isinstance(tensor, Hollow) or tensor.device.type != "meta":
        return tensor
    return Hollow.like(_emptied(tensor), reach)


def _listed(shapes: Sequence[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes) or "none"
