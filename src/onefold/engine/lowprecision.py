"""What low precision needs of a model and its devices, checked before work begins."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from onefold.core.precision import Precision
from onefold.engine.modelparts import ModelParts
from onefold.errors import PrecisionError
from onefold.system.compat import BatchNorm

__all__ = ["check_device", "check_precision", "computing_in", "held_in"]

_NO_KERNEL = (
    "could not create a primitive",
    "not implemented for 'BFloat16'",
    "not implemented for 'Half'",
    "must have the same dtype",
    "to have the same dtype",
    "expected scalar type",
)
"""Words of the errors of kernels that a device lacks in a dtype, or that refuse several dtypes."""

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


@contextmanager
def computing_in(
    dtype: torch.dtype, device: torch.device, module: torch.nn.Module
) -> Iterator[None]:
    """Have autocast compute in a lower precision, and say what a device cannot compute in it.

    Args:
        dtype: what autocast casts to.
        device: computes.
        module: the model, whose layers an error names.

    Raises:
        PrecisionError: an operation has no kernel for this dtype there.
    """
    try:
        with torch.autocast(device.type, dtype=dtype):
            yield
    except RuntimeError as error:
        if isinstance(error, PrecisionError) or not any(e in str(error) for e in _NO_KERNEL):
            raise
        layer = _layer_of(error.__traceback__, module)
        name = str(dtype).removeprefix("torch.")
        said = str(error).strip().splitlines()[0].rstrip(".")
        raise PrecisionError(
            f'{layer} cannot be computed in {name} on {_processor(device)}: PyTorch says "{said}". '
            f'Use Trainer(precision="fp32"), or compute this layer in float32: call it in a block '
            f'of torch.autocast("{device.type}", enabled=False), with inputs that are .float()'
        ) from error


def _layer_of(traceback: TracebackType | None, module: torch.nn.Module) -> str:
    """Name the innermost layer of a model whose method is in a traceback."""
    names = {id(layer): name for name, layer in module.named_modules()}
    found = "an operation of the loss function"
    while traceback is not None:
        layer = traceback.tb_frame.f_locals.get("self")
        if isinstance(layer, torch.nn.Module) and id(layer) in names:
            name = names[id(layer)]
            kind = type(layer).__name__
            found = f"layer {name} ({kind})" if name else f"an operation of the model ({kind})"
        traceback = traceback.tb_next
    return found


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = next(iter(models), platform.machine())
    return f"this processor ({model}, kernels for {torch.backends.cpu.get_cpu_capability()})"
