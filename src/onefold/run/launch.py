"""Starts one process for each device of this machine, watches over them, and tells how they ended.

This module does not load PyTorch: the workers can start before the launcher would have.

Note: how a run ends
--------------------
Each worker leads a process group of its own, so its children (loader workers) end with it. The
kernel kills a worker whose launcher is gone. When one worker fails, the others notice by themselves
(they wait for it) and are given ``_LAST_WORDS_S`` to say so; then whatever is left is killed. The
first failure that no other device caused is the one that the user is told.

Note: whose number a process has
--------------------------------
The number of a process, and of its group, is given to another one as soon as its end was collected
(by wait, or by Popen.poll, which does so as well). So nobody collects before the end of the run:
that a worker has ended is learnt without collecting it (WNOWAIT, or its descriptor), its group is
killed while its number is still taken, and only then is it collected. No signal is sent afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onefold.core.numbers import check_seconds
from onefold.core.options import DEFAULT_GRACE_S, DEFAULT_TIMEOUT_S, ExchangeName, RunOptions
from onefold.core.world import World
from onefold.errors import LaunchError, RunFailed
from onefold.run.devices import Selection, select_devices
from onefold.run.restarts import checkpoints_to_leave_out, words_of_restart
from onefold.run.rundir import Board, Logs, Report
from onefold.run.world import current_world, worker_environment
from onefold.system.interrupt import STOPPED_CODE, StopSignals, ctrl_c_later
from onefold.system.ownfiles import PrivateFolder
from onefold.system.process import LOOK_S, Stillness
from onefold.system.record import check_trace
from onefold.watch.timeline import check_timeline, join_timeline

__all__ = ["Outcome", "launch", "supervise"]

_LAST_WORDS_S = 3.0
_KILLED_S = 30.0
"""How long a process that was killed may take to end: one may be waiting inside the system."""
_PARTS = "timeline"
_START = (
    "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.append(root); "
    "from onefold.run.worker import main; sys.exit(main(sys.argv[1:]))"
)
"""Of a worker, with ``-P``: the current folder, where somebody may have put a ``pickle.py``, is not
on its path while libraries are loaded. Where onefold was found is, behind everything else."""
_ROOT = str(Path(__file__).resolve().parents[2])


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


def launch(
    main: Callable[..., Any],
    *,
    devices: int | str | Sequence[str] = "auto",
    args: Sequence[Any] = (),
    exchange: ExchangeName = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float | None = None,
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
        grace_s: how long ``main`` may take to save itself after the first SIGINT, SIGTERM or
            SIGHUP, which sets ``trainer.asked_to_stop`` on all devices; without it, these end the
            run at once.

    Raises:
        RunFailed: a device failed, or the run was stopped; the message carries the first traceback.
        LaunchError: a device is not there.
        TypeError, ValueError: an argument is not usable.

    >>> onefold.launch(lambda: 6 * 7, devices="cpu:1")
    42
    """
    if current_world().launched:
        return main(*args)
    import cloudpickle

    selection = select_devices(devices)
    options = RunOptions(
        exchange=exchange,
        timeout_s=check_seconds("timeout_s", timeout_s),
        saves=grace_s is not None,
        grace_s=DEFAULT_GRACE_S if grace_s is None else check_seconds("grace_s", grace_s),
    )
    # What is unpickled is run. These files have no name, and are inherited as open descriptors:
    # nobody else can have put anything there, nobody can remove them, and nothing stays behind.
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as result:
        # In two layers: what is inside may only be found along the path that is outside.
        pickle.dump((list(sys.path), cloudpickle.dumps((main, tuple(args)))), payload)
        payload.flush()
        handed = (payload.fileno(), result.fileno())
        outcome = supervise(["--call", *map(str, handed)], selection, options, handed=handed)
        if outcome.stopped_by in (signal.SIGTERM, signal.SIGHUP) and not options.may_stop:
            # It was put off for as long as the workers ran: now it does what it does here.
            signal.raise_signal(outcome.stopped_by)
        if outcome.exit_code:
            raise RunFailed(
                "\n".join(filter(None, [outcome.message, outcome.traceback])), outcome.exit_code
            )
        if not os.fstat(result.fileno()).st_size:
            raise RunFailed("device 0 ended the program (SystemExit) before the function returned")
        with mmap.mmap(result.fileno(), 0, access=mmap.ACCESS_READ) as returned:
            return cloudpickle.loads(returned)


def supervise(
    command: Sequence[str],
    selection: Selection,
    options: RunOptions,
    *,
    handed: Sequence[int] = (),
) -> Outcome:
    """Start a worker for each device, and return when all have ended.

    Args:
        command: for ``onefold.run.worker``: a script and its arguments, or ``--call`` and two
            descriptors.
        selection: the devices.
        options: of the run.
        handed: descriptors that the workers inherit.

    Raises:
        LaunchError: a file that would be written over is not one of ours.
    """
    _check_places(options)
    ranks = range(0 if options.quiet else 1, len(selection.devices))
    with StopSignals(saves=options.may_stop) as signals, _log_files(options, ranks) as logs:
        run = _Run(command, selection, options, signals, logs, tuple(handed))
        failed_in: list[int] = []
        for attempt in range(options.restarts + 1):
            outcome = run.attempt(checkpoints_to_leave_out(failed_in))
            if outcome.final or attempt == options.restarts:
                break
            failed_in.append(outcome.step)
            print(
                f"{outcome.traceback}onefold: {outcome.message}\n"
                f"onefold: starting again ({attempt + 1} of {options.restarts})"
                f"{words_of_restart(failed_in)}",
                file=sys.stderr,
            )
        return logs.mention(outcome)


def _check_places(options: RunOptions) -> None:
    """Refuse what would be written over, before any work.

    Raises:
        LaunchError: it is not ours.
    """
    try:
        if options.trace:
            check_trace(Path(options.trace))
    except ValueError as error:
        raise LaunchError(f"--trace {error}") from None
    try:
        if options.profile:
            check_timeline(Path(options.profile))
    except ValueError as error:
        raise LaunchError(f"--profile {error}") from None


class _LogFiles:
    """The logs of a run: in the folder that the user named, or in one kept after a failure."""

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
        """How a run ended, with its logs where there are any that tell something."""
        if self._private is None:
            told = self._any
        else:
            told = outcome.failed and self._logs.size() > 0 and self._private.is_there()
        if not told:
            return replace(outcome, logs="")
        self._keeps = True
        folder, first = self._logs.folder, self._logs.number == 1
        return replace(outcome, logs=str(folder) if first else self._logs.pattern)

    def close(self) -> None:
        """Let go of the files, and remove a folder that nobody is told of."""
        self._logs.close()
        if self._private is not None:
            leave = self._private.keep if self._keeps else self._private.remove
            leave()


@contextlib.contextmanager
def _log_files(options: RunOptions, ranks: Sequence[int]) -> Iterator[_LogFiles]:
    files = _LogFiles(options, ranks)
    try:
        yield files
    finally:
        files.close()


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that may be attempted several times."""

    command: Sequence[str]
    selection: Selection
    options: RunOptions
    signals: StopSignals
    logs: _LogFiles
    handed: tuple[int, ...]

    def attempt(self, leave_out: int) -> Outcome:
        """Start the workers and watch over them until all have ended.

        Args:
            leave_out: how many of the newest checkpoints the run does not go on from.
        """
        with PrivateFolder() as folder:
            (folder.path / _PARTS).mkdir()
            with contextlib.closing(Board(len(self.selection.devices))) as board:
                outcome = self._watched(folder.path, board, leave_out)
                outcome = replace(outcome, step=board.progress.step_of(0))
            if not self.options.profile:
                return outcome
            if not folder.is_there():
                print(
                    f"onefold: {folder.path} was removed, and the timeline with it", file=sys.stderr
                )
                return outcome
            return _with_timeline(outcome, folder.path / _PARTS, Path(self.options.profile))

    def _watched(self, folder: Path, board: Board, leave_out: int) -> Outcome:
        crew, run_id = _Crew(board, self.signals), uuid.uuid4().hex
        requests = _Requests(self.signals, board, self.options)
        interrupted = False
        try:
            for rank in range(len(self.selection.devices)):
                requests.check()
                with ctrl_c_later():  # or a worker is started that nobody knows of
                    device = self.selection.devices[rank]
                    worker = self._start(rank, run_id, folder, board, leave_out)
                    crew.add(rank, device, worker)
            crew.watch(requests)
        except KeyboardInterrupt:  # raised by a handler of the program's own
            interrupted = True
            crew.interrupt(signal.SIGINT)
        except _StoppedAtOnce:
            interrupted = True
            if not self.options.may_stop:
                crew.interrupt(self.signals.came[0])
        finally:
            crew.end()
        if self.options.may_stop and requests.came:
            return crew.stopped_outcome(requests, self.options.checkpoint)
        by = self.signals.came[0] if self.signals.came else signal.SIGINT
        return crew.interrupted_outcome(by) if interrupted else crew.outcome()

    def _start(
        self, rank: int, run_id: str, folder: Path, board: Board, leave_out: int
    ) -> subprocess.Popen[bytes]:
        options, devices = self.options, self.selection.devices
        world = World(
            rank=rank,
            size=len(devices),
            run_id=run_id,
            launcher="onefold",
            devices=devices,
            may_leave=self.selection.may_leave,
            options=options,
            leave_out=leave_out,
            directory=str(folder),
            timeline_parts=str(folder / _PARTS) if options.profile else "",
            progress_descriptor=board.table,
            report_descriptor=board.reports[rank],
            store_descriptor=board.store,
            safe_path=sys.flags.safe_path,
            local_rank=rank,
            local_size=len(devices),
        )
        log = self.logs.descriptor(rank)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _START, _ROOT, str(os.getpid()), *self.command],
            env=worker_environment(world),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(board.table, board.reports[rank], board.store, *self.handed),
        )


def _with_timeline(outcome: Outcome, parts: Path, folder: Path) -> Outcome:
    """How a run ended, with its timeline; one that cannot be written is no reason to fail it."""
    try:
        timeline = join_timeline(parts, folder)
    except (OSError, ValueError) as error:
        print(f"onefold: the timeline could not be written: {error}", file=sys.stderr)
        return outcome
    return replace(outcome, timeline=str(timeline or ""))


class _StoppedAtOnce(Exception):
    """A signal came that ends the run, a second one came, or the time for stopping is over."""


class _Requests:
    """Passes the first request to stop on to workers that save themselves, and ends the run at the
    second; at the first where they do not.

    Args:
        signals: that have come to the launcher.
        board: of the run.
        options: of the run.
    """

    def __init__(self, signals: StopSignals, board: Board, options: RunOptions) -> None:
        self._signals = signals
        self._progress = board.progress
        self._saves = options.may_stop
        self._limit_s = options.grace_s
        self._deadline_s = 0.0

    @property
    def came(self) -> bool:
        """Whether the run was asked to stop, through the launcher or a worker."""
        return bool(self._signals.came) or self._progress.stop_requested()

    @property
    def signal(self) -> signal.Signals | None:
        """Which one came to the launcher first."""
        return self._signals.came[0] if self._signals.came else None

    @property
    def twice(self) -> bool:
        """Whether a second one came."""
        return len(self._signals.came) > 1

    def check(self) -> None:
        """See to a request that has come.

        Raises:
            _StoppedAtOnce: the run is to end now.
        """
        signals = self._signals.look()
        if signals > (1 if self._saves else 0):
            raise _StoppedAtOnce
        if self.came and not self._deadline_s:
            self._deadline_s = time.monotonic() + self._limit_s
            self._progress.request_stop()
        if self._deadline_s and time.monotonic() > self._deadline_s:
            raise _StoppedAtOnce


class _Worker:
    """One process of the crew."""

    def __init__(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.device = device
        self.ended_s: float | None = None
        self.stillness = Stillness(process.pid)
        self.unresponsive = False
        self.ended_by_us = False
        self._process = process
        self._code: int | None = None
        self._collected = False
        self.pid = process.pid
        self.descriptor = os.pidfd_open(process.pid)
        """Can be read from when the process has ended."""

    def __str__(self) -> str:
        return f"device {self.rank} ({self.device}, process {self.pid})"

    @property
    def code(self) -> int | None:
        """Its exit code, or a signal's number below 0; None while it runs. Collects nothing."""
        if self._code is None:
            self._code = self._look()
        return self._code

    def _look(self) -> int | None:
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else in this program has collected it, code and all
            self._collected = True
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker alone."""
        if self.code is None:
            signal.pidfd_send_signal(self.descriptor, number)

    def kill_all(self) -> None:
        """Kill the worker and all its children; not once its end was collected."""
        self.ended_by_us |= self.code is None
        self.signal(signal.SIGKILL)  # a script may have made another group its own
        if not self._collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Have the system forget it; nothing is sent to its number from here on."""
        if self.code is not None:
            self._collected = True
            self._process.wait()
        os.close(self.descriptor)


class _Crew:
    """The workers of one attempt."""

    def __init__(self, board: Board, signals: StopSignals) -> None:
        self._board = board
        self._signals = signals
        self._workers: list[_Worker] = []

    def add(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        """Take in a worker that was just started."""
        self._workers.append(_Worker(rank, device, process))

    def watch(self, requests: _Requests) -> None:
        """Return when all have ended well, or when it is clear that one has not.

        Raises:
            _StoppedAtOnce: somebody has asked for the end.
        """
        while waiting := self._running():
            requests.check()
            if not self._wait_for_end(waiting, LOOK_S):
                for worker in waiting:
                    worker.unresponsive = worker.stillness.look()
            if self._note_ended() or any(worker.unresponsive for worker in self._workers):
                self._wait_for_words()
                return

    def interrupt(self, number: signal.Signals) -> None:
        """Pass a signal on and give the workers a moment to put things in order."""
        for worker in self._running():
            worker.ended_by_us = True
            worker.signal(number)
        self._wait_for_words()

    def end(self) -> None:
        """Kill whatever is left, children of the workers included."""
        for worker in self._workers:
            worker.kill_all()
        limit = time.monotonic() + _KILLED_S
        while (waiting := self._running()) and time.monotonic() < limit:
            _poll([worker.descriptor for worker in waiting], limit - time.monotonic())
        for worker in waiting:
            print(
                f"onefold: {worker} was killed and has not ended within {_KILLED_S:g} s: it waits "
                f"inside the system, for a disk or a device",
                file=sys.stderr,
            )
        for worker in self._workers:
            worker.collect()

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.code is None]

    def _note_ended(self) -> bool:
        """Note who has ended since; whether any of them ended badly."""
        for worker in self._workers:
            if worker.code is not None and worker.ended_s is None:
                worker.ended_s = time.time()
        return any(worker.code not in (None, 0, STOPPED_CODE) for worker in self._workers)

    def _wait_for_words(self) -> None:
        """Until all have ended, or time is up, or somebody asks for the end once more."""
        limit, signals = time.monotonic() + _LAST_WORDS_S, self._signals.look()
        while (waiting := self._running()) and time.monotonic() < limit:
            self._wait_for_end(waiting, limit - time.monotonic())
            self._note_ended()
            if self._signals.look() > signals:
                return

    def _wait_for_end(self, workers: Sequence[_Worker], limit_s: float) -> bool:
        """Whether one of the workers has ended within the limit; a signal ends the wait."""
        descriptors = [worker.descriptor for worker in workers]
        ready = _poll([*descriptors, self._signals.descriptor], limit_s)
        return not ready.isdisjoint(descriptors)

    def interrupted_outcome(self, by: signal.Signals) -> Outcome:
        """How a run ended that somebody has ended at once."""
        name = "Ctrl-C" if by == signal.SIGINT else by.name
        text = f"stopped by {name} in step {self._step_text(0)} (device 0)"
        return Outcome(128 + by, text, final=True, stopped_by=by)

    def stopped_outcome(self, requests: _Requests, checkpoint: str) -> Outcome:
        """How a run ended that was asked to save itself and stop."""
        codes = {worker.code for worker in self._workers}
        name = requests.signal.name if requests.signal else "a signal to a device"
        if codes == {0}:
            return Outcome(0, final=True)
        if codes <= {0, STOPPED_CODE}:
            text = f"stopped by {name} after step {self._board.progress.step_of(0) - 1} and saved"
            if checkpoint:
                text += f" in {checkpoint}: the same command goes on from there"
            return Outcome(STOPPED_CODE, text, final=True, stopped_by=requests.signal)
        failed = self.outcome()
        if failed.exit_code:
            return replace(failed, final=True)
        why = "a second signal came" if requests.twice else "its time for saving was over"
        text = (
            f"stopped by {name} in step {self._step_text(0)} (device 0) before it had saved "
            f"itself, as {why}"
        )
        if checkpoint:
            text += f"; earlier checkpoints, if any, are in {checkpoint}"
        by = requests.signal or signal.SIGTERM
        return Outcome(128 + by, text, final=True, stopped_by=by)

    def outcome(self) -> Outcome:
        """The first failure that no other device caused."""
        failures = [failure for worker in self._workers if (failure := self._failure(worker))]
        if not failures:
            return Outcome(0, final=True)
        _, _, outcome = min(failures, key=lambda failure: failure[:2])
        return replace(outcome, failed=True)

    def _failure(self, worker: _Worker) -> tuple[bool, float, Outcome] | None:
        """Whether another device caused it, when it was, and what to say."""
        ended_s = worker.ended_s or time.time()
        report = self._board.report(worker.rank)
        step = self._step_text(worker.rank)
        if report is not None:
            return report.caused_by_peer, report.time_s, self._told(worker, report)
        if worker.unresponsive:
            text = f"{worker} is stopped and does not respond, in step {step}"
            return False, ended_s, Outcome(1, text)
        code = worker.code
        if worker.ended_by_us or not code:
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
        step = self._board.progress.step_of(rank)
        return str(step) if step >= 0 else "0 (before the first step)"


def _poll(descriptors: Sequence[int], limit_s: float) -> set[int]:
    """Which of them can be read from within the limit."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(max(0.0, limit_s) * 1000)}
