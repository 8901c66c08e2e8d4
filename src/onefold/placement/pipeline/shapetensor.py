"""Tensors that have a shape, a dtype and a device, and no values: another device has those.

A device in the middle of a pipeline runs the script's loss from its beginning, as all the others
do. What the stages before its own would give is without values there: it is computed with in shape
alone, until the device comes to its first stage, where values arrive (see
`onefold.placement.pipeline.boundary`). Whatever is made of something without values is without
values as well, and what is made of the batch is not.

Note: dtypes under autocast
---------------------------
Autocast casts what is on a device, not what has a shape alone: a tensor without values has the
dtype that would come without it, and is unsure of it if an operation that casts was among those it
is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onefold.core.structure import parts_of, tensors_of, with_parts, with_tensors
from onefold.errors import PipelineError
from onefold.system.compat import address_of, version_of
from onefold.system.words import message_of

__all__ = [
    "LossProgress",
    "ShapeTensor",
    "followed",
    "in_common",
    "is_unsure",
    "shown",
    "times_written",
]


_META = torch.device("meta")
_DEVICE_OF: Any = torch.Tensor.device.__get__
_MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)


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
    is_told: bool = False
    """Whether that stage was told a dtype that is unsure."""

    _stands: dict[int, _StandIn] = field(default_factory=dict)
    """For tensors with values that something without values is made of, by their id."""

    def begin_again(self) -> None:
        """Begin backward, in which layers with checkpoints are computed once more."""
        self.arrived, self.is_shaped = "", False

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the meta device that is computed with in the place of one with values."""
        known = self._stands.get(id(tensor))
        if known is not None and known.fits():
            return known.meta
        # Of inference tensors nobody knows whether they were written to.
        with torch.inference_mode(mode=False):
            meta = _on_meta(tensor)
        self._stands[id(tensor)] = _StandIn(tensor, meta)
        return meta

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or one that it is a view of, has values on this device as well."""
        if not isinstance(tensor, ShapeTensor):
            return True
        return any(in_common([tensor.plain], [stand.meta for stand in self._stands.values()]))

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
class _StandIn:
    """What is computed with in the place of a tensor with values."""

    tensor: torch.Tensor
    meta: torch.Tensor
    times: int = 0
    """How often it was written to, as far as has been seen."""

    def fits(self) -> bool:
        form = self.meta.shape, self.meta.requires_grad
        return form == (self.tensor.shape, self.tensor.requires_grad)


class ShapeTensor(torch.Tensor):
    """What a stage on another device would give: a tensor on the meta device that hides it."""

    progress: LossProgress
    plain: torch.Tensor
    """The same on the meta device, for what is computed of it."""
    is_unsure: bool = False
    """Whether autocast may have given another dtype on the device that has the values."""

    @classmethod
    def like(
        cls, tensor: torch.Tensor, progress: LossProgress, *, is_unsure: bool = False
    ) -> ShapeTensor:
        """Make one that is shaped as this tensor, which may be on the meta device."""
        if tensor.device != _META:
            tensor = progress.stand_in(tensor)
        made = tensor.as_subclass(cls)
        made.progress, made.plain, made.is_unsure = progress, tensor, is_unsure
        return made

    @classmethod
    def apart(cls, tensor: torch.Tensor, progress: LossProgress) -> ShapeTensor:
        """Make one that is shaped as this one and has no memory in common with it."""
        return cls.like(_on_meta(tensor), progress)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = next(t for t in tensors_of((args, kwargs)) if isinstance(t, ShapeTensor))
        progress = found.progress
        if func == _DEVICE_OF:
            return progress.device
        name = getattr(func, "__name__", repr(func))
        if tells_dtype(func, args, kwargs) and any(map(is_unsure, tensors_of((args, kwargs)))):
            raise _unsure_dtype(progress)
        if name == "__set__":  # such as .requires_grad, or .grad
            return None
        if _writes(name) and not isinstance(args[0], ShapeTensor):
            raise _written_by_script(progress, name)
        result = _run(func, args, kwargs, progress, name)
        if progress.written():
            raise _written_by_script(progress, name)
        return result


class _Following(TorchFunctionMode):
    """Has everything computed in shape alone, whatever it is made of."""

    def __init__(self, progress: LossProgress) -> None:
        super().__init__()
        self._progress = progress

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", repr(func))
        # Attributes of tensors that have values are theirs.
        if name in ("__get__", "__set__") and not isinstance(args[0], ShapeTensor):
            return func(*args, **kwargs)
        if next(tensors_of((args, kwargs)), None) is None:
            # What is made here may be filled with what is without values.
            made = func(*args, **kwargs)
            return with_tensors(made, lambda t: ShapeTensor.apart(t, self._progress))
        if func == _DEVICE_OF:
            return self._progress.device
        self._progress.is_told |= tells_dtype(func, args, kwargs) and any(
            map(is_unsure, tensors_of((args, kwargs)))
        )
        return _run(func, args, kwargs, self._progress, name)


@contextmanager
def followed(progress: LossProgress, stage: str) -> Iterator[None]:
    """A block in which a stage of another device, of this name, is computed in shape alone."""
    progress.inside = stage
    with _Following(progress):
        yield
    progress.is_told, progress.inside = False, ""


def shown(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be asked for its form, whether it is without values or not."""
    return tensor.plain if isinstance(tensor, ShapeTensor) else tensor


def is_unsure(tensor: torch.Tensor) -> bool:
    """Whether autocast may have given another dtype on the device that has the values."""
    return isinstance(tensor, ShapeTensor) and tensor.is_unsure


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
    # On the meta device there are no addresses.
    return storage.data_ptr() or address_of(storage)


def _run(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    progress: LossProgress,
    name: str,
) -> Any:
    places: dict[int, ShapeTensor] = {}

    def emptied(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, ShapeTensor):
            return progress.stand_in(tensor)
        places[id(tensor.plain)] = tensor
        return tensor.plain

    if func in _MOVES:
        # To another dtype, perhaps; the device is hidden in any case.
        func, args, kwargs = _moved(args, kwargs)
    given = _on_no_device(with_tensors(args, emptied))
    named = _on_no_device(with_tensors(kwargs, emptied))
    tracked = torch.is_grad_enabled() and name != "detach"
    tracked &= any(tensor.requires_grad for tensor in tensors_of((given, named)))
    try:
        # No graph: it would have what layers with checkpoints note of a stage, one time or another.
        with torch.no_grad():
            result = func(*given, **named)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise _without_values(progress, name, error) from error
    made = list(tensors_of(result))
    forms = ((shown(tensor), is_unsure(tensor)) for tensor in tensors_of((args, kwargs)))
    unsure = progress.is_told or gives_unsure(name, args, kwargs, forms, progress.device.type)
    progress.is_shaped |= bool(made)
    if made and progress.arrived:
        raise PipelineError(
            f"{progress.where}: the script uses something made before stage {progress.arrived} "
            f"again after it, in {name}: a pipeline passes on what each stage is called with, and "
            f"nothing past it. Use --placement shard"
        )

    def shape_only(tensor: torch.Tensor) -> torch.Tensor:
        if tracked and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
        found = places.get(id(tensor))
        return ShapeTensor.like(tensor, progress, is_unsure=unsure) if found is None else found

    return with_tensors(result, shape_only) if made else result


def _without_values(progress: LossProgress, name: str, error: Exception) -> PipelineError:
    why = message_of(error).partition("\n")[0]
    if progress.inside:
        return PipelineError(
            f"{progress.where}: stage {progress.inside} is another device's, and computes {name}, "
            f"of which the shape depends on values ({why}), so that later devices of a pipeline "
            f"cannot follow it. Use --placement shard"
        )
    return PipelineError(
        f"{progress.where}: the script computes {name} of what a stage on another device gives, "
        f"before that has arrived, and cannot without its values: a pipeline cannot follow "
        f"that ({why}). Use --placement shard"
    )


def _unsure_dtype(progress: LossProgress) -> PipelineError:
    return PipelineError(
        f"{progress.where}: the script asks for the dtype of what a stage on another device gives, "
        f"which autocast decides there: a pipeline does not know it before that has "
        f"arrived. Name a dtype, ask inside of a stage, or use --placement shard"
    )


def _written_by_script(progress: LossProgress, name: str) -> PipelineError:
    return PipelineError(
        f"{progress.where}: the script writes what a stage on another device gives into a tensor "
        f"of its own ({name}): a pipeline cannot follow that. Use --placement shard"
    )


def _moved(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """What a move to another device and dtype comes to on the meta device."""
    like = kwargs.get("tensor")
    # Of a tensor to be like, the dtype is left.
    given = (arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in (*args[1:], like))
    kept = [arg for arg in given if isinstance(arg, torch.dtype | torch.memory_format)]
    named = {key: value for key, value in kwargs.items() if key not in ("device", "tensor")}
    return torch.Tensor.to, (args[0], _META, *kept), named


def _writes(name: str) -> bool:
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == _META:
        return tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    else:
        # A parameter that is elsewhere has no strides to ask for.
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
    return made.requires_grad_(tensor.requires_grad)


def _on_no_device(value: Any) -> Any:
    """Put the meta device in the place of others."""
    if isinstance(value, torch.device):
        return _META
    if isinstance(value, dict) and isinstance(value.get("device"), str | int):
        value = {**value, "device": _META}
    parts = parts_of(value)
    if not parts or isinstance(value, torch.Size):
        return value
    return with_parts(value, [_on_no_device(part) for _, part in parts])


_CASTING = re.compile(
    "mm|mv|addr|matmul|conv|linear|attention|rnn|lstm|gru|cell|einsum|dot|inner|prelu|transformer"
    "|linalg|matrix|cov|corr"
)
"""In the names of operations that autocast may do in a lower precision, on any kind of device."""

_PROMOTING = re.compile(
    "(__)?[ri]?(add|sub|mul|div|truediv|cat|concat|stack|hstack|vstack|where)_*"
)
"""Of operations that give the widest dtype of those of the tensors that they are given."""
_WIDE = (torch.float32, torch.float64)

_ATTRIBUTES: Sequence[Any] = (torch.Tensor.dtype, torch.Tensor.itemsize, torch.Tensor.nbytes)
_ASKING: Sequence[Any] = (
    *(attribute.__get__ for attribute in _ATTRIBUTES),
    torch.Tensor.element_size,
    torch.result_type,
)
_CASTS = ("float", "double", "half", "bfloat16")


def tells_dtype(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether what a call gives to Python depends on the dtype of a tensor."""
    if func == torch.Tensor.type:
        return len(args) == 1 and not kwargs
    if func == torch.Tensor.to:
        return any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values()))
    return func in _ASKING


def gives_unsure(
    name: str,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    forms: Iterable[tuple[torch.Tensor, bool]],
    device: str,
) -> bool:
    """Whether the dtype of what an operation makes is unsure.

    Args:
        name: the name of the operation.
        args: what it is given by position.
        kwargs: what it is given by name.
        forms: the tensors in these, without values, and whether the dtype of each is unsure.
        device: the kind of device for which it stands.
    """
    if name in _CASTS or any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values())):
        return False
    if torch.is_autocast_enabled(device) and _CASTING.search(name):
        return True
    forms = list(forms)
    if _PROMOTING.fullmatch(name) and any(
        not is_unsure and form.dtype in _WIDE and form.dim() > 0 for form, is_unsure in forms
    ):
        return False
    return any(is_unsure for _, is_unsure in forms)
