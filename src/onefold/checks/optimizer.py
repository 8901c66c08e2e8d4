"""Which optimizers can be divided among devices, and how finely; those that draw are refused.

`UpdateDraws` refuses optimizers that draw random numbers while they update. Each device updates its
own partitions, and would draw for them from where its generators stand: all devices the same
numbers for other parameters, and as many as its partitions need. Noise would repeat in the model,
and depend on how many devices there are.
"""

from __future__ import annotations

import inspect

import torch

from onefold.update.optimizers import TAKEN, has_own_step, optimizers_in

__all__ = ["BY_ELEMENT", "check_optimizer", "updates_by_element"]


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
_LOW = {torch.bfloat16, torch.float16}


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
        raise TypeError("SparseAdam works on sparse gradients; use Adam and dense embeddings")
    if isinstance(optimizer, torch.optim.Adafactor):
        _check_adafactor(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        _check_lists(optimizer)
    if optimizer in TAKEN:
        raise ValueError(
            f"this {name} already belongs to a Trainer, which has divided its state. Make another "
            f"optimizer for another Trainer"
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


def _check_lists(optimizer: torch.optim.SGD) -> None:
    """Refuse kernels for lists of low-precision parameters on a processor."""
    # They round otherwise than those for single tensors, which SGD takes as long as a parameter of
    # a call of step has no momentum yet: and that is any of the segments of its device.
    for number, group in enumerate(optimizer.param_groups):
        low = {p.dtype for p in group["params"] if p.device.type == "cpu"} & _LOW
        if group["foreach"] and group["momentum"] and low:
            raise ValueError(
                f"SGD: group {number} has foreach=True, momentum and parameters of "
                f"{', '.join(sorted(map(str, low)))} on a processor, where PyTorch rounds lists of "
                f"them in another way than single ones, and chooses by what else a device updates. "
                f"Leave foreach out, which costs nothing there"
            )


def _check_adafactor(optimizer: torch.optim.Adafactor) -> None:
    """Refuse groups of mixed precision, whose default eps depends on the order of parameters."""
    # PyTorch derives eps from the first parameter of a call of step, and uses it for all that
    # follow. Which parameter is the first would depend on which partition a device has.
    for number, group in enumerate(optimizer.param_groups):
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["eps"][0] is None and len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"Adafactor: group {number} has parameters of {listed} and the default eps, which "
                f"then depends on the parameter that is updated first, and so on the device. Give "
                f"eps=(1e-7, 1e-3) or the like, or a group for each dtype"
            )
