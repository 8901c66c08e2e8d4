"""The program that a launcher starts for each device: the launcher's part, with all tools."""

from __future__ import annotations

import sys

from onefold.launcher.worker import main as run_worker
from onefold.tools.registry import prepare_process

__all__ = ["main"]


def main() -> int:
    """Run what the launcher asked for, and return the exit code of the process."""
    return run_worker(sys.argv[1:], prepare_process)
