"""The options of a run that ``onefold verify`` compares with others."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.core.context import LaunchContext

__all__ = ["VerifyOptions", "options_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `RunOptions.tools` has under ``verify``."""

    folder: str = ""
    """Folder of the comparison; empty if this run is not compared."""
    run: str = ""
    """Name of this run in that folder."""
    steps: int = 0
    """How many steps are compared."""
    trainers: int = 0
    """Number of Trainers after whose compared steps the script ends; 0 for all."""
    records: bool = False
    """Whether this run keeps its tensors for the others, instead of comparing them."""
    mathematics: str = ""
    """The dtype in which V shards are compared with one, ``float64`` or ``float32``."""


def options_of(context: LaunchContext) -> VerifyOptions:
    """Return the options of the comparison that a process takes part in."""
    return VerifyOptions(**context.options.tools.get("verify", {}))
