"""Computes stages of other devices in shape alone, where a device comes past them.

A device in the middle of a pipeline runs the script's loss from its beginning, as all the others
do. What the stages before its own would give is without values there: it is computed with in shape
alone, until the device comes to its first stage, where values arrive (see
`onefold.placement.pipeline.boundary`). Whatever is made of something without values is without
values as well, and what is made of the batch is not.

PyTorch's own fake tensors know the shape, strides, dtype and device of a result, under autocast as
well. `ShapeTensor` is one that knows how far the loss has come. `ShapeStages` has the stages.

Note: no graph
--------------
Results want a gradient where they would, but come from nowhere: a graph would have what layers with
checkpoints note of a stage, one time or another, as a stage is not computed whenever it is passed.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import zip_longest
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from onefold.core.randomness import forked_generators, packed_generators
from onefold.core.structure import parts_of, tensors_of, with_tensors
from onefold.errors import PipelineError
from onefold.shard.stage_modules import StageModules
from onefold.system.compat import (
    FakeTensor,
    FakeTensorMode,
    address_of,
    hidden_from_classes,
    hidden_from_modes,
    version_of,
)
from onefold.system.words import message_of

__all__ = [
    "MOST_KEPT",
    "LossProgress",
    "ShapeStages",
    "ShapeTensor",
    "are_left",
    "call_in_words",
    "followed",
    "in_common",
    "marks_of",
    "times_written",
    "unlike",
]


_META = torch.device("meta")
MOST_KEPT = 20_000
"""Operations of which PyTorch remembers the form of the result; one takes about 1 kB."""


@cache
def _mode() -> FakeTensorMode:
    """What computes in shape alone; one for all, as tensors of several do not go together."""
    # A kernel that must be run to know the shape would be run with other values.
    return FakeTensorMode(allow_fallback_kernels=False)


@dataclass(slots=True)
class LossProgress:
    """How far a device has come in the loss of a shard."""

    where: str
    """Step and shard, for errors."""
    device: torch.device
    arrived: str = ""
    """The stage at which values have arrived; empty while what came before is without values."""
    is_shaped: bool = False
    """Whether something was computed in shape alone."""
    inside: str = ""
    """The stage that is computed in shape alone just now, if one is."""

    _stands: dict[int, _ShapeValue] = field(default_factory=dict)
    """For tensors with values that something without values is made of, by their id."""

    def __post_init__(self) -> None:
        # PyTorch would remember them for good, and shards come in many sizes.
        if FakeTensorMode.cache_info().size > MOST_KEPT:
            FakeTensorMode.cache_clear()

    def stand_in(self, tensor: torch.Tensor) -> ShapeTensor:
        """What is computed with in the place of a tensor with values."""
        known = self._stands.get(id(tensor))
        if known is None or not known.fits():
            known = self._stands[id(tensor)] = _ShapeValue(tensor, on_meta(tensor))
        return ShapeTensor.on(tensor.device, known.meta, self)

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or one that it is a view of, has values on this device as well."""
        if not isinstance(tensor, ShapeTensor):
            return True
        return any(in_common([tensor], [stand.meta for stand in self._stands.values()]))

    def written(self) -> list[torch.Tensor]:
        """The tensors with values that were, since the last call, to be written to in place."""
        found = []
        for stand in self._stands.values():
            times = times_written(stand.meta)
            if times > stand.times:
                stand.times = times
                found.append(stand.tensor)
        return found


@dataclass(slots=True)
class _ShapeValue:
    """What is computed with in the place of a tensor with values."""

    tensor: torch.Tensor
    meta: torch.Tensor
    times: int = 0
    """How often it was written to, as far as has been seen."""

    def fits(self) -> bool:
        form = self.meta.shape, self.meta.requires_grad
        return form == (self.tensor.shape, self.tensor.requires_grad)


class ShapeTensor(FakeTensor):
    """What a stage on another device would give."""

    progress: LossProgress

    @classmethod
    def on(cls, device: torch.device, meta: torch.Tensor, progress: LossProgress) -> ShapeTensor:
        """Make one of a tensor on the meta device: a view of it that hides that."""
        made = cls(_mode(), meta, device)
        made.progress = progress
        return made

    @classmethod
    def apart(cls, tensor: torch.Tensor, progress: LossProgress) -> ShapeTensor:
        """Make one that is shaped as this tensor and has no memory in common with it."""
        return cls.on(tensor.device, on_meta(tensor), progress)

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = next(t for t in tensors_of((args, kwargs)) if isinstance(t, ShapeTensor))
        progress, name = found.progress, _name_of(func)
        if name == "__set__":  # such as .requires_grad, or .grad
            return None
        if _writes(name) and not isinstance(args[0], ShapeTensor):
            raise _written_by_script(progress, name)
        result = _run(func, args, kwargs, progress)
        if progress.written():
            raise _written_by_script(progress, name)
        return result

    def __copy__(self) -> Any:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise _without_values(self.progress, "pickle", TypeError("there is nothing to write"))


class _ShapeCalls(TorchFunctionMode):
    """Has everything computed in shape alone, whatever it is made of."""

    def __init__(self, progress: LossProgress) -> None:
        super().__init__()
        self._progress = progress

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Attributes of tensors that have values are theirs.
        is_attribute = _name_of(func) in ("__get__", "__set__")
        if is_attribute and not isinstance(args[0], ShapeTensor):
            return func(*args, **kwargs)
        if next(tensors_of((args, kwargs)), None) is None:
            # What is made here may be filled with what is without values.
            made = func(*args, **kwargs)
            return with_tensors(made, lambda t: ShapeTensor.apart(t, self._progress))
        return _run(func, args, kwargs, self._progress)


@contextmanager
def followed(progress: LossProgress, stage: str) -> Iterator[None]:
    """A block in which a stage of another device, of this name, is computed in shape alone."""
    progress.inside = stage
    with _ShapeCalls(progress):
        yield
    progress.inside = ""


def times_written(tensor: torch.Tensor) -> int:
    """How often a tensor, or another one that is a view of the same, was written to in place."""
    return 0 if tensor.is_inference() else version_of(tensor)


def in_common(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """Which tensors have memory in common with each other, or with these others."""
    places = [_memory(tensor) for tensor in tensors]
    theirs = {_memory(tensor) for tensor in others}
    return [place in theirs or places.count(place) > 1 for place in places]


def _memory(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    # On the meta device there are no addresses, nor where there is nothing.
    place = 0 if storage.device == _META else storage.data_ptr()
    return place or address_of(storage)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form on the meta device."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, ShapeTensor)
    # Of inference tensors nobody knows whether they were written to.
    with hidden_from_modes(), torch.inference_mode(mode=False):
        # A parameter that is elsewhere has no strides to ask for.
        form = tensor if is_plain else torch.empty(tensor.shape, device=_META)
        made = torch.empty_strided(tensor.shape, form.stride(), dtype=tensor.dtype, device=_META)
        return made.requires_grad_(tensor.requires_grad)


def _run(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], progress: LossProgress
) -> Any:
    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, ShapeTensor) else progress.stand_in(tensor)

    given, named = with_tensors(args, without_values), with_tensors(kwargs, without_values)
    name, tracked = _name_of(func), torch.is_grad_enabled()
    with hidden_from_classes(), torch.no_grad(), _mode():
        tracked &= name != "detach" and any(t.requires_grad for t in tensors_of((given, named)))
        try:
            result = func(*given, **named)
        except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
            raise _without_values(progress, name, error) from error
        made: list[Any] = list(tensors_of(result))
        for tensor in made:
            tensor.__class__, tensor.progress = ShapeTensor, progress
            if tracked and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.requires_grad_()
    progress.is_shaped |= bool(made)
    if made and progress.arrived:
        raise PipelineError(
            f"{progress.where}: the script uses something made before stage {progress.arrived} "
            f"again after it, in {name}: a pipeline passes on what each stage is called with, and "
            f"nothing past it. Use --placement partition"
        )
    return result


def _name_of(func: Callable[..., Any]) -> str:
    # Of an operation of the dispatcher, it goes on with that of its overload.
    return str(getattr(func, "__name__", repr(func))).partition(".")[0]


def _without_values(progress: LossProgress, name: str, error: Exception) -> PipelineError:
    why = message_of(error).partition("\n")[0]
    if progress.inside:
        return PipelineError(
            f"{progress.where}: stage {progress.inside} is another device's, and computes {name}, "
            f"of which the shape depends on values ({why}), so that later devices of a pipeline "
            f"cannot follow it. Use --placement partition"
        )
    return PipelineError(
        f"{progress.where}: the script computes {name} of what a stage on another device gives, "
        f"before that has arrived, and cannot without its values: a pipeline cannot follow "
        f"that ({why}). Use --placement partition"
    )


def _written_by_script(progress: LossProgress, name: str) -> PipelineError:
    return PipelineError(
        f"{progress.where}: the script writes what a stage on another device gives into a tensor "
        f"of its own ({name}): a pipeline cannot follow that. Use --placement partition"
    )


def _writes(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    )


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
                f"other devices of a pipeline draw other ones than the device that has this stage. "
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
