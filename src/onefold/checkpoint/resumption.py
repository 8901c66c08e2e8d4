"""Goes on from a checkpoint in a script that runs again from its beginning, unaware of it.

Note: when the checkpoint's values become the run's
---------------------------------------------------
A resumed script runs again through what it has done: all that stands before its loops, and the
beginning of the epoch that it was in (of all epochs, where it loops by ``range``). It comes to no
step there, but it may change the model, step a schedule, copy a target network. The checkpoint has
the effect of all that. So its values are taken where the checkpoint was made, and not before::

    Trainer                    the checkpoint is found, checked and kept open; step, epoch and the
        │                      places in the data are those of the checkpoint from here on
        │  before any loop     the model is what it was here in the whole run: the script's own
        ▼
    the first epoch or pass    the values are shown, as what the script does here (an evaluation, a
        │                      copy for later) is nearer to what it was with them; at the beginning
        │                      of an epoch whose first step comes next it is the same
        │  until the place     a block of `changing` acts on nothing: the values are back at its end
        ▼
    the place                  the values are taken, whatever has been done to them before; from
                               here on everything acts once

The place is where the checkpoint was made, as it says itself:

- ``step``: at the beginning of the next step, where `Autosave` makes its own. So everything that
  the script does between two steps is in the checkpoint of the first of them.
- ``end``: at the end of the script, which made no step after it. Its values are shown at once, or a
  script that merely reads them at its end would find its own. Blocks act on nothing up to the next
  epoch of `Trainer.epochs`, if the script now goes on for longer; without it, up to the next step.
  Whether a block between them belongs to the part that is done is then undecidable: it counts as
  done, and a step that follows says so, with the line.
- neither: wherever the script called `Trainer.save`, or an earlier version made one within a step.
  The place is the beginning of the pass that was under way, or of the next epoch.

What `evaluate` and `predict` return before the place, after a loop has begun, cannot be what it was
without a record of it. That is reported once, with the line. What a script makes of it is taken
back where it can be: schedules and settings are the checkpoint's at the place, and a loader of
another subset is refused (`onefold.reading.track`). Its own variables cannot be seen.
"""

from __future__ import annotations

import logging
import sys

from onefold.checkpoint.record import Place
from onefold.checkpoint.resume import Checkpoints, Found
from onefold.engine.engine import Engine
from onefold.reading.position import Position, Reached
from onefold.system.caller import script_line

__all__ = ["Resumption"]

_log = logging.getLogger("onefold")


class Resumption:
    """The part of a resumed script that is done; all devices make the same calls.

    Args:
        engine: the devices of this process.
        checkpoints: takes the values of the checkpoint.
        position: where the run is.
        on_lead: whether this process has device 0, which alone warns.
    """

    def __init__(
        self, engine: Engine, checkpoints: Checkpoints, position: Position, *, on_lead: bool
    ) -> None:
        self._engine, self._checkpoints, self._position = engine, checkpoints, position
        self._on_lead = on_lead
        self._found: Found | None = None
        """The checkpoint, until its values are taken for good."""
        self._place: Place = None
        self._shown = self._over = self._warned = False
        self._block = ""
        """The line of the last block that acted on nothing, if it may have been meant to act."""

    def begin(self, found: Found) -> None:
        """Have the run stand where a checkpoint was made; its values come later."""
        self._found, self._place = found, found.stored.run.get("place")
        self._checkpoints.adopt_place(found)
        if self._on_lead:
            step, folder = self._position.step, found.stored.folder
            print(f"onefold: going on after step {step}: {folder}", file=sys.stderr)
        if self._place == "end":
            self._show(found)

    @property
    def _where(self) -> str:
        assert self._found is not None
        stored = self._found.stored
        return f"after step {stored.run['step']} from {stored.folder}"

    def reached(self, where: Reached) -> None:
        """Show or take the values where the script begins an epoch or a pass, or is past them."""
        if self._found is None or self._engine.averaging.is_shown:
            return
        self._over |= where == "over"
        known = self._place is None or (self._place == "end" and where == "epoch")
        if known and not self._position.awaits:
            self._take(self._found)
        elif not self._shown:
            self._show(self._found)

    def begin_step(self) -> None:
        """Take the values where the first step begins."""
        if self._found is None:
            return
        if self._place == "end" and self._block:
            self._warn(
                "the block of trainer.changing at %s was taken for one of the run that had ended, "
                "which this one goes on with %s, and has changed nothing. If it is to prepare the "
                "steps that follow, have it stand in a loop over trainer.epochs",
                *(self._block, self._where),
            )
        self._take(self._found)

    def end_block(self) -> None:
        """Undo what a block of `changing` has done, if the checkpoint has it already."""
        if self._found is None or not self._shown:
            return
        if self._place != "end" or not self._position.awaits:
            self._block = script_line()
        self._show(self._found)

    def note_result(self, call: str) -> None:
        """Warn once of what a call returns that the whole run made earlier than the checkpoint."""
        done = self._place == "end" and self._over
        if self._found is None or not self._shown or self._warned or done:
            return
        self._warned = True
        self._warn(
            "%s at %s comes before the place where this run goes on, %s: it uses the values of "
            "that checkpoint, and what it returns may not be what it was when the run came "
            "through here before. No later step may depend on it",
            *(call, script_line(), self._where),
        )

    def begin_save(self) -> None:
        """Have a save of the script in the part that is done hold what the checkpoint does."""
        if self._found is not None:
            self._show(self._found)
            self.note_result("trainer.save")

    def begin_anew(self) -> None:
        """Leave all to a `Trainer.load` of the script, which has just gone on from elsewhere."""
        if self._found is not None:
            self._warn(
                "trainer.load at %s takes the place of onefold run --checkpoint, which was to go "
                "on %s",
                *(script_line(), self._where),
            )
        self.end()

    def finish(self) -> None:
        """Warn at the end of a script that has not come to the place where its run goes on."""
        if self._found is not None and self._place != "end" and (self._block or not self._shown):
            self._warn(
                "the script has ended before the place where its run goes on, %s: %s",
                self._where,
                f"the block of trainer.changing at {self._block} has changed nothing"
                if self._shown
                else "its model has the values that the script gave it, and not the checkpoint's",
            )
        self.end()

    def end(self) -> None:
        """Take nothing more from the checkpoint."""
        if self._found is not None:
            self._found.close()
        self._found = None

    def _warn(self, text: str, *arguments: object) -> None:
        if self._on_lead:
            _log.warning(text, *arguments)

    def _take(self, found: Found) -> None:
        self._show(found)
        self.end()

    def _show(self, found: Found) -> None:
        # A loop may stand in a block of changes, as may a gradient.
        with self._engine.changes.closed(self._position.step + 1):
            self._checkpoints.take(found)
        self._shown = True
