"""Starts a process for each device, watches them, starts failed runs again, and reports their end.

All devices are of this machine. This module does not load PyTorch: the workers start sooner than
the launcher could load it. `checkpoints_to_leave_out` chooses the checkpoint from which a failed
run is started again. `LogFiles` has the logs of the run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onefold.core.numbers import check_seconds
from onefold.core.options import DEFAULT_GRACE_S, DEFAULT_TIMEOUT_S, ExchangeName, RunOptions
from onefold.core.world import World
from onefold.errors import LaunchError, RunFailed
from onefold.run.crew import Crew, Outcome, Requests, StoppedAtOnce
from onefold.run.devices import Selection, select_devices
from onefold.run.rundir import Board, Logs
from onefold.run.world import KEEP_VARIABLE, current_world, options_of, worker_environment
from onefold.system.folderlock import lock_of_checkpoints
from onefold.system.ownfiles import PrivateFolder
from onefold.system.process import StopSignals, ctrl_c_later
from onefold.system.record import check_trace
from onefold.watch.timeline import check_timeline, join_timeline

__all__ = ["launch", "supervise"]


_PARTS = "timeline"
_START = (
    "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.append(root); "
    "from onefold.run.worker import main; sys.exit(main(sys.argv[1:]))"
)
"""What a worker runs, with ``-P``: the current folder, where anyone may have put a ``pickle.py``,
is not on its path while libraries are loaded. The place of onefold is, behind everything else."""
_ROOT = str(Path(__file__).resolve().parents[2])


def launch(
    main: Callable[..., Any],
    *,
    devices: int | str | Sequence[str] = "auto",
    args: Sequence[Any] = (),
    keep: str | None = None,
    home: str = "",
    exchange: ExchangeName = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_s: float | None = None,
) -> Any:
    """Run a function on several devices of this machine and return what it returns on the lead.

    Each device is a new Python process that calls ``main(*args)``. From a script, call this under
    ``if __name__ == "__main__":``; in a notebook, simply call it. In a process that is itself part
    of a run, it only calls ``main``.

    Args:
        main: makes its own model, optimizer and Trainer. Sent by value if it is defined in a
            script or notebook, with what it refers to; lambdas and closures may be given, too.
        devices: a number, ``"auto"``, ``"cpu:2"`` or a list such as ``["cuda:1", "cuda:3"]``.
        args: arguments for ``main``.
        keep: what a device keeps of the model: ``"all"``, ``"span"``, nothing (``"host"``), or some
            of its stages (``"stages"``; ``"stages:2"`` for lines of two devices side by side);
            by default what ``ONEFOLD_KEEP`` says, and all without it.
        home: folder on a disk for the file that has the model if devices do not keep all of it;
            ``ONEFOLD_HOME`` if empty, and then that of temporary files.
        exchange: ``"auto"``, ``"shared"`` or ``"collective"``.
        timeout_s: the longest that a device waits for another.
        grace_s: how long ``main`` may take to save itself after the first SIGINT, SIGTERM or
            SIGHUP, or after SIGUSR1 or SIGUSR2, which set ``trainer.asked_to_stop`` on all devices;
            without it, these end the run at once.

    Raises:
        RunFailed: a device failed, or the run was stopped; the message carries the first traceback.
        LaunchError: a chosen device does not exist, or this process was started by another launcher
            (torchrun, srun), without the ``ONEFOLD_KEEP`` that ``keep`` asks for.
        TypeError, ValueError: an argument is of a wrong type or value, or ``main`` refers to what
            cannot be sent to another process.

    >>> onefold.launch(lambda: 6 * 7, devices="cpu:1")
    42
    """
    world = current_world()
    if world.launched:
        _refuse_other_keep(world, keep)
        return main(*args)
    import cloudpickle

    from onefold.run.handover import pack_call

    around = options_of(os.environ)
    keep = keep or around.keep
    if home and keep == "all":
        raise ValueError(
            f'expected keep="host", "span" or "stages" with home={home!r}, got keep="all"'
        )
    if not home and keep != "all":
        home = around.home
    call = pack_call(main, args)
    selection = select_devices(devices)
    options = RunOptions(
        keep=keep,
        home=os.path.abspath(home) if home else "",
        exchange=exchange,
        timeout_s=check_seconds("timeout_s", timeout_s),
        saves=grace_s is not None,
        grace_s=DEFAULT_GRACE_S if grace_s is None else check_seconds("grace_s", grace_s),
    )
    # Unpickling runs code. These files have no name and are inherited as open descriptors, so that
    # nobody else can have written there, nobody can remove them, and nothing stays behind.
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as result:
        # In two layers: the function's modules are found only once the path is set, which is
        # therefore unpickled first.
        pickle.dump((list(sys.path), call), payload)
        payload.flush()
        handed = (payload.fileno(), result.fileno())
        outcome = supervise(["--call", *map(str, handed)], selection, options, handed=handed)
        if outcome.stopped_by in (signal.SIGTERM, signal.SIGHUP) and not options.may_stop:
            # It was held back while the workers ran; now it takes its usual effect on this process.
            signal.raise_signal(outcome.stopped_by)
        if outcome.exit_code:
            raise RunFailed(
                "\n".join(filter(None, [outcome.message, outcome.traceback])), outcome.exit_code
            )
        if not os.fstat(result.fileno()).st_size:
            raise RunFailed("device 0 ended the program (SystemExit) before the function returned")
        with mmap.mmap(result.fileno(), 0, access=mmap.ACCESS_READ) as returned:
            return cloudpickle.loads(returned)


def _refuse_other_keep(world: World, keep: str | None) -> None:
    """Refuse to keep all of a model on devices of another launcher where less was asked for.

    Raises:
        LaunchError: the environment says nothing of it. What it says takes precedence.
    """
    if world.launcher != "onefold" and keep not in (None, "all") and world.options.keep == "all":
        raise LaunchError(
            f"keep={keep!r} was asked for in a process that another launcher has started: there "
            f"the environment decides. Set {KEEP_VARIABLE}={keep} for all of its processes, or "
            f'ask for keep="all"'
        )


def supervise(
    command: Sequence[str],
    selection: Selection,
    options: RunOptions,
    *,
    handed: Sequence[int] = (),
) -> Outcome:
    """Start a worker for each device, and return when all have ended.

    Args:
        command: what ``onefold.run.worker`` is to run: a script and its arguments, or ``--call``
            and two descriptors.
        selection: the devices.
        options: the options of the run.
        handed: descriptors that the workers inherit.

    Raises:
        LaunchError: a file would be overwritten that is not one of ours.
        ValueError: the devices do not make whole lines.
    """
    options.line_of(len(selection.devices))
    _check_places(options)
    if not options.quiet:
        _tell_of_others(current_world())
    ranks = range(0 if options.quiet else 1, len(selection.devices))
    with StopSignals(saves=options.may_stop) as signals, log_files(options, ranks) as logs:
        run = _Run(command, selection, options, signals, logs, tuple(handed))
        failed_in: list[int] = []
        failures, saved = 0, newest_step(options.checkpoint)
        while True:
            outcome = run.attempt(checkpoints_to_leave_out(failed_in))
            now_saved = newest_step(options.checkpoint)
            failures = 1 if now_saved > saved else failures + 1
            saved = max(saved, now_saved)
            if outcome.final or failures > options.restarts:
                return logs.mention(outcome)
            failed_in.append(outcome.step)
            if options.restarts_with == "fewer":
                run = replace(run, selection=_without(run.selection, outcome.lost, options))
            devices = run.selection.devices
            print(
                f"{outcome.traceback}onefold: {outcome.message}\n"
                f"onefold: starting again ({failures} of {options.restarts})"
                f"{words_of_restart(failed_in, len(devices) if run.selection != selection else 0)}",
                file=sys.stderr,
            )


def _without(selection: Selection, lost: int, options: RunOptions) -> Selection:
    """The devices that are left, in whole lines; all of them if that would be none."""
    devices = selection.devices
    left = [device for rank, device in enumerate(devices) if rank != lost]
    _, _, line = options.keep.partition(":")
    whole = len(left) // int(line or 1) * int(line or 1)
    return replace(selection, devices=tuple(left[:whole])) if whole else selection


def _tell_of_others(world: World) -> None:
    """Say that there are others beside the run that begins here."""
    others = world.others
    if world.size > 1:
        others = f"a launcher has started {world.size} processes, and this one is no. {world.rank}"
    if others:
        print(
            f"onefold: {others}. This is a run of its own, on this machine alone", file=sys.stderr
        )


def _check_places(options: RunOptions) -> None:
    """Refuse to overwrite what is not ours, before any work is done.

    Raises:
        LaunchError: the place for the trace or the timeline holds something else, or another run
            saves itself in the folder for checkpoints.
    """
    if options.checkpoint:
        # Only a look: the lead takes the lock, and keeps it.
        lock_of_checkpoints(Path(options.checkpoint)).look(options.grace_s)
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


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that may be attempted several times."""

    command: Sequence[str]
    selection: Selection
    options: RunOptions
    signals: StopSignals
    logs: LogFiles
    handed: tuple[int, ...]

    def attempt(self, leave_out: int) -> Outcome:
        """Start the workers and watch over them until all have ended.

        Args:
            leave_out: how many of the newest checkpoints to pass over.
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
        crew, run_id = Crew(board, self.signals), uuid.uuid4().hex
        requests = Requests(self.signals, board, self.options)
        interrupted = False
        try:
            for rank in range(len(self.selection.devices)):
                requests.check()
                # Or an interrupt between start and add leaves a worker that nobody ends.
                with ctrl_c_later():
                    device = self.selection.devices[rank]
                    worker = self._start(rank, run_id, folder, board, leave_out)
                    crew.add(rank, device, worker)
            crew.watch(requests)
        # Our own handlers raise none: this comes from one that the calling program has set.
        except KeyboardInterrupt:
            interrupted = True
            crew.interrupt(signal.SIGINT)
        except StoppedAtOnce:
            interrupted = True
            # A run that saves was warned by the first request, and has had its time.
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
            # A group of its own, so that its children can be killed with it, and so that Ctrl-C in
            # the terminal reaches the launcher alone, which passes it on in order.
            start_new_session=True,
            pass_fds=(board.table, board.reports[rank], board.store, *self.handed),
        )


def _with_timeline(outcome: Outcome, parts: Path, folder: Path) -> Outcome:
    """Add the timeline to an outcome; one that cannot be written is no reason to fail the run."""
    try:
        timeline = join_timeline(parts, folder)
    except (OSError, ValueError) as error:
        print(f"onefold: the timeline could not be written: {error}", file=sys.stderr)
        return outcome
    return replace(outcome, timeline=str(timeline or ""))


def newest_step(directory: str) -> int:
    """The highest step of the checkpoints in a directory; -1 if there are none."""
    names = (path.name for path in Path(directory).glob("step-*")) if directory else ()
    found = (re.fullmatch(r"step-(\d+)", name) for name in names)
    return max((int(each[1]) for each in found if each), default=-1)


def checkpoints_to_leave_out(failed_in: Sequence[int]) -> int:
    """How many of the newest checkpoints the next attempt passes over.

    The first failure in a step may be an accident. A second one in the same step may be due to the
    checkpoint itself, so each further failure there goes back by one.

    Args:
        failed_in: the step in which each attempt so far has failed.

    >>> [checkpoints_to_leave_out(failed_in) for failed_in in ([6], [6, 6], [6, 6, 9])]
    [0, 1, 0]
    """
    same = 0
    for step in reversed(failed_in):
        if step != failed_in[-1]:
            break
        same += 1
    return max(0, same - 1)


def words_of_restart(failed_in: Sequence[int], devices: int = 0) -> str:
    """How a message mentions it: not at all if the newest checkpoint is used.

    Args:
        failed_in: the step in which each attempt so far has failed.
        devices: how many devices are left, if some were left out.
    """
    left = f", with {devices} device{'' if devices == 1 else 's'}" if devices else ""
    back = checkpoints_to_leave_out(failed_in)
    if not back:
        return left
    step = failed_in[-1]
    where = f"in step {step}" if step >= 0 else "before the first step"
    further = "one checkpoint" if back == 1 else f"{back} checkpoints"
    newest = f"further back than the newest: it failed {where} {back + 1} times in a row"
    return f"{left}, {further} {newest}"


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
