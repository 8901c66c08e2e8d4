"""A process of a launched run: runs the user's script or function and leaves word if it fails.

Started by `onefold.launch` with LAUNCHER_PID SCRIPT [ARGUMENT ...], or with ``-m MODULE`` or
``--call PAYLOAD RESULT`` (two inherited descriptors) in place of the script.

Note: what is on the path
-------------------------
The process is started with ``-P``, so that nothing of the current folder or of the script's is
loaded in the place of a library. When PyTorch is there, what ``python SCRIPT`` and ``python -m``
put at the head of ``sys.path`` is put there, unless the user has forbidden it (PYTHONSAFEPATH).

Note: a child that the script forks
-----------------------------------
It comes back from the script as the worker does, but it is not the device: it leaves no word, saves
nothing and takes nothing apart.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import mmap
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from onefold.checkpoint.background import finish_all
from onefold.errors import PeerError
from onefold.exchange.progress import progress_of
from onefold.run.membership import abandon, end_well
from onefold.run.rundir import Report, write_report
from onefold.run.world import current_world
from onefold.system.interrupt import STOP_SIGNALS, STOPPED_CODE
from onefold.system.process import die_with_parent

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run what the launcher asked for; the exit code of the process."""
    die_with_parent(int(arguments[0]))
    _keep_to_ourselves()
    _take_requests_to_stop()
    process = os.getpid()
    code: object = 0
    try:
        _load_torch()
        _prepare()
        if arguments[1] == "--call":
            _call(int(arguments[2]), int(arguments[3]))
        else:
            _run_script(arguments[1:])
    except SystemExit as end:
        if os.getpid() != process:
            _end_child(end)
        if end.code not in (None, 0, STOPPED_CODE):
            abandon(end)
            raise
        code = end.code
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
        _fail(error)
    if os.getpid() != process:
        _end_child(SystemExit(0))
    try:
        if code != STOPPED_CODE:
            end_well()
        finish_all()
    except BaseException as error:
        _fail(error)
    _say_that_it_ends()
    return STOPPED_CODE if code == STOPPED_CODE else 0


def _keep_to_ourselves() -> None:
    """Hand what was inherited from the launcher on to no program that the script starts."""
    world = current_world()
    for descriptor in (
        world.progress_descriptor,
        world.report_descriptor,
        world.store_descriptor,
    ):
        os.set_inheritable(descriptor, False)


def _take_requests_to_stop() -> None:
    """Where a run can save itself, a signal that is sent to its workers asks for no less."""
    progress, process = progress_of(current_world()), os.getpid()
    if progress is None or not current_world().options.may_stop:
        return
    before: dict[int, Any] = {}

    asked: list[int] = []

    def request(number: int, frame: object) -> None:
        if os.getpid() == process and not asked:
            asked.append(number)
            progress.request_stop()
            return
        # The second time; or a child of the script, which is ended like any other.
        signal.signal(number, before[number])
        os.kill(os.getpid(), number)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, request)


def _say_that_it_ends() -> None:
    """Others may wait for a Trainer that this process never makes."""
    world = current_world()
    progress = progress_of(world)
    if progress is not None:
        progress.set_ended(world.rank)


def _fail(error: BaseException) -> NoReturn:
    _leave_word(error)
    abandon(error)
    _end_at_once()


def _load_torch() -> None:
    """Load what every run needs, and do not look for garbage meanwhile.

    Loading makes hundreds of thousands of objects and next to no garbage; the collector's looking
    through them again and again takes a third of the time. PyTorch's optimizers load its compiler.
    """
    gc.disable()
    try:
        importlib.import_module("onefold.system.compat").load_compiler()
    finally:
        gc.enable()
    gc.freeze()  # these objects stay: nobody need look at them again


def _prepare() -> None:
    if current_world().options.probe:
        from onefold.verifying import prepare_process

        prepare_process(current_world())


def _run_script(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        _put_first(os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = command[0]
    sys.argv = command
    _put_first(os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name="__main__")


def _put_first(folder: str) -> None:
    if not current_world().safe_path:
        sys.path.insert(0, folder)


def _call(payload: int, result: int) -> None:
    """Call what the launcher has put into one descriptor, and answer into the other one.

    What is unpickled is run: see `onefold.launch.launch` for why it is the launcher's.
    """
    import cloudpickle

    os.set_inheritable(result, False)
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as packed:
        sys.path[:], call = pickle.loads(packed)
    os.close(payload)
    process = os.getpid()
    function, values = cloudpickle.loads(call)
    del call
    returned = function(*values)
    if os.getpid() == process and current_world().rank == 0:
        with os.fdopen(result, "wb") as file:
            file.write(cloudpickle.dumps(returned))


def _leave_word(error: BaseException) -> None:
    world = current_world()
    progress = progress_of(world)
    if progress is None:
        raise error
    write_report(
        world.report_descriptor,
        Report(
            rank=world.rank,
            step=progress.step_of(world.rank),
            time_s=time.time(),
            kind=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(_of_the_user(error))),
            caused_by_peer=isinstance(error, PeerError),
        ),
    )


def _end_at_once() -> NoReturn:
    """End without taking the program apart: objects that are half at work would only complain."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _end_child(end: BaseException) -> NoReturn:
    """End a process that the script has forked, as the end of its script says."""
    code = 0
    if not isinstance(end, SystemExit):
        traceback.print_exception(_of_the_user(end))
        code = 1
    elif end.code is not None:
        code = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _of_the_user(error: BaseException) -> BaseException:
    """The exception without the frames through which we came to the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (
        "__main__",
        "onefold.run.worker",
        "runpy",
    ):
        own = frames.tb_frame.f_code.co_filename
        if own not in (__file__, runpy.__file__) and not own.startswith("<frozen"):
            break
        frames = frames.tb_next
    return error.with_traceback(frames or error.__traceback__)
