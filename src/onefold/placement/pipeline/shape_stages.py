"""Shape inference for stages of other devices, when a device passes them.

A device in the middle of a pipeline runs the script's loss from its beginning, as every device
does. It has no values for the outputs of stages before its own. It computes with their shapes until
its first stage, where values arrive (see `onefold.placement.pipeline.boundary`). Results computed
from tensors without values have no values either; results computed from the batch alone do.

PyTorch's fake tensors infer the shape, strides, dtype and device of a result, also under autocast.
`ShapeTensor` is a fake tensor that knows the progress of the loss. `ShapeStages` handles the
stages.

Note: no graph
--------------
Results require grad as they would with values, but have no graph. A graph would contain what
checkpointed layers save of a stage, in some shards and not in others, because a stage is not
computed every time it is passed.

Note: cached results
------------------------
Most stages return the same shapes whenever they are called in the same way, so their results are
cached. Stages with side effects, on their arguments or on attributes of their modules, are computed
every time.

Note: descriptions of arguments
------------------------
Tensors are sent. Each device makes all other arguments of a stage (numbers, strings, containers)
itself, when it runs the loss. They must be the same as on the previous device, which sends a
description of its arguments.
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

from onefold.core.packed_generators import packed_generators
from onefold.core.randomness import forked_generators
from onefold.core.structure import parts_of, tensors_of, with_tensors
from onefold.errors import PipelineError
from onefold.shard.stage_modules import StageModules
from onefold.system.compat import (
    CallModes,
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
"""Maximum number of operations whose result shapes PyTorch caches; each takes about 1 kB."""


class _ShapeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    avoid_device_init = False
    """Otherwise, on a machine without a GPU, each use of the mode replaces PyTorch's guard of GPUs,
    which crashes if several threads do so at the same time."""


@cache
def _mode() -> FakeTensorMode:
    """Return the one mode that computes shapes; fake tensors of several modes do not mix."""
    # A kernel that must run to find the shape would run on arbitrary values.
    return _ShapeMode(allow_fallback_kernels=False)


@dataclass(slots=True)
class LossProgress:
    """Progress of a device in the loss of a shard."""

    where: str
    """Step and shard, for errors."""
    device: torch.device
    arrived: str = ""
    """Stage at which values have arrived; empty as long as results lack values."""
    is_shaped: bool = False
    """Whether a shape without values was computed."""
    inside: str = ""
    """Stage whose shapes are being computed; empty if none."""

    _stands: dict[int, _ShapeValue] = field(default_factory=dict)
    """Stand-ins of tensors with values, used in results without values, by the tensor's id."""

    def __post_init__(self) -> None:
        # PyTorch would cache shapes forever, and shards come in many sizes.
        if FakeTensorMode.cache_info().size > MOST_KEPT:
            FakeTensorMode.cache_clear()

    def stand_in(self, tensor: torch.Tensor) -> ShapeTensor:
        """Return a stand-in without values for a tensor with values."""
        known = self._stands.get(id(tensor))
        if known is None or not known.fits():
            known = self._stands[id(tensor)] = _ShapeValue(tensor, on_meta(tensor))
        return ShapeTensor.on(tensor.device, known.meta, self)

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, or the tensor that it is a view of, also has values here."""
        if not isinstance(tensor, ShapeTensor):
            return True
        return any(in_common([tensor], [stand.meta for stand in self._stands.values()]))

    def written(self) -> list[torch.Tensor]:
        """Return the tensors whose stand-ins were written to in place since the last call."""
        found = []
        for stand in self._stands.values():
            times = times_written(stand.meta)
            if times > stand.times:
                stand.times = times
                found.append(stand.tensor)
        return found


@dataclass(slots=True)
class _ShapeValue:
    """Stand-in for a tensor with values."""

    tensor: torch.Tensor
    meta: torch.Tensor
    times: int = 0
    """Number of detected writes to it."""

    def fits(self) -> bool:
        form = self.meta.shape, self.meta.requires_grad
        return form == (self.tensor.shape, self.tensor.requires_grad)


class ShapeTensor(FakeTensor):
    """Output of a stage on another device, without values."""

    progress: LossProgress

    @classmethod
    def on(cls, device: torch.device, meta: torch.Tensor, progress: LossProgress) -> ShapeTensor:
        """Make one from a tensor on the meta device, as a view that reports ``device``."""
        made = cls(_mode(), meta, device)
        made.progress = progress
        return made

    @classmethod
    def apart(cls, tensor: torch.Tensor, progress: LossProgress) -> ShapeTensor:
        """Make one with the shape of this tensor, and separate memory."""
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
    """Computes all operations without values, even on tensors that have them."""

    def __init__(self, progress: LossProgress) -> None:
        super().__init__()
        self._progress = progress

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Attributes of tensors with values stay as they are.
        is_attribute = _name_of(func) in ("__get__", "__set__")
        if is_attribute and not isinstance(args[0], ShapeTensor):
            return func(*args, **kwargs)
        if next(tensors_of((args, kwargs)), None) is None:
            # A tensor that is made here may be filled from tensors without values.
            made = func(*args, **kwargs)
            return with_tensors(made, lambda t: ShapeTensor.apart(t, self._progress))
        return _run(func, args, kwargs, self._progress)


@contextmanager
def followed(progress: LossProgress, stage: str) -> Iterator[None]:
    """Compute a stage of another device without values inside this context."""
    progress.inside = stage
    with _ShapeCalls(progress):
        yield
    progress.inside = ""


def times_written(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor, including those through other views."""
    return 0 if tensor.is_inference() else version_of(tensor)


def in_common(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """Return which tensors share memory with each other, or with ``others``."""
    places = [_memory(tensor) for tensor in tensors]
    theirs = {_memory(tensor) for tensor in others}
    return [place in theirs or places.count(place) > 1 for place in places]


def _memory(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    # Tensors on the meta device, and empty ones, have no address.
    place = 0 if storage.device == _META else storage.data_ptr()
    return place or address_of(storage)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form on the meta device."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, ShapeTensor)
    # Inference tensors do not count writes.
    with hidden_from_modes(), CallModes.inference(False):
        # A partitioned parameter has no strides to read.
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
            f"{progress.where}: after stage {progress.arrived}, the script uses in {name} a value "
            f"made before it, but a pipeline sends only the arguments of each stage. Use "
            f"--placement partition"
        )
    return result


def _name_of(func: Callable[..., Any]) -> str:
    # The name of a dispatcher operation continues with that of its overload.
    return str(getattr(func, "__name__", repr(func))).partition(".")[0]


def _without_values(progress: LossProgress, name: str, error: Exception) -> PipelineError:
    why = message_of(error).partition("\n")[0]
    if progress.inside:
        return PipelineError(
            f"{progress.where}: stage {progress.inside} of another device computes {name}, whose "
            f"shape depends on values ({why}), so later devices of a pipeline cannot infer it. Use "
            f"--placement partition"
        )
    return PipelineError(
        f"{progress.where}: the script computes {name} from the output of a stage on another "
        f"device before it has arrived, and this needs values, so a pipeline cannot infer its "
        f"shape ({why}). Use --placement partition"
    )


def _written_by_script(progress: LossProgress, name: str) -> PipelineError:
    return PipelineError(
        f"{progress.where}: the script writes the output of a stage on another device into its own "
        f"tensor ({name}), which a pipeline does not support. Use --placement partition"
    )


def _writes(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    )


_NO_VALUES = torch.empty(0)
"""Placeholder for any tensor."""
_MOST_KNOWN = 512
"""Maximum number of stage calls whose results are cached."""


class ShapeStages:
    """The stages of a model as seen from other devices.

    Args:
        modules: the stages.
    """

    def __init__(self, modules: StageModules) -> None:
        self._modules = modules
        self._known: dict[object, _StageResult] = {}
        """Results of stages, by their arguments."""

    def given(
        self,
        stage: int,
        forward: Callable[..., Any],
        called: tuple[Any, Any],
        progress: LossProgress,
    ) -> Any:
        """Return the output of a stage of an earlier device, without values."""
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
                    f"to a tensor of shape {tuple(tensor.shape)} that does not belong to it "
                    f"(possibly the batch), and that other devices have as well, which a pipeline "
                    f"does not support. Write to a clone (x = x.clone()), or use --placement "
                    f"partition"
                )
        if draws and (numbers_in(result) or noted != numbers_in(_tables(module))):
            raise PipelineError(
                f"{progress.where}: stage {self._modules.stages.names[stage]} draws random "
                f"numbers, and returns a number that is not a tensor, or stores one in an "
                f"attribute. Other devices of a pipeline draw other numbers than the device of "
                f"this stage. Make it a tensor, draw it before calling the model, or use "
                f"--placement partition"
            )
        # A stage that writes to its arguments must do so every time, so it is not cached.
        is_alone = _alike(before, [*_leaves(called)])
        if key is not None and is_alone and not any(map(progress.has_values, tensors_of(result))):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()  # shards come in many sizes
            devices = [tensor.device for tensor in tensors_of(result)]
            self._known[key] = _StageResult(
                with_tensors(result, on_meta), devices, [*_held(module)]
            )
        return with_tensors(
            result, lambda t: t if isinstance(t, ShapeTensor) else progress.stand_in(t)
        )

    @contextmanager
    def _explained(self, stage: int, progress: LossProgress) -> Iterator[None]:
        """Explain an error; with values there would be none, or the shard would not have come
        here."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            why = message_of(error).partition("\n")[0]
            raise PipelineError(
                f"{progress.where}: stage {self._modules.stages.names[stage]} belongs to another "
                f"device, and its output shape could not be inferred ({type(error).__name__}: "
                f"{why}), as later devices of a pipeline must. Use --placement partition"
            ) from error


@dataclass(frozen=True, slots=True)
class _StageResult:
    """Output of a stage of another device for one form of call."""

    result: Any
    """The output, with tensors on the meta device."""
    devices: Sequence[torch.device]
    """Devices on which its tensors would be."""
    held: Sequence[object]
    """Objects that the stage held afterwards."""

    def given(self, progress: LossProgress) -> Any:
        """Return new tensors, because the script may write to them in place."""
        devices = iter(self.devices)
        return with_tensors(
            self.result, lambda t: ShapeTensor.on(next(devices), on_meta(t), progress)
        )

    def fits(self, module: torch.nn.Module) -> bool:
        """Return whether calling the stage would leave its modules unchanged."""
        return _alike(self.held, [*_held(module)])


def _tables(module: torch.nn.Module) -> list[object]:
    """Return the attribute values of a stage's modules."""
    # Exclude forward, which is replaced for each shard while this runs: see
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
    """Return the leaves of containers, with their numbers of in-place writes."""
    return [
        (leaf, times_written(leaf) if isinstance(leaf, torch.Tensor) else 0)
        for leaf in _leaves(value)
    ]


def are_left(marks: Sequence[tuple[object, int]], value: object) -> bool:
    """Return whether containers hold the same unmodified leaves as when `marks_of` was called."""
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
    """Return a key for the form of a stage's result; None if there is no reliable key."""
    with hidden_from_classes():
        forms = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in tensors_of((args, kwargs))
        ]
    casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    plain = with_tensors((args, kwargs), lambda _: _NO_VALUES)
    return (stage, training, casts, *forms, repr(plain)) if _is_plain(plain) else None


def _is_plain(value: object) -> bool:
    """Return whether the repr of a value describes it completely, except for tensors."""
    return all(leaf is _NO_VALUES or is_plain(leaf) for leaf in _leaves(value))


_PLAIN = (bool, int, float, complex, str, bytes, np.generic, Enum, torch.dtype)


def is_plain(value: object) -> bool:
    """Return whether the repr of a value describes it completely."""
    return value is None or isinstance(value, _PLAIN)


def words_of(value: object, path: str) -> Iterator[str]:
    """Describe a value, except for the values of tensors and the contents of objects.

    Args:
        value: any value.
        path: name of the value.

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
    """Describe the arguments of a stage.

    >>> call_in_words((torch.ones(3), 1), {"causal": True})
    ['argument [0] is a tensor of shape (3,)', 'argument [1] is 1', "argument ['causal'] is True"]
    """
    return [*words_of(args, "argument "), *words_of(kwargs, "argument ")]


def unlike(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Return the first difference between two descriptions; None if they are equal.

    >>> unlike(["[0] is 1"], ["[0] is 1", "[1] is 2"])
    ('nothing', '[1] is 2')
    """
    for first, second in zip_longest(one, other, fillvalue="nothing"):
        if first != second:
            return first, second
    return None


def numbers_in(value: object) -> list[int | float | complex | np.generic]:
    """Return the numbers and booleans in nested containers."""
    kinds = bool | int | float | complex | np.generic
    return [leaf for leaf in _leaves(value) if isinstance(leaf, kinds)]
