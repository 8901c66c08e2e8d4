"""A process of a launched run: runs the user's script or function and leaves word if it fails.

Started as ``python -m onefold.worker LAUNCHER_PID SCRIPT [ARGUMENT ...]``, or with ``-m MODULE`` or
``--call PAYLOAD RESULT`` in place of the script.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from onefold.checkpoint.background import finish_all
from onefold.errors import PeerError
from onefold.membership import abandon, end_well
from onefold.process import die_with_parent
from onefold.rundir import STOPPED_CODE, Report
from onefold.world import current_world

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run what the launcher asked for; the exit code of the process."""
    die_with_parent(int(arguments[0]))
    _take_requests_to_stop()
    code: object = 0
    try:
        _load_torch()
        _prepare()
        if arguments[1] == "--call":
            _call(Path(arguments[2]), Path(arguments[3]))
        else:
            _run_script(arguments[1:])
    except SystemExit as end:
        if end.code not in (None, 0, STOPPED_CODE):
            abandon(end)
            raise
        code = end.code
    except BaseException as error:
        _fail(error)
    try:
        if code != STOPPED_CODE:
            end_well()
        finish_all()
    except BaseException as error:
        _fail(error)
    return STOPPED_CODE if code == STOPPED_CODE else 0


def _take_requests_to_stop() -> None:
    """Where a run can save itself, a signal that is sent to its workers asks for no less."""
    directory = current_world().run_directory
    if directory is None or not current_world().checkpoint:
        return
    progress, process = directory.progress(), os.getpid()
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

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, request)


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
        importlib.import_module("torch._dynamo")
    finally:
        gc.enable()
    gc.freeze()  # these objects stay: nobody need look at them again


def _prepare() -> None:
    if current_world().probe:
        from onefold.verifying import prepare_process

        prepare_process(current_world())


def _run_script(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = command[0]
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _call(payload: Path, result: Path) -> None:
    import cloudpickle

    sys.path[:], call = pickle.loads(payload.read_bytes())
    function, values = cloudpickle.loads(call)
    returned = function(*values)
    if current_world().rank == 0:
        result.write_bytes(cloudpickle.dumps(returned))


def _leave_word(error: BaseException) -> None:
    world = current_world()
    directory = world.run_directory
    if directory is None:
        raise error
    directory.write_report(
        Report(
            rank=world.rank,
            step=directory.progress().step_of(world.rank),
            time_s=time.time(),
            kind=type(error).__name__,
            text=str(error),
            traceback="".join(traceback.format_exception(_of_the_user(error))),
            caused_by_peer=isinstance(error, PeerError),
        )
    )


def _end_at_once() -> NoReturn:
    """End without taking the program apart: objects that are half at work would only complain."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _of_the_user(error: BaseException) -> BaseException:
    """The exception without the frames through which we came to the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (
        "__main__",
        "onefold.worker",
        "runpy",
    ):
        own = frames.tb_frame.f_code.co_filename
        if own not in (__file__, runpy.__file__) and not own.startswith("<frozen"):
            break
        frames = frames.tb_next
    return error.with_traceback(frames or error.__traceback__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
