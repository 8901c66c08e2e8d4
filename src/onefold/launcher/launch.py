"""Starts one process per device, watches them, restarts failed runs, and reports how the run ended.

The devices belong to this machine; `onefold.launcher.hosts` adds those of other hosts. This module
does not load PyTorch: the workers are running before the launcher could have loaded it.
`checkpoints_to_leave_out` chooses the checkpoint that a restart resumes from.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, TypeVar

from onefold.core.late import load
from onefold.core.numbers import check_seconds
from onefold.core.options import (
    DEFAULT_GRACE_PERIOD_S,
    DEFAULT_PLACEMENT,
    DEFAULT_TIMEOUT_S,
    ExchangeName,
    LaunchContext,
    RunOptions,
)
from onefold.errors import LaunchError, RunFailed
from onefold.launcher.devices import Selection, select_devices
from onefold.launcher.environment import (
    CONTEXT_VARIABLE,
    CUBLAS_SETTING,
    INDUCTOR_VARIABLE,
    OFFLOAD_DIR_VARIABLE,
    PLACE,
    PLACEMENT_VARIABLE,
    code_of_run,
    current_context,
)
from onefold.launcher.workers import Logs, Outcome, RunStatus, StoppedGroup, WorkerGroup
from onefold.system.caches import default_of_torch
from onefold.system.folder_lock import lock_of_checkpoints
from onefold.system.process import ctrl_c_later
from onefold.system.safe_files import PrivateFolder, local_path
from onefold.system.stop_signals import StopSignals
from onefold.system.words import counted, program, show_traceback, tell
from onefold.watch.timeline import check_timeline, join_timeline

__all__ = ["LaunchedRun", "launch", "supervise", "worker_environment"]


_Value = TypeVar("_Value")
_START = (
    "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.append(root); "
    "from onefold.worker import main; sys.exit(main())"
)
"""Program of a worker. ``-P`` keeps the current folder off the path while libraries load, because
another user may have put a ``pickle.py`` there. onefold's own location is appended last."""
_OF_ONE_RUN = ("ONEFOLD_CHECKPOINT", "ONEFOLD_HOSTS", "ONEFOLD_RECORD")
"""Folders and hosts of one run, which no program of its script may use."""
_ROOT = str(Path(__file__).resolve().parents[2])


def launch(
    main: Callable[..., _Value],
    *,
    devices: int | str | Sequence[str] = "auto",
    args: Sequence[Any] = (),
    placement: str | None = None,
    offload_dir: str = "",
    exchange: ExchangeName = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    grace_period_s: float | None = None,
) -> _Value:
    """Run a function on several devices of this machine and return the lead's result.

    Each device is a new Python process that calls ``main(*args)``. From a script, call this under
    ``if __name__ == "__main__":``; in a notebook, simply call it. In a process that is itself part
    of a run, it only calls ``main``.

    Args:
        main: creates its own model, optimizer and Trainer. A function defined in a script or
            notebook is sent by value with everything it refers to; lambdas and closures work, too.
            An object that it returns has the caller's own class, which stays as it is.
        devices: a number, ``"auto"``, ``"cpu:2"`` or a list such as ``["cuda:1", "cuda:3"]``.
        args: arguments for ``main``.
        placement: as in ``onefold run --placement``; defaults to ``ONEFOLD_PLACEMENT``.
        offload_dir: folder, on a disk, for the file that holds the model if the devices do not;
            defaults to ``ONEFOLD_OFFLOAD_DIR``, then to the folder for temporary files.
        exchange: ``"auto"``, ``"shared"`` or ``"collective"``.
        timeout_s: timeout for waiting on another device, in seconds.
        grace_period_s: seconds that ``main`` has to save after the first SIGINT, SIGTERM, SIGHUP,
            SIGUSR1 or SIGUSR2, which sets ``trainer.asked_to_stop`` on all devices. If None, these
            signals end the run at once.

    Raises:
        RunFailed: a device failed, or the run was stopped; the message has the first traceback.
        LaunchError: a chosen device does not exist, or another launcher (torchrun, srun) started
            this process and its ``ONEFOLD_PLACEMENT`` differs from ``placement``.
        TypeError, ValueError: an argument has a wrong type or value, or ``main`` refers to an
            object that cannot be sent to another process.

    >>> onefold.launch(lambda: 6 * 7, devices="cpu:1")
    42
    """
    context = current_context()
    if context.launched:
        # The other launcher's devices follow the environment, and would ignore this argument.
        decided = context.launcher != "onefold" and context.options.placement_kind.keeps_whole
        asked = RunOptions(placement=placement or DEFAULT_PLACEMENT).placement
        if decided and asked not in (DEFAULT_PLACEMENT, context.options.placement):
            raise LaunchError(
                f"placement={placement!r} cannot be set in a process that another launcher "
                f"started. Set {PLACEMENT_VARIABLE}={placement} for all of its processes, or pass "
                f"placement={DEFAULT_PLACEMENT!r}"
            )
        return main(*args)
    if not callable(main):
        raise TypeError(
            f"main must be a function, but got {type(main).__name__}. Write onefold.launch(main, "
            f"args=(...)), without calling main"
        )
    call, classes = _packed(main, args)
    selection = select_devices(devices)
    options = RunOptions(
        placement=placement or os.environ.get(PLACEMENT_VARIABLE) or DEFAULT_PLACEMENT,
        offload_dir=os.path.abspath(offload_dir) if offload_dir else "",
        exchange=exchange,
        timeout_s=check_seconds("timeout_s", timeout_s),
        saves=grace_period_s is not None,
        program=(*map(os.path.abspath, program()[:1]), *program()[1:]),
        grace_period_s=DEFAULT_GRACE_PERIOD_S
        if grace_period_s is None
        else check_seconds("grace_period_s", grace_period_s),
    )
    options.check_combination(offload_dir=offload_dir)
    # Unpickling runs code. These files have no name and are inherited as open descriptors, so no
    # other user can write to them or remove them, and none is left behind.
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as result:
        # Two layers, because the function's modules can be found only after sys.path is set: the
        # worker unpickles the path first.
        pickle.dump((list(sys.path), call), payload)
        payload.flush()
        handed = (payload.fileno(), result.fileno())
        outcome = supervise(["--call", *map(str, handed)], selection, options, handed=handed)
        if outcome.stopped_by in (signal.SIGTERM, signal.SIGHUP) and not options.may_stop:
            # StopSignals held it back while the workers ran. Deliver it to this process now.
            signal.raise_signal(outcome.stopped_by)
        if outcome.exit_code:
            raise RunFailed(
                "\n".join(filter(None, [outcome.message, outcome.traceback])), outcome.exit_code
            )
        if not os.fstat(result.fileno()).st_size:
            raise RunFailed("main ended the program (SystemExit) on device 0 before it returned")
        result.seek(0)
        value: _Value = _Unpickler(result, classes).load()
        return value


_USELESS = {
    ("optuna", "Trial"): "an Optuna trial: read its values first, pass trial.params, and report "
    "what launch returns",
    ("optuna", "Study"): "an Optuna study: call launch from the objective that it optimizes",
    ("_io", "TextIOWrapper"): "an open file: open it inside the function",
    ("onefold", "Trainer"): "a Trainer, which belongs to this process: make it inside the function",
}
"""Objects of which every process would get a separate copy, by package and class, with advice."""


def _packed(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[bytes, list[type]]:
    """Pickle a function and its arguments by value, with everything they refer to.

    Returns:
        The pickle, and the classes in it that are sent by value. The worker returns such a class by
        its place in this list: unpickling it by value would replace the methods of the class here.

    Raises:
        TypeError: they refer to an object that another process cannot have or use.
    """
    import cloudpickle

    useless: list[str] = []
    classes: list[type] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            words = _USELESS.get((kind.__module__.partition(".")[0], kind.__name__))
            if words is not None and obj not in (sys.stdout, sys.stderr):
                useless.append(words)
                raise pickle.PicklingError
            reduced = super().reducer_override(obj)
            if isinstance(obj, type) and isinstance(reduced, tuple):
                classes.append(obj)
            return reduced

    packed = io.BytesIO()
    try:
        # The list comes last: it is complete by then, and its classes are pickled already.
        Pickler(packed).dump((function, tuple(arguments), classes))
    except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        text = f"{name} cannot be sent to the devices' processes"
        if useless:
            raise TypeError(f"{text}, because it refers to {useless[0]}") from None
        raise TypeError(
            f"{text}: {error}. It or one of its arguments refers to an object that exists only in "
            f"this process, such as a lock, a thread, an open file or a generator. Pass plain "
            f"values, and create the rest inside the function"
        ) from error
    return packed.getvalue(), classes


class _Unpickler(pickle.Unpickler):
    """Reads what a function returned, with the classes that were sent to it."""

    def __init__(self, file: IO[bytes], classes: Sequence[type]) -> None:
        super().__init__(file)
        self._classes = classes

    def persistent_load(self, number: int) -> type:
        return self._classes[number]


def supervise(
    command: Sequence[str],
    selection: Selection,
    options: RunOptions,
    *,
    handed: Sequence[int] = (),
    joins: bool = False,
) -> Outcome:
    """Start a worker for each device and return when all of them have ended.

    Args:
        command: arguments of ``onefold.worker``: a script and its arguments, or ``--call`` and two
            descriptors.
        selection: devices of the run.
        options: options of the run.
        handed: descriptors that the workers inherit.
        joins: whether to become a device of another launcher's run instead, and not return, if it
            started several processes and this is one of them.

    Raises:
        LaunchError: an output path holds other files, another run uses the checkpoint folder, or
            an option is for onefold's launcher alone.
        ValueError: the devices do not form whole pipelines.

    >>> import tempfile
    >>> script = Path(tempfile.mkdtemp(), "train.py")
    >>> _ = script.write_text("import onefold, sys; sys.exit(not onefold.is_launched())")
    >>> devices = onefold.select_devices("cpu:1")
    >>> supervise([str(script)], devices, onefold.RunOptions()).exit_code
    0
    """
    if joins:
        _join(command, options)
    if "://" in options.checkpoint:
        options = load("options").staged(options, os.environ)
    if not options.hosts:
        options.pipeline_of(len(selection.devices))
    if not (options.offload_dir or options.placement_kind.keeps_whole):
        offload_dir = os.environ.get(OFFLOAD_DIR_VARIABLE, "")
        options = replace(options, offload_dir=os.path.abspath(offload_dir) if offload_dir else "")
    _check_places(options)
    context = current_context()
    others = context.others
    if context.size > 1:
        others = (
            f"a launcher has started {context.size} processes, and this one is rank {context.rank}"
        )
    if others and not options.quiet and not options.hosts:
        tell(f"{others}. onefold starts a separate run, on this machine only")
    ranks = range(0 if options.quiet else 1, len(selection.devices))
    with (
        StopSignals(saves=options.may_stop) as signals,
        contextlib.closing(Logs(options.logs, ranks)) as logs,
    ):
        run = (
            load("launcher.hosts").HostsRun(command, selection.choice, options, signals)
            if options.hosts
            else LaunchedRun(command, _place(selection, options), signals, logs, tuple(handed))
        )
        failed_in: list[int] = []
        failures, saved, devices = 0, newest_step(options.checkpoint), len(selection.devices)
        while True:
            outcome = run.attempt(checkpoints_to_leave_out(failed_in))
            now_saved = newest_step(options.checkpoint)
            failures = 1 if now_saved > saved else failures + 1
            saved = max(saved, now_saved)
            if outcome.final or failures > options.max_restarts:
                return outcome if options.hosts else logs.name_in(outcome)
            # A host that is lost with the lead leaves no step.
            if outcome.step >= 0 or not options.hosts:
                failed_in.append(outcome.step)
            if options.restart_devices == "fewer":
                selection = _without(selection, outcome.lost, options)
                run = replace(run, place=_place(selection, options))
            show_traceback(outcome.traceback)
            tell(outcome.message)
            left = ""
            if len(selection.devices) != devices:
                left = f", with {counted(len(selection.devices), 'device')}"
            words = words_of_restart(failed_in)
            tell(f"restarting ({failures} of {options.max_restarts}){left}{words}")


def _join(command: Sequence[str], options: RunOptions) -> None:
    """Replace this process by a device of the run that another launcher has started, if any.

    Raises:
        LaunchError: an option is for onefold's launcher alone.
    """
    context = current_context()
    if context.launcher != "torch" or context.size == 1:
        return
    table = load("options")
    variables = table.variables_of(options)
    launching = [name for name, option in table.OPTIONS.items() if option.launches]
    changed = [name for name in launching if table.variable(name) in variables]
    if changed:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise LaunchError(
            f"{named} cannot be used in a process that another launcher has started, because that "
            f"launcher restarts processes and keeps their output. Remove the option, or pass "
            f"--devices to start a separate run on this machine"
        )
    os.environ.update(variables)
    os.environ.setdefault("PYTHONHASHSEED", "0")  # sets of strings have the same order everywhere
    sys.stdout.flush()
    sys.stderr.flush()
    start = [sys.executable, "-P", "-c", _START, _ROOT, str(os.getppid())]
    os.execv(sys.executable, [*start, *command])


def _place(selection: Selection, options: RunOptions) -> LaunchContext:
    """The place of this host in a run that has no other host."""
    return LaunchContext(
        size=len(selection.devices),
        local_size=len(selection.devices),
        launcher="onefold",
        devices=selection.devices,
        may_leave=selection.may_leave,
        options=options,
    )


def _without(selection: Selection, lost: int, options: RunOptions) -> Selection:
    """Drop the lost device and devices beyond whole pipelines; keep all if none would remain."""
    devices = selection.devices
    left = [device for rank, device in enumerate(devices) if rank != lost]
    for count in range(len(left), 0, -1):
        with contextlib.suppress(ValueError):
            options.pipeline_of(count)
            return replace(selection, devices=tuple(left[:count]))
    return selection


def _check_places(options: RunOptions) -> None:
    """Check all output paths before any work is done, so that no foreign file is overwritten.

    Raises:
        LaunchError: the offload folder is not a directory, the path of the timeline holds something
            else, or another run writes its checkpoints to the same folder.
    """
    if options.hosts:
        _refuse_with_hosts(options)
    try:
        for name in ("record", "profile", "checkpoint", "offload_dir", "logs"):
            local_path(name, getattr(options, name))
    except ValueError as error:
        raise LaunchError(str(error)) from None
    if options.offload_dir and not Path(options.offload_dir).is_dir():
        raise LaunchError(
            f"--offload-dir or {OFFLOAD_DIR_VARIABLE} must be an existing folder, on a disk, but "
            f"got {options.offload_dir}"
        )
    if options.checkpoint:
        # Only check: the lead takes the lock and keeps it.
        lock_of_checkpoints(Path(options.checkpoint)).refuse_held(options.grace_period_s)
    try:
        if options.profile:
            check_timeline(Path(options.profile))
    except ValueError as error:
        raise LaunchError(f"--profile {error}") from None
    except OSError as error:
        raise LaunchError(f"--profile {error.filename}: {error.strerror}") from None


def _refuse_with_hosts(options: RunOptions) -> None:
    """Raise for an option that acts on one host only."""
    given = {
        "--logs": options.logs,
        "--profile": options.profile,
        "--restart-devices fewer": options.restart_devices == "fewer",
    }
    if named := [name for name, value in given.items() if value]:
        raise LaunchError(
            f"{', '.join(named)} cannot be used with --hosts. Remove it, or run on this host alone"
        )


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run on this host, or the part of a run there; it may be attempted several times."""

    command: Sequence[str]
    place: LaunchContext
    """Place of this host in the run: the rank of its first device, and all devices."""
    signals: StopSignals
    logs: Logs
    handed: tuple[int, ...] = ()

    def attempt(self, leave_out: int) -> Outcome:
        """Start the workers of this host and watch them until all have ended.

        Args:
            leave_out: number of newest checkpoints to skip.
        """
        place, profile = self.place, self.place.options.profile
        ranks = range(place.rank, place.rank + place.local_size)
        with PrivateFolder() as folder, contextlib.closing(RunStatus(place.size, ranks)) as status:
            parts = folder.path / "timeline"
            parts.mkdir()
            context = replace(
                place,
                run_id=place.run_id or uuid.uuid4().hex,
                leave_out=leave_out,
                directory=str(folder.path),
                timeline_parts=str(parts) if profile else "",
                progress_descriptor=status.table,
                screen_descriptor=status.screen,
                store_descriptor=status.store,
                safe_path=bool(os.environ.get("PYTHONSAFEPATH")),
            )
            outcome, timeline = self._watched(context, status), None
            if profile and not folder.is_there():
                tell(f"{folder.path} was removed, and the timeline with it")
            elif profile:
                # A timeline that cannot be written must not fail the run.
                try:
                    timeline = join_timeline(parts, Path(profile))
                except (OSError, ValueError) as error:
                    tell(f"the timeline could not be written: {error}")
            return replace(
                outcome,
                step=status.progress.step_of(place.rank),
                timeline=str(timeline or ""),
                devices=place.devices,
            )

    def _watched(self, context: LaunchContext, status: RunStatus) -> Outcome:
        group = WorkerGroup(status, self.signals, context)
        interrupted = False
        try:
            for number in range(context.local_size):
                rank = context.rank + number
                device = context.devices[rank]
                group.check_requests()
                own = replace(
                    context,
                    rank=rank,
                    local_rank=number,
                    report_descriptor=status.reports[rank],
                    stacks_descriptor=status.stacks[rank],
                )
                # Otherwise an interrupt between start and add would leave an unwatched worker.
                with ctrl_c_later():
                    group.add(rank, device, self._start(own))
            group.watch()
        # onefold's handlers do not raise: this comes from a handler of the calling program.
        except KeyboardInterrupt:
            interrupted = True
            group.interrupt(signal.SIGINT)
        except StoppedGroup:
            interrupted = True
            # A run that saves itself got the first request, and its grace period is over.
            if not context.options.may_stop:
                group.interrupt(self.signals.came[0])
        finally:
            group.end()
        return group.outcome(interrupted=interrupted)

    def _start(self, context: LaunchContext) -> subprocess.Popen[bytes]:
        log = self.logs.descriptors.get(context.rank)
        shared = (
            context.progress_descriptor,
            context.report_descriptor,
            context.screen_descriptor,
            context.stacks_descriptor,
            context.store_descriptor,
        )
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _START, _ROOT, str(os.getpid()), *self.command],
            env=worker_environment(context),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A separate process group, so that a worker's children are killed with it, and so that
            # Ctrl-C in the terminal reaches only the launcher, which passes it on in order.
            start_new_session=True,
            pass_fds=(*shared, *self.handed),
        )


def worker_environment(context: LaunchContext) -> dict[str, str]:
    """Build the environment of a worker that onefold launches."""
    environment = dict(os.environ)
    environment[CONTEXT_VARIABLE] = context.to_json()
    # PyTorch creates this folder as soon as its compiler loads, so set it before.
    if environment.get(INDUCTOR_VARIABLE) in (None, "", default_of_torch()):
        environment[INDUCTOR_VARIABLE] = code_of_run(context)
    # CUDA's default order is by speed. Devices were chosen in NVML's order, which is by PCI bus.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # Read when cuBLAS loads: with other workspaces its results may differ between runs.
    environment.setdefault(*CUBLAS_SETTING)
    environment.setdefault("PYTHONHASHSEED", "0")  # sets of strings have the same order everywhere
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the launcher reports the first failure
    if context.one_host:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    # With these variables, a data library would read only part of the data, which every device
    # must read whole, and a program that the script starts would take itself for a device.
    other = "MASTER_ADDR", "MASTER_PORT", "NNODES", "PET_NNODES", "SLURM_STEP_ID"
    for name in (*PLACE, *other, *_OF_ONE_RUN):
        environment.pop(name, None)
    return environment


def newest_step(directory: str) -> int:
    """Return the highest step of the checkpoints in a directory; -1 if there are none."""
    names = (path.name for path in Path(directory).glob("step-*")) if directory else ()
    found = (re.fullmatch(r"step-(\d+)", name) for name in names)
    return max((int(each[1]) for each in found if each), default=-1)


def checkpoints_to_leave_out(failed_in: Sequence[int]) -> int:
    """Return how many of the newest checkpoints the next attempt skips.

    The first failure in a step may be an accident. A second failure in the same step may be due to
    the checkpoint itself, so each further failure there goes back by one checkpoint.

    Args:
        failed_in: step in which each attempt so far failed.

    >>> [checkpoints_to_leave_out(failed_in) for failed_in in ([6], [6, 6], [6, 6, 9])]
    [0, 1, 0]
    """
    same = takewhile(failed_in[-1:].__contains__, reversed(failed_in))
    return max(0, len(list(same)) - 1)


def words_of_restart(failed_in: Sequence[int]) -> str:
    """Describe the checkpoint of a restart; empty if it is the newest one."""
    back = checkpoints_to_leave_out(failed_in)
    if not back:
        return ""
    step = failed_in[-1]
    where = f"in step {step}" if step >= 0 else "before the first step"
    newest = f"further back than the newest: it failed {where} {back + 1} times in a row"
    return f", {counted(back, 'checkpoint')} {newest}"
