"""Weights that others have saved, into a model's own parameters and buffers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from onefold.errors import CheckpointError

__all__ = ["LoadedWeights", "load_weights"]

_WRAPPERS = ("module", "_orig_mod")
"""Names that DataParallel and torch.compile put before those of the model that they wrap."""

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_LISTED = 5


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What did not find its place; both are empty where ``strict`` is left as it is."""

    missing: tuple[str, ...]
    """Names of the model that got no value."""
    unexpected: tuple[str, ...]
    """Names of the file that were not used."""


def load_weights(
    model: torch.nn.Module, path: str | Path, *, key: str | None = None, strict: bool = True
) -> LoadedWeights:
    """Read a ``state_dict`` into a model, whoever saved it and from whatever device.

    Values are copied to where the parameters and buffers lie, in their types, so this may be called
    before a Trainer is made of the model or between its steps, then on every device. Names may come
    with the ``module.`` of DataParallel and DistributedDataParallel or the ``_orig_mod.`` of
    torch.compile, or without where the model has them.

    Args:
        model: to be filled.
        path: a file of torch.save, read with ``weights_only=True``, a safetensors file, or the
            folder of a checkpoint.
        key: where in the file the ``state_dict`` lies, if it holds more.
        strict: every name of the model and of the file must find its place. If not, what fits in
            name and shape is read.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it cannot be read, or does not fit. The model has not been changed then.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/weights.pt"
        >>> torch.save({"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)}, path)
        >>> model = torch.nn.Linear(2, 1)
        >>> load_weights(model, path)
        LoadedWeights(missing=(), unexpected=())
        >>> model.weight.tolist()
        [[1.0, 1.0]]
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    path = Path(path)
    found = _state_dict_in(_read(path), key, path)
    wanted = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    places = _find_places(found, wanted, path)
    unfit = {
        name: text
        for name, place in places.items()
        if (text := _misfit(found[name], wanted[place]))
    }
    if strict and unfit:
        name, text = next(iter(unfit.items()))
        raise CheckpointError(f"{path}: {places[name]} {text}")
    used = {place: found[name] for name, place in places.items() if name not in unfit}
    unexpected = tuple(name for name in found if name not in places or name in unfit)
    missing = _missing(used, wanted)
    if not used or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"{path} does not fit the model: {_listed('it lacks', missing)}; "
            f"{_listed('it has, and the model has not,', unexpected)}"
        )
    model.load_state_dict(used, strict=False)
    return LoadedWeights(missing, unexpected)


def _read(path: Path) -> Any:
    """What a file holds, on the host."""
    if path.is_dir():
        path = path / "model.safetensors"
        if not path.exists():
            raise CheckpointError(
                f"{path.parent} is a folder without {path.name}: expected a file of weights, or "
                f"the folder of a checkpoint"
            )
    with path.open("rb") as file:
        start = file.read(len(_ZIP))
    if start == _ZIP or start.startswith(_PICKLE):
        return _read_torch(path)
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is neither a file of torch.save nor a safetensors file, or is damaged: {error}"
        ) from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, or is damaged; to read that could "
            f"run any code. Load it in a program that you trust, and save its state_dict(): "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from error


def _state_dict_in(value: Any, key: str | None, path: Path) -> Mapping[str, torch.Tensor]:
    if key is not None:
        if not isinstance(value, Mapping) or key not in value:
            keys = list(value) if isinstance(value, Mapping) else type(value).__name__
            raise CheckpointError(f"{path} has nothing under {key!r}: it holds {keys}")
        value = value[key]
    if _is_state_dict(value):
        return value  # type: ignore[no-any-return]
    inside = (
        [k for k, v in value.items() if _is_state_dict(v)] if isinstance(value, Mapping) else []
    )
    hint = f": say which, such as key={inside[0]!r}" if inside else ""
    raise CheckpointError(
        f"{path} holds no plain state_dict (a dict of tensors by name)"
        f"{f', but has one under each of {inside}' if inside else ''}{hint}"
    )


def _is_state_dict(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
    )


def _find_places(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], path: Path
) -> dict[str, str]:
    """For names of the file, names of the model: the same, or the same but for wrappers."""
    by_plain: dict[str, list[str]] = {}
    for name in wanted:
        by_plain.setdefault(_plain(name), []).append(name)
    places: dict[str, str] = {}
    for name in found:
        like = by_plain.get(_plain(name), [])
        if name in wanted:
            places[name] = name
        elif len(like) == 1:
            places[name] = like[0]
    taken: dict[str, str] = {}
    for name, place in places.items():
        if place in taken:
            raise CheckpointError(
                f"{path} has two values for {place}: {taken[place]} and {name}. Expected one"
            )
        taken[place] = name
    return places


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _misfit(value: torch.Tensor, target: torch.Tensor) -> str | None:
    """What keeps a value from being copied, in words."""
    if value.shape != target.shape:
        return f"has shape {tuple(value.shape)} in the file and {tuple(target.shape)} in the model"
    if not torch.can_cast(value.dtype, target.dtype):
        return f"is {value.dtype} in the file and {target.dtype} in the model"
    return None


def _missing(
    used: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Names without a value, but for other names of a parameter that has one."""
    filled = {_place(wanted[name]) for name in used if wanted[name].numel()}
    return tuple(n for n, t in wanted.items() if n not in used and _place(t) not in filled)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"{what} nothing"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{what} {', '.join(names[:_LISTED])}{more}"
