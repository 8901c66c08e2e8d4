"""The stages of a model: where it is cut, and how each is handed over while backward runs.

`StageModules` has the modules at whose ends a model may be cut, and `frozen_of` shares frozen
parameters out to the devices. `GradientHooks` hands over the gradients of one microbatch.

Note: when a stage is done
--------------------------
Nothing is put into the graph of autograd: a node between two stages would change the order in which
it adds gradients where a model has skips, and so the bits. It is enough to be told when an output
of a stage has its gradient: autograd works backward in the reverse order in which the forward pass
made its nodes, so everything that was computed after this output is done then. Of a stage that is
called several times the first call counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from onefold.core.flat import lay_out
from onefold.core.results import Gradients
from onefold.core.stages import ROOT, Stages, cut_pipeline, merge
from onefold.core.storage import Frozen, cut_partitions, cut_segments
from onefold.core.structure import tensors_of
from onefold.exchange.reduction import GradientSend
from onefold.shard.gradients import GradientHandover
from onefold.shard.task import Microbatch

__all__ = ["GradientHooks", "StageModules", "cut_by_itself", "frozen_of"]

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class StageModules:
    """The stages of a user's model.

    Args:
        module: the model.
        modules: the stages, in the order in which the model uses them; None to find them.
        trained: the parameters that the optimizer updates, by name.
        pipeline: how many devices compute the model one after the other, each some of its stages.
        merged: whether small neighbors are one stage, as each stage that is sent by itself costs
            launches and messages.

    Raises:
        TypeError: something that is no module was named as a stage.
        ValueError: a stage is no part of the model, is named twice, or lies in another one; or
            there are fewer stages than devices in the pipeline.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        modules: Sequence[torch.nn.Module] | None,
        trained: Mapping[str, torch.nn.Parameter],
        pipeline: int = 1,
        *,
        merged: bool = False,
    ) -> None:
        names = {id(part): name or "the model" for name, part in module.named_modules()}
        modules = cut_by_itself(module) if modules is None else modules
        _check(modules, names)
        self.modules = tuple(modules)
        """The module of each stage but the root, from stage 1 on; merged stages have several."""
        self.last = {ROOT}
        """Stages that are handed over after all of backward: something uses their parameters
        before they run."""
        self._homes: dict[int, set[int]] = {}
        self._stages = list(range(ROOT + 1, len(self.modules) + ROOT + 1))
        """The stage of each module."""
        for stage, part in zip(self._stages, modules, strict=True):
            for parameter in part.parameters():
                self._homes.setdefault(id(parameter), set()).add(stage)
        if merged:
            self._merge(self._sizes(trained.values()))
        # The first module of merged ones gives its name.
        called = {
            s: names[id(part)] for s, part in zip(self._stages[::-1], modules[::-1], strict=True)
        }
        self.stages = Stages(
            names=("the rest of the model", *(called[stage] for stage in sorted(called))),
            stage_of=tuple(map(self.stage_of, trained.values())),
            places=self._places(module, pipeline) if pipeline > 1 else (),
        )

    def _merge(self, sizes: Sequence[int]) -> None:
        """Number the stages anew, where some of these sizes in bytes become one."""
        numbers = [ROOT, *(number + ROOT + 1 for number in merge(sizes[ROOT + 1 :]))]
        self._stages = [numbers[stage] for stage in self._stages]
        self._homes = {key: {numbers[s] for s in homes} for key, homes in self._homes.items()}

    def stage_of(self, parameter: torch.nn.Parameter) -> int:
        """The number of the stage that a parameter of the model lies in."""
        homes = self._homes.get(id(parameter), set())
        # What several stages use is nobody's alone.
        return min(homes) if len(homes) == 1 else ROOT

    def _sizes(self, parameters: Iterable[torch.nn.Parameter]) -> list[int]:
        """Bytes of some parameters in each stage."""
        sizes = [0] * (len(self.modules) + 1)
        for parameter in parameters:
            sizes[self.stage_of(parameter)] += parameter.numel() * parameter.element_size()
        return sizes

    def _places(self, module: torch.nn.Module, pipeline: int) -> tuple[int, ...]:
        """The place in a pipeline of each stage, the root with the first device."""
        return 0, *cut_pipeline(self._sizes(module.parameters())[ROOT + 1 :], pipeline)

    @contextmanager
    def watched(self, done: Callable[[Sequence[int]], None]) -> Iterator[Callable[[], None]]:
        """Call ``done`` with the stages whose gradients are complete, while backward runs.

        Yields:
            What is to be called when the forward pass is over.
        """
        calls: list[int] = []
        begun = False

        def after(stage: int, output: object) -> None:
            # Layers that are computed once more in backward run forward again.
            if begun or torch.compiler.is_compiling():
                return
            calls.append(stage)
            number = len(calls)
            for tensor in tensors_of(output):
                # A leaf is a parameter, perhaps, and would keep the hook.
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: complete(number))  # type: ignore[no-untyped-call]

        def complete(number: int) -> None:
            # A gradient that the loss itself asks for, in its forward pass, is not the shard's.
            if begun:
                later = set(calls[number:]) - set(calls[:number])
                done(sorted(later, reverse=True))

        def begin() -> None:
            nonlocal begun
            begun = True

        handles = [
            part.register_forward_hook(lambda *call, stage=stage: after(stage, call[-1]))
            for stage, part in zip(self._stages, self.modules, strict=True)
            # These take no hooks: a stage of none but these is handed over when backward is over.
            if not isinstance(part, torch.jit.ScriptModule)
        ]
        try:
            yield begin
        finally:
            for handle in handles:
                handle.remove()


def cut_by_itself(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Find where a model may be cut: at each item of its lists and sequences of modules.

    What holds such lists is gone through; what holds none is a stage as a whole.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> [part.out_features for part in cut_by_itself(model)]
    [3, 1]
    """
    found: list[torch.nn.Module] = []
    seen: set[torch.nn.Module] = set()

    def visit(part: torch.nn.Module, *, listed: bool) -> None:
        if isinstance(part, _LISTS):
            for child in part.children():
                visit(child, listed=True)
        elif listed or not any(isinstance(inner, _LISTS) for inner in part.modules()):
            if next(part.parameters(), None) is not None and seen.isdisjoint(part.modules()):
                found.append(part)
                seen.update(part.modules())
        else:
            for child in part.children():
                visit(child, listed=False)

    visit(module, listed=False)
    return found


def _check(modules: Sequence[torch.nn.Module], names: Mapping[int, str]) -> None:
    seen: dict[int, str] = {}
    for place, part in enumerate(modules):
        if not isinstance(part, torch.nn.Module):
            raise TypeError(
                f"expected stages to be modules of the model, got {part!r} as number {place}"
            )
        if id(part) not in names:
            raise ValueError(
                f"stage {place} ({type(part).__name__}) is no part of the model: expected modules "
                f"that model.modules() lists"
            )
        for inner in part.modules():
            if id(inner) in seen:
                raise ValueError(
                    f"stage {place} ({names[id(part)]}) and {seen[id(inner)]} both hold "
                    f"{names[id(inner)]}: expected stages that have no module in common"
                )
        seen |= {id(inner): f"stage {place} ({names[id(part)]})" for inner in part.modules()}


def frozen_of(
    parameters: Mapping[str, torch.nn.Parameter], modules: StageModules, devices: int
) -> Frozen | None:
    """Share frozen parameters out to the devices; None if there are none.

    Args:
        parameters: those that `ModelParts.partition_frozen` has set apart.
        modules: the stages.
        devices: how many there are.
    """
    if not parameters:
        return None
    layout, stage_of = lay_out(parameters), tuple(map(modules.stage_of, parameters.values()))
    segments = cut_segments(layout, by_element=True)
    partitions = cut_partitions(segments, devices, replace(modules.stages, stage_of=stage_of))
    return Frozen(layout, stage_of, segments, partitions)


class GradientHooks:
    """What has been handed over of one microbatch, and what has not.

    Args:
        modules: the stages.
        microbatch: of which shard.
        take: takes the gradients of a stage out of ``.grad``.
        send: is given each stage.
    """

    def __init__(
        self,
        modules: StageModules,
        microbatch: Microbatch,
        take: Callable[[int], Gradients],
        send: Callable[[GradientSend], None],
    ) -> None:
        self._modules = modules
        self._entries = modules.stages.entries
        self._microbatch = microbatch
        self._take = take
        self._give = send
        self._left, self._handed = list(reversed(range(len(self._entries)))), GradientHandover()
        self.given = [False] * len(modules.stages.stage_of)
        """For each trained parameter, whether there was a gradient."""
        self.begin_backward: Callable[[], None]
        """To be called between the two."""
        self.is_late = False
        """Whether a gradient came after its stage had been handed over."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surround a forward pass and its backward."""
        with self._modules.watched(self._hand_over_early) as self.begin_backward:
            yield

    def finish(self) -> None:
        """Hand over all stages that are left, after backward.

        A gradient that came after its stage had been handed over is dropped, and the stage is
        handed over last from now on: the step has to be computed once more.
        """
        for stage in range(len(self._entries)):
            if stage not in self._left and any(g is not None for g in self._take(stage)):
                self._modules.last.add(stage)
                self.is_late = True
        self._hand_over(list(self._left))

    def _hand_over_early(self, stages: Sequence[int]) -> None:
        self._hand_over([s for s in stages if s in self._left and s not in self._modules.last])

    def _hand_over(self, stages: Sequence[int]) -> None:
        for stage in stages:
            self._left.remove(stage)
            numbers = self._entries[stage]
            gradients = self._handed.apart(self._take(stage))
            for number, gradient in zip(numbers, gradients, strict=True):
                self.given[number] = gradient is not None
            part = self._microbatch
            self._give(GradientSend(part.shard, stage, part.is_last, gradients))
