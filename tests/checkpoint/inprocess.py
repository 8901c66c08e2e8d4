"""``onefold run --checkpoint`` in this process: scripts that die anywhere, and go on again."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.exchange.progress import Progress
from onefold.launcher import membership
from onefold.launcher.membership import RunStopped
from onefold.session import forming
from tests.inside import run_in, session_in
from tests.small import make_trainer

Script = Callable[["Life"], str]
"""Makes its Trainer by `Life.trainer`, calls `Life.tick` wherever it may die; returns a result."""


@contextmanager
def new_progress(devices: int) -> Iterator[Progress]:
    """The table that the launcher and its devices share."""
    memory = os.memfd_create("progress")
    os.truncate(memory, Progress.nbytes(devices))
    try:
        yield Progress(memory, devices)
    finally:
        os.close(memory)


class Died(Exception):
    """The script was killed."""


class Life:
    """One start of a script.

    Args:
        devices: on so many.
        dies: in which call of `tick`, counted from 1; None to live on.
    """

    def __init__(self, devices: int, dies: int | None, progress: Progress | None = None) -> None:
        self._devices, self._left, self._progress = devices, dies, progress
        self.ticks = 0
        self.made: onefold.Trainer | None = None

    def trainer(self, *given: Any, **settings: Any) -> onefold.Trainer:
        self.made = make_trainer(*given, devices=self._devices, **settings)
        return self.made

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == self._left:
            raise Died

    def ask_to_stop(self) -> None:
        """As the launcher does when it gets a signal."""
        if self._progress is not None:
            self._progress.request_stop()


class Runs:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        folder.mkdir(parents=True, exist_ok=True)
        self.ticks = 0
        """How often the last script could have died."""

    def below(self, name: object) -> "Runs":
        """Runs that save in a folder of this name, inside of this one's."""
        return Runs(self.folder / str(name), self._patch)

    def whole(self, script: Script) -> str:
        """What a script returns that nothing saves and nobody stops."""
        life = Life(1, None)
        result = script(life)
        assert life.made is not None
        life.made.close()
        self.ticks = life.ticks
        return result

    def start(
        self,
        script: Script,
        devices: int = 1,
        *,
        dies: int | None = None,
        every: int = 1,
        **choices: Any,
    ) -> str | None:
        """What a script returns; None if it died or was stopped."""
        options = RunOptions(checkpoint=str(self.folder), save_every=every, **choices)
        with self._patch.context() as patch, new_progress(1) as progress:
            life = Life(devices, dies, progress)
            patch.setattr("onefold.trainer.current_context", lambda: LaunchContext(options=options))
            for name in ("progress_of", "places_of"):
                patch.setattr(f"onefold.tools.registry.{name}", lambda context: progress)
            patch.setattr(forming, "_trainers", itertools.count())
            patch.setattr(membership, "members", membership.Members())
            try:
                result: str | None = script(life)
                membership.end_well()
            except (Died, RunStopped):
                result = None
            finally:
                _leave(life)
        return result


def _leave(life: Life) -> None:
    """Let go of what the system would take from a process that has ended."""
    if life.made is None:
        return
    session = session_in(life.made)
    run_in(life.made).checkpoints.finish()
    session.hooks.close()
    session.engine.context.exchange.close()
