"""What a checkpoint can hold of a model: asked as a run begins, and each time it is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from onefold.core.flat import named_tensors, own_name
from onefold.deferred.access import ResidentError
from onefold.system.compat import EXTRA_STATE_KEY_SUFFIX
from onefold.system.dtypes import DTYPES

__all__ = ["is_saved_as_it_is", "readable", "sorted_values", "state_of"]


def readable(
    module: torch.nn.Module, gathered: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Gather all parameters if the model itself computes what is saved of them.

    Args:
        module: the user's own model.
        gathered: opens a block in which this process has all parameters.
    """
    return nullcontext() if is_saved_as_it_is(module) else gathered()


def is_saved_as_it_is(module: torch.nn.Module) -> bool:
    """Whether ``state_dict`` merely names parameters, and does not compute with their values.

    Asked where some are elsewhere; where all are here it makes no difference.
    """
    try:
        state_of(module)
    except ResidentError:
        return False
    return True


def sorted_values(
    module: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[str, ...]]:
    """Check and return what ``state_dict`` names, what it leaves out, and the names of all.

    Raises:
        TypeError: the model holds something that is no tensor, or of a type that no file can hold.
    """
    model = state_of(module)
    named = named_tensors(module)
    rest = {name: tensor for name, tensor in named.items() if name not in model}
    for name, value in (*model.items(), *rest.items()):
        _check_value(name, value)
    return model, rest, tuple(named)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What ``state_dict`` names: the tensors themselves, under the user's own names."""
    # Not detached: to detach those whose values are elsewhere would mean to read them.
    with torch.no_grad():
        state = module.state_dict(keep_vars=True)
    return {own_name(name): value for name, value in state.items()}


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or name.endswith(EXTRA_STATE_KEY_SUFFIX):
        raise TypeError(
            f"the model's state_dict holds {name}, which is no parameter and no buffer: a "
            f"checkpoint cannot hold what get_extra_state() returns. Keep it in a buffer, or save "
            f"it with save(..., extra=...)"
        )
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} is of {value.dtype}, which no safetensors file can hold")
