"""Computes stages of other devices in shape alone, where a device comes past them.

Note: what is remembered
------------------------
Most stages give the same shapes whenever they are called alike, so they need not be computed again.
Those that leave something behind, in their arguments or in attributes of their modules, are.

Note: arguments in words
------------------------
Tensors travel. All else that a stage is called with (numbers, text, containers) each device makes
for itself, as it runs the loss; it must be the same as on the device before, which says in words
what it was there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from onefold.core.randomness import forked_generators, packed_generators
from onefold.core.structure import parts_of, tensors_of, with_tensors
from onefold.errors import PipelineError
from onefold.placement.pipeline.shape_tensor import (
    LossProgress,
    ShapeTensor,
    followed,
    in_common,
    on_meta,
    times_written,
)
from onefold.shard.stages import StageModules
from onefold.system.compat import hidden_from_classes
from onefold.system.words import message_of

__all__ = ["ShapeStages", "are_left", "call_in_words", "marks_of", "unlike"]


_NO_VALUES = torch.empty(0)
"""Stands for any tensor."""
_MOST_KNOWN = 512
"""Calls of stages whose results are remembered."""


class ShapeStages:
    """The stages of a model as other devices see them.

    Args:
        modules: the stages.
    """

    def __init__(self, modules: StageModules) -> None:
        self._modules = modules
        self._known: dict[object, _StageResult] = {}
        """What a stage gives, by what it is called with."""

    def given(
        self,
        stage: int,
        forward: Callable[..., Any],
        called: tuple[Any, Any],
        progress: LossProgress,
    ) -> Any:
        """What a stage of an earlier device gives, in shape alone."""
        module = self._modules.modules[stage - 1]
        progress.is_shaped = True
        key = _form_of(stage, module.training, progress.device.type, *called)
        known = self._known.get(key)
        if known is not None and known.fits(module):
            return known.given(progress)
        buffers, before = list(module.buffers()), [*_leaves(called)]
        noted = numbers_in(_tables(module))
        with self._explained(stage, progress), forked_generators(progress.device):
            states = packed_generators(progress.device)
            with followed(progress, self._modules.stages.names[stage]):
                result = forward(*called[0], **called[1])
            draws = not torch.equal(states, packed_generators(progress.device))
        written = progress.written()
        for tensor, is_own in zip(written, in_common(written, buffers), strict=True):
            if not is_own:
                raise PipelineError(
                    f"{progress.where}: stage {self._modules.stages.names[stage]} writes in place "
                    f"to a tensor of shape {tuple(tensor.shape)} that is not its own (the batch, "
                    f"perhaps), which other devices have as well: a pipeline cannot follow "
                    f"that. Write to a clone (x = x.clone()), or use --placement partition"
                )
        if draws and (numbers_in(result) or noted != numbers_in(_tables(module))):
            raise PipelineError(
                f"{progress.where}: stage {self._modules.stages.names[stage]} draws random "
                f"numbers, and gives a number that is no tensor, or keeps one in an attribute: "
                f"other devices of a line draw other ones than the device that has this stage. "
                "Make it a tensor, draw it before the model is called, or use --placement "
                "partition"
            )
        # What it puts into its arguments it must put there each time.
        is_alone = _alike(before, [*_leaves(called)])
        if key is not None and is_alone and not any(map(progress.has_values, tensors_of(result))):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()  # shards of many sizes
            devices = [tensor.device for tensor in tensors_of(result)]
            self._known[key] = _StageResult(
                with_tensors(result, on_meta), devices, [*_held(module)]
            )
        return with_tensors(
            result, lambda t: t if isinstance(t, ShapeTensor) else progress.stand_in(t)
        )

    @contextmanager
    def _explained(self, stage: int, progress: LossProgress) -> Iterator[None]:
        """Say what has failed: with values it has not, or the shard would not have come so far."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            why = message_of(error).partition("\n")[0]
            raise PipelineError(
                f"{progress.where}: stage {self._modules.stages.names[stage]} is another device's, "
                f"and could not be computed in shape alone ({type(error).__name__}: "
                f"{why}), as later devices of a pipeline do. Use --placement partition"
            ) from error


@dataclass(frozen=True, slots=True)
class _StageResult:
    """What a stage of another device gives when it is called in one way."""

    result: Any
    """With tensors on the meta device."""
    devices: Sequence[torch.device]
    """Where its tensors would be."""
    held: Sequence[object]
    """What the stage held afterwards."""

    def given(self, progress: LossProgress) -> Any:
        """The same anew, as the script may write to it in place."""
        devices = iter(self.devices)
        return with_tensors(
            self.result, lambda t: ShapeTensor.on(next(devices), on_meta(t), progress)
        )

    def fits(self, module: torch.nn.Module) -> bool:
        """Whether calling the stage would leave it as it is."""
        return _alike(self.held, [*_held(module)])


def _tables(module: torch.nn.Module) -> list[object]:
    """What the modules of a stage hold."""
    # Their forward is another one for each shard, while this is looked at: see
    # `onefold.placement.pipeline.boundary`.
    return [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if name != "forward"
    ]


def _held(module: torch.nn.Module) -> Iterator[object]:
    yield from _leaves(_tables(module))


def _alike(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def marks_of(value: object) -> list[tuple[object, int]]:
    """What containers hold, and how often it was written to in place."""
    return [
        (leaf, times_written(leaf) if isinstance(leaf, torch.Tensor) else 0)
        for leaf in _leaves(value)
    ]


def are_left(marks: Sequence[tuple[object, int]], value: object) -> bool:
    """Whether containers still hold what they did when `marks_of` was called, as it was."""
    now = marks_of(value)
    alike = (one is other and t == u for (one, t), (other, u) in zip(marks, now, strict=False))
    return len(marks) == len(now) and all(alike)


def _leaves(value: object) -> Iterator[object]:
    parts = parts_of(value)
    if parts is None:
        yield value
    for _, part in parts or ():
        yield from _leaves(part)


def _form_of(stage: int, training: bool, device: str, args: Any, kwargs: Any) -> object:
    """What the form of a stage's result depends on; None if that cannot be said."""
    with hidden_from_classes():
        forms = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in tensors_of((args, kwargs))
        ]
    casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    plain = with_tensors((args, kwargs), lambda _: _NO_VALUES)
    return (stage, training, casts, *forms, repr(plain)) if _is_plain(plain) else None


def _is_plain(value: object) -> bool:
    """Whether a value is made of nothing but what its text tells."""
    return all(leaf is _NO_VALUES or is_plain(leaf) for leaf in _leaves(value))


_PLAIN = (bool, int, float, complex, str, bytes, np.generic, Enum, torch.dtype)


def is_plain(value: object) -> bool:
    """Whether a value is nothing but what its text tells."""
    return value is None or isinstance(value, _PLAIN)


def words_of(value: object, path: str) -> Iterator[str]:
    """Say what something is made of, but for the values of tensors and the insides of objects.

    Args:
        value: anything.
        path: what it is called.

    >>> list(words_of({"x": torch.ones(2, 3), "rest": (None, 0.5)}, "y"))
    ["y['x'] is a tensor of shape (2, 3)", "y['rest'][0] is None", "y['rest'][1] is 0.5"]
    """
    if isinstance(value, torch.Tensor):
        yield f"{path} is a tensor of shape {tuple(value.shape)}"
    elif is_plain(value):
        yield f"{path} is {value!r}"
    elif (parts := parts_of(value)) is None:
        yield f"{path} is of type {type(value).__qualname__}"
    else:
        for name, part in parts:
            yield from words_of(part, path + name)


def call_in_words(args: Any, kwargs: Any) -> list[str]:
    """Say what a stage is called with.

    >>> call_in_words((torch.ones(3), 1), {"causal": True})
    ['argument [0] is a tensor of shape (3,)', 'argument [1] is 1', "argument ['causal'] is True"]
    """
    return [*words_of(args, "argument "), *words_of(kwargs, "argument ")]


def unlike(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """The first words in which two things differ; None if they are alike.

    >>> unlike(["[0] is 1"], ["[0] is 1", "[1] is 2"])
    ('nothing', '[1] is 2')
    """
    for first, second in zip_longest(one, other, fillvalue="nothing"):
        if first != second:
            return first, second
    return None


def numbers_in(value: object) -> list[int | float | complex | np.generic]:
    """The numbers and truth values in nested containers."""
    kinds = bool | int | float | complex | np.generic
    return [leaf for leaf in _leaves(value) if isinstance(leaf, kinds)]
