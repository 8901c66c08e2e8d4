"""A process of a launched run: runs the user's script or function, and reports its failure.

`onefold.launch` starts it with LAUNCHER_PID SCRIPT [ARGUMENT ...], or with ``-m MODULE`` or
``--call PAYLOAD RESULT`` (two inherited descriptors) instead of the script. `supervise` turns a
process of another launcher into one, which has none of the launcher's descriptors.

Note: a child that the script forks
-----------------------------------
A forked child returns from the script as the worker does, but it is not the device. It must neither
report nor save anything, nor run what the parent registered for its exit. So every path out of the
script compares the process id, and a child leaves through `_end_child`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import mmap
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from onefold.core.late import load
from onefold.core.options import LaunchContext
from onefold.errors import OnefoldError, PeerError
from onefold.exchange.progress import progress_of
from onefold.launcher.environment import current_context
from onefold.launcher.hang import answer_with_stacks
from onefold.launcher.membership import end_well, leave
from onefold.launcher.workers import WorkerReport, advice_on_one_file, write_report
from onefold.system.process import (
    NOTICES,
    STOP_SIGNALS,
    STOPPED_CODE,
    die_with_parent,
)
from onefold.system.safe_files import gather_sockets_in
from onefold.system.stop_signals import take_requests
from onefold.system.words import listed, message_of
from onefold.tools.registry import prepare_process

__all__ = ["main"]


_LONGEST_NAMES = 2000
_PATIENCE_S = 5.0
"""Seconds that a process may take to end after its script before its threads are reported."""


def main() -> int:
    """Run the script or function of the launcher; return the exit code of the process."""
    arguments = sys.argv[1:]
    # Do this before anything slow: if the launcher has died, no worker must remain, and a signal
    # while PyTorch loads must find this handler instead of the default one, which kills.
    die_with_parent(int(arguments[0]))
    context, process = current_context(), os.getpid()
    # Programs that the script starts must not inherit the launcher's descriptors.
    of_onefold = context.launcher == "onefold"
    for name in ("progress", "report", "screen", "stacks", "store") if of_onefold else ():
        os.set_inheritable(getattr(context, f"{name}_descriptor"), False)
    if of_onefold:
        answer_with_stacks(context.stacks_descriptor)
    progress = progress_of(context)
    # A signal to this worker counts as a signal to the launcher, if the run can save itself.
    if progress is not None and context.options.may_stop:
        take_requests((*STOP_SIGNALS, *NOTICES), progress.request_stop)
    code: object = 0
    try:
        _load_torch()
        _prepare(context)
        prepare_process(context)
        if arguments[1] == "--call":
            _call(int(arguments[2]), int(arguments[3]))
        else:
            _run_script(arguments[1:])
    except SystemExit as end:
        if os.getpid() != process:
            _end_child(end)
        if end.code not in (None, 0, STOPPED_CODE):
            # No report, because there is no traceback: the launcher reads the exit code.
            leave(end)
            raise
        code = end.code
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
        _fail(error)
    if os.getpid() != process:
        _end_child(SystemExit(0))
    # Still inside the run: a failure while saving is a failure of the device like any other.
    try:
        if code != STOPPED_CODE:
            end_well()
        load("system.background").finish_all()
    except BaseException as error:
        _fail(error)
    if progress is not None:
        # Other devices may wait for a Trainer that this script never makes.
        progress.set_ended(context.rank)
        _mention_threads_later(context.report_descriptor)
    return STOPPED_CODE if code == STOPPED_CODE else 0


def _mention_threads_later(report_descriptor: int) -> None:
    """Report after a while which threads of the script keep this process from ending.

    Python ends only after all threads that are not daemons, and reports nothing about it.
    """
    here = threading.current_thread()

    def mention() -> None:
        each = [t for t in threading.enumerate() if not t.daemon and t is not here and t.is_alive()]
        if each:
            names = listed(f"{thread.name!r}" for thread in each)
            write_report(report_descriptor, WorkerReport(threads=names[:_LONGEST_NAMES]))

    timer = threading.Timer(_PATIENCE_S, mention)
    timer.daemon = True
    timer.start()


def _fail(error: BaseException) -> NoReturn:
    """End without destroying objects: objects in the middle of their work would print errors."""
    # Report first, then tell the other devices. They fail at once, and the launcher, which wakes
    # when the first process ends, must then find the cause and not only its consequences.
    _leave_word(error)
    leave(error)
    # Exit functions remove files and folders that must not outlive the process.
    atexit._run_exitfuncs()
    _end_at_once(1)


def _load_torch() -> None:
    """Load what every run needs, with garbage collection off.

    Loading creates hundreds of thousands of objects and hardly any garbage; scanning them again and
    again takes a third of the time. PyTorch's optimizers load its compiler in any case.
    """
    gc.disable()
    try:
        importlib.import_module("onefold.system.internals").load_compiler()
    finally:
        gc.enable()
    # These objects stay, so no later collection needs to scan them.
    gc.freeze()


def _prepare(context: LaunchContext) -> None:
    # Otherwise sockets of loader workers would outlive them if they are killed.
    if context.directory:
        gather_sockets_in(context.directory)


def _run_script(command: list[str]) -> None:
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    if not current_context().safe_path:
        # The process starts with -P, so that no file in the current or the script's folder replaces
        # a library. After PyTorch is loaded, put the folder where `python SCRIPT` and `python -m`
        # put it, unless the user set PYTHONSAFEPATH.
        sys.path.insert(0, folder)
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def _call(payload: int, result: int) -> None:
    """Call the function in one descriptor, and write its result to the other.

    Unpickling runs code; `onefold.launcher.launch.launch` explains why it can only be the
    launcher's. Classes that the launcher sent by value are returned by number.
    """
    import cloudpickle

    # A program that the function starts must not be able to write the result.
    os.set_inheritable(result, False)
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as packed:
        # Set the path first: the function's own modules may be found only through it.
        sys.path[:], call = pickle.loads(packed)
    os.close(payload)
    process = os.getpid()
    function, values, classes = cloudpickle.loads(call)
    # The pickle may hold large arguments a second time.
    del call
    # A function may delete its class, and another object may then have its id: `classes` stays.
    numbers = {id(kind): number for number, kind in enumerate(classes)}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def persistent_id(self, obj: Any) -> int | None:
            return numbers.get(id(obj))

    returned = function(*values)
    # A child that the function forked arrives here, too.
    if os.getpid() == process and current_context().rank == 0:
        with os.fdopen(result, "wb") as file:
            try:
                Pickler(file).dump(returned)
            except Exception as error:
                raise TypeError(
                    f"the function returned an object of {type(returned).__name__} that cannot be "
                    f"sent back: {message_of(error)}. Return values, or trainer.model.state_dict()"
                ) from error


def _leave_word(error: BaseException) -> None:
    context = current_context()
    # Started by hand, without a launcher to read a report: fail as any program does.
    if context.report_descriptor < 0:
        raise error
    words = (message_of(error), advice_on_one_file(error, context.size))
    report = WorkerReport(
        time_s=time.time(),
        kind=type(error).__name__,
        text=". ".join(filter(None, words)),
        traceback=_traceback_of(error),
        caused_by_peer=isinstance(error, PeerError),
    )
    write_report(context.report_descriptor, report)


def _end_at_once(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_child(end: BaseException) -> NoReturn:
    """End a forked child of the script, with the exit code of its error or exit."""
    code = 1
    if not isinstance(end, SystemExit):
        traceback.print_exception(_of_the_user(end))
    elif end.code is None or isinstance(end.code, int):
        code = end.code or 0
    else:
        print(end.code, file=sys.stderr)
    # Do not use sys.exit: functions of atexit belong to the parent, and would run a second time.
    _end_at_once(code & 0xFF)


def _traceback_of(error: BaseException) -> str:
    """Format the traceback as Python does, but errors of onefold without its own frames."""
    shown: Any = traceback.TracebackException.from_exception(_of_the_user(error))
    ours, known, pair = f"{Path(__file__).parent}{os.sep}", False, [shown, error]
    while None not in pair:
        known |= isinstance(pair[1], OnefoldError) or _refuses(pair[0].stack, ours)
        pair[0].stack[:] = [f for f in pair[0].stack if not (known and f.filename.startswith(ours))]
        pair = [each.__cause__ or each.__context__ for each in pair]
    return "".join(shown.format())


def _refuses(stack: traceback.StackSummary, ours: str) -> bool:
    """Whether onefold raised a built-in exception on purpose, as for an invalid argument."""
    last = stack[-1] if stack else None
    return bool(last and last.filename.startswith(ours) and (last.line or "").startswith("raise "))


def _of_the_user(error: BaseException) -> BaseException:
    """Drop the frames of the traceback through which onefold reached the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (
        "__main__",
        __name__,
        "runpy",
    ):
        own = frames.tb_frame.f_code.co_filename
        if own not in (__file__, runpy.__file__) and not own.startswith("<frozen"):
            break
        frames = frames.tb_next
    return error.with_traceback(frames or error.__traceback__)
