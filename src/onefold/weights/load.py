"""`load_weights`: brings weights that others saved into a model, in place and whole or not at all.

It does not read files (`onefold.weights.file`), nor say which name is which
(`onefold.weights.names`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from onefold.core.finite import first_not_finite, names_with_nan
from onefold.core.flat import same_bits
from onefold.errors import CheckpointError
from onefold.system.words import listed
from onefold.weights.file import keys_of_states, read_weights, state_under
from onefold.weights.names import match_names

__all__ = ["Loaded", "load_weights", "refuse_spoilt"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_weights` left out."""

    missing: tuple[str, ...]
    """The model's names that kept their values."""
    unexpected: tuple[str, ...]
    """The file's names that were not used."""


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    strict: bool = True,
) -> Loaded:
    """Copy a file's values into a model's parameters and buffers, in place.

    They keep their identity, memory, strides, dtype and device, so it may be called before
    ``Trainer`` is made or between steps, then by every process of the run. The optimizer's state is
    left as it is. Names may have the ``module.`` of DataParallel and DDP or the ``_orig_mod.`` of
    torch.compile, or lack that of a model that is wrapped itself. All is checked before anything is
    changed, and the model's own ``load_state_dict`` does the copying. Only tensors and plain values
    are read from a file, never code.

    Args:
        model: any module whose parameters have values.
        path: a file of safetensors or of ``torch.save``, from whatever device and with whatever
            ending; or the folder of a checkpoint that ``Trainer.save`` has written.
        key: where the file keeps the ``state_dict`` in a dict, such as ``"model"``.
        strict: refuse a file that lacks a name of the model, has another one, or has a tensor of
            another shape. Otherwise what fits in name and shape is loaded, and a tensor of another
            shape is both missing and unexpected. Tied parameters need one of their names; a
            ``num_batches_tracked`` that the file lacks is no reason to refuse.

    Returns:
        The names of either side that were left out.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a parameter or buffer has no memory of its own to copy to.
        FileNotFoundError: there is no such file.
        CheckpointError: the file cannot be read, or does not fit: in names or shapes; in numbers
            that the model's dtype has no room for, as fractions in an integer buffer; in two names
            for one tensor of the model. Also where nothing fits at all.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "weights.pth"
        >>> trained, model = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> torch.save({"epoch": 3, "model": trained.state_dict()}, file)
        >>> load_weights(model, file, key="model")
        Loaded(missing=(), unexpected=())
        >>> torch.equal(model.weight, trained.weight)
        True
    """
    _check_arguments(model, path, key, strict)
    own = model.state_dict(keep_vars=True)
    _check_memory(own)
    content = read_weights(Path(path))
    found = state_under(content, key, Path(path))
    try:
        matched = match_names(found, own)
        if not matched:
            raise CheckpointError(_none_of(found, own, keys_of_states(content)))
        fit = _Fit(own, found, matched)
        fit.check(strict=strict)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} does not fit the model, which is unchanged: {error}"
        ) from None
    model.load_state_dict(fit.state(), strict=False)
    return Loaded(fit.missing, fit.unexpected)


class _Fit:
    """Which of a file's values go where.

    Args:
        own: the model's names and tensors; tied ones are one tensor.
        found: the file's.
        matched: the file's names to the model's.
    """

    def __init__(
        self, own: Mapping[str, Any], found: Mapping[str, Any], matched: Mapping[str, str]
    ) -> None:
        self._own = own
        self._found = found
        pairs = [
            (name, target, _misfit(target, own[target], found[name]))
            for name, target in matched.items()
        ]
        self._taken = {name: target for name, target, wrong in pairs if wrong is None}
        self._misfits = {target: wrong for _, target, wrong in pairs if wrong is not None}
        given = {_identity(target, own[target]) for target in self._taken.values()}
        self.missing = tuple(name for name in own if _identity(name, own[name]) not in given)
        self.unexpected = tuple(name for name in found if name not in self._taken)
        self._strange = [name for name in found if name not in matched]

    def check(self, *, strict: bool) -> None:
        """Refuse what must not be loaded."""
        lacking = [
            name for name in self.missing if not _may_lack(name) and name not in self._misfits
        ]
        if not self._taken or (strict and (lacking or self._strange or self._misfits)):
            told = [f"{name} ({wrong})" for name, wrong in self._misfits.items()]
            parts = [
                f"{len(names)} {what}: {listed(names)}"
                for what, names in (
                    ("of another shape", told),
                    ("missing in the file", lacking),
                    ("unexpected in it", self._strange),
                )
                if names
            ]
            advice = "; strict=False loads what fits" if self._taken else ""
            raise CheckpointError("; ".join(parts) + advice)
        for name, target in self._taken.items():
            _check_dtype(target, self._own[target], self._found[name])
        self._check_tied()

    def state(self) -> Mapping[str, object]:
        """What the model's ``load_state_dict`` takes, under its own names."""
        state: OrderedDict[str, Any] = OrderedDict(
            (target, self._found[name]) for name, target in self._taken.items()
        )
        versions = getattr(self._found, "_metadata", None)
        if isinstance(versions, Mapping):  # of the modules that wrote the file, for hooks that ask
            state._metadata = {  # type: ignore[attr-defined]
                _owner(target): versions.get(_owner(name), {})
                for name, target in self._taken.items()
            }
        return state

    def _check_tied(self) -> None:
        groups: dict[object, list[str]] = {}
        for name, target in self._taken.items():
            groups.setdefault(_identity(target, self._own[target]), []).append(name)
        for names in groups.values():
            for one, other in pairwise(names):
                dtype = self._own[self._taken[one]].dtype
                if not same_bits(self._found[one].to(dtype), self._found[other].to(dtype)):
                    raise CheckpointError(
                        f"{one} and {other} differ in the file, and are one tensor in the model"
                    )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _identity(name: str, value: object) -> object:
    """The same for names of one tensor alone."""
    return id(value) if isinstance(value, torch.Tensor) else name


def _may_lack(name: str) -> bool:
    """Files that are not PyTorch's own often lack this count, and hardly any model reads it."""
    return name.rpartition(".")[2] == "num_batches_tracked"


def _is_extra(name: str) -> bool:
    """Whether it is what a module's ``get_extra_state`` returned: anything at all."""
    return name.rpartition(".")[2] == "_extra_state"


def _misfit(name: str, own: Any, value: object) -> str | None:
    """Why a value cannot be copied to a tensor of the model."""
    if _is_extra(name):
        return None
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} in the file, and no tensor"
    if value.layout != own.layout:
        return f"{own.layout} in the model, {value.layout} in the file"
    if value.shape != own.shape:
        return f"{tuple(own.shape)} in the model, {tuple(value.shape)} in the file"
    return None


def _check_dtype(name: str, own: Any, value: Any) -> None:
    if not _is_extra(name) and _kind(value.dtype) > _kind(own.dtype):
        raise CheckpointError(
            f"{name} is {own.dtype} in the model and {value.dtype} in the file: expected numbers "
            f"that it has room for"
        )


def _kind(dtype: torch.dtype) -> int:
    """Whole numbers, then real ones, then complex ones: each has room for those before it."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def _check_arguments(model: object, path: object, key: object, strict: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"expected path to be a str or Path, got {type(path).__name__}")
    if not (key is None or isinstance(key, str)):
        raise TypeError(f"expected key to be a str or None, got {type(key).__name__}")
    if not isinstance(strict, bool):
        raise TypeError(f"expected strict to be True or False, got {type(strict).__name__}")


def _check_memory(own: Mapping[str, object]) -> None:
    for name, tensor in own.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: run one forward pass of the lazy module first"
            )
        if tensor.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device: give the model memory first, by "
                f"model.to_empty(device=...)"
            )
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in pairs):
            raise ValueError(
                f"{name} is expanded, so that its elements share memory: register a .clone() of it"
            )


def _none_of(found: Collection[str], own: Collection[str], keys: Collection[str]) -> str:
    if keys:
        options = " or ".join(f"key={key!r}" for key in keys)
        return f"the file keeps its tensors in dicts of their own. Pass {options}"
    have = [listed(names) or "none" for names in (found, own)]
    return f"no name of it is the model's. The file has {have[0]}; the model {have[1]}"


def refuse_spoilt(model: torch.nn.Module, weights: Path) -> None:
    """Refuse a model with values that are of no use.

    Args:
        model: as it was read.
        weights: where from.

    Raises:
        CheckpointError: a parameter is NaN or infinite, or a buffer NaN.
    """
    parameters = dict(model.named_parameters())
    spoilt = first_not_finite(parameters.values(), parameters)
    spoilt = spoilt or min(names_with_nan(dict(model.named_buffers())), default=None)
    if spoilt is not None:
        raise CheckpointError(
            f"{weights}: {spoilt} has values that are NaN or infinite: expected finite ones. The "
            f"run that saved them went wrong before; use an earlier checkpoint of it"
        )
