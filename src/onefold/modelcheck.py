"""Refuses models that cannot be folded, before any work."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

__all__ = ["check_model"]

_MAY_BE_SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_model(model: object) -> None:
    """Check that every parameter can lie in flat memory and get a dense gradient.

    Raises:
        TypeError: not a module, or one that is wrapped for another kind of parallel training.
        ValueError: a parameter is complex, has no values yet, or a layer gives sparse gradients.
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
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"layer {name} is a SyncBatchNorm, whose statistics are those of all processes "
                f"that take part: expected BatchNorm, whose statistics are those of a shard and "
                f"do not depend on the devices. Leave out convert_sync_batchnorm"
            )
        if isinstance(module, _MAY_BE_SPARSE) and module.sparse:
            raise ValueError(
                f"layer {name} ({type(module).__name__}) gives sparse gradients: expected dense "
                f"ones. Make it with sparse=False"
            )
