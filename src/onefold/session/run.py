"""A run as its tools see it: `RunSetup` before any device is used, then `RunView`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from onefold.core.assignment import Devices
from onefold.core.batch import ShardedBatch
from onefold.core.late import load
from onefold.core.options import LaunchContext
from onefold.core.settings import Settings
from onefold.data_order.position import Position
from onefold.exchange.progress import Progress
from onefold.session.batches import Batches
from onefold.session.user_parts import UserParts
from onefold.shard.task import LossFunction
from onefold.step.engine import Engine
from onefold.step.hook import ScriptCall
from onefold.step.result import Step
from onefold.update.scheduler import RunScheduler

if TYPE_CHECKING:
    from onefold.checkpoint.resume import Checkpoints
    from onefold.passes.averaged import Averaging
    from onefold.passes.modifying import Modifying
    from onefold.system.folder_lock import FolderLock

__all__ = ["RunSetup", "RunTools", "RunView"]


@dataclass(slots=True, kw_only=True, eq=False)
class RunSetup:
    """The parts of a Trainer; tools may replace settings and losses before the engine is made."""

    context: LaunchContext
    user: UserParts
    settings: Settings
    losses: Mapping[str, LossFunction]
    """The losses that the engine computes."""
    optimizer: torch.optim.Optimizer = field(init=False)


class RunTools(Protocol):
    """The tools of a run, called in this order on every device."""

    def adjust(self, start: RunSetup) -> None:
        """Replace settings before they are checked."""

    def prepare(self, start: RunSetup) -> None:
        """Act on checked arguments, before any device is used; may end the script."""

    def build_hooks(self, run: RunView) -> None:
        """Make the hooks of the run."""


_NO_RECORD = {"entries": 0, "head": ""}
"""What a checkpoint has seen of the record of a run that has none."""


@dataclass(kw_only=True, eq=False)
class RunView:
    """A run, as its tools see it."""

    context: LaunchContext
    engine: Engine
    devices: Devices
    position: Position
    scheduler: RunScheduler
    changes: Callable[[], Modifying]
    averaging: Callable[[], Averaging]
    """Both are made at the first call."""
    batches: Batches
    telling_others: Callable[[], AbstractContextManager[None]]
    """Surrounds code that may raise between two calls to the other devices."""
    count: Callable[[ScriptCall, Step, ShardedBatch | None], Step]
    """Counts a step that a hook answers, calls `Hook.after_step`, and returns the step with its
    number. The batch is None if the script made it and it was not cut."""
    left: Callable[[], bool]
    """Whether this process left the run, or failed in it."""
    note_checkpoint: Callable[[int, Path, str], Mapping[str, Any]] = lambda *about: _NO_RECORD
    """Notes a checkpoint in the record, if there is one; see `Checkpoints`."""
    progress: Progress | None = None
    """The table through which the launcher asks the run to stop, if there is one."""
    places: Progress | None = None
    """The table in which devices note where they are, if there is one."""
    recorded_in: Path | None = None
    """The folder of the run's record, if it is recorded."""
    lock: FolderLock | None = None
    """Of the directory in which the run saves itself, if it does; the lead's process holds it."""
    begun_after: int = 0
    """After which step the run resumes; 0 if it begins."""
    is_answered: bool = False
    """Whether the record answers the script up to there."""
    note_left_out: Callable[[int], None] = lambda kept: None
    """Notes in the record, if there is one, how many entries of the end of a run stay in it."""
    found: list[Callable[[Any], None]] = field(default_factory=list)
    """Called with each finding of a tool that another tool may record."""

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Saves and loads the run."""
        made: Checkpoints = load("checkpoint.resume").Checkpoints(
            *(self.engine, self.averaging(), self.devices, self.position, self.scheduler),
            note=lambda *about: self.note_checkpoint(*about),
        )
        return made

    @property
    def has_checkpoints(self) -> bool:
        """Whether `checkpoints` was used."""
        return "checkpoints" in vars(self)
