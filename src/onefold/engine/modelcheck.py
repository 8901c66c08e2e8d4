"""Refuses models that cannot be trained alike on any number of devices, before any work.

Low precision needs more of a model and its devices, which `check_precision` and `check_device`
check.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.nn.parameter import is_lazy

from onefold.core.flat import extent
from onefold.core.precision import Precision
from onefold.engine.firstvalues import undrawn_of
from onefold.engine.modelparts import ModelParts
from onefold.errors import PrecisionError
from onefold.system.compat import BatchNorm

__all__ = ["check_device", "check_model", "check_precision", "computing_in", "held_in"]


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


_MAY_BE_SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_model(model: object) -> None:
    """Check that every parameter can lie in flat memory and get a dense gradient.

    Raises:
        TypeError: the model is not a module, or it is wrapped for another kind of parallel
            training.
        ValueError: a parameter is complex, has no values yet or shares memory with another tensor,
            or a layer gives sparse gradients or computes statistics over processes.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"the model is wrapped in {type(model).__name__}; expected the plain module. Pass "
            f"model.module: onefold does the rest"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: run one forward pass of the lazy module first"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: give the model values first")
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} is complex ({parameter.dtype}): expected real parameters. Keep "
                f"its real and imaginary part as two real ones (torch.view_as_real)"
            )
    _check_memory(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"layer {name} is a SyncBatchNorm, whose statistics are those of all processes "
                f"that take part: expected BatchNorm, whose statistics are those of a shard, or "
                f"onefold.SyncBatchNorm, whose are those of the batch; neither depends on the "
                f"devices. Use onefold.SyncBatchNorm.convert in place of convert_sync_batchnorm"
            )
        if isinstance(module, _MAY_BE_SPARSE) and module.sparse:
            raise ValueError(
                f"layer {name} ({type(module).__name__}) gives sparse gradients: expected dense "
                f"ones. Make it with sparse=False"
            )


def _check_memory(model: torch.nn.Module) -> None:
    """Refuse tensors that share memory: each gets memory of its own, and they would part ways."""
    # By identity, so that one tensor under two names, a tied parameter, counts once.
    named = {id(t): (name, t) for name, t in (*model.named_buffers(), *model.named_parameters())}
    held = [(name, t) for name, t in named.values() if t.numel() and t.layout is torch.strided]
    # What has no values yet has its memory to itself.
    held = [(name, tensor) for name, tensor in held if undrawn_of(tensor) is None]
    ranges = sorted((*extent(tensor), name, tensor) for name, tensor in held)
    for place, (_, stop, name, tensor) in enumerate(ranges):
        # Sorted by their starts, so the first range that begins behind this one ends the search.
        for start, _, other_name, other in ranges[place + 1 :]:
            if start >= stop:
                break
            # Tolerated where neither is trained: constants cannot part ways.
            if (tensor.requires_grad or other.requires_grad) and _touch(tensor, other):
                raise ValueError(
                    f"{' and '.join(sorted((name, other_name)))} share memory without being the "
                    f"same tensor: a change of one would no longer be one of the other. To tie "
                    f"them, give both names the same parameter (a.weight = b.weight); else clone "
                    f"one of them"
                )


def _touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose ranges overlap have a byte in common, not just alternating rows."""
    # Listing every address is slow, and only needed where one of the two has gaps.
    if all(_fills_its_range(tensor) for tensor in (one, other)):
        return True
    return bool(torch.isin(_places_of(one), _places_of(other)).any())


def _fills_its_range(tensor: torch.Tensor) -> bool:
    start, stop = extent(tensor)
    return stop - start == tensor.numel() * tensor.element_size()


def _places_of(tensor: torch.Tensor) -> torch.Tensor:
    """List every address that a tensor occupies: (bytes,) int64."""
    size = tensor.element_size()
    place = torch.tensor([tensor.data_ptr()])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        place = (place[:, None] + torch.arange(length) * stride * size).flatten()
    return (place[:, None] + torch.arange(size)).flatten()
