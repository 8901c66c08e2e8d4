"""A run as tools see it: `RunSetup` before any device is used, `RunView` afterwards."""

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
    """Parts of a Trainer. Tools may replace settings and losses before the engine is created."""

    context: LaunchContext
    user: UserParts
    settings: Settings
    losses: Mapping[str, LossFunction]
    """Losses that the engine computes."""
    optimizer: torch.optim.Optimizer = field(init=False)


class RunTools(Protocol):
    """The tools of a run. Every device calls these methods in this order."""

    def adjust(self, start: RunSetup) -> None:
        """Replace settings before they are checked."""

    def prepare(self, start: RunSetup) -> None:
        """Act on checked arguments before any device is used; may end the script."""

    def build_hooks(self, run: RunView) -> None:
        """Create the hooks of the run."""


_NO_RECORD = {"entries": 0, "head": ""}
"""State of the record in a checkpoint if the run has no record."""


@dataclass(kw_only=True, eq=False)
class RunView:
    """A run as tools see it."""

    context: LaunchContext
    engine: Engine
    devices: Devices
    position: Position
    scheduler: RunScheduler
    changes: Callable[[], Modifying]
    averaging: Callable[[], Averaging]
    """Modifying block and averages; both are created at the first call."""
    batches: Batches
    telling_others: Callable[[], AbstractContextManager[None]]
    """Context manager for code that may raise between two collective calls."""
    count: Callable[[ScriptCall, Step, ShardedBatch | None], Step]
    """Counts a step that was not computed, calls `Hook.after_step`, and returns the step with its
    number. The batch is None if the script made it and it was not cut."""
    left: Callable[[], bool]
    """Whether this process has left the run, or failed in it."""
    note_checkpoint: Callable[[int, Path, str], Mapping[str, Any]] = lambda *about: _NO_RECORD
    """Records a checkpoint, if the run has a record; see `Checkpoints`."""
    progress: Progress | None = None
    """Table through which the launcher requests a stop, if there is one."""
    places: Progress | None = None
    """Table in which devices record their positions, if there is one."""
    recorded_in: Path | None = None
    """Folder of the run's record, if it is recorded."""
    lock: FolderLock | None = None
    """Lock of the directory of automatic checkpoints, if any; the lead's process holds it."""
    begun_after: int = 0
    """Step after which the run resumes; 0 if it begins."""
    is_answered: bool = False
    """Whether the script is replayed up to that step."""
    note_left_out: Callable[[int], None] = lambda kept: None
    """Records how many entries of a finished run remain when the script extends it."""
    found: list[Callable[[Any], None]] = field(default_factory=list)
    """Functions called with each finding of a tool, so that another tool may record it."""

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
        """Whether `checkpoints` has been created."""
        return "checkpoints" in vars(self)
