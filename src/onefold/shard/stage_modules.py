"""The stages of a model: where it is cut, and when the gradients of each are sent during backward.

`StageModules` lists the modules at which a model may be cut, `frozen_of` partitions frozen
parameters among devices, and `GradientHooks` sends the gradients of one microbatch.

Note: when a stage is complete
------------------------------
onefold adds no node to the autograd graph: in a model with skip connections, a node between two
stages would change the order in which autograd adds gradients, and thereby the bits. A hook on a
stage's output is enough. Autograd runs nodes in the reverse order of the forward pass, so once the
output has its gradient, everything computed after the output is complete. A stage that is called
several times is complete when everything from its first call on is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

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
    """Stages of the user's model.

    Args:
        module: the model.
        modules: the stages, in the order of use; None to find them.
        trained: the parameters that the optimizer updates, by name.
        pipeline: number of devices that compute the model one after the other, each with some of
            the stages.
        merged: whether to merge small neighboring stages, because each separate send costs kernel
            launches and messages.

    Raises:
        TypeError: a stage is not a module.
        ValueError: a stage is not part of the model, is named twice, or is inside another stage; or
            the pipeline has more devices than stages.
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
        """The module of each stage except the root, from stage 1 on; merged stages have several."""
        self.last = {ROOT}
        """Stages sent only after backward, because their parameters are used before they run."""
        self._homes: dict[int, set[int]] = {}
        self._stages = list(range(ROOT + 1, len(self.modules) + ROOT + 1))
        """Stage number of each module."""
        for stage, part in zip(self._stages, modules, strict=True):
            for parameter in part.parameters():
                self._homes.setdefault(id(parameter), set()).add(stage)
        if merged:
            self._merge(self._sizes(trained.values()))
        # Merged stages are named after their first module: in reverse order, the first one wins.
        called = {
            s: names[id(part)] for s, part in zip(self._stages[::-1], modules[::-1], strict=True)
        }
        self.stages = Stages(
            names=("the rest of the model", *(called[stage] for stage in sorted(called))),
            stage_of=tuple(map(self.stage_of, trained.values())),
            places=self._places(module, pipeline) if pipeline > 1 else (),
        )

    def _merge(self, sizes: Sequence[int]) -> None:
        """Renumber the stages after merging neighbors, given their sizes in bytes."""
        numbers = [ROOT, *(number + ROOT + 1 for number in merge(sizes[ROOT + 1 :]))]
        self._stages = [numbers[stage] for stage in self._stages]
        self._homes = {key: {numbers[s] for s in homes} for key, homes in self._homes.items()}

    def stage_of(self, parameter: torch.nn.Parameter) -> int:
        """Return the number of the stage that contains a parameter."""
        homes = self._homes.get(id(parameter), set())
        # Parameters shared by several stages belong to the root.
        return min(homes) if len(homes) == 1 else ROOT

    def _sizes(self, parameters: Iterable[torch.nn.Parameter]) -> list[int]:
        """Return the size of some parameters in each stage, in bytes."""
        sizes = [0] * (len(self.modules) + 1)
        for parameter in parameters:
            sizes[self.stage_of(parameter)] += parameter.numel() * parameter.element_size()
        return sizes

    def _places(self, module: torch.nn.Module, pipeline: int) -> tuple[int, ...]:
        """Return each stage's position in the pipeline; the root is on the first device."""
        return 0, *cut_pipeline(self._sizes(module.parameters())[ROOT + 1 :], pipeline)

    @contextmanager
    def watched(self, done: Callable[[Sequence[int]], None]) -> Iterator[Callable[[], None]]:
        """Call ``done`` during backward with the stages whose gradients are complete.

        Yields:
            A function to call at the end of the forward pass.
        """
        calls: list[int] = []
        begun = False

        def after(stage: int, part: torch.nn.Module, inputs: object, output: object) -> None:
            # Ignore calls during backward: checkpointed layers rerun forward.
            if begun or torch.compiler.is_compiling():
                return
            calls.append(stage)
            number = len(calls)
            for tensor in tensors_of(output):
                # Skip leaves: a leaf may be a parameter, and would keep the hook.
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: complete(number))  # type: ignore[no-untyped-call]

        def complete(number: int) -> None:
            # Ignore gradients that the loss computes during its forward pass: they are not the
            # shard's.
            if begun:
                # A stage that was also called earlier is not complete yet.
                later = set(calls[number:]) - set(calls[:number])
                done(sorted(later, reverse=True))

        def begin() -> None:
            nonlocal begun
            begun = True

        with ExitStack() as hooks:
            for stage, part in zip(self._stages, self.modules, strict=True):
                # Scripted modules accept no hooks. A stage of scripted modules only is sent at the
                # end.
                if not isinstance(part, torch.jit.ScriptModule):
                    hooks.enter_context(part.register_forward_hook(partial(after, stage)))
            yield begin


def cut_by_itself(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Find the stages of a model: the items of its lists and sequences of modules.

    A module that contains such lists is searched; a module without any is one stage.

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
            # Skip modules without parameters, and modules shared with an earlier stage.
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
                f"stage {place} ({type(part).__name__}) is not part of the model: expected modules "
                f"that model.modules() lists"
            )
        for inner in part.modules():
            if id(inner) in seen:
                raise ValueError(
                    f"stage {place} ({names[id(part)]}) and {seen[id(inner)]} both contain "
                    f"{names[id(inner)]}: stages must not have modules in common"
                )
        seen |= {id(inner): f"stage {place} ({names[id(part)]})" for inner in part.modules()}


def frozen_of(
    parameters: Mapping[str, torch.nn.Parameter], modules: StageModules, devices: int
) -> Frozen | None:
    """Partition frozen parameters among devices; return None if there are none.

    Args:
        parameters: the parameters that `ModelParts.partition_frozen` selected.
        modules: the stages.
        devices: number of devices.
    """
    if not parameters:
        return None
    layout, stage_of = lay_out(parameters), tuple(map(modules.stage_of, parameters.values()))
    # No optimizer updates frozen parameters, so they may be cut anywhere between elements.
    segments = cut_segments(layout, by_element=True)
    partitions = cut_partitions(segments, devices, replace(modules.stages, stage_of=stage_of))
    return Frozen(layout, stage_of, segments, partitions)


class GradientHooks:
    """Sends the gradients of one microbatch, stage by stage.

    Args:
        modules: the stages.
        microbatch: the microbatch.
        take: takes the gradients of a stage out of ``.grad``.
        send: sends the gradients of a stage.
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
        """Whether each trained parameter got a gradient."""
        self.begin_backward: Callable[[], None]
        """Call this between the forward pass and backward."""
        self.is_late = False
        """Whether a stage got a gradient after it was sent."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context for a forward pass and its backward."""
        with self._modules.watched(self._hand_over_early) as self.begin_backward:
            yield

    def finish(self) -> None:
        """Send all remaining stages, after backward.

        If a stage got a gradient after it was sent, that gradient is dropped and the stage is sent
        last from now on. The step must then be computed again.
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
            # Autograd may return views of one tensor for several stages, and the exchange adds to
            # them in place.
            gradients = self._handed.apart(self._take(stage))
            for number, gradient in zip(numbers, gradients, strict=True):
                self.given[number] = gradient is not None
            part = self._microbatch
            self._give(GradientSend(part.shard, stage, part.is_last, gradients))
