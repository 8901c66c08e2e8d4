"""How a launched run ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and what to tell the user about it."""

    exit_code: int
    """Exit code for the command line: 0 if all is well."""
    message: str = ""
    """One line about the first failure."""
    traceback: str = ""
    """The traceback of the first failure, if it was an exception."""
    logs: str = ""
    """The files with the output of the other devices, kept after a failure."""
    timeline: str = ""
    """The timeline's file, if one was asked for and a step was done."""
    final: bool = False
    """It ended well, as the user asked, or by a refusal: it is not started again."""
    failed: bool = False
    """A device failed; the run was not just stopped."""
    lost: int = -1
    """The device whose process was killed or did not respond, or whose GPU failed, if that was the
    failure; else -1."""
    stopped_by: signal.Signals | None = None
    """The signal that ended the run before it was done, if one did."""
    step: int = -1
    """The step that the lead was at when the run ended; -1 before the first step."""
