"""Refuses models and optimizers whose results would depend on the number of devices, before work.

`check_precision` and `check_device` check the additional requirements of low precision.
`sorted_values` lists the tensors of a model for a checkpoint, at the start of a run and at each
save. `updates_by_element` determines how finely an optimizer can be partitioned among devices.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch.nn.parameter import is_lazy

from onefold.core.flat import extent, is_dense, named_tensors, own_name
from onefold.core.late import load
from onefold.core.settings import Precision
from onefold.deferred.access import ResidentError, deferred_of
from onefold.shard.model_parts import ModelParts
from onefold.system.accelerator import DTYPES, name_of
from onefold.system.compat import EXTRA_STATE_KEY_SUFFIX, BatchNorm
from onefold.system.cuda import has_bfloat16
from onefold.system.internals import has_own_step
from onefold.update.optimizers import TAKEN, optimizers_in

__all__ = [
    "BY_ELEMENT",
    "check_device",
    "check_model",
    "check_optimizer",
    "check_precision",
    "held_in",
    "is_saved_as_it_is",
    "readable",
    "sorted_values",
    "state_of",
    "updates_by_element",
]


_NORMALIZING = (BatchNorm, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


def check_precision(precision: Precision, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse a model whose trained parameters do not have the initial dtype of a precision.

    Raises:
        ValueError: a precision is named, and a parameter is not in float32.
    """
    if precision.name is None:
        return
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            raise ValueError(
                f'precision="{precision.name}" requires float32 parameters, but {name} is '
                f"{parameter.dtype}. Keep the model in float32, or omit precision"
            )


def check_device(precision: Precision, device: torch.device) -> None:
    """Refuse a device that cannot compute in a precision.

    Raises:
        ValueError: the device cannot; the message names both.
    """
    if device.type != "cuda" or precision.compute is None:
        return
    if precision.compute is torch.bfloat16 and not has_bfloat16(device):
        raise ValueError(
            f'precision="{precision.name}": {name_of(device)} ({device}) does not support '
            f'bfloat16, which requires compute capability 8.0. Use precision="fp16"'
        )


def held_in(precision: Precision, parts: ModelParts) -> dict[str, torch.Tensor]:
    """Return stand-ins for the trained parameters, in the dtypes that models hold them in.

    Parameters of normalization layers keep their dtype. Batch norm's belong to running means, whose
    small updates low precision would round away, and the kernels of all these layers accept
    low-precision parameters only together with low-precision inputs.
    """
    low = precision.parameters
    kept = {
        id(parameter)
        for module in parts.module.modules()
        if isinstance(module, _NORMALIZING)
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


_MAY_BE_SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_model(model: object) -> None:
    """Check that every parameter can be stored in flat memory and get a dense gradient.

    Raises:
        TypeError: the model is not a module, or it is wrapped for another kind of parallel
            training.
        ValueError: a parameter is complex, has no values yet or shares memory with another tensor;
            a tensor is sparse; a layer gives sparse gradients or computes statistics over
            processes.
    """
    if not isinstance(model, torch.nn.Module):
        raise load("shard.advice").wrong_part("model must be a torch.nn.Module", model)
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"the model is wrapped in {type(model).__name__}. Pass the plain module, model.module: "
            f"onefold replaces the wrapper"
        )
    _check_kinds(*model.modules())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet. Run one forward pass of the lazy module first"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device. Give the model values first")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} must have a dense layout, but has {tensor.layout}. Call .to_dense()"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} is complex ({parameter.dtype}), but parameters must be real. "
                f"Store its real and imaginary parts as two real ones (torch.view_as_real)"
            )
    _check_memory(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"layer {name} is a torch.nn.SyncBatchNorm, whose statistics cover all processes "
                f"and would depend on the devices. Use onefold.SyncBatchNorm, with the statistics "
                f"of the batch (onefold.SyncBatchNorm.convert instead of convert_sync_batchnorm), "
                f"or BatchNorm, with the statistics of a shard"
            )
        if isinstance(module, _MAY_BE_SPARSE) and module.sparse:
            raise ValueError(
                f"layer {name} ({type(module).__name__}) gives sparse gradients, but onefold "
                f"requires dense ones. Create it with sparse=False. {load('shard.advice').DENSE}"
            )


def _check_kinds(*parts: object) -> None:
    for part in parts:
        if re.search("(GradSampleModule|DPOptimizer)'", str(type(part).__mro__)):
            load("shard.advice").refuse_per_sample(part)


def _check_memory(model: torch.nn.Module) -> None:
    """Refuse different tensors that share memory: onefold would give each its own memory."""
    # Key by identity, so that a tied parameter, one tensor with two names, counts once.
    named = {id(t): (name, t) for name, t in (*model.named_buffers(), *model.named_parameters())}
    held = [(name, t) for name, t in named.values() if t.numel() and t.layout is torch.strided]
    # Skip deferred tensors: they share no memory, because they have no values yet.
    held = [(name, tensor) for name, tensor in held if deferred_of(tensor) is None]
    ranges = []
    for name, tensor in held:
        # Skip parameters partitioned by another Trainer: that Trainer gave them their own memory.
        with suppress(ResidentError):
            ranges.append((*extent(tensor), name, tensor))
    ranges.sort()
    for place, (_, stop, name, tensor) in enumerate(ranges):
        # The ranges are sorted by start: the first range that starts after this one ends the
        # search.
        for start, _, other_name, other in ranges[place + 1 :]:
            if start >= stop:
                break
            # Tolerate the overlap of untrained tensors: constants cannot diverge.
            if (tensor.requires_grad or other.requires_grad) and _touch(tensor, other):
                raise ValueError(
                    f"{' and '.join(sorted((name, other_name)))} share memory but are different "
                    f"tensors, so Trainer would separate them. To tie them, assign one parameter "
                    f"to both names (a.weight = b.weight); otherwise clone one of them"
                )


def _touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors with overlapping ranges share a byte, instead of alternating rows."""
    # Listing every address is slow, and only needed if a tensor has gaps.
    if all(is_dense(tensor.shape, tensor.stride()) for tensor in (one, other)):
        return True
    return bool(torch.isin(_places_of(one), _places_of(other)).any())


def _places_of(tensor: torch.Tensor) -> torch.Tensor:
    """List every address of a tensor: (bytes,) int64."""
    size = tensor.element_size()
    place = torch.tensor([tensor.data_ptr()])
    # Build only the used addresses: the range of, say, one column may be a thousand times larger.
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        place = (place[:, None] + torch.arange(length) * stride * size).flatten()
    return (place[:, None] + torch.arange(size)).flatten()


def readable(
    module: torch.nn.Module, gathered: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Gather all parameters if ``state_dict`` computes with their values.

    Args:
        module: the user's model.
        gathered: opens a block in which this process has all parameters.
    """
    return nullcontext() if is_saved_as_it_is(module) else gathered()


def is_saved_as_it_is(module: torch.nn.Module) -> bool:
    """Whether ``state_dict`` only names parameters, without computing with their values.

    This matters only while some parameters are not resident.
    """
    try:
        state_of(module)
    except ResidentError:
        return False
    return True


def sorted_values(
    module: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[str, ...]]:
    """Check and return the tensors in ``state_dict``, the other tensors, and the names of all.

    Raises:
        TypeError: the model holds an object that is not a tensor, or a dtype that no file supports.
    """
    model = state_of(module)
    named = named_tensors(module)
    rest = {name: tensor for name, tensor in named.items() if name not in model}
    for name, value in (*model.items(), *rest.items()):
        _check_value(name, value)
    return model, rest, tuple(named)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in ``state_dict``, without copies, under the user's names."""
    # Do not detach: detaching a tensor that is not resident would read its values.
    with torch.no_grad():
        state = module.state_dict(keep_vars=True)
    return {own_name(name): value for name, value in state.items()}


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or name.endswith(EXTRA_STATE_KEY_SUFFIX):
        raise TypeError(
            f"the model's state_dict contains {name}, which is neither a parameter nor a buffer: a "
            f"checkpoint cannot store results of get_extra_state(). Store it in a buffer, or pass "
            f"it to save(..., extra=...)"
        )
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} is {value.dtype}, which safetensors files cannot store")


BY_ELEMENT: set[type[torch.optim.Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
}
"""Classes that update each element from that element alone; other modules may add their classes."""


def updates_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update depends only on that element's history."""
    # Compare exact types: a subclass, or a hook, may use a whole parameter, such as its norm.
    each = optimizers_in(optimizer).values()
    return all(type(one) in BY_ELEMENT and not has_own_step(one) for one in each)


def check_optimizer(optimizer: object, module: torch.nn.Module) -> None:
    """Refuse an optimizer that cannot be partitioned among devices, before any work.

    Raises:
        TypeError: the argument is not an optimizer, or it needs a closure or sparse gradients.
        ValueError: a parameter is not in the module, the optimizer already belongs to a Trainer, or
            its result would depend on the order of parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise load("shard.advice").wrong_part("expected a torch.optim.Optimizer", optimizer)
    _check_kinds(optimizer)
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{name} requires a closure that runs the model several times per step, which cannot "
            f"be divided among devices. Pass None to Trainer instead, and run this in every step, "
            f"on every device: `with trainer.modifying(): optimizer.step(lambda: "
            f"trainer.gradient(batch).loss)`. Or use an optimizer whose step() takes no closure"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        dense = load("shard.advice").DENSE
        raise TypeError(f"SparseAdam requires sparse gradients, which are refused. {dense}")
    if isinstance(optimizer, torch.optim.Adafactor | torch.optim.SGD):
        load("shard.advice").check_dtypes(optimizer)
    if optimizer in TAKEN:
        gone = TAKEN[optimizer]() is None
        raise ValueError(
            f"this {name} already belongs to a Trainer, which has partitioned its state and "
            f"{'is deleted' if gone else 'still exists: use that one for all steps'}. Create "
            f"another optimizer for another Trainer; trainer.save and trainer.load transfer the "
            f"state"
        )
    known = {id(parameter) for parameter in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"{name}: parameter {place} of group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the model. Create the "
                    f"optimizer from this model's parameters() (after moving or changing it). If "
                    f"the parameter belongs to a criterion of the loss, pass both to Trainer: "
                    f"Trainer({{'model': model, 'criterion': criterion}}, ...); the loss gets a "
                    f"dict of them, too"
                )
