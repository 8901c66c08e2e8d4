"""The part of a run on one host, which `onefold.launcher.hosts` starts as a program.

Arguments: value of ``--devices``, and a descriptor for answers if stdout belongs to the script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onefold.core.options import LaunchContext
from onefold.errors import LaunchError, OnefoldError
from onefold.launcher.devices import select_devices
from onefold.launcher.environment import kernel_flags
from onefold.launcher.hosts import Channel
from onefold.launcher.launch import LaunchedRun
from onefold.launcher.workers import Logs
from onefold.system.stop_signals import StopSignals
from onefold.system.words import message_of

__all__ = ["main"]


def main(devices: str, answers: int | None = None) -> int:
    """Run this host's part; return the exit code of the process."""
    if answers is None:
        # Output of the script must not be read as an answer.
        answers = os.dup(1)
        os.dup2(2, 1)
    os.set_inheritable(answers, False)
    channel = Channel(os.dup(0), answers)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    channel.keep_alive()
    try:
        found = select_devices(devices)
        channel.send({"onefold": version("onefold"), "devices": found.devices})
        job = _next(channel)
        if job is None:
            return 1
        place = LaunchContext.from_json(job["place"])
        for name in kernel_flags().keys() - job["kernel_flags"].keys():
            os.environ.pop(name)
        os.environ.update(job["kernel_flags"])
        _enter(job["folder"], job["command"])
    except (OnefoldError, ValueError, OSError) as error:
        channel.send({"refused": message_of(error)})
        return 1
    return _run(channel, place, job["command"])


def _next(channel: Channel) -> dict[str, Any] | None:
    """Wait for a message; None if the first host has ended."""
    while not channel.messages and not channel.is_over:
        channel.receive()
    return channel.messages.popleft() if channel.messages else None


def _enter(folder: str, command: list[str]) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"the folder {folder} of the first host cannot be used on {socket.gethostname()}: "
            f"{error.strerror}. The script and its folder must be at the same path on all hosts"
        ) from None
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise LaunchError(
            f"the script {command[0]} does not exist on {socket.gethostname()}. The script and its "
            f"folder must be at the same path on all hosts"
        )


def _run(channel: Channel, place: LaunchContext, command: list[str]) -> int:
    ranks = range(max(place.rank, 1), place.rank + place.local_size)
    with (
        StopSignals(saves=place.options.may_stop) as signals,
        contextlib.closing(Logs("", ranks)) as logs,
    ):
        # Daemon, because it may wait for the first host when the run has ended.
        threading.Thread(target=_relay_signals, args=(channel,), daemon=True).start()
        run = LaunchedRun(command, place, signals, logs)
        outcome = logs.name_in(run.attempt(place.leave_out))
        # Here, because a late signal would end this process outside of the block.
        channel.send({"outcome": asdict(outcome)})
        return outcome.exit_code


def _relay_signals(channel: Channel) -> None:
    """Act on the signals that the first host passes on; end the run if that host is gone."""
    while message := _next(channel):
        os.kill(os.getpid(), signal.Signals[message["signal"]])
    # Two requests end a run at once, see `StopSignals.drain`.
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
