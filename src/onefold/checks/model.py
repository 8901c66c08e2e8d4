"""Refuses models and optimizers that cannot be trained alike on any number of devices, before work.

Low precision needs more of a model and its devices, which `check_precision` and `check_device`
check. `sorted_values` finds what a checkpoint holds of a model, as a run begins and at each save.
`updates_by_element` says how finely an optimizer is divided among devices.
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
    if precision.compute is torch.bfloat16 and not has_bfloat16(device):
        raise ValueError(
            f'precision="{precision.name}": {name_of(device)} ({device}) has no '
            f'bfloat16, which begins with compute capability 8.0. Use precision="fp16"'
        )


def held_in(precision: Precision, parts: ModelParts) -> dict[str, torch.Tensor]:
    """Stand-ins for the trained parameters, in the dtypes in which models are to hold them.

    Those of normalizing layers stay as they are. Batch norm's go with running means, which low
    precision would freeze, and the kernels of all of them take low parameters only with inputs that
    are low as well.
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
    """Check that every parameter can lie in flat memory and get a dense gradient.

    Raises:
        TypeError: the model is not a module, or it is wrapped for another kind of parallel
            training.
        ValueError: a parameter is complex, has no values yet or shares memory with another tensor,
            a tensor is sparse, or a layer gives sparse gradients or computes statistics over
            processes.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected model to be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"the model is wrapped in {type(model).__name__}; expected the plain module. Pass "
            f"model.module: onefold does the rest"
        )
    _check_kinds(*model.modules())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: run one forward pass of the lazy module first"
            )
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: give the model values first")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} has the layout {tensor.layout}: expected a dense one, as .to_dense() makes"
            )
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
                f"ones. Make it with sparse=False. {load('shard.advice').DENSE}"
            )


def _check_kinds(*parts: object) -> None:
    for part in parts:
        if re.search("(GradSampleModule|DPOptimizer)'", str(type(part).__mro__)):
            load("shard.advice").refuse_per_sample(part)


def _check_memory(model: torch.nn.Module) -> None:
    """Refuse tensors that share memory: each gets memory of its own, and they would part ways."""
    # By identity, so that one tensor under two names, a tied parameter, counts once.
    named = {id(t): (name, t) for name, t in (*model.named_buffers(), *model.named_parameters())}
    held = [(name, t) for name, t in named.values() if t.numel() and t.layout is torch.strided]
    # What has no values yet has its memory to itself.
    held = [(name, tensor) for name, tensor in held if deferred_of(tensor) is None]
    ranges = []
    for name, tensor in held:
        # What another Trainer has partitioned had memory of its own there.
        with suppress(ResidentError):
            ranges.append((*extent(tensor), name, tensor))
    ranges.sort()
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
    if all(is_dense(tensor.shape, tensor.stride()) for tensor in (one, other)):
        return True
    return bool(torch.isin(_places_of(one), _places_of(other)).any())


def _places_of(tensor: torch.Tensor) -> torch.Tensor:
    """List every address that a tensor occupies: (bytes,) int64."""
    size = tensor.element_size()
    place = torch.tensor([tensor.data_ptr()])
    # Not of the whole range, which may be a thousand times as large: one column of a matrix, say.
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        place = (place[:, None] + torch.arange(length) * stride * size).flatten()
    return (place[:, None] + torch.arange(size)).flatten()


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
"""Classes that update each element from that element alone. Other modules may add theirs."""


def updates_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update depends on nothing but that element's own history."""
    # The exact type: a subclass may override step() and look at a whole parameter, or at its norm;
    # and so may a hook.
    each = optimizers_in(optimizer).values()
    return all(type(one) in BY_ELEMENT and not has_own_step(one) for one in each)


def check_optimizer(optimizer: object, module: torch.nn.Module) -> None:
    """Refuse an optimizer that cannot be divided among devices, before any work.

    Raises:
        TypeError: the argument is not an optimizer, or it needs a closure or sparse gradients.
        ValueError: a parameter is not the module's, the optimizer already belongs to a Trainer, or
            what it computes would depend on the order of parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_kinds(optimizer)
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{name} needs a closure that runs the model several times a step, which cannot be "
            f"divided among devices. Give Trainer None in its place, and in every step, on every "
            f"device: `with trainer.modifying(): optimizer.step(lambda: "
            f"trainer.gradient(batch).loss)`. Or use an optimizer whose step() takes no closure"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        dense = load("shard.advice").DENSE
        raise TypeError(f"SparseAdam takes sparse gradients, which are refused. {dense}")
    if isinstance(optimizer, torch.optim.Adafactor):
        load("shard.advice").check_adafactor(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        load("shard.advice").check_lists(optimizer)
    if optimizer in TAKEN:
        gone = TAKEN[optimizer]() is None
        raise ValueError(
            f"this {name} already belongs to a Trainer, which has divided its state, and "
            f"{'is gone' if gone else 'is still there: make all steps by that one'}. "
            f"Make another optimizer for another Trainer; trainer.save and trainer.load bring the "
            f"state over"
        )
    known = {id(parameter) for parameter in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"{name}: parameter {place} of group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the model. Make the "
                    f"optimizer from this model's parameters() (after moving or changing it). If "
                    f"it is that of a criterion that the loss uses, give Trainer both: "
                    f"Trainer({{'model': model, 'criterion': criterion}}, ...); the loss gets a "
                    f"dict of them, too"
                )
