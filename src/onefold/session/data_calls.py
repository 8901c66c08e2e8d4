"""Calls that iterate over a data set: evaluation, prediction, statistics of averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from onefold.core.call_digest import Call
from onefold.data_order.loader import Loader
from onefold.data_order.reader import Collate, SizedDataset
from onefold.passes.evaluation import DataCall, ScoreFunction, recompute_statistics
from onefold.step.engine import Engine
from onefold.step.hook import ScriptCall

if TYPE_CHECKING:
    from onefold.session.session import Session

__all__ = ["Results", "averaged", "over_data"]


class Results(dict[str, Any]):
    """Results by name: a dict, which `onefold.integrations.ipython` shows as a table."""


def over_data(
    session: Session,
    call: Call,
    compute: Callable[[Engine, ScoreFunction, Loader, DataCall], dict[str, Any]],
    function: ScoreFunction,
    model: str | None,
    chosen: Mapping[str, Any],
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """Run a call over a data set, in its order. Collective."""
    part = _on_part(session.parts.module, function, model)
    batches = session.batches.loader(**chosen, whole=whole)
    with session.telling_others():
        session.engine.check_last_step()
        size = batches.track.size
        made = DataCall(call, session.position.step + 1, size.samples, size.batch_size, function)
        key, data = (call, function, model, whole), batches.dataset
        asked = ScriptCall("result", words=call.words, given=part, key=key, data=data)
        return Results(
            session.hooks.call(asked, partial(compute, session.engine, part, batches, made))
        )


def _on_part(module: torch.nn.Module, function: ScoreFunction, name: str | None) -> ScoreFunction:
    """Wrap a function of model and batch so that it gets one of several models; all if None.

    Raises:
        TypeError: there is only one model.
        ValueError: there is no model with that name.
    """
    if name is None or not callable(function):
        return function
    if not isinstance(module, torch.nn.ModuleDict):
        raise TypeError(
            f"model={name!r} selects one of several models, but this Trainer has a single "
            f"{type(module).__name__}, not a dict of models"
        )
    if name not in module:
        known = ", ".join(map(repr, module))
        raise ValueError(f"model must be one of {known}, but got {name!r}")
    part = module[name]
    return lambda _, batch: function(part, batch)


@contextmanager
def averaged(
    session: Session,
    data: SizedDataset | None,
    batch_size: int | None,
    *,
    workers: int,
    collate: Collate | None,
) -> Iterator[None]:
    """Open the block in which the model holds its averages; see `Trainer.averaged`."""
    step, asked = session.position.step + 1, ScriptCall("averaged")
    if data is None:
        with session.hooks.around(asked), session.averaging.block(step):
            yield
        return
    if len(session.parts.losses) > 1:
        raise ValueError(
            "update_bn runs the model through the loss, but this Trainer has several losses. Use "
            "the block without update_bn, which averages statistics like all other values"
        )
    # Create the loader first, so that invalid arguments raise before the model shows averages.
    batches = session.batches.loader(data, collate, batch_size=batch_size, workers=workers)
    with session.hooks.around(asked), session.averaging.block(step, recomputes=True):
        size = batches.track.size
        call = DataCall(Call.UPDATE_BN, step, size.samples, size.batch_size, session.engine.loss)
        work = partial(recompute_statistics, session.engine, batches, call)
        session.hooks.call(ScriptCall("statistics"), work)
        yield
