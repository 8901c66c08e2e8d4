"""How a launched run ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """What the command line should return: 0 if all is well."""
    message: str = ""
    """One line about the first failure."""
    traceback: str = ""
    """Of the first failure, if it was an exception."""
    logs: str = ""
    """The files with the output of the other devices, kept after a failure."""
    timeline: str = ""
    """File of the timeline, if one was asked for and a step was done."""
    final: bool = False
    """It ended well, or as somebody asked: there is nothing to start again."""
    failed: bool = False
    """A device failed, rather than that somebody ended the run."""
    stopped_by: signal.Signals | None = None
    """The signal that ended it before it was done."""
    step: int = -1
    """What the lead was at when it ended; -1 before the first step."""
