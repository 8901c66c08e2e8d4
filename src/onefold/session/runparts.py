"""What a session lets the hooks of its run work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onefold.core.assignment import Devices
from onefold.core.batch import ShardedBatch
from onefold.core.context import LaunchContext
from onefold.core.settings import Settings
from onefold.data_order.position import Position
from onefold.session.batches import Batches
from onefold.session.userparts import UserParts
from onefold.shard.replica import LossFunction
from onefold.step.engine import Engine
from onefold.step.hook import Asked, Kind
from onefold.step.result import Step
from onefold.update.scheduler import RunScheduler

if TYPE_CHECKING:
    import torch

    from onefold.checkpoint.resume import Checkpoints
    from onefold.passes.averaged import Averaging
    from onefold.passes.modifying import Modifying

__all__ = ["RunParts", "RunTools"]


class RunTools(Protocol):
    """Makes the hooks of a run. Called in this order."""

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of the run, given those of the script."""

    def before_devices(
        self, user: UserParts, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        """Act before any device is used. The arguments of the script are checked."""

    def losses(self, user: UserParts) -> Mapping[str, LossFunction]:
        """Return the losses of the engine."""

    def begin(self, run: RunParts) -> None:
        """Make the hooks."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunParts:
    """A run, as its hooks see it."""

    context: LaunchContext
    engine: Engine
    devices: Devices
    position: Position
    scheduler: RunScheduler
    changes: Callable[[], Modifying]
    averaging: Callable[[], Averaging]
    """Both are made where they are first needed."""
    batches: Batches
    telling_others: Callable[[], AbstractContextManager[None]]
    """Surrounds what may raise between two calls to the others."""
    count: Callable[[Asked, Step, ShardedBatch | None], Step]
    """Counts a step that is answered, and tells the hooks of it; returns it with its number. None
    for a batch of the script's own that is not cut."""
    left: Callable[[], bool]
    """Whether this process has left the run, or has failed in it."""
    makers: dict[Kind, Callable[[Asked], Any]]
    """Make calls that a session does not make by itself; a hook puts them there."""
    checkpoints: Checkpoints = field(init=False)
    """There with the hook that makes them."""
    note_checkpoint: Callable[[int, Path, str], int] = lambda step, folder, line: 0
    """Notes a checkpoint in the record, if there is one; see `Checkpoints`."""
    found: list[Callable[[Any], None]] = field(default_factory=list)
    """Called with what one hook finds that another one writes down."""
