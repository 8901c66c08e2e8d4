"""Finds a learning rate by a short sweep before training: the learning rate range test.

A copy of the model is trained for at most 100 steps while the learning rate grows by a constant
factor from step to step, until the loss diverges (Smith, 2017, "Cyclical learning rates for
training neural networks"). The rate of the run is a tenth of the one with the lowest smoothed loss,
as in Howard and Gugger, 2020, "fastai: a layered API for deep learning".

The sweep uses the shards, the seed and the first batches of the run. So its losses, and with them
the rate, are the same on any number of devices. The run starts as if there had been no sweep: its
model was not trained, and generators are not advanced.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain

from onefold.cli import counted
from onefold_jobs.audience import tell
from onefold_jobs.finetune import freeze
from onefold_jobs.options import TrainOptions
from onefold_jobs.training import STOPPED_CODE, Task, loader_of, trainer_of

__all__ = ["GROWTH", "LEAST", "STEPS", "RangeTest", "find_rate", "with_rate"]

LEAST, _MOST, STEPS = 1e-7, 10.0, 100
"""First and last learning rate of a sweep, and its number of steps."""
GROWTH = (_MOST / LEAST) ** (1 / (STEPS - 1))
_KEPT = 0.9
"""Weight of the previous mean in the smoothed loss."""
_DIVERGED = 4.0
"""Factor above its minimum at which the smoothed loss ends the sweep."""
_BEFORE = 10.0
"""Factor between the rate with the lowest loss and the chosen one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTest:
    """The result of a sweep; stored in ``run.json`` and in the record."""

    rates: Sequence[float]
    """Learning rate of each step."""
    losses: Sequence[float]
    """Loss of each step, before its update."""
    smoothed: Sequence[float]
    """Moving average of the losses."""
    rate: float
    """The chosen learning rate."""


def with_rate(options: TrainOptions, task: Task) -> tuple[TrainOptions, Task]:
    """Fill in the learning rate, if the options ask for a sweep. Called on every device.

    Returns:
        The options, and the task with the result of the sweep among its facts and notes.

    Raises:
        ValueError: no learning rate lowers the loss.
        SystemExit: the launcher asked the run to stop.
    """
    if options.lr != "auto":
        return options, task
    found = find_rate(options, task)
    # The copy and its trainer refer to each other; on a GPU they would take memory of the run.
    gc.collect()
    note = (
        f"--lr auto: learning rate {found.rate:.2g}, a tenth of the one with the lowest loss in "
        f"{counted(len(found.rates), 'step')} from {found.rates[0]:.0e} to {found.rates[-1]:.0e}"
    )
    facts = {**task.facts, "range_test": asdict(found)}
    task = replace(task, facts=facts, notes=[*task.notes, note])
    return replace(options, lr=found.rate), task


def find_rate(options: TrainOptions, task: Task) -> RangeTest:
    """Sweep learning rates on a copy of the task's model.

    Raises:
        ValueError: no learning rate lowers the loss.
        SystemExit: the launcher asked the run to stop.
    """
    model = copy.deepcopy(task.model)
    freeze(model, options, task.head)
    first = replace(options, lr=LEAST, compile=False)
    trainer, _ = trainer_of(first, task, model, lambda done: GROWTH**done, on_nonfinite="skip")
    if trainer.is_lead:
        tell(f"--lr auto: trying learning rates in at most {STEPS} steps")
    batches = loader_of(trainer, options, task)
    losses: list[float] = []
    for batch in chain.from_iterable(batches for _ in trainer.epochs(STEPS)):
        losses.append(float(trainer.step(batch).loss))
        if trainer.asked_to_stop:
            raise SystemExit(STOPPED_CODE)
        smoothed = smooth(losses)
        if len(losses) == STEPS or not smoothed[-1] < _DIVERGED * min(smoothed):
            break
    return choose(losses)


def choose(losses: Sequence[float]) -> RangeTest:
    """Choose the learning rate from the losses of a sweep's steps.

    Raises:
        ValueError: no learning rate lowers the loss.

    >>> falling = [1 - step / 100 for step in range(80)]
    >>> f"{choose([*falling, 2.0, 9.0]).rate:.2g}"
    '0.024'
    """
    smoothed, rates = smooth(losses), [LEAST * GROWTH**step for step in range(len(losses))]
    finite = [each if math.isfinite(each) else math.inf for each in smoothed]
    lowest = finite.index(min(finite))
    if lowest == 0:
        raise ValueError(
            f"--lr auto: no learning rate from {LEAST:.0e} to {rates[-1]:.0e} lowered the loss "
            f"from {losses[0]:.4g}: check the data and the labels, or give --lr a number"
        )
    return RangeTest(rates=rates, losses=losses, smoothed=smoothed, rate=rates[lowest] / _BEFORE)


def smooth(losses: Sequence[float]) -> list[float]:
    """Average each loss with those before it, with weights that fall exponentially."""
    sums = accumulate(losses, lambda mean, loss: _KEPT * mean + (1 - _KEPT) * loss, initial=0.0)
    # The average begins at 0, which the divisor corrects.
    return [each / (1 - _KEPT**step) for step, each in enumerate(sums) if step]
