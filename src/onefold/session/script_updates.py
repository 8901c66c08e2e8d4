"""Updates that a script makes itself, from gradients that `Trainer.gradient` computes.

`GradientSteps` decides which calls of `Trainer.gradient` belong to one step. `ScriptOptimizer`
stands in for the optimizer of a Trainer without one.

Note: several gradients per step
--------------------------------
Line searches and two-pass optimizers compute several gradients of one batch before each update.
These calls are one step: they share a step number, and therefore the random numbers, and the batch
counts as used once. A step lasts as long as the script passes the same batch object. If it passed
the object inside `Trainer.modifying`, the step ends with that block, so that a script may use the
same batch (all of its data, for example) for the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from onefold.checks.model import BY_ELEMENT
from onefold.core.options import RunOptions
from onefold.core.settings import Precision
from onefold.step.hook import ScriptCall
from onefold.step.result import Step
from onefold.update.optimizer import PartitionedOptimizer

if TYPE_CHECKING:
    from onefold.session.session import Session

__all__ = [
    "NO_STEP",
    "GradientSteps",
    "ScriptOptimizer",
    "check_by_script",
    "check_gradient",
    "stand_in",
]

_log = logging.getLogger("onefold")

_MOST_BLOCKS = 4
"""Number of `Trainer.modifying` blocks without a warning in one step; two-pass optimizers use 2."""

NO_STEP = (
    "trainer.step was called, but this Trainer has no optimizer (it was created with None), so the "
    "script makes the updates. Call trainer.gradient(batch) and update the parameters in `with "
    "trainer.modifying():`, or pass an optimizer to Trainer"
)
"""Error message of a step without an optimizer."""


class ScriptOptimizer(torch.optim.Optimizer):
    """Holds the parameters that require gradients, without settings or state.

    Args:
        module: the user's model.

    Raises:
        ValueError: no parameter requires a gradient.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        super().__init__(trained, {})

    def step(self, closure: Any = None) -> Any:
        """Raise, because the script makes the updates itself."""
        raise RuntimeError(NO_STEP)


# Its device partition does not matter, because it updates no elements.
BY_ELEMENT.add(ScriptOptimizer)


def check_by_script(scheduler: LRScheduler | None, precision: Precision) -> None:
    """Raise if the arguments need an optimizer that the Trainer does not have.

    Raises:
        ValueError: there is a scheduler, or the precision keeps float32 masters, which only the
            Trainer's optimizer could update.
    """
    if scheduler is not None:
        raise ValueError(
            f"scheduler is a {type(scheduler).__name__}, but Trainer has no optimizer (it was "
            f"created with None). Step the scheduler in the script, together with the script's "
            f"optimizer"
        )
    if precision.parameters is not None:
        raise ValueError(
            f'precision="{precision.name}" needs an optimizer in Trainer: it updates float32 '
            f"values, of which the model holds rounded copies. Pass an optimizer, or "
            f'precision="{str(precision.name).removesuffix("-params")}" or "fp32"'
        )


def check_gradient(update: PartitionedOptimizer) -> None:
    """Refuse `trainer.gradient` if the script's update would be wrong.

    Raises:
        ValueError: the model holds rounded copies of the values that the optimizer updates, or an
            EMA is kept.
    """
    if update.storage.rounds:
        raise ValueError(
            "trainer.gradient does not support this precision: the optimizer updates float32 "
            "values and the model holds rounded copies of them, so rounding would discard the "
            'script\'s updates. Use precision="bf16", "fp16", "fp32" or None'
        )
    if update.averages.rule is not None:
        raise ValueError(
            "trainer.gradient was called while trainer.average keeps an average, which follows "
            "only the updates of trainer.step. Keep the average in the script, with "
            "torch.optim.swa_utils.AveragedModel, or use trainer.step"
        )


def stand_in(module: torch.nn.Module, options: RunOptions) -> ScriptOptimizer:
    """Return a stand-in for the optimizer of a script that makes its own updates.

    Args:
        module: the user's model.
        options: whether the launcher is to save the run automatically.

    Raises:
        ValueError: the launcher would save the run without the state of the script's optimizer.
    """
    if options.checkpoint:
        raise ValueError(
            "onefold run --checkpoint saves the state of Trainer's optimizer, but this Trainer has "
            "none (it was created with None), so the state of the script's own optimizer would be "
            "lost. Call trainer.save(..., extra=...) and trainer.load in the script, with that "
            "state"
        )
    return ScriptOptimizer(module)


class Place(NamedTuple):
    """Position in a script at which it requests a gradient."""

    step: int
    """Number of finished steps."""
    block: int
    """Number of the open `Trainer.modifying` block; 0 if none is open."""
    blocks: int
    """Number of blocks opened so far."""


class GradientSteps:
    """Computes gradients, and remembers the last batch and the position of its call.

    Args:
        session: session of the Trainer.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._warned = session, False
        self.forget()

    def forget(self) -> None:
        """Make the next call begin a step, regardless of its batch."""
        self._batch: object = None
        self._loss = ""
        self._last = Place(-1, 0, 0)
        self._blocks_before = 0

    def goes_on(self, batch: object, place: Place, loss: str) -> bool:
        """Whether a call belongs to the same step as the previous call.

        Outside a block, a different loss begins a new step.

        Raises:
            RuntimeError: the call is in the same block as the previous one, but has another batch.
        """
        last, same = self._last, batch is self._batch
        if place.block and place.block == last.block and not same:
            raise RuntimeError(
                "trainer.gradient was called with two batches in one block of `with "
                "trainer.modifying():`, but a block is one step and needs the same batch object in "
                "all calls. Create the batch before the block (batch = (x, y), not gradient((x, "
                "y)) in a closure), and use a block for each batch"
            )
        if not same or place.step != last.step or last.block not in (0, place.block):
            return False
        if loss != self._loss and not place.block:
            return False
        if (
            place.blocks - self._blocks_before > _MOST_BLOCKS
            and not self._warned
            and self._session.devices.has_lead
        ):
            self._warned = True
            _log.warning(
                "trainer.gradient received the same batch object again after more than %d blocks "
                "of trainer.modifying: all of them count as one step, with the same random "
                "numbers. For the next step, pass a new object, such as (x, y) created in the "
                "loop, or call gradient inside the block, whose end ends the step",
                _MOST_BLOCKS,
            )
        return True

    def note(self, batch: object, place: Place, loss: str, *, begins: bool) -> None:
        """Record a successful call, and whether it began a step. A step that it began is done."""
        if begins:
            self._blocks_before = place.blocks
        self._batch, self._last = batch, place._replace(step=place.step + begins)
        self._loss = loss

    def gradient(self, batch: object, loss: str | None = None, dim: int = 0) -> Step:
        """Compute a batch's gradient into ``.grad``; see `Trainer.gradient`."""
        session = self._session
        name = session.parts.loss_name(loss)
        session.engine.take_spans()
        with session.telling_others():
            place = Place(session.position.step, session.changes.number, session.changes.blocks)
            begins = not self.goes_on(batch, place, name)
        asked = ScriptCall("gradient", given=batch, name=name, dim=dim, begins=begins)
        note = partial(self.note, batch, place, name, begins=begins)
        step: Step = session.hooks.call(asked, partial(self._gradient, asked, place, note))
        if not asked.computed:
            note()
        return step

    def _gradient(self, asked: ScriptCall, place: Place, note: Callable[[], None]) -> Step:
        session, name = self._session, asked.name
        with session.telling_others():
            check_gradient(session.engine.context.update)
            cut, waited = session.batches.cut(asked.given, asked.dim)
            with session.changes.closed(place.step + 1):
                session.start_step(asked, cut)
                with session.hooks.around(asked):
                    assert asked.batch is not None
                    outcome = session.engine.gradient(
                        asked.batch, asked.number, name=name, requests=asked.requests
                    )
                note()
                # The script makes the update later.
                session.note_done(cut if asked.begins else None, outcome)
        return session.finish_step(asked, outcome, waited)
