"""The workers of one attempt at a run: watches them, ends them, and determines the outcome.

`WorkerGroup` holds all workers and passes stop requests on. `Worker` is the launcher's view of one
worker. `Outcome` records how the run ended. `RunStatus` and `Logs` are shared between the launcher
and the workers.

Note: shared memory has no names
--------------------------------
Progress, reports and the store are in memory that the workers inherit as open descriptors. It has
no name, so no other user can write to it, no cleaner of temporary files can remove it, and nothing
is left when the processes end.

Note: how a run ends
--------------------
Each worker leads a separate process group, so its children (loader workers) end with it. The kernel
kills a worker whose launcher is gone. When one worker fails, the others notice, because they wait
for it, and have ``_LAST_WORDS_S`` to report; then the launcher kills the rest. The user sees the
first failure that no other device caused.

Note: when a process id is safe to signal
-----------------------------------------
Once a process has been reaped (by wait, or by Popen.poll, which reaps too), the kernel may reuse
its id and its group's id for another process. So no worker is reaped before the run ends. The
launcher detects the end of a worker without reaping it (WNOWAIT, or its pidfd), kills its group
while the id is still reserved, and only then reaps it. It sends no signal afterwards.

Note: without pidfds
--------------------
Some containers (seccomp) and kernels before 5.3 do not allow pidfds. Then the launcher signals a
worker by its id, which is reserved until the worker is reaped, and polls for its end several times
a second.
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

from onefold.core.call_digest import Call
from onefold.core.options import RECORD_FILE, LaunchContext
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
    "advice_on_one_file",
    "write_report",
]


_LOOK_S = 0.05
_LEFT_OVER = {
    **dict.fromkeys(
        ("process group has not been initialized", "using env:// rendezvous"),
        " (onefold connects the devices itself: for onefold run, remove init_process_group, "
        "DistributedDataParallel and DistributedSampler from the script; start a script that does "
        "not use onefold with torchrun)",
    ),
    **dict.fromkeys(
        ("'RANK'", "'LOCAL_RANK'", "'WORLD_SIZE'", "'LOCAL_WORLD_SIZE'"),
        " (onefold run does not set these variables, because data libraries would split the data "
        "by them: read trainer.is_lead or trainer.devices, and let onefold choose the device)",
    ),
    **dict.fromkeys(
        ("EOF when reading a line", "BdbQuit"),
        " (a device reads no input: ask before the run starts, and pass it the answer; to debug, "
        "start the script with python)",
    ),
    "Attempted unscale_ but": " (onefold scales losses itself: pass precision='fp16' and "
    "clip_norm to Trainer instead of using GradScaler and clip_grad_norm_)",
}
"""Parts of errors of lines that are for other launchers, or for a single process, with advice."""


class Worker:
    """One worker process."""

    def __init__(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        self.rank, self.pid, self._process = rank, process.pid, process
        self._name = f"device {rank} ({device}, process {process.pid})"
        self._code: int | None = None
        self.ended_s: float | None = None
        self.stillness = StoppedProcess(process.pid)
        self.unresponsive = self.ended_by_us = self._collected = False
        self.descriptor: int | None = None
        """A pidfd, readable once the process has ended. None if pidfds are not available."""
        # Safe to open by id: a child keeps its id until it is reaped, dead or alive.
        with _where_refused():
            self.descriptor = os.pidfd_open(process.pid)

    def __str__(self) -> str:
        return self._name

    @property
    def code(self) -> int | None:
        """Exit code, or the negative signal number; None while it runs. Does not reap."""
        if self._code is None:
            self._code = self._read_exit_code()
        return self._code

    def _read_exit_code(self) -> int | None:
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        # Other code in this program (a SIGCHLD handler, a wait for any child) reaped it and took
        # the exit code. Another process may have its id by now.
        except ChildProcessError:
            self._collected = True
            return 0
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker, but not to its children."""
        if self.code is not None:
            return
        # A pidfd never refers to another process, even if the worker ends right here.
        if self.descriptor is not None:
            with _where_refused():
                signal.pidfd_send_signal(self.descriptor, number)
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """Kill the worker and all its children, unless it was reaped already."""
        # Check before the kill: afterwards, this kill looks like the worker's own death.
        self.ended_by_us |= self.code is None
        # First the worker itself, because its script may have moved it to another group; then the
        # group, whose id is reserved until the worker is reaped.
        self.signal(signal.SIGKILL)
        if not self._collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Reap the worker; no signal may be sent to its id from here on."""
        # Leave a worker that survived its kill to the kernel: waiting for it could take forever.
        if self.code is not None:
            self._collected = True
            self._process.wait()
        if self.descriptor is not None:
            os.close(self.descriptor)


@contextlib.contextmanager
def _where_refused() -> Iterator[None]:
    """Ignore errors of the block that mean that the system does not allow pidfds."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise


def wait_for_end(workers: Sequence[Worker], limit_s: float, wake: int | None = None) -> bool:
    """Wait until a worker has ended; return whether one has.

    Args:
        workers: running workers.
        limit_s: maximum wait in seconds.
        wake: descriptor that ends the wait once it is readable.
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
"""Seconds that a killed process has to end: it may be blocked in a system call."""


class StoppedGroup(Exception):
    """The run must end now: at its first signal, at a second one, or after its grace period."""


class WorkerGroup:
    """The workers of one attempt.

    Workers that can save are asked to save at the first stop request, and ended at the second.
    Other workers are ended at the first.

    Args:
        status: memory shared with the workers.
        signals: signals that the launcher received.
        place: place of this host in the run, with its options.
    """

    def __init__(self, status: RunStatus, signals: StopSignals, place: LaunchContext) -> None:
        self._status = status
        self._signals = signals
        self._place, self._options = place, place.options
        self._workers: list[Worker] = []
        self._mentioned = False
        self._deadline_s = 0.0
        folder = self._options.recorded_in
        self._hang = HangWatch(Path(folder, RECORD_FILE) if folder else None)

    def add(self, rank: int, device: str, process: subprocess.Popen[bytes]) -> None:
        """Add a worker that was just started."""
        self._workers.append(Worker(rank, device, process))

    def check_requests(self) -> None:
        """Act on the stop requests since the last call.

        Raises:
            StoppedGroup: the run must end now.
        """
        if self._signals.drain() > (1 if self._options.may_stop else 0):
            raise StoppedGroup
        # The grace period starts with the first request. A worker notes its request in the table.
        if self._is_requested() and not self._deadline_s:
            self._deadline_s = time.monotonic() + self._options.grace_period_s
            self._status.progress.request_stop()
        if self._deadline_s and time.monotonic() > self._deadline_s:
            raise StoppedGroup

    def _is_requested(self) -> bool:
        """Whether the run was asked to stop, through the launcher or a worker."""
        return bool(self._signals.came) or self._status.progress.stop_requested()

    def watch(self) -> None:
        """Wait until all workers have ended, or one failed and the others had time to report.

        Raises:
            StoppedGroup: the user requested that the run end now.
        """
        while waiting := self._running():
            self.check_requests()
            # A suspended worker never ends: only sampling its state at intervals reveals it.
            if not wait_for_end(waiting, LOOK_S, self._signals.descriptor):
                for worker in waiting:
                    worker.unresponsive = worker.stillness.sample_state()
                self._mention_threads(waiting)
                if self._place.one_host:  # otherwise the workers of all hosts watch each other
                    self._hang.report_hangs([self._watched(each) for each in self._running()])
            if self._note_ended() or any(worker.unresponsive for worker in self._workers):
                self._wait_for_words()
                return

    def _watched(self, worker: Worker) -> HostDevice:
        """A worker as a device of the hang watch."""
        table, stacks = self._status.progress, self._status.stacks[worker.rank]
        return HostDevice(worker.rank, worker.pid, table, stacks)

    def _mention_threads(self, waiting: Sequence[Worker]) -> None:
        """Report once that a worker waits for its threads after the script has ended."""
        for worker in waiting:
            if not self._mentioned and (threads := self._status.report(worker.rank).threads):
                self._mentioned = True
                tell(
                    f"the script has ended, but {worker} waits for its threads {threads}, which "
                    f"are not daemon threads. End them, or start them with daemon=True"
                )

    def interrupt(self, number: signal.Signals) -> None:
        """Pass a signal on and give the workers a moment to clean up."""
        for worker in self._running():
            # From here on the launcher causes its death, so it does not count as a failure.
            worker.ended_by_us = True
            worker.signal(number)
        self._wait_for_words()

    def end(self) -> None:
        """Kill all workers and their children."""
        # Include workers that have ended: their children may still run.
        for worker in self._workers:
            worker.kill_all()
        limit = time.monotonic() + _KILLED_S
        while (waiting := self._running()) and time.monotonic() < limit:
            wait_for_end(waiting, limit - time.monotonic())
        for worker in waiting:
            tell(
                f"{worker} was killed but has not ended within {_KILLED_S:g} s: it is blocked in "
                f"the kernel, by a disk or a device"
            )
        # Last, because from here on other processes may get these ids.
        for worker in self._workers:
            worker.collect()

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code is None]

    def _note_ended(self) -> bool:
        """Note when workers ended; return whether any of them failed."""
        for worker in self._workers:
            if worker.code is not None and worker.ended_s is None:
                worker.ended_s = time.time()
        return any(worker.code not in (None, 0, STOPPED_CODE) for worker in self._workers)

    def _wait_for_words(self) -> None:
        """Wait until all workers have ended, time is up, or another signal requests the end."""
        limit, signals = time.monotonic() + _LAST_WORDS_S, self._signals.drain()
        while (waiting := self._running()) and time.monotonic() < limit:
            # A signal ends the wait early.
            wait_for_end(waiting, limit - time.monotonic(), self._signals.descriptor)
            # Note each end as it happens: the order tells the cause from its consequences.
            self._note_ended()
            if self._signals.drain() > signals:
                return

    def outcome(self, *, interrupted: bool = False) -> Outcome:
        """Determine how the run ended; ``interrupted`` if a signal ended it at once."""
        # Another host may have been asked to stop.
        codes = {worker.code for worker in self._workers}
        asked = not self._place.one_host and STOPPED_CODE in codes and codes <= {0, STOPPED_CODE}
        if self._options.may_stop and (asked or self._is_requested()):
            return self._stopped_outcome()
        if not interrupted:
            return self._own_outcome()
        by = self._signals.came[0] if self._signals.came else signal.SIGINT
        name = "Ctrl-C" if by == signal.SIGINT else by.name
        first = self._place.rank
        text = f"stopped by {name} {self._when(first)} (device {first})"
        return Outcome(128 + by, text, final=True, stopped_by=by)

    def _stopped_outcome(self) -> Outcome:
        """Outcome of a run that was asked to save itself and stop."""
        codes, first = {worker.code for worker in self._workers}, self._place.rank
        by = self._signals.came[0] if self._signals.came else None
        name = by.name if by else "a notice or signal to a device"
        checkpoint = self._options.remote or self._options.checkpoint
        if codes == {0}:
            return Outcome(0, final=True)
        if codes <= {0, STOPPED_CODE}:
            last = self._status.progress.step_of(first) - 1
            text = f"stopped by {name} after step {last} and saved"
            if checkpoint:
                text += f" in {checkpoint}. Run the same command to resume"
            return Outcome(STOPPED_CODE, text, final=True, stopped_by=by)
        # If a device failed while stopping, the user must see the failure, not the stop.
        failed = self._own_outcome()
        if failed.exit_code:
            return replace(failed, final=True)
        why = "a second signal arrived" if self._signals.drain() > 1 else "its grace period ended"
        text = f"stopped by {name} {self._when(first)} (device {first}) before it had saved, "
        text += f"because {why}"
        if checkpoint:
            text += f"; earlier checkpoints, if any, are in {checkpoint}"
        by = by or signal.SIGTERM
        return Outcome(128 + by, text, final=True, stopped_by=by)

    def _own_outcome(self) -> Outcome:
        """Outcome of a run that ended by itself: its first failure that no peer caused."""
        failures = [failure for worker in self._workers if (failure := self._failure(worker))]
        if not failures:
            return Outcome(0, final=True)
        # False sorts before True: a device's own failure counts before one that a peer caused, even
        # if the latter was reported earlier.
        _, _, first = min(failures, key=lambda failure: failure[:2])
        # If devices raise the same error, report the lowest-numbered one.
        alike = (f for *_, f in failures if first.traceback and f.traceback == first.traceback)
        return replace(next(alike, first), failed=True)

    def _failure(self, worker: Worker) -> tuple[bool, float, Outcome] | None:
        """Whether a peer caused the failure, its time, and its outcome; None if it did not fail."""
        ended_s = worker.ended_s or time.time()
        # The worker's report says more than its exit code, so it comes first.
        report = self._status.report(worker.rank)
        code, lost = worker.code, worker.rank
        if report.kind:
            return report.caused_by_peer, report.time_s, self._told(worker, report)
        if worker.unresponsive:
            text, exit_code = "is suspended and does not respond,", 1
        elif worker.ended_by_us or not code:
            return None
        elif code < 0:
            hint = " (the kernel does this when memory runs out)" if code == -9 else ""
            text, exit_code = f"was killed by {signal.Signals(-code).name}{hint}", 128 - code
        else:
            text, exit_code, lost = f"ended with exit code {code}", code, -1
        text = f"{worker} {text} {self._when(worker.rank)}"
        return False, ended_s, Outcome(exit_code, text, lost=lost)

    def _told(self, worker: Worker, report: WorkerReport) -> Outcome:
        if report.caused_by_peer:  # the text names the peer; this device's step does not matter
            return Outcome(1, report.text, caused_by_peer=True)
        error = f"{report.kind}: {report.text}".removesuffix(": ")
        hint = next((hint for words, hint in _LEFT_OVER.items() if words in error), "")
        text = f"{worker} failed {self._when(worker.rank)}: {error}{hint}"
        # A device would raise the same LaunchError again.
        final = report.kind == LaunchError.__name__
        # PyTorch's exception for an error of the GPU itself, or of its driver.
        lost = worker.rank if report.kind == "AcceleratorError" else -1
        return Outcome(1, text, report.traceback, final=final, lost=lost)

    def _when(self, rank: int) -> str:
        """Return where a device is: in a step, or between two of them."""
        place = self._status.progress.place_of(rank)
        if place.call in (Call.STEP, Call.GRADIENT):
            return f"in step {place.step}"
        return f"after step {place.step - 1}" if place.step > 1 else "before the first step"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and the messages for the user; see `supervise`."""

    exit_code: int
    """Exit code for the command line; 0 on success."""
    message: str = ""
    """One line about the first failure."""
    traceback: str = ""
    """Traceback of the first failure, if it was an exception."""
    logs: str = ""
    """Files with the output of the other devices, kept after a failure."""
    timeline: str = ""
    """File of the timeline, if one was requested and a step was completed."""
    final: bool = False
    """Whether the run must not be restarted: it succeeded, the user ended it, or it was refused."""
    failed: bool = False
    """Whether a device failed, as opposed to a requested stop."""
    lost: int = -1
    """Device whose process was killed or did not respond, or whose GPU failed, if that was the
    failure; -1 otherwise."""
    stopped_by: signal.Signals | None = None
    """Signal that ended the run early, if any."""
    step: int = -1
    """Step of the lead when the run ended; -1 before the first step."""
    devices: tuple[str, ...] = ()
    """Devices of the last attempt."""
    caused_by_peer: bool = False
    """Whether a device of another host caused the failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """How a worker ended, as reported by itself."""

    time_s: float = 0.0
    """Time of the failure, in seconds since 1970."""
    kind: str = ""
    """Type of the exception; empty if it did not fail."""
    text: str = ""
    """Message of the exception."""
    traceback: str = ""
    """Traceback as printed by Python."""
    caused_by_peer: bool = False
    """Whether another device caused the failure."""
    threads: str = ""
    """Threads that it waits for after its script ended without an error."""


class RunStatus:
    """Status of one attempt of a run, in memory that the launcher shares with its workers.

    Args:
        devices: number of devices of the run.
        ranks: devices of this host.
    """

    def __init__(self, devices: int, ranks: Sequence[int]) -> None:
        # Python opens them close-on-exec; workers get only those in `pass_fds`.
        self.table = memory_file("onefold-progress")
        """Descriptor of the table of steps."""
        self.reports = {rank: memory_file(f"onefold-report-{rank}") for rank in ranks}
        """Descriptor of the report of each worker on this host."""
        self.stacks = {rank: memory_file(f"onefold-stacks-{rank}") for rank in ranks}
        """Descriptor of the memory to which each of them writes its stacks on request."""
        self.screen = os.dup(2)
        """Descriptor for reports of workers whose output goes to a log."""
        self.store = memory_file()
        """Descriptor of the file through which the workers' process group is formed."""
        os.ftruncate(self.table, Progress.nbytes(devices))
        self.progress = Progress(self.table, devices)

    def report(self, rank: int) -> WorkerReport:
        """Return the worker's report if it is complete, else an empty one."""
        descriptor = self.reports[rank]
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return WorkerReport(**json.loads(text)) if text.endswith(b"\n") else WorkerReport()

    def close(self) -> None:
        """Close the descriptors; the kernel frees the memory with the last process that has it."""
        for descriptor in (
            *(self.table, self.store, self.screen),
            *self.reports.values(),
            *self.stacks.values(),
        ):
            os.close(descriptor)


def write_report(descriptor: int, report: WorkerReport) -> None:
    """Write a worker's report, replacing an earlier one."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    # The process may be killed at any moment: a report is complete only with its newline.
    write_all(descriptor, json.dumps(asdict(report)).encode() + b"\n")


_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.EAGAIN, errno.EBUSY, errno.ETXTBSY}
"""Errors that mean another process created, filled, locked or is using the file."""


def advice_on_one_file(error: BaseException, processes: int) -> str:
    """Return advice if another process may have used the file first; empty for other errors.

    Args:
        error: exception that ended the script.
        processes: number of processes that run the script.
    """
    if processes < 2 or not isinstance(error, OSError) or error.filename is None:
        return ""
    # Renaming failed because a faster process had already renamed the file.
    moved = error.errno == errno.ENOENT and error.filename2 is not None
    if error.errno not in _IN_THE_WAY and not moved:
        return ""
    return (
        f"all {processes} processes of this run execute the script. If each of them writes "
        f"{error.filename}, write it only on the lead, under `if trainer.is_lead:`, and call "
        f"trainer.barrier() before the other devices read it"
    )


class Logs:
    """Files for the output of some devices of one run.

    The files are named ``device-1.log`` and so on. If an earlier run or anything else uses one of
    these names, all of them are named ``device-1.run-2.log`` and so on, with the first free number.

    Args:
        folder: folder of the logs, created if it does not exist; empty for a private folder, which
            is kept once `place` returns it.
        ranks: numbers of the devices that have a log.
    """

    def __init__(self, folder: str, ranks: Sequence[int]) -> None:
        self._private = None if folder else PrivateFolder()
        self._folder = Path(folder) if self._private is None else self._private.path
        self._folder.mkdir(parents=True, exist_ok=True)
        self.descriptors: dict[int, int] = {}
        """Descriptors of the logs, by device."""
        self._number = 1
        while not self._make(ranks):
            self._number += 1
        self._is_named = False
        if ranks and self._number > 1:
            tell(f"{folder} contains logs of an earlier run. This run writes {self._path('*')}")

    def _make(self, ranks: Sequence[int]) -> bool:
        """Create the logs unless one of the names is taken; return whether they were created."""
        try:
            for rank in ranks:
                self.descriptors[rank] = create_file(self._path(rank), append=True)
        # Exclusive creation, so that two simultaneous runs never share a file: the second one
        # removes the files it created and tries the next number.
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
        """Return where the logs are, for the user; empty if none is worth reading."""
        if self._private is None:
            useful = bool(self.descriptors)
        else:
            sizes = (os.fstat(descriptor).st_size for descriptor in self.descriptors.values())
            useful = failed and any(sizes) and self._private.is_there()
        # The user may open a path that was shown, so the folder is kept from here on.
        self._is_named |= useful
        return str(self._folder if self._number == 1 else self._path("*")) if useful else ""

    def name_in(self, outcome: Outcome) -> Outcome:
        """Return an outcome with the place of the logs."""
        # A run that a tool stopped early, as planned, has no logs worth naming.
        failed = outcome.failed and outcome.exit_code != STOPPED_CODE
        return replace(outcome, logs=self.place(failed=failed))

    def close(self) -> None:
        """Close the files; remove a private folder unless it was shown to the user."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        if self._private is not None:
            leave = self._private.keep if self._is_named else self._private.remove
            leave()
