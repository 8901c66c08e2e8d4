"""Compares the checkpoint folders of several hosts, of which only the lead's is used.

The folder may be shared or not: the lead alone reads and writes it, and sends each device what it
needs. A run must not start from scratch because its lead is on another host than its checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from onefold.checkpoint.folder import readable_records, try_directory
from onefold.errors import CheckpointError
from onefold.session.run import RunSetup, RunView

__all__ = ["check_folders", "prepare"]

_log = logging.getLogger("onefold")
_Folder = tuple[str, bool, str, int, int]
"""Name of a host, whether it sees the lead's folder, and run, serial number and step of its newest
checkpoint."""


def prepare(start: RunSetup) -> Callable[[RunView], None]:
    """Compare the folders before the lead looks for a checkpoint."""

    def begin(run: RunView) -> None:
        if run.engine.context.with_others:
            directory = Path(run.context.options.checkpoint)
            with run.telling_others():
                words = check_folders(_folders(run, directory), directory)
            if words and run.devices.has_lead:
                _log.warning(words)

    return begin


def _folders(run: RunView, directory: Path) -> list[_Folder]:
    number, gather = run.devices.own[0], run.engine.context.exchange.transport.all_gather_values
    with contextlib.ExitStack() as marks:
        mark = ""
        if run.devices.has_lead:
            try_directory(directory)
            mark = marks.enter_context(
                tempfile.TemporaryDirectory(prefix=".onefold-", dir=directory)
            )
        # A random name, so no other folder has it.
        sees = (directory / Path(gather({number: mark})[0]).name).exists()
        newest = ("", 0, 0)
        # A folder that cannot be read has nothing that this host could give.
        with contextlib.suppress(OSError):
            records = readable_records(directory).values()
            each = [(run["run"], run["serial"], run["step"]) for run in records]
            newest = max(each, key=lambda found: found[1:], default=newest)
        return [tuple(found) for found in gather({number: [socket.gethostname(), sees, *newest]})]


def check_folders(folders: Sequence[_Folder], directory: Path) -> str:
    """Return a warning if other hosts do not see the lead's folder; empty if all do.

    Args:
        folders: those of all devices, the lead's first.
        directory: the lead's folder.

    Raises:
        CheckpointError: another host has checkpoints that the lead lacks.

    >>> check_folders([("node1", True, "", 0, 0), ("node2", True, "", 0, 0)], Path("runs"))
    ''
    """
    lead, _, run, serial, step = folders[0]
    apart = [each for each in folders if not each[1]]
    for host, _, other, newer, there in apart:
        if other and (not run or (other == run and newer > serial)):
            has = f"its newest one is of step {step}" if run else "there is none"
            raise CheckpointError(
                f"{host} has a checkpoint of step {there} in {directory}, but the run resumes from "
                f"the folder of device 0, which is on {lead}, and {has}. Start device 0 on {host} "
                f"(for --hosts, list it first), copy the folder to {lead}, or remove it from {host}"
            )
    if not apart:
        return ""
    names = ", ".join(sorted({each[0] for each in apart}))
    return (
        f"checkpoints are kept on {lead} alone, in {directory}, which is not visible on {names}. "
        f"To resume, start device 0 on {lead} again"
    )
