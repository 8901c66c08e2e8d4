"""Updates that a script makes by itself, of gradients that it asks for.

`GradientSteps` tells which calls of `Trainer.gradient` belong to one step. `ScriptOptimizer` stands
in for the optimizer of a Trainer that was given none.

Note: several gradients of a step
---------------------------------
Line searches and two-pass optimizers ask for several gradients of one batch before they update
once. These calls are one step: they have one number, and so the same random numbers, and the batch
counts as used once. A step lasts as long as the very same batch object is given; one that was
given inside of `Trainer.modifying` ends with that block, so that a script may take the same batch
(all of its data, say) for the next step.
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

if TYPE_CHECKING:
    from onefold.session.session import Session

__all__ = ["NO_STEP", "GradientSteps", "ScriptOptimizer", "check_by_script", "stand_in"]

_log = logging.getLogger("onefold")

_MOST_BLOCKS = 4
"""Blocks of changes that one step may well have; of two-pass optimizers it has two."""

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


class Place(NamedTuple):
    """Where in a script a gradient is asked for."""

    step: int
    """How many steps are done."""
    block: int
    """Number of the block of changes that the script is in; 0 outside of any."""
    blocks: int
    """How many blocks it has opened so far."""


class GradientSteps:
    """Makes gradients; remembers the batch of the last one, and where it was given.

    Args:
        session: the Trainer's part in the run.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._warned = session, False
        self.forget()

    def forget(self) -> None:
        """Have the next call begin a step, whatever its batch is."""
        self._batch: object = None
        self._loss = ""
        self._last = Place(-1, 0, 0)
        self._blocks_before = 0

    def goes_on(self, batch: object, place: Place, loss: str) -> bool:
        """Whether a call belongs to the step of the call before it.

        Outside of a block another loss begins another step.

        Raises:
            RuntimeError: it is in the same block as that call, and has another batch.
        """
        last, same = self._last, batch is self._batch
        if place.block and place.block == last.block and not same:
            raise RuntimeError(
                "trainer.gradient was called with two batches in one block of `with "
                "trainer.modifying():`, which is one step: expected the very same object in all "
                "calls. Make it before the block (batch = (x, y), not gradient((x, y)) in a "
                "closure), and a block for each batch"
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
                "trainer.gradient has been given the same batch object again, after more than %d "
                "blocks of trainer.modifying: all of it counts as one step, with the same random "
                "numbers. For the next step give a new object, such as (x, y) made in the loop, or "
                "call gradient inside the block, whose end is the step's",
                _MOST_BLOCKS,
            )
        return True

    def note(self, batch: object, place: Place, loss: str, *, begins: bool) -> None:
        """Note a call that has succeeded, and whether it began a step, which is done by now."""
        if begins:
            self._blocks_before = place.blocks
        self._batch, self._last = batch, place._replace(step=place.step + begins)
        self._loss = loss

    def gradient(self, batch: object, loss: str | None = None, dim: int = 0) -> Step:
        """Leave a batch's gradient in ``.grad``; see `Trainer.gradient`."""
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
            cut, waited = session.batches.cut(asked.given, asked.dim)
            with session.changes.closed(place.step + 1):
                session.start_step(asked, cut)
                with session.hooks.around(asked):
                    assert asked.batch is not None
                    outcome = session.engine.gradient(
                        asked.batch, asked.number, name=name, asked_to_stop=asked.asked_to_stop
                    )
                note()
                # Its update is the script's, and comes later.
                session.note_done(cut if asked.begins else None, outcome)
        return session.told(asked, outcome, waited)
