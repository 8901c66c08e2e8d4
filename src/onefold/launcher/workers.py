"""The workers of one attempt at a run: watches over them, ends them, and finds out how it went.

`WorkerGroup` has all of them, and passes requests to stop on. `Worker` is one worker of a run, as
its launcher sees it. `Outcome` records how the run ended. `RunStatus` and `Logs` are what the
launcher shares with the workers.

Note: nothing has a name
------------------------
Progress, reports and the store lie in memory that the workers inherit as open descriptors. It has
no name, so no other user can write there, no cleaner of temporary files can remove it, and nothing
is left when the processes end.

Note: how a run ends
--------------------
Each worker leads a process group of its own, so its children (loader workers) end with it. The
kernel kills a worker whose launcher is gone. When one worker fails, the others notice by themselves
(they wait for it) and get ``_LAST_WORDS_S`` to report; then whatever is left is killed. The user is
shown the first failure that no other device caused.

Note: when a process id is safe to signal
-----------------------------------------
Once the end of a process is collected (by wait, or by Popen.poll, which collects too), the kernel
may give its id, and that of its group, to another process. So no worker is collected before the end
of the run. Its end is noticed without collecting it (WNOWAIT, or its pidfd), its group is killed
while the id is still its own, and only then is it collected. No signal is sent afterwards.

Note: without pidfds
--------------------
Some containers, by seccomp, and kernels before 5.3 refuse them. A worker is then signalled by its
id, which is its own until it is collected, and its end is looked for several times a second.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from pathlib import Path

from onefold.core.options import RECORD_FILE, RunOptions
from onefold.errors import LaunchError
from onefold.exchange.progress import Progress
from onefold.launcher.hang import HangWatch, HostDevice
from onefold.system.process import LOOK_S, STOPPED_CODE, StoppedProcess
from onefold.system.safe_files import PrivateFolder, create_file, memory_file, write_all
from onefold.system.stop_signals import StopSignals
from onefold.system.words import tell

__all__ = [
    "Logs",
    "Outcome",
    "RunStatus",
    "StoppedGroup",
    "WorkerGroup",
    "WorkerReport",
    "write_report",
]


_LOOK_S = 0.05
_LEFT_OVER = {
    **dict.fromkeys(
        ("process group has not been initialized", "using env:// rendezvous"),
        " (onefold connects the devices itself: in a script for onefold run leave out "
        "init_process_group, DistributedDataParallel and DistributedSampler; a script without "
        "onefold is started by torchrun)",
    ),
    **dict.fromkeys(
        ("'RANK'", "'LOCAL_RANK'", "'WORLD_SIZE'", "'LOCAL_WORLD_SIZE'"),
        " (onefold run does not set these variables, as data libraries would split the data by "
        "them: read trainer.is_lead or trainer.devices, and leave the choice of a device out)",
    ),
    "Attempted unscale_ but": " (onefold scales losses itself: give Trainer precision='fp16' and "
    "clip_norm in place of GradScaler and clip_grad_norm_)",
}
"""Words in errors of PyTorch that come of lines which other launchers need, and what to do."""


class Worker:
    """One process of the group."""

    def __init__(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        self.rank, self.pid, self._process = rank, process.pid, process
        self._name = f"device {rank} ({device}, process {process.pid})"
        self._code: int | None = None
        self.ended_s: float | None = None
        self.stillness = StoppedProcess(process.pid)
        self.unresponsive = self.ended_by_us = self._collected = False
        self.descriptor: int | None = None
        """A pidfd: readable once the process has ended. None where there is no such thing."""
        # Safe to open by id: a child that nobody has collected keeps its id, dead or alive.
        with _where_refused():
            self.descriptor = os.pidfd_open(process.pid)

    def __str__(self) -> str:
        return self._name

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal's number; None while it runs. Collects nothing."""
        if self._code is None:
            self._code = self._read_exit_code()
        return self._code

    def _read_exit_code(self) -> int | None:
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        # Something else in this program (a SIGCHLD handler, a wait for any child) has collected it,
        # code and all. Its id may be another process's by now.
        except ChildProcessError:
            self._collected = True
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker alone."""
        if self.code is not None:
            return
        # By pidfd, which never means another process, even if the worker ends right here.
        if self.descriptor is not None:
            with _where_refused():
                signal.pidfd_send_signal(self.descriptor, number)
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """Kill the worker and all its children, unless its end was collected already."""
        # Asked before the kill, or a death of ours could not be told from one of its own.
        self.ended_by_us |= self.code is None
        # The worker by itself, as its script may have moved it to another group; then the group,
        # whose id lasts as long as the worker is uncollected.
        self.signal(signal.SIGKILL)
        if not self._collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Collect its end; no signal may be sent to its id from here on."""
        # One that outlived its kill is left to the kernel: waiting for it could take for ever.
        if self.code is not None:
            self._collected = True
            self._process.wait()
        if self.descriptor is not None:
            os.close(self.descriptor)


@contextlib.contextmanager
def _where_refused() -> Iterator[None]:
    """Leave the block without an error where the system has no pidfds."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise


def wait_for_end(workers: Sequence[Worker], limit_s: float, wake: int | None = None) -> bool:
    """Wait until one of the workers has ended; return whether one has.

    Args:
        workers: those that run.
        limit_s: the longest wait.
        wake: a descriptor that ends the wait once it is readable.
    """
    limit = time.monotonic() + limit_s
    descriptors = [d for d in (wake, *(w.descriptor for w in workers)) if d is not None]
    step_s = _LOOK_S if any(worker.descriptor is None for worker in workers) else limit_s
    while True:
        left_s = max(0.0, limit - time.monotonic())
        ready = connection.wait(descriptors, min(left_s, step_s))
        if any(worker.code is not None for worker in workers):
            return True
        if ready or left_s == 0:
            return False


_LAST_WORDS_S = 3.0
_KILLED_S = 30.0
"""How long a killed process may take to end: it may be stuck in a system call."""


class StoppedGroup(Exception):
    """The run is to end now: by its first signal, by a second one, or as its grace is over."""


class WorkerGroup:
    """The workers of one attempt.

    Workers that can save themselves are asked to at the first request to stop, and ended at the
    second. Others are ended at the first.

    Args:
        status: the memory shared with the workers.
        signals: the signals that have come to the launcher.
        options: the options of the run.
    """

    def __init__(self, status: RunStatus, signals: StopSignals, options: RunOptions) -> None:
        self._status = status
        self._signals = signals
        self._options = options
        self._workers: list[Worker] = []
        self._mentioned = False
        self._deadline_s = 0.0
        folder = options.recorded_in
        self._hang = HangWatch(Path(folder, RECORD_FILE) if folder else None)

    def add(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        """Add a worker that was just started."""
        self._workers.append(Worker(rank, device, process))

    def check_requests(self) -> None:
        """Act on the requests to stop that have come since the last call.

        Raises:
            StoppedGroup: the run is to end now.
        """
        if self._signals.drain() > (1 if self._options.may_stop else 0):
            raise StoppedGroup
        # The grace period starts with the first request. If a worker received it, the table has it.
        if self._is_requested() and not self._deadline_s:
            self._deadline_s = time.monotonic() + self._options.grace_period_s
            self._status.progress.request_stop()
        if self._deadline_s and time.monotonic() > self._deadline_s:
            raise StoppedGroup

    def _is_requested(self) -> bool:
        """Whether the run was asked to stop, through the launcher or a worker."""
        return bool(self._signals.came) or self._status.progress.stop_requested()

    def watch(self) -> None:
        """Wait until all have ended well, or one has failed and the others had time to report.

        Raises:
            StoppedGroup: the user has asked to end the run now.
        """
        while waiting := self._running():
            self.check_requests()
            # A stopped worker never ends: only looks at its state, at even intervals, show it.
            if not wait_for_end(waiting, LOOK_S, self._signals.descriptor):
                for worker in waiting:
                    worker.unresponsive = worker.stillness.sample_state()
                self._mention_threads(waiting)
                self._hang.report_hangs([self._watched(worker) for worker in self._running()])
            if self._note_ended() or any(worker.unresponsive for worker in self._workers):
                self._wait_for_words()
                return

    def _watched(self, worker: Worker) -> HostDevice:
        """A worker as a device that may wait for others."""
        table, stacks = self._status.progress, self._status.stacks[worker.rank]
        return HostDevice(worker.rank, worker.pid, table, stacks)

    def _mention_threads(self, waiting: Sequence[Worker]) -> None:
        """Say once what devices wait for whose scripts have ended."""
        for worker in waiting:
            if not self._mentioned and (threads := self._status.report(worker.rank).threads):
                self._mentioned = True
                tell(
                    f"the script has ended, and {worker} waits for its threads {threads}, which "
                    f"are no daemons: have them end, or start them with daemon=True"
                )

    def interrupt(self, number: signal.Signals) -> None:
        """Pass a signal on and give the workers a moment to put things in order."""
        for worker in self._running():
            # Whatever it dies of from here on is our doing, and no failure of the device.
            worker.ended_by_us = True
            worker.signal(number)
        self._wait_for_words()

    def end(self) -> None:
        """Kill whatever is left, children of the workers included."""
        # All of them, ended ones too: children of a worker that is gone may still run.
        for worker in self._workers:
            worker.kill_all()
        limit = time.monotonic() + _KILLED_S
        while (waiting := self._running()) and time.monotonic() < limit:
            wait_for_end(waiting, limit - time.monotonic())
        for worker in waiting:
            tell(
                f"{worker} was killed and has not ended within {_KILLED_S:g} s: it waits inside "
                f"the system, for a disk or a device"
            )
        # Last of all: from here on the ids may be other processes'.
        for worker in self._workers:
            worker.collect()

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code is None]

    def _note_ended(self) -> bool:
        """Note when workers ended; return whether any of them ended badly."""
        for worker in self._workers:
            if worker.code is not None and worker.ended_s is None:
                worker.ended_s = time.time()
        return any(worker.code not in (None, 0, STOPPED_CODE) for worker in self._workers)

    def _wait_for_words(self) -> None:
        """Wait until all have ended, time is up, or another signal asks to end the run."""
        limit, signals = time.monotonic() + _LAST_WORDS_S, self._signals.drain()
        while (waiting := self._running()) and time.monotonic() < limit:
            # A signal ends the wait early.
            wait_for_end(waiting, limit - time.monotonic(), self._signals.descriptor)
            # Noted as each one ends: the order of their ends tells cause from consequence.
            self._note_ended()
            if self._signals.drain() > signals:
                return

    def outcome(self, *, interrupted: bool = False) -> Outcome:
        """How the run ended; ``interrupted`` if a signal ended it at once."""
        if self._options.may_stop and self._is_requested():
            return self._stopped_outcome()
        if not interrupted:
            return self._own_outcome()
        by = self._signals.came[0] if self._signals.came else signal.SIGINT
        name = "Ctrl-C" if by == signal.SIGINT else by.name
        text = f"stopped by {name} in step {self._step_text(0)} (device 0)"
        return Outcome(128 + by, text, final=True, stopped_by=by)

    def _stopped_outcome(self) -> Outcome:
        """The outcome of a run that was asked to save itself and stop."""
        codes = {worker.code for worker in self._workers}
        by = self._signals.came[0] if self._signals.came else None
        name = by.name if by else "a signal to a device"
        checkpoint = self._options.checkpoint
        if codes == {0}:
            return Outcome(0, final=True)
        if codes <= {0, STOPPED_CODE}:
            text = f"stopped by {name} after step {self._status.progress.step_of(0) - 1} and saved"
            if checkpoint:
                text += f" in {checkpoint}: the same command goes on from there"
            return Outcome(STOPPED_CODE, text, final=True, stopped_by=by)
        # A failure on the way to the stop is what the user must see, not that it was stopped.
        failed = self._own_outcome()
        if failed.exit_code:
            return replace(failed, final=True)
        why = (
            "a second signal came" if self._signals.drain() > 1 else "its time for saving was over"
        )
        text = f"stopped by {name} in step {self._step_text(0)} (device 0) before it had saved "
        text += f"itself, as {why}"
        if checkpoint:
            text += f"; earlier checkpoints, if any, are in {checkpoint}"
        by = by or signal.SIGTERM
        return Outcome(128 + by, text, final=True, stopped_by=by)

    def _own_outcome(self) -> Outcome:
        """The outcome of a run that ended by itself: its first failure that no peer caused."""
        failures = [failure for worker in self._workers if (failure := self._failure(worker))]
        if not failures:
            return Outcome(0, final=True)
        # False sorts before True: a device's own failure counts before any that a peer caused, even
        # if that was reported earlier.
        _, _, first = min(failures, key=lambda failure: failure[:2])
        # What all devices raise alike, in any order, is told of the lowest.
        alike = (f for *_, f in failures if first.traceback and f.traceback == first.traceback)
        return replace(next(alike, first), failed=True)

    def _failure(self, worker: Worker) -> tuple[bool, float, Outcome] | None:
        """Whether a peer made the worker fail, when, and what to say of it; None if it did not."""
        ended_s = worker.ended_s or time.time()
        # Its own report says more than its exit code, so it is looked at first.
        report = self._status.report(worker.rank)
        step, code, lost = self._step_text(worker.rank), worker.code, worker.rank
        if report.kind:
            return report.caused_by_peer, report.time_s, self._told(worker, report)
        if worker.unresponsive:
            text, exit_code = "is stopped and does not respond,", 1
        elif worker.ended_by_us or not code:
            return None
        elif code < 0:
            hint = " (the system does this when memory runs out)" if code == -9 else ""
            text, exit_code = f"was killed by {signal.Signals(-code).name}{hint}", 128 - code
        else:
            text, exit_code, lost = f"ended with exit code {code}", code, -1
        return False, ended_s, Outcome(exit_code, f"{worker} {text} in step {step}", lost=lost)

    def _told(self, worker: Worker, report: WorkerReport) -> Outcome:
        step = self._step_text(worker.rank)
        if report.caused_by_peer:  # the text names the peer; where this device was is no help
            return Outcome(1, report.text)
        hint = next((hint for words, hint in _LEFT_OVER.items() if words in report.text), "")
        text = f"{worker} failed in step {step}: {report.kind}: {report.text}{hint}"
        # What a device refuses before it begins, it would refuse again.
        final = report.kind == LaunchError.__name__
        # PyTorch's name for an error of the GPU itself, or of its driver.
        lost = worker.rank if report.kind == "AcceleratorError" else -1
        return Outcome(1, text, report.traceback, final=final, lost=lost)

    def _step_text(self, rank: int) -> str:
        step = self._status.progress.step_of(rank)
        return str(step) if step >= 0 else "0 (before the first step)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and what to tell the user about it; see `supervise`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """How a worker ended, in its own words."""

    time_s: float = 0.0
    """When it failed, in seconds since 1970."""
    kind: str = ""
    """Type of the exception; empty if it has not failed."""
    text: str = ""
    """The message of the exception."""
    traceback: str = ""
    """As Python prints it."""
    caused_by_peer: bool = False
    """Whether it failed because another device did."""
    threads: str = ""
    """The threads that it waits for, once its script has ended well."""


class RunStatus:
    """The status of one attempt of a run, in memory that the launcher shares with its workers.

    Args:
        devices: number of workers.
    """

    def __init__(self, devices: int) -> None:
        # Closed on exec as Python opens them; the workers get theirs by `pass_fds` alone.
        self.table = memory_file("onefold-progress")
        """Descriptor of the table of steps."""
        self.reports = [memory_file(f"onefold-report-{number}") for number in range(devices)]
        """Descriptor of each worker's report."""
        self.stacks = [memory_file(f"onefold-stacks-{number}") for number in range(devices)]
        """Descriptor of the memory in which each worker writes its stacks when it is asked."""
        self.store = memory_file()
        """Descriptor of the file through which the workers' process group is formed."""
        os.ftruncate(self.table, Progress.nbytes(devices))
        self.progress = Progress(self.table, devices)

    def report(self, rank: int) -> WorkerReport:
        """The worker's report if it left a whole one; else an empty one."""
        descriptor = self.reports[rank]
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return WorkerReport(**json.loads(text)) if text.endswith(b"\n") else WorkerReport()

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last process that has it."""
        for descriptor in (self.table, self.store, *self.reports, *self.stacks):
            os.close(descriptor)


def write_report(descriptor: int, report: WorkerReport) -> None:
    """Write a worker's report, in place of an earlier one."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    # The process may be killed at any moment: only what has its line's end is whole.
    write_all(descriptor, json.dumps(asdict(report)).encode() + b"\n")


class Logs:
    """Files for the output of some devices of one run.

    They are called ``device-1.log`` and so on. If one of these names is taken, by an earlier run or
    anything else, all of them are called ``device-1.run-2.log`` and so on, with the first number
    that is free.

    Args:
        folder: where they lie, made if it does not exist; empty for a private folder, which stays
            if `place` has named it.
        ranks: numbers of the devices that have a log.
    """

    def __init__(self, folder: str, ranks: Sequence[int]) -> None:
        self._private = None if folder else PrivateFolder()
        self._folder = Path(folder) if self._private is None else self._private.path
        self._folder.mkdir(parents=True, exist_ok=True)
        self.descriptors: dict[int, int] = {}
        """Those of the logs, by device."""
        self._number = 1
        while not self._make(ranks):
            self._number += 1
        self._is_named = False
        if ranks and self._number > 1:
            tell(f"{folder} has logs already: those of this run are {self._path('*')}")

    def _make(self, ranks: Sequence[int]) -> bool:
        """Make the logs, unless one of the names is taken; return whether they are made."""
        try:
            for rank in ranks:
                self.descriptors[rank] = create_file(self._path(rank), append=True)
        # Made only where there was nothing, so that two runs at once never share a file: whoever
        # comes second takes back what it made, and tries the next number.
        except FileExistsError:
            while self.descriptors:
                rank, descriptor = self.descriptors.popitem()
                os.close(descriptor)
                self._path(rank).unlink(missing_ok=True)
            return False
        return True

    def _path(self, rank: int | str) -> Path:
        run = "" if self._number == 1 else f".run-{self._number}"
        return self._folder / f"device-{rank}{run}.log"

    def place(self, *, failed: bool) -> str:
        """Where the logs are, for a user who is to read them; empty if nothing is worth reading."""
        if self._private is None:
            useful = bool(self.descriptors)
        else:
            sizes = (os.fstat(descriptor).st_size for descriptor in self.descriptors.values())
            useful = failed and any(sizes) and self._private.is_there()
        # A path that the user has read must last, so this decides that the folder is kept.
        self._is_named |= useful
        return str(self._folder if self._number == 1 else self._path("*")) if useful else ""

    def close(self) -> None:
        """Close the files, and remove a private folder that nobody was told of."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        if self._private is not None:
            leave = self._private.keep if self._is_named else self._private.remove
            leave()
