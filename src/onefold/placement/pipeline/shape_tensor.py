"""Tensors that have a shape, a dtype and a device, and no values: another device has those.

A device in the middle of a pipeline runs the script's loss from its beginning, as all the others
do. What the stages before its own would give is without values there: it is computed with in shape
alone, until the device comes to its first stage, where values arrive (see
`onefold.placement.pipeline.boundary`). Whatever is made of something without values is without
values as well, and what is made of the batch is not.

PyTorch's own fake tensors know the shape, strides, dtype and device of a result, under autocast as
well. `ShapeTensor` is one that knows how far the loss has come.

Note: no graph
--------------
Results want a gradient where they would, but come from nowhere: a graph would have what layers with
checkpoints note of a stage, one time or another, as a stage is not computed whenever it is passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, SupportsIndex

import torch
from torch.overrides import TorchFunctionMode

from onefold.core.structure import tensors_of, with_tensors
from onefold.errors import PipelineError
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
    "ShapeTensor",
    "followed",
    "in_common",
    "on_meta",
    "times_written",
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
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    progress: LossProgress,
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
