"""Chooses where the output of the devices other than the lead goes, and what is kept of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from onefold.core.options import RunOptions
from onefold.run.outcome import Outcome
from onefold.run.rundir import Logs
from onefold.system.ownfiles import PrivateFolder

__all__ = ["LogFiles", "log_files"]


class LogFiles:
    """The logs of a run: in the folder that the user named, or in one kept only after a failure."""

    def __init__(self, options: RunOptions, ranks: Sequence[int]) -> None:
        self._private = None if options.logs else PrivateFolder()
        place = Path(options.logs) if self._private is None else self._private.path
        self._logs = Logs(place, ranks)
        self._any = bool(ranks)
        self._keeps = False
        self.descriptor = self._logs.descriptor
        if ranks and self._logs.number > 1:
            print(
                f"onefold: {place} has logs already: those of this run are {self._logs.pattern}",
                file=sys.stderr,
            )

    def mention(self, outcome: Outcome) -> Outcome:
        """Add the place of the logs to an outcome, if there are any worth reading."""
        if self._private is None:
            useful = self._any
        else:
            useful = outcome.failed and self._logs.size() > 0 and self._private.is_there()
        if not useful:
            return replace(outcome, logs="")
        # A path that the user has read must last, so this decides that the folder is kept.
        self._keeps = True
        folder, first = self._logs.folder, self._logs.number == 1
        return replace(outcome, logs=str(folder) if first else self._logs.pattern)

    def close(self) -> None:
        """Close the files, and remove a private folder that no outcome mentions."""
        self._logs.close()
        if self._private is not None:
            leave = self._private.keep if self._keeps else self._private.remove
            leave()


@contextlib.contextmanager
def log_files(options: RunOptions, ranks: Sequence[int]) -> Iterator[LogFiles]:
    """Open the logs of a run for as long as the block lasts."""
    files = LogFiles(options, ranks)
    try:
        yield files
    finally:
        files.close()
