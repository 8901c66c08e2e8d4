"""What low precision needs of a model and its devices, checked before work begins."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from onefold.core.precision import Precision
from onefold.engine.modelparts import ModelParts
from onefold.system.compat import BatchNorm

__all__ = ["check_device", "check_precision", "held_in"]

_NORMALISING = (BatchNorm, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


def check_precision(precision: Precision, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse a model whose trained parameters are not what a precision begins with.

    Raises:
        ValueError: a precision was named, and a parameter is not in float32.
    """
    if precision.name is None:
        return
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise ValueError(
                f'precision="{precision.name}": expected parameters in float32, of which lower '
                f"precision is made here, got {name} in {parameter.dtype}. Leave the model in "
                f"float32, or precision out"
            )


def check_device(precision: Precision, device: torch.device) -> None:
    """Refuse a device that cannot compute in a precision.

    Raises:
        ValueError: the device cannot; the message names both.
    """
    if device.type != "cuda" or precision.compute is None:
        return
    if precision.compute is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(
            f'precision="{precision.name}": {torch.cuda.get_device_name(device)} ({device}) has no '
            f'bfloat16, which begins with compute capability 8.0. Use precision="fp16"'
        )


def held_in(precision: Precision, parts: ModelParts) -> dict[str, torch.Tensor]:
    """Stand-ins for the trained parameters, in the dtypes in which models are to hold them.

    Those of normalising layers stay as they are. Batch norm's go with running means, which low
    precision would freeze, and the kernels of all of them take low parameters only with inputs that
    are low as well.
    """
    low = precision.parameters
    kept = {
        id(parameter)
        for module in parts.module.modules()
        if isinstance(module, _NORMALISING)
        for parameter in module.parameters(recurse=False)
    }
    return {
        name: torch.empty_strided(
            parameter.shape,
            parameter.stride(),
            dtype=parameter.dtype if low is None or id(parameter) in kept else low,
            device="meta",
        )
        for name, parameter in parts.trained.items()
    }
