"""Answers a resumed script from the record of its run, until it is where its run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onefold.checkpoint.autosave import Resumption
from onefold.checkpoint.folder import folder_of
from onefold.core.batch import map_parts
from onefold.data_order.position import Reached
from onefold.record.entries import BlockEntry, Result, SavedEntry, StepEntry
from onefold.session.batches import read_now
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall
from onefold.step.result import Step

__all__ = ["Answers", "prepare"]


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Resume the run of a script, if it has a checkpoint."""

    def begin(run: RunView) -> Answers:
        run.resumption = Resumption(
            *(run.engine, run.changes(), run.checkpoints, run.position),
            run.devices,
        )
        return Answers(run, run.resumption)

    return begin


class Answers(Hook):
    """Answers the calls that a resumed script makes again.

    Args:
        run: the run.
        resumption: where it goes on.
    """

    def __init__(self, run: RunView, resumption: Resumption) -> None:
        self._run, self._resumption = run, resumption
        run.position.reached = self._reached

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Answer a call that was made before; have others act where the run goes on."""
        resumption = self._resumption
        match asked.kind:
            case "step" | "gradient":
                return self._step(asked, make)
            case "result":
                return self._result(asked, make)
            case "save":
                if (replay := resumption.answers(SavedEntry)) is not None:
                    replay.saved()
                    resumption.note_answer()
                    return folder_of(asked.given, self._run.position.step)
                resumption.begin_save()
            case "load":
                found = make()
                if found is not None:
                    resumption.begin_anew()
                return found
            case "statistics" if resumption.answering:
                return None  # all that is asked of the averages comes from the record
            case "replaying":
                return resumption.replaying
        return make()

    def _step(self, asked: ScriptCall, make: Make) -> Any:
        resumption, run = self._resumption, self._run
        replay = resumption.answers(StepEntry) if asked.kind == "step" else None
        if replay is None:
            if resumption.replay is not None and not resumption.answering:
                asked.given = map_parts(asked.given, read_now)
            if asked.begins:
                with run.telling_others():
                    resumption.begin_step()
            return make()
        cut = run.batches.cut(asked.given, asked.dim)[0]
        if (failure := replay.failure()) is not None:
            raise failure  # on all devices alike
        asked.computed, name = False, asked.name
        with run.telling_others():
            resumption.show()
            outcome, scheduler = replay.step(cut, name), run.scheduler
            scheduler.note_step(run.position.here, name, updates=outcome.verdict.updates)
            made = Step(0, cut.samples, cut.epoch, outcome, (), name)
            step = run.count(asked, made, cut)
            resumption.note_answer()
        return step

    def _result(self, asked: ScriptCall, make: Make) -> Any:
        resumption = self._resumption
        if (replay := resumption.answers(Result, asked.words)) is not None:
            known = replay.result(asked.words)
            resumption.note_answer()
            return known
        if asked.data is not None:  # it goes through data, by a model of another time
            resumption.note_result(asked.words)
        return make()

    @contextmanager
    def around(self, asked: ScriptCall) -> Iterator[None]:
        """Undo what a block does that was made before."""
        if asked.kind != "modifying":
            yield
            return
        replay = self._resumption.answers(BlockEntry)
        asked.computed = replay is None
        yield
        self._resumption.end_block(replay)

    def _reached(self, where: Reached) -> None:
        with self._run.telling_others():
            self._resumption.reached(where)

    def close(self) -> None:
        """Take nothing more from the checkpoint."""
        self._resumption.end()
