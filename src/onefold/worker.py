"""A process of a launched run: runs the user's script or function, and reports if that fails.

Started by `onefold.launch` with LAUNCHER_PID SCRIPT [ARGUMENT ...], or with ``-m MODULE`` or
``--call PAYLOAD RESULT`` (two inherited descriptors) in place of the script.

Note: what is on the path
-------------------------
The process is started with ``-P``, so that no file in the current folder or the script's is loaded
in place of a library. Once PyTorch is loaded, the folder that ``python SCRIPT`` and ``python -m``
put at the head of ``sys.path`` is put there, unless the user has forbidden it (PYTHONSAFEPATH).

Note: a child that the script forks
-----------------------------------
It returns from the script as the worker does, but it is not the device. It must neither report nor
save anything, nor run what the parent has registered for its end. So every way out of the script
compares the process id, and a child leaves through `_end_child`.

Note: the order of a failure
----------------------------
The report is written first, then the other devices are told. They then fail at once, and the
launcher, which wakes when the first process ends, must find the cause by then and not only its
consequences.
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
from onefold.core.options import RECORD_FILE, LaunchContext
from onefold.errors import OnefoldError, PeerError
from onefold.exchange.progress import progress_of
from onefold.launcher.environment import current_context
from onefold.launcher.hang import answer_with_stacks
from onefold.launcher.membership import advice_on_one_file, end_well, leave
from onefold.launcher.workers import WorkerReport, write_report
from onefold.system.output import hold_output
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
"""How long a process may take to end after its script, before it is said what it waits for."""


def main() -> int:
    """Run what the launcher asked for, and return the exit code of the process."""
    arguments = sys.argv[1:]
    # Before anything slow: a launcher that is gone must leave no worker behind, and a signal during
    # the long load of PyTorch must find our handler, not the default one, which kills.
    die_with_parent(int(arguments[0]))
    context, process = current_context(), os.getpid()
    # Programs that the script starts must not inherit what the launcher has handed over.
    for name in ("progress", "report", "stacks", "store"):
        os.set_inheritable(getattr(context, f"{name}_descriptor"), False)
    answer_with_stacks(context.stacks_descriptor)
    progress = progress_of(context)
    # A signal to this worker is as one to the launcher, if the run can save itself.
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
            # No report, as there is no traceback: the launcher reads the exit code.
            leave(end)
            raise
        code = end.code
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
        _fail(error)
    if os.getpid() != process:
        _end_child(SystemExit(0))
    # Still inside the run: what fails in saving is a failure of the device like any other.
    try:
        if code != STOPPED_CODE:
            end_well()
        load("system.background").finish_all()
    except BaseException as error:
        _fail(error)
    if progress is not None:
        # Others may wait for a Trainer that this script never makes.
        progress.set_ended(context.rank)
        _mention_threads_later(context.report_descriptor)
    return STOPPED_CODE if code == STOPPED_CODE else 0


def _mention_threads_later(report_descriptor: int) -> None:
    """Have the launcher say after a while which threads of the script this process waits for.

    Python ends when all threads have but those that are daemons, and says nothing of it.
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
    """End without destroying objects: those in the middle of their work would only print errors."""
    # In this order; see the note at the head.
    _leave_word(error)
    leave(error)
    # They remove files and folders that must not outlive the process.
    atexit._run_exitfuncs()
    _end_at_once(1)


def _load_torch() -> None:
    """Load what every run needs, with garbage collection off.

    Loading makes hundreds of thousands of objects and next to no garbage; to look through them
    again and again takes a third of the time. PyTorch's optimizers load its compiler in any case.
    """
    gc.disable()
    try:
        importlib.import_module("onefold.system.internals").load_compiler()
    finally:
        gc.enable()
    gc.freeze()  # these objects stay: no later collection need look at them


def _prepare(context: LaunchContext) -> None:
    # Or what loader workers put there would outlive them if they are killed.
    if context.directory:
        gather_sockets_in(context.directory)
    options = context.options
    saved = options.checkpoint and any(Path(options.checkpoint).glob("step-*"))
    if context.rank == 0 and saved and Path(options.recorded_in, RECORD_FILE).exists():
        hold_output()


def _run_script(command: list[str]) -> None:
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    if not current_context().safe_path:
        sys.path.insert(0, folder)
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def _call(payload: int, result: int) -> None:
    """Call the function in one descriptor, and write what it returns into the other one.

    Unpickling runs code; `onefold.launcher.launch.launch` says why this can only be the launcher's.
    """
    import cloudpickle

    # A program that the function starts must not be able to write the answer.
    os.set_inheritable(result, False)
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as packed:
        # The path first: the function's own modules may be found along it alone.
        sys.path[:], call = pickle.loads(packed)
    os.close(payload)
    process = os.getpid()
    function, values = cloudpickle.loads(call)
    del call  # it may hold large arguments a second time
    returned = function(*values)
    # A child that the function forked comes by here, too.
    if os.getpid() == process and current_context().rank == 0:
        with os.fdopen(result, "wb") as file:
            file.write(cloudpickle.dumps(returned))


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
    """End a process that the script has forked, with the exit code that its end asks for."""
    code = 1
    if not isinstance(end, SystemExit):
        traceback.print_exception(_of_the_user(end))
    elif end.code is None or isinstance(end.code, int):
        code = end.code or 0
    else:
        print(end.code, file=sys.stderr)
    # Not by sys.exit: the functions of atexit are the parent's, and would run a second time.
    _end_at_once(code & 0xFF)


def _traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it; errors of ours and their causes without our frames."""
    shown: Any = traceback.TracebackException.from_exception(_of_the_user(error))
    ours, known, pair = f"{Path(__file__).parent}{os.sep}", False, [shown, error]
    while None not in pair:
        known |= isinstance(pair[1], OnefoldError) or _refuses(pair[0].stack, ours)
        pair[0].stack[:] = [f for f in pair[0].stack if not (known and f.filename.startswith(ours))]
        pair = [each.__cause__ or each.__context__ for each in pair]
    return "".join(shown.format())


def _refuses(stack: traceback.StackSummary, ours: str) -> bool:
    """Whether an exception of Python's was raised by us on purpose, as for a wrong argument."""
    last = stack[-1] if stack else None
    return bool(last and last.filename.startswith(ours) and (last.line or "").startswith("raise "))


def _of_the_user(error: BaseException) -> BaseException:
    """Drop the frames from the traceback through which we reached the user's code."""
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
