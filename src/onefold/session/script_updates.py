"""Stands in for the optimizer of a Trainer whose script makes the updates by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.checks.model import BY_ELEMENT
from onefold.core.options import RunOptions
from onefold.core.settings import Precision

__all__ = ["NO_STEP", "ScriptOptimizer", "check_by_script", "stand_in"]

NO_STEP = (
    "trainer.step was called of a Trainer that was made with None for its optimizer, so that the "
    "script makes the updates: call trainer.gradient(batch), and update the parameters in `with "
    "trainer.modifying():`; or give Trainer an optimizer"
)
"""The message of a step that nobody could update."""


class ScriptOptimizer(torch.optim.Optimizer):
    """Holds the parameters that get a gradient, and has neither settings nor state.

    Args:
        module: the model, made by the user.

    Raises:
        ValueError: no parameter of it requires a gradient.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        super().__init__(trained, {})

    def step(self, closure: Any = None) -> Any:
        """Refuse: there is nothing that could update."""
        raise RuntimeError(NO_STEP)


# Which elements a device has makes no difference: it updates none.
BY_ELEMENT.add(ScriptOptimizer)


def check_by_script(scheduler: LRScheduler | None, precision: Precision) -> None:
    """Refuse what a Trainer without an optimizer cannot do.

    Raises:
        ValueError: a scheduler was given, or a precision in which Trainer's optimizer keeps values
            that are finer than the model's.
    """
    if scheduler is not None:
        raise ValueError(
            f"scheduler is a {type(scheduler).__name__}, and Trainer was given None for its "
            f"optimizer: step the scheduler in the script, beside the optimizer that it belongs to"
        )
    if precision.parameters is not None:
        raise ValueError(
            f'precision="{precision.name}" has Trainer\'s optimizer update float32 values, of '
            f"which the model holds rounded ones, and Trainer was given None for its optimizer: "
            f'expected precision="{str(precision.name).removesuffix("-params")}" or "fp32"'
        )


def stand_in(module: torch.nn.Module, options: RunOptions) -> ScriptOptimizer:
    """Return the stand-in for the optimizer of a script that has its own.

    Args:
        module: the user's model.
        options: say whether the launcher is to save the run by itself.

    Raises:
        ValueError: the launcher would save the run without the state of the script's optimizer.
    """
    if options.checkpoint:
        raise ValueError(
            "onefold run --checkpoint saves the state of Trainer's optimizer, and this Trainer was "
            "given None for it: what the script's own keeps would be lost. Call trainer.save(..., "
            "extra=...) and trainer.load in the script, with what its optimizer keeps"
        )
    return ScriptOptimizer(module)
