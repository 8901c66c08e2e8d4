"""Moves a model between memory and files: copies it for writing, and fills in saved values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from onefold.core.fingerprint import fingerprint_of, named_tensors, tensor_digests
from onefold.core.flat import aligned, bits_of
from onefold.core.names import own_name
from onefold.engine.lentparameter import Elsewhere
from onefold.errors import CheckpointError
from onefold.system.compat import EXTRA_STATE_KEY_SUFFIX
from onefold.system.tensorfile import DTYPES, TensorParts

__all__ = [
    "ModelCopy",
    "ModelFiles",
    "check_fingerprint",
    "check_model_can_be_saved",
    "coming_parts",
    "copy_model",
    "is_saved_as_it_is",
    "tensor_parts",
]


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """A copy of a model's values at one moment, on the host."""

    model: Mapping[str, torch.Tensor]
    """The values that ``state_dict`` names."""
    rest: Mapping[str, torch.Tensor]
    """Parameters and buffers that ``state_dict`` leaves out."""
    names: tuple[str, ...]
    """Names of all parameters and buffers, in the model's own order."""

    def parts(self) -> tuple[list[TensorParts], list[TensorParts]]:
        """``model`` and ``rest``, ready to be written; views of the copy."""
        return tensor_parts(self.model), tensor_parts(self.rest)

    def fingerprint(self) -> str:
        """What ``trainer.fingerprint()`` was at that moment."""
        known = {**self.model, **self.rest}
        return fingerprint_of(tensor_digests({name: known[name] for name in self.names}))


def copy_model(module: torch.nn.Module, room: Callable[[int], torch.Tensor]) -> ModelCopy:
    """Copy every parameter and buffer of a model to the host.

    Args:
        module: the user's own model.
        room: takes a number of bytes, and returns (at least that many,) uint8 on the host.

    Raises:
        TypeError: the model holds something that is no tensor, or of a type that no file can hold.
    """
    # Into one stretch that is used again for every checkpoint: fresh memory would cost a page fault
    # every 4 KiB, while training waits.
    model, rest, names = _sorted_values(module)
    sizes = [aligned(value.nbytes) for value in (*model.values(), *rest.values())]
    memory = room(sum(sizes))
    copies: list[torch.Tensor] = []
    start = 0
    for value, size in zip((*model.values(), *rest.values()), sizes, strict=True):
        # A tensor without elements has no bytes to view as its type; it stands for itself.
        stretch = memory[start : start + value.nbytes]
        copy = stretch.view(value.dtype).view(value.shape) if value.nbytes else value.detach().cpu()
        copies.append(copy.copy_(value.detach()) if value.nbytes else copy)
        start += size
    return ModelCopy(
        dict(zip(model, copies, strict=False)),
        dict(zip(rest, copies[len(model) :], strict=True)),
        names,
    )


def check_model_can_be_saved(module: torch.nn.Module, *, keep_vars: bool = False) -> None:
    """Refuse what `copy_model` would refuse, before there is anything to lose.

    Args:
        module: the user's own model.
        keep_vars: whether its parameters are elsewhere, and it `is_saved_as_it_is`.

    Raises:
        TypeError: the model holds something that is no tensor, or of a type that no file can hold.
    """
    _sorted_values(module, keep_vars=keep_vars)


def is_saved_as_it_is(module: torch.nn.Module) -> bool:
    """Whether ``state_dict`` merely names parameters, and does not compute with their values.

    Asked where some are elsewhere; where all are here it makes no difference.
    """
    try:
        _state_of(module, keep_vars=True)
    except Elsewhere:
        return False
    return True


def coming_parts(
    module: torch.nn.Module,
    numbers: Mapping[int, int],
    coming: Callable[[str, int], TensorParts],
) -> tuple[list[TensorParts], list[TensorParts]]:
    """What ``state_dict`` names, and what it leaves out, of a model whose parameters are elsewhere.

    Args:
        module: the user's own model, which `is_saved_as_it_is`.
        numbers: those of the parameters that are elsewhere, by their identity.
        coming: makes what is written of one of them, given its name and number.

    Raises:
        TypeError: the model holds something that is no tensor, or of a type that no file can hold.
    """
    model, rest, _ = _sorted_values(module, keep_vars=True)

    def part(name: str, value: torch.Tensor) -> TensorParts:
        if id(value) in numbers:
            return coming(name, numbers[id(value)])
        return tensor_parts({name: value.detach().cpu()})[0]

    return [part(*each) for each in model.items()], [part(*each) for each in rest.items()]


def check_fingerprint(now: str, folder: Path, expected: str) -> None:
    """Check that a model which was loaded from a checkpoint has the bits that were saved.

    Raises:
        RuntimeError: it has not.
    """
    if now != expected:
        raise RuntimeError(
            f"{folder} was loaded and the model's fingerprint is {now}, {expected} was expected: "
            f"the model changes the values that are written to it"
        )


def _sorted_values(
    module: torch.nn.Module, *, keep_vars: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[str, ...]]:
    """Check and return what ``state_dict`` names, what it leaves out, and the names of all."""
    model = _state_of(module, keep_vars=keep_vars)
    named = named_tensors(module)
    rest = {name: tensor for name, tensor in named.items() if name not in model}
    for name, value in (*model.items(), *rest.items()):
        _check_value(name, value)
    return model, rest, tuple(named)


class ModelFiles:
    """The values of a model in the files of a checkpoint.

    Args:
        paths: the files, which are open while this is used as a context.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._stack = ExitStack()

    def __enter__(self) -> ModelFiles:
        opened = [self._opened(path) for path in self._paths]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        return self

    def _opened(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is a broken safetensors file: {error}") from error

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, module: torch.nn.Module, *, keep_vars: bool = False) -> None:
        """Compare names, shapes and types with those of a model.

        Args:
            module: the user's own.
            keep_vars: whether its parameters are elsewhere, and it `is_saved_as_it_is`.

        Raises:
            CheckpointError: a tensor differs, or is in only one of the two; the message names it.
        """
        wanted = {**_state_of(module, keep_vars=keep_vars), **named_tensors(module)}
        for name, tensor in wanted.items():
            if name not in self._files:
                raise CheckpointError(
                    f"{name}, of shape {tuple(tensor.shape)}, is in this model and not in the "
                    f"checkpoint: it was saved from another model"
                )
            shape, dtype = self.kind_of(name)
            if (shape, dtype) != (tuple(tensor.shape), DTYPES.get(tensor.dtype)):
                raise CheckpointError(
                    f"{name} is {dtype} {shape} in the checkpoint and "
                    f"{DTYPES.get(tensor.dtype)} {tuple(tensor.shape)} in this model: it was saved "
                    f"from another model"
                )
        for name in self._files:
            if name not in wanted:
                shape, _ = self.kind_of(name)
                raise CheckpointError(
                    f"{name}, of shape {shape}, is in the checkpoint and not in this model: it was "
                    f"saved from another model"
                )

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._files.keys()

    def kind_of(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape of a tensor, and its type as `DTYPES` calls it; reads no values."""
        saved = self._files[name].get_slice(name)
        return tuple(saved.get_shape()), saved.get_dtype()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the host."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def fill(self, module: torch.nn.Module, *, but: Collection[int] = ()) -> None:
        """Write the values into a model's parameters and buffers, where these lie.

        Args:
            module: the user's own.
            but: the identities of those that are left alone.
        """
        # In place: the parameters are views of flat memory that the engine goes on with.
        with torch.no_grad():
            for name, tensor in named_tensors(module).items():
                if id(tensor) not in but:
                    tensor.copy_(self.read(name))


def _state_of(module: torch.nn.Module, *, keep_vars: bool) -> dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=keep_vars)
    return {own_name(name): value for name, value in state.items()}


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> list[TensorParts]:
    """Tensors on the host, by name, ready to be written; views of those that are contiguous."""
    return [
        TensorParts.in_rows(name, tensor.dtype, tuple(tensor.shape), [bits_of(tensor).numpy()])
        for name, tensor in tensors.items()
    ]


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or name.endswith(EXTRA_STATE_KEY_SUFFIX):
        raise TypeError(
            f"the model's state_dict holds {name}, which is no parameter and no buffer: a "
            f"checkpoint cannot hold what get_extra_state() returns. Keep it in a buffer, or save "
            f"it with save(..., extra=...)"
        )
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} is of {value.dtype}, which no safetensors file can hold")
