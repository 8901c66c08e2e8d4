"""What a step begins with: what devices compare, and what is refused or warned of before it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from onefold.core.batch import ShardedBatch
from onefold.core.head import Call, StepHead, plan_number

__all__ = ["ModeWarning", "head_of", "refuse_unfrozen"]

_log = logging.getLogger("onefold")


def head_of(batch: ShardedBatch, step: int, call: Call, *, loss: int) -> StepHead:
    """Describe a step by its batch, as far as this process knows it, and its loss's number."""
    return StepHead(
        call=call,
        step=step,
        loss=loss,
        samples=batch.samples,
        plan=plan_number(batch.plan),
        loader=batch.loader,
        data_pass=batch.pass_number,
        place=batch.stop,
        data=batch.data_digest,
        batch=batch.digest,
        arguments=batch.dim,
    )


def refuse_unfrozen(frozen: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that were frozen when Trainer was made, and are not any more.

    Raises:
        ValueError: there is one.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise ValueError(
                f"parameter {name} was frozen when Trainer was made, so it has no place in the "
                f"gradient buffers. If it is to be trained later, let it require a gradient "
                f"until Trainer is made, and freeze it then, before the first step"
            )


class ModeWarning:
    """Warns once where a model is trained in evaluation mode.

    Args:
        module: the user's.
        on_lead: whether this process has device 0, which alone warns.
    """

    def __init__(self, module: torch.nn.Module, *, on_lead: bool) -> None:
        self._module = module
        self._on_lead = on_lead
        self._given = False

    def give(self) -> None:
        """Warn, if there is reason to, for the first time."""
        if not self._module.training and not self._given:
            self._given = True
            if self._on_lead:
                _log.warning(
                    "the model is in evaluation mode: dropout and batch norm do not train. Modes "
                    "are yours; call model.train() before the steps if that was not meant"
                )
