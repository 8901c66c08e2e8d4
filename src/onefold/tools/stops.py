"""Stops a run on request: by a signal, a notice, the launcher, or after a given step.

Note: notices
-------------
With ``--stop-notice``, one process of each host looks every two seconds for a notice that its
machine is about to end: a file that a scheduler writes, or the answer of a cloud's metadata server.
A thread does this, because a file server or a metadata server may take long to answer; a step only
reads a list. A failure to look, or an answer without sense, is reported once and never ends a run.

Every instance reaches its metadata server at the same fixed address, without a name server, a proxy
or a redirection, so nothing else is contacted. The rebalance recommendation of AWS is not read: it
may come hours before an interruption, or without one, and would stop each restarted run again.

A notice file that is left from an earlier run must not stop its continuation. A file therefore
counts once it differs from the file at the start of the process.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from http.client import HTTPConnection

from onefold.core.call_digest import StepRequests
from onefold.core.options import LaunchContext
from onefold.exchange.progress import WAITING
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, ScriptCall, Spans, Surrounds
from onefold.step.result import Step
from onefold.system.stop_signals import take_requests

__all__ = ["CLOUDS", "StopRequests", "notice_of", "prepare", "requests_by_signals"]

_log = logging.getLogger("onefold")
# Goes to the terminal of every host, although the output of most devices goes to log files.
_screen = logging.getLogger(WAITING)

PAUSE_S, ANSWER_S = 2.0, 2.0
"""Interval between two looks, and time limit for each part of an answer, in seconds."""
_MOST_BYTES, _SHOWN = 16 * 1024, 200
"""Maximum length of an answer, and of its text in a message. Azure lists the events of a whole
group of machines."""


@functools.cache
def requests_by_signals(names: tuple[str, ...]) -> list[bool]:
    """Register signals as stop requests, once per process; return a list that grows by requests."""
    came: list[bool] = []
    if threading.current_thread() is threading.main_thread():
        take_requests([signal.Signals[f"SIG{name}"] for name in names], lambda: came.append(True))
    elif names:
        _log.warning(
            "Python handles signals only in the main thread, but this Trainer is created in "
            "another thread, so %s will not stop the run. Create the Trainer in the main thread",
            ", ".join(names),
        )
    return came


def prepare_process(context: LaunchContext) -> None:
    """Take signals before the script begins, which may take long to make its Trainer."""
    requests_by_signals(context.options.stop_signals)
    if context.options.stop_notice and context.local_rank == 0:
        notice_of(context.options.stop_notice)


def prepare(start: RunSetup) -> Callable[[RunView], Hook]:
    """Handle signals from now on: while waiting for others, a signal would kill this process."""
    prepare_process(start.context)
    return StopRequests


class StopRequests(Hook):
    """Passes a stop request of this process to each step.

    Devices see a signal or a notice at different times; the step agrees on one answer.

    Args:
        run: the run.
    """

    def __init__(self, run: RunView) -> None:
        options = run.context.options
        self._position, self._progress = run.position, run.progress
        self._requests = requests_by_signals(options.stop_signals)
        self._stops_after, self._saves = options.stops_after, bool(options.checkpoint)
        self._end = threading.Event()
        if options.stop_notice and run.context.local_rank == 0:
            # A daemon, because it may wait for an answer when the run ends.
            given = notice_of(options.stop_notice)
            threading.Thread(target=self._look, args=given, name="notices", daemon=True).start()

    def around(self, asked: ScriptCall) -> Surrounds:
        """Note a stop request right before all devices agree on it."""
        if (
            self._requests
            or self._stops_after == self._position.step + 1
            or (self._progress is not None and self._progress.stop_requested())
        ):
            asked.requests |= StepRequests.STOP
        return None

    def after_step(self, asked: ScriptCall, step: Step, spans: Spans) -> None:
        """Report a stop that devices of another host requested to this host's launcher."""
        if self._progress is not None and StepRequests.STOP in step.outcome.verdict.requests:
            self._progress.request_stop()

    def close(self) -> None:
        """End the thread that looks for notices, once it has its answer."""
        self._end.set()

    def _look(self, name: str, find: Find) -> None:
        """Look for a notice until it comes; the loop of a thread."""
        failed = found = ""
        while not found and not self._end.is_set():
            try:
                if found := find():
                    self._note(f"{found[:_SHOWN]} (host {socket.gethostname()})")
            # However wrong an answer is, it must not end the run.
            except Exception as error:
                if not failed:
                    failed = f"{type(error).__name__}: {error}"[:_SHOWN]
                    words = "onefold: cannot read %s: %s. No notice stops the run until this works"
                    _screen.warning(words, name, failed)
            self._end.wait(PAUSE_S)

    def _note(self, notice: str) -> None:
        stops = "saves itself and stops" if self._saves else "is asked to stop"
        _screen.warning("onefold: %s. The run %s after the next step", notice, stops)
        self._requests.append(True)
        # The launcher starts the grace period, and expects the exit code of a stopped run.
        if self._progress is not None:
            self._progress.request_stop()


Find = Callable[[], str]
"""Returns a notice in words; nothing without one. May raise any exception."""


@functools.cache
def notice_of(source: str, address: str = "169.254.169.254") -> tuple[str, Find]:
    """Return the name of a source of notices, and a function that looks for its notice.

    It is made once per process, because a file is compared with the one at the start.

    Args:
        source: path of a file, or one of `CLOUDS`.
        address: address of the metadata server, the same for every cloud.
    """
    if find := CLOUDS.get(source):
        cloud = source.upper()
        words = f"{cloud} announced the end of this instance"
        name = f"the metadata server of {cloud} at {address}"
        return name, lambda: words + when if (when := find(partial(_ask, address))) else ""
    before, name = _identity(source), f"the notice file {source}"
    if not os.path.isdir(os.path.dirname(source)):
        raise ValueError(f"the folder of {name} does not exist on this host. Create it first")
    if before:
        _log.warning("%s is older than this run: it is ignored until it is written again", name)
    return name, lambda: f"{name} was written" if _identity(source) not in ((), before) else ""


def _identity(path: str) -> tuple[int, ...]:
    """Return numbers that change if a file is written or replaced; nothing without a file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _ask(
    address: str, path: str, headers: dict[str, str], *, method: str = "GET", absent: int = 200
) -> str:
    """Return the answer of a metadata server; nothing if its status is ``absent``."""
    # HTTPConnection reads no variables of proxies and follows no redirections.
    with closing(HTTPConnection(address, timeout=ANSWER_S)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            text = answer.read(_MOST_BYTES + 1)
    if answer.status not in (200, absent) or len(text) > _MOST_BYTES:
        raise ValueError(f"{method} {path}: status {answer.status}, {len(text)} bytes")
    return text.decode().strip() if answer.status == 200 else ""


def _of_aws(ask: Callable[..., str]) -> str:
    limit = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = {"X-aws-ec2-metadata-token": ask("/latest/api/token", limit, method="PUT")}
    if not (text := ask("/latest/meta-data/spot/instance-action", token, absent=404)):
        return ""
    found = json.loads(text)
    return f" at {found['time']} ({found['action']})"


def _of_gcp(ask: Callable[..., str]) -> str:
    text = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if text not in ("TRUE", "FALSE"):
        raise ValueError(f"expected TRUE or FALSE, but got {text!r}")
    return " in 30 seconds or less" if text == "TRUE" else ""


def _of_azure(ask: Callable[..., str]) -> str:
    header = {"Metadata": "true"}
    events = json.loads(ask("/metadata/scheduledevents?api-version=2020-07-01", header))["Events"]
    for event in (each for each in events if each["EventType"] == "Preempt"):
        # The machines of a group see each other's events.
        own = ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
        if own.casefold() in map(str.casefold, event["Resources"]):
            return f" at {event['NotBefore'] or 'any moment'}"
    return ""


CLOUDS = {"aws": _of_aws, "gcp": _of_gcp, "azure": _of_azure}
"""Asks the metadata server of each cloud when this instance ends; empty if it does not."""
