"""Which optimizers can be divided among devices, and how finely; those that draw are refused.

`UpdateDraws` refuses optimizers that draw random numbers while they update. Each device updates its
own spans, and would draw for them from where its generators stand: all devices the same numbers for
other parameters, and as many as its spans need. Noise would repeat in the model, and depend on how
many devices there are.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from onefold.core.randomness import GeneratorStates
from onefold.engine.byscript import ByScript
from onefold.engine.optimizers import has_own_step, optimizers_in, steps_by_parameter
from onefold.errors import StateError
from onefold.reading.held import held_states

__all__ = ["TAKEN", "UpdateDraws", "check_optimizer", "updates_by_element"]


_BY_ELEMENT = frozenset(
    {
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
        ByScript,
    }
)
_LOW = {torch.bfloat16, torch.float16}


TAKEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that belong to a Trainer. Weakly held: nothing here may keep them and their state."""


def updates_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update depends on nothing but that element's own history."""
    # The exact type: a subclass may override step() and look at a whole parameter, or at its norm;
    # and so may a hook.
    each = optimizers_in(optimizer).values()
    return all(type(one) in _BY_ELEMENT and not has_own_step(one) for one in each)


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
            f"device: `with trainer.changing(): optimizer.step(lambda: "
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
    # a call of step has no momentum yet: and that is any of the pieces of its device.
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
    # follow. Which parameter is the first would depend on which span a device has.
    for number, group in enumerate(optimizer.param_groups):
        dtypes = {parameter.dtype for parameter in group["params"]}
        if group["eps"][0] is None and len(dtypes) > 1:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"Adafactor: group {number} has parameters of {listed} and the default eps, which "
                f"then depends on the parameter that is updated first, and so on the device. Give "
                f"eps=(1e-7, 1e-3) or the like, or a group for each dtype"
            )


_NOTHING = nullcontext()
_EVERY = 50
"""The first two updates of so many are looked at: reading all states takes 0.3 ms."""


class UpdateDraws:
    """Looks at the generators before and after some of the updates.

    Args:
        optimizers: that may draw; named in the error.
        devices: those of which the generators count as well, if they are GPUs.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], devices: Iterable[torch.device]
    ) -> None:
        self._optimizers = list(optimizers)
        self._devices = tuple(devices)
        self._updates = 0

    def watched(self) -> AbstractContextManager[None]:
        """A block in which the optimizer updates.

        Raises:
            StateError: random numbers were drawn in it.
        """
        self._updates += 1
        due = self._updates % _EVERY in (1, 2)
        return self._looked_at() if due and not steps_by_parameter(self._optimizers) else _NOTHING

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        before, held = GeneratorStates(*self._devices), held_states(self._optimizers)
        yield
        own = "" if held == held_states(self._optimizers) else "a generator of its own"
        if drawn := own or before.drawn_from():
            names = " or ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise StateError(
                f"{names} draws random numbers in step(), from {drawn}: expected none, as "
                f"each device updates a part of the model, and would draw the same numbers for "
                f"other parameters. Train with Trainer(model, None, ...) and trainer.gradient, and "
                f"have the optimizer update in trainer.changing(), where the lead's draws count"
            )
