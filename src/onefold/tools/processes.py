"""Prepares a worker's process for the tools of its run, before the script begins."""

from __future__ import annotations

from onefold.core.context import LaunchContext

__all__ = ["prepare_process"]


def prepare_process(context: LaunchContext) -> None:
    """Let the tools of a run change the process before the script imports anything."""
    if context.options.probe or context.options.inspection:
        from onefold.tools.verifying import prepare_process as prepare_for_verify

        prepare_for_verify(context)
