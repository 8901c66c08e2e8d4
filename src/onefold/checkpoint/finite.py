"""Refuses to save a model with values that are not finite; all devices raise alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch

from onefold.checkpoint.lead import Lead
from onefold.core.finite import all_finite, first_not_finite, names_with_nan
from onefold.core.names import own_name
from onefold.engine.engine import Engine
from onefold.errors import StateError

__all__ = ["own_buffers", "refuse_not_finite"]


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model under its own names."""
    return {own_name(name): buffer for name, buffer in module.named_buffers()}


def refuse_not_finite(engine: Engine, lead: Lead, step: int, nan_before: Collection[str]) -> None:
    """Have all devices raise if a value that is saved is not finite.

    The lead looks at what it has, and where each device keeps its span, each of them at that.

    Args:
        engine: the devices of this process.
        lead: the lead's work.
        step: the number of the last step.
        nan_before: the buffers that were NaN when the run began.

    Raises:
        StateError: a parameter is not finite, or a buffer has become NaN.
    """
    module = engine.replicas[0].module
    parameters = [own_name(name) for name, _ in module.named_parameters()]
    names = [*parameters, *own_buffers(module)]
    found = [*_of_span(engine)]
    if lead.is_here:
        found += _of_lead(engine, nan_before)
    # As a number, which all can be sent: the place of the name in a list that all have.
    number = lead.least(min(map(names.index, found), default=math.inf))
    if not math.isfinite(number):
        return
    what = "parameter" if number < len(parameters) else "buffer"
    raise StateError(
        f"{what} {names[int(number)]} is not finite after step {step}: no "
        f"checkpoint is written, and those that are there stay. The loss was finite and a "
        f"gradient, or what was computed beside it, was not. Look at the samples of that "
        f"step, and at square roots, norms and divisions at 0; lower the learning rate, or "
        f"set clip_norm. The run can go on from the checkpoint before"
    )


def _of_span(engine: Engine) -> Iterator[str]:
    """Name what is not finite of the pieces that this device keeps, if it has no more."""
    if engine.lending.is_whole:
        return
    entries = engine.update.storage.lent_layout().layout.entries
    for item in engine.update.owned:
        if not all_finite(engine.update.values_of(item.number)):
            yield own_name(entries[item.piece.entry].name)
    frozen = engine.exchange.memory.frozen
    if frozen is not None:
        spoilt = (n for n in frozen.numbers if not all_finite(frozen.part(n)))
        yield from (own_name(entries[frozen.entry_of(number)].name) for number in spoilt)


def _of_lead(engine: Engine, nan_before: Collection[str]) -> Iterator[str]:
    """Name the first value that is not finite of all that the lead has."""
    first, frozen = engine.replicas[0], engine.exchange.memory.frozen
    of_all = [] if frozen is None else frozen.flat.sections
    with engine.averaging.training_values() as trained:
        here = first.parts.named if engine.lending.is_whole else first.parts.other
        named = {own_name(name): parameter for name, parameter in here.items()}
        found = first_not_finite((*trained.sections, *first.other.sections, *of_all), named)
        # Buffers that were NaN from the start are the model's own affair (masks, unset statistics).
        spoilt = names_with_nan(own_buffers(first.module)) - {*nan_before}
        yield from [name for name in (found, min(spoilt, default=None)) if name is not None]
