"""Starts one process for each device of this machine, watches over them, and tells how they ended.

This module does not load PyTorch: the workers can start before the launcher would have.

Note: how a run ends
--------------------
Each worker leads a process group of its own, so its children (loader workers) end with it. The
kernel kills a worker whose launcher is gone. When one worker fails, the others notice by themselves
(they wait for it) and are given ``_LAST_WORDS_S`` to say so; then whatever is left is killed. The
first failure that no other device caused is the one that the user is told.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onefold.devices import Selection, select_devices
from onefold.errors import RunFailed
from onefold.process import stopped_process
from onefold.rundir import STOPPED_CODE, Report, RunDirectory
from onefold.timeline import join_timeline, remove_parts
from onefold.world import DEFAULT_TIMEOUT_S, ExchangeName, World, current_world, worker_environment

__all__ = ["DEFAULT_GRACE_S", "LaunchOptions", "Outcome", "launch", "supervise"]

_LAST_WORDS_S = 3.0
_LOOK_S = 0.5
_STOPPED_LOOKS = 8
_INTERRUPTED = 130
DEFAULT_GRACE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What a launcher may settle for a run."""

    exchange: ExchangeName = "auto"
    """Which exchange to use between processes."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The longest that a device waits for another one."""
    trace: str = ""
    """File that takes one JSON line a step."""
    profile: str = ""
    """Folder that takes the timeline; it must be there."""
    checkpoint: str = ""
    """Directory of checkpoints: go on from the newest there, and write new ones."""
    every: int = 200
    """Steps from one checkpoint to the next."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    changed: tuple[str, ...] = ()
    """What may differ from the run whose checkpoints they are."""
    grace_s: float = DEFAULT_GRACE_S
    """How long a run with checkpoints may take to save itself when it is asked to stop."""
    restarts: int = 0
    """How many times the workers are started again after a failure, from the last checkpoint."""
    probe: str = ""
    """Folder for the comparison of runs."""
    probe_steps: int = 0
    """Steps to compare."""
    probe_records: bool = False
    """Record what others are compared with, rather than compare."""
    probe_mathematics: str = ""
    """Compare V shards with one in this run, in ``float64`` or ``float32``."""
    logs: str = ""
    """Folder that keeps the output of the devices other than the lead."""
    quiet: bool = False
    """The lead's output goes to a log file as well."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"the timeout must be more than 0 s, got {self.timeout_s}")
        for name, value, least in (
            ("every", self.every, 1),
            ("keep", self.keep, 1),
            ("restarts", self.restarts, 0),
        ):
            if value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")
        if not self.grace_s > 0:
            raise ValueError(f"the grace must be more than 0 s, got {self.grace_s}")
        if self.restarts and not self.checkpoint:
            raise ValueError("restarts go on from the last checkpoint: name a directory for them")
        if self.exchange not in ("auto", "shared", "collective"):
            raise ValueError(
                f"expected the exchange to be auto, shared or collective, got {self.exchange!r}"
            )


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
    """Folder with the output of the other devices, kept after a failure."""
    timeline: str = ""
    """File of the timeline, if one was asked for and a step was done."""
    final: bool = False
    """It ended well, or as somebody asked: there is nothing to start again."""


def launch(
    main: Callable[..., Any],
    *,
    devices: int | str | Sequence[str] = "auto",
    args: Sequence[Any] = (),
    exchange: ExchangeName = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run a function on several devices of this machine and return what it returns on the lead.

    Each device is a new Python process that calls ``main(*args)``. From a script, call it under
    ``if __name__ == "__main__":``; in a notebook, simply call it. In a process that is itself part
    of a run it only calls ``main``.

    Args:
        main: makes its own model, optimizer and Trainer. Sent by value if it is defined in a
            script or notebook.
        devices: a number, ``"auto"``, ``"cpu:2"`` or a list such as ``["cuda:1", "cuda:3"]``.
        args: for ``main``.
        exchange: ``"auto"``, ``"shared"`` or ``"collective"``.
        timeout_s: the longest that a device waits for another one.

    Raises:
        RunFailed: a device failed; the message carries the first traceback.
        LaunchError: a device is not there.

    >>> onefold.launch(lambda: 6 * 7, devices="cpu:1")
    42
    """
    if current_world().launched:
        return main(*args)
    import cloudpickle

    selection = select_devices(devices)
    options = LaunchOptions(exchange=exchange, timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="onefold-call-") as folder:
        payload, result = Path(folder, "call"), Path(folder, "result")
        # In two layers: what is inside may only be found along the path that is outside.
        call = cloudpickle.dumps((main, tuple(args)))
        payload.write_bytes(pickle.dumps((list(sys.path), call)))
        command = ["--call", str(payload), str(result)]
        outcome = supervise(command, selection, options)
        if outcome.exit_code:
            raise RunFailed(
                "\n".join(filter(None, [outcome.message, outcome.traceback])), outcome.exit_code
            )
        return cloudpickle.loads(result.read_bytes())


def supervise(command: Sequence[str], selection: Selection, options: LaunchOptions) -> Outcome:
    """Start a worker for each device, and return when all have ended.

    Args:
        command: for ``onefold.worker``: a script and its arguments, or ``--call`` and two paths.
        selection: the devices.
        options: of the run.
    """
    folder = Path(options.logs or tempfile.mkdtemp(prefix="onefold-"))
    folder.mkdir(parents=True, exist_ok=True)
    directory = RunDirectory(folder, len(selection.devices))
    directory.clear_logs()
    for attempt in range(options.restarts + 1):
        outcome = _attempt(command, selection, options, directory)
        if outcome.final or attempt == options.restarts:
            break
        print(
            f"{outcome.traceback}onefold: {outcome.message}\n"
            f"onefold: starting again ({attempt + 1} of {options.restarts})",
            file=sys.stderr,
        )
    if options.profile and (timeline := join_timeline(Path(options.profile))):
        outcome = replace(outcome, timeline=str(timeline))
    if not options.logs and not (outcome.exit_code and directory.log_sizes()):
        shutil.rmtree(folder)
        return replace(outcome, logs="")
    return outcome


def _attempt(
    command: Sequence[str], selection: Selection, options: LaunchOptions, directory: RunDirectory
) -> Outcome:
    directory.create()
    crew = _Crew(directory, selection.devices)
    if options.profile:
        remove_parts(Path(options.profile))
    requests = _StopRequests(directory, options.grace_s) if options.checkpoint else None
    interrupted = False
    try:
        with requests or contextlib.nullcontext():
            crew.start(command, selection, options)
            crew.watch(requests)
    except KeyboardInterrupt:
        interrupted = True
        crew.interrupt()
    except _StoppedAtOnce:
        interrupted = True
    finally:
        crew.end()
    if requests is not None and requests.came:
        return crew.stopped_outcome(requests, options.checkpoint)
    return crew.interrupted_outcome() if interrupted else crew.outcome()


class _StoppedAtOnce(Exception):
    """A second signal came, or the time for stopping is over."""


class _StopRequests:
    """Passes the first signal to stop on to the workers, and ends the run at the second.

    Args:
        directory: of the run.
        limit_s: how long the workers may take.
    """

    def __init__(self, directory: RunDirectory, limit_s: float) -> None:
        self._progress = directory.progress()
        self._limit_s = limit_s
        self._deadline_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self.signal: signal.Signals | None = None
        """Which one came."""
        self.twice = False
        """A second one came."""

    @property
    def came(self) -> bool:
        """Whether the run was asked to stop, through the launcher or a worker."""
        return self.signal is not None or self._progress.stop_requested()

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._take)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """End the run if its time for stopping is over."""
        if self.came and not self._deadline_s:  # a device has been asked
            self._deadline_s = time.monotonic() + self._limit_s
        if self._deadline_s and time.monotonic() > self._deadline_s:
            raise _StoppedAtOnce

    def _take(self, number: int, frame: object) -> None:
        if self.signal is not None:
            self.twice = True
            raise _StoppedAtOnce
        self.signal = signal.Signals(number)
        self._deadline_s = time.monotonic() + self._limit_s
        self._progress.request_stop()


class _Worker:
    """One process of the crew."""

    def __init__(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.device = device
        self.process = process
        self.ended_s: float | None = None
        self.stopped_looks = 0
        self.unresponsive = False
        self.ended_by_us = False

    def __str__(self) -> str:
        return f"device {self.rank} ({self.device}, process {self.process.pid})"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and all its children."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return  # all of them have ended


class _Crew:
    """The workers of one run."""

    def __init__(self, directory: RunDirectory, devices: Sequence[str]) -> None:
        self._directory = directory
        self._devices = devices
        self._workers: list[_Worker] = []

    def start(self, command: Sequence[str], selection: Selection, options: LaunchOptions) -> None:
        run_id = uuid.uuid4().hex
        for rank, device in enumerate(self._devices):
            world = World(
                rank=rank,
                size=len(self._devices),
                run_id=run_id,
                launcher="onefold",
                devices=selection.devices,
                may_leave=selection.may_leave,
                exchange=options.exchange,
                timeout_s=options.timeout_s,
                directory=str(self._directory.path),
                trace=options.trace,
                profile=options.profile,
                checkpoint=options.checkpoint,
                checkpoint_every=options.every,
                checkpoint_keep=options.keep,
                checkpoint_changed=options.changed,
                probe=options.probe,
                probe_steps=options.probe_steps,
                probe_records=options.probe_records,
                probe_mathematics=options.probe_mathematics,
                local_rank=rank,
                local_size=len(self._devices),
            )
            own_log = rank > 0 or options.quiet
            process = _start_worker(command, world, self._directory.log(rank) if own_log else None)
            self._workers.append(_Worker(rank, device, process))

    def watch(self, requests: _StopRequests | None) -> None:
        """Return when all have ended well, or when it is clear that one has not."""
        while waiting := self._running():
            if requests is not None:
                requests.check()
            if not _wait_for_end(waiting, _LOOK_S):
                for worker in waiting:
                    self._look_at(worker)
            if self._note_ended() or any(worker.unresponsive for worker in self._workers):
                self._wait_for_words()
                return

    def interrupt(self) -> None:
        """Pass Ctrl-C on and give the workers a moment to put things in order."""
        for worker in self._running():
            worker.ended_by_us = True
            worker.process.send_signal(signal.SIGINT)
        self._wait_for_words()

    def end(self) -> None:
        """Kill whatever is left, children of the workers included."""
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.ended_by_us = True
            worker.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.process.poll() is None]

    def _note_ended(self) -> bool:
        """Note who has ended since; whether any of them ended badly."""
        for worker in self._workers:
            if worker.process.poll() is not None and worker.ended_s is None:
                worker.ended_s = time.time()
        ended = [worker.process.poll() for worker in self._workers]
        return any(code not in (None, 0, STOPPED_CODE) for code in ended)

    def _look_at(self, worker: _Worker) -> None:
        stopped = stopped_process(worker.process.pid)
        worker.stopped_looks = worker.stopped_looks + 1 if stopped else 0
        worker.unresponsive = worker.stopped_looks >= _STOPPED_LOOKS

    def _wait_for_words(self) -> None:
        limit = time.monotonic() + _LAST_WORDS_S
        while (waiting := self._running()) and time.monotonic() < limit:
            _wait_for_end(waiting, limit - time.monotonic())
            self._note_ended()

    def interrupted_outcome(self) -> Outcome:
        text = f"stopped by Ctrl-C in step {self._step_text(0)} (device 0)"
        return Outcome(_INTERRUPTED, text, final=True)

    def stopped_outcome(self, requests: _StopRequests, checkpoint: str) -> Outcome:
        """How a run ended that was asked to save itself and stop."""
        codes = {worker.process.returncode for worker in self._workers}
        name = requests.signal.name if requests.signal else "a signal to a device"
        if codes == {0}:
            return Outcome(0, final=True)
        if codes <= {0, STOPPED_CODE}:
            done = self._directory.progress().step_of(0) - 1
            text = (
                f"stopped by {name} after step {done} and saved in {checkpoint}: the same command "
                f"goes on from there"
            )
            return Outcome(STOPPED_CODE, text, final=True)
        failed = self.outcome()
        if failed.exit_code:
            return replace(failed, final=True)
        why = "a second signal came" if requests.twice else "its time for saving was over"
        text = (
            f"stopped by {name} in step {self._step_text(0)} (device 0) before it had saved "
            f"itself, as {why}; earlier checkpoints, if any, are in {checkpoint}"
        )
        return Outcome(128 + (requests.signal or signal.SIGTERM), text, final=True)

    def outcome(self) -> Outcome:
        """The first failure that no other device caused."""
        failures = [failure for worker in self._workers if (failure := self._failure(worker))]
        if not failures:
            return Outcome(0, logs=str(self._directory.path), final=True)
        _, _, outcome = min(failures, key=lambda failure: failure[:2])
        return replace(outcome, logs=str(self._directory.path))

    def _failure(self, worker: _Worker) -> tuple[bool, float, Outcome] | None:
        """Whether another device caused it, when it was, and what to say."""
        ended_s = worker.ended_s or time.time()
        report = self._directory.read_report(worker.rank)
        step = self._step_text(worker.rank)
        if report is not None:
            return report.caused_by_peer, report.time_s, self._told(worker, report)
        if worker.unresponsive:
            text = f"{worker} is stopped and does not respond, in step {step}"
            return False, ended_s, Outcome(1, text)
        code = worker.process.returncode
        if worker.ended_by_us or code == 0:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (the system does this when memory runs out)" if code == -9 else ""
            text = f"{worker} was killed by {name}{hint} in step {step}"
            return False, ended_s, Outcome(128 - code, text)
        return False, ended_s, Outcome(code, f"{worker} ended with exit code {code} in step {step}")

    def _told(self, worker: _Worker, report: Report) -> Outcome:
        step = self._step_text(worker.rank)
        if report.caused_by_peer:  # it says who; where this device stood is of no interest
            return Outcome(1, report.text)
        text = f"{worker} failed in step {step}: {report.kind}: {report.text}"
        return Outcome(1, text, report.traceback)

    def _step_text(self, rank: int) -> str:
        step = self._directory.progress().step_of(rank)
        return str(step) if step >= 0 else "0 (before the first step)"


def _start_worker(
    command: Sequence[str], world: World, log: Path | None
) -> subprocess.Popen[bytes]:
    whole = [sys.executable, "-m", "onefold.worker", str(os.getpid()), *command]
    environment = worker_environment(world)
    if log is None:
        return subprocess.Popen(
            whole, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    with log.open("ab") as output:
        return subprocess.Popen(
            whole,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_for_end(workers: Sequence[_Worker], limit_s: float) -> bool:
    """Whether one of the workers has ended within the limit."""
    poller = select.poll()
    descriptors = [os.pidfd_open(worker.process.pid) for worker in workers]
    try:
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(max(0.0, limit_s) * 1000))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
