"""Refuses models that cannot be folded, before any work."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from onefold.core.flat import extent
from onefold.engine.firstvalues import undrawn_of

__all__ = ["check_model"]

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
