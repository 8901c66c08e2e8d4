"""Programs of tests start by a fork of this process, which has PyTorch loaded already.

To load PyTorch and its compiler takes a process five seconds of a core, and tests start hundreds.
`Popen` forks where that gives the same program: a command or a device of onefold, or a script of
``tests/scripts``. All of onefold is loaded anew in the child. Everything else is started as ever,
and so is everything in a test marked ``fresh``, and with ONEFOLD_TESTS_FRESH=1 in all tests.

Note: what a child must not keep
--------------------------------
Threads do not come along in a fork, and a child that wakes one that is not there waits for ever. So
OpenMP's pool is dissolved first (the next computation makes another one; OpenBLAS does the same by
itself), and a process with other threads of Python's starts its programs as ever. What is read
while Python and its libraries are loaded cannot be changed later: variables of such names must be
what they were. The rest is put back by hand in `_Child`: descriptors, signals, the path, what
pytest has put in place of streams and warnings, exit functions, caches that belong to a process.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import io
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

SCRIPTS = Path(__file__).parent / "scripts"
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG")
_PAUSE = 1  # omp_pause_soft: keep the settings
_OURS = ("onefold", "onefold_jobs", "tests", "benchmarks")
_RealPopen = subprocess.Popen
_bound = inspect.signature(subprocess.Popen._execute_child).bind  # type: ignore[attr-defined]


class _State:
    """Of this process, as it was at its start."""

    def __init__(self) -> None:
        self.fresh = _all_fresh()
        self.environment = dict(os.environ)


def _all_fresh() -> bool:
    return os.environ.get("ONEFOLD_TESTS_FRESH", "") == "1"


_state = _State()
_libc = ctypes.CDLL(None)
_threads = torch.get_num_threads()


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks this process where that gives the program that was asked for."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        asked = types.SimpleNamespace(**_bound(self, *given, **named).arguments)
        words = asked.args if isinstance(asked.args, list | tuple) else [asked.args]
        words = [os.fspath(word) for word in words]
        program = None if _state.fresh or asked.shell else _program(words)
        if program is None or not _suits(asked) or not _is_ready():
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        # A fork copies the tables of all pages, also of those that hold nothing any more.
        _libc.malloc_trim(0)
        before = _descriptors()
        pid = os.fork()
        if pid == 0:
            _Child(asked, before).become(program)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            asked.p2cread,
            asked.p2cwrite,
            asked.c2pread,
            asked.c2pwrite,
            asked.errread,
            asked.errwrite,
        )


def start_by_fork(item_is_fresh: bool) -> None:
    """Whether the programs of the next test may be forked."""
    _state.fresh = item_is_fresh or _all_fresh()


def _suits(asked: types.SimpleNamespace) -> bool:
    wanted = os.environ if asked.env is None else asked.env
    wanted = {os.fsdecode(name): os.fsdecode(value) for name, value in wanted.items()}
    unchanged = all(
        wanted.get(name) == _state.environment.get(name)
        for name in wanted.keys() | _state.environment.keys()
        if name.startswith(_READ_AT_START)
    )
    plain = asked.uid is None and asked.gid is None and asked.umask < 0 and asked.close_fds
    return unchanged and plain


def _is_ready() -> bool:
    """Whether a child would find all that it needs in this process, and no thread that is gone."""
    _load()
    lines = Path("/proc/self/maps").read_text().splitlines()
    # PyTorch brings one of its own, and other libraries theirs.
    for openmp in {path for line in lines if "/libgomp" in (path := line.split(maxsplit=5)[-1])}:
        # Some have one that is older than OpenMP 5, and has no such function.
        pause = getattr(ctypes.CDLL(openmp), "omp_pause_resource_all", None)
        if pause is None or pause(_PAUSE) != 0:
            return False
    return threading.active_count() == 1


def _program(words: Sequence[str]) -> Callable[[], None] | None:
    """What runs in the child, or None for what is not known to be the same in a fork."""
    if words[0] != sys.executable:
        return None
    match list(words[1:]):
        case ["-m", "onefold", *_]:
            return lambda: _run_module("onefold", list(words[3:]))
        case ["-P", "-c", code, *rest] if "onefold.worker" in code:
            return lambda: _run_code(code, rest)
        case [script, *rest] if Path(script).parent == SCRIPTS:
            return lambda: _run_script(script, rest)
    return None


def _run_module(name: str, arguments: list[str]) -> None:
    sys.path.insert(0, os.getcwd())
    sys.argv = ["-m", *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_code(code: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def _run_script(script: str, arguments: list[str]) -> None:
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


@cache
def _load() -> None:
    """What every program loads sooner or later, once, before the first fork."""
    environment, filters = dict(os.environ), list(warnings.filters)
    for name in ("cloudpickle", "torch._dynamo"):
        importlib.import_module(name)

    for name in os.environ.keys() - environment.keys():  # of the compiler's cache
        del os.environ[name]
    _Kept.filters[:0] = [each for each in warnings.filters if each not in filters]
    # Asked here, as each child would ask again: it takes a Python of its own.
    _fresh_path()


@cache
def _fresh_path() -> list[str]:
    """The path of a Python that has just started, without the folder of its program."""
    command = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]
    with _RealPopen(command, stdout=subprocess.PIPE, text=True) as process:
        return process.communicate()[0].splitlines()


class _Child:
    """The forked process on its way to be a program of its own."""

    def __init__(self, asked: types.SimpleNamespace, before: dict[int, str]) -> None:
        self._asked = asked
        # libuv, which PyTorch's store uses, makes a pipe anew in every forked process, and closes
        # the old one by its numbers: these must not come to be those of other files.
        self._anew = {n for n, target in _descriptors().items() if before.get(n) != target}

    def become(self, program: Callable[[], None]) -> NoReturn:
        """Run the program and end as it ends; never returns to the parent's stack."""
        code = 1
        try:
            self._leave_the_parent()
            code = _ended(program)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _leave_the_parent(self) -> None:
        # What the parent holds is neither looked at nor destroyed in here: a file that would be
        # closed as garbage may have the number of one of ours.
        gc.freeze()
        self._restore_signals()
        if self._asked.start_new_session:
            os.setsid()
        if self._asked.cwd is not None:
            os.chdir(self._asked.cwd)
        if self._asked.env is not None:
            os.environ.clear()
            os.environ.update(self._asked.env)
        self._restore_descriptors()
        if self._asked.preexec_fn is not None:
            self._asked.preexec_fn()
        # As Python does when it starts.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _restore_python()
        _restore_libraries()
        _state.__init__()  # type: ignore[misc]

    def _restore_signals(self) -> None:
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)

    def _restore_descriptors(self) -> None:
        asked = self._asked
        streams = [asked.p2cread, asked.c2pwrite, asked.errwrite]
        # First to numbers beyond the three, or one of them could be overwritten before its turn.
        streams = [os.dup(each) if each != -1 else -1 for each in streams]
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        inherited = {int(each) for each in asked.pass_fds} | {0, 1, 2}
        kept = sorted(inherited | self._anew)
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        for number in inherited:
            os.set_inheritable(number, True)


def _descriptors() -> dict[int, str]:
    """What the open descriptors of this process lead to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder which is being read
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _restore_python() -> None:
    """What pytest and the tests have changed of Python."""
    stdin = open(0, closefd=False)  # noqa: SIM115
    stdout, stderr = _writing(1), _writing(2, errors="backslashreplace")
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, f"__{name}__", stream)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.path[:] = _fresh_path()
    # Kept alive: objects of theirs would be destroyed, which are the parent's.
    _Kept.modules = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] in _OURS or name in ("__main__", "conftest")
    }
    sys.modules["__main__"] = types.ModuleType("__main__")
    warnings._showwarnmsg_impl = _Kept.show_warning  # type: ignore[attr-defined]
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
    warnings.resetwarnings()
    warnings.filters.extend(_Kept.filters)  # type: ignore[attr-defined]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    _leave_handlers_of_pytest()
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_OURS)]:
        del logging.root.manager.loggerDict[name]
    atexit._clear()
    atexit.register(logging.shutdown)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    tempfile.tempdir = None
    random.seed()


def _leave_handlers_of_pytest() -> None:
    """They write into descriptors that are closed here, so into whatever is opened next.

    pytest adds them to the root and, while a test runs, to each logger that does not propagate,
    as the compiler's does not.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers[:] = [
                each for each in logger.handlers if not type(each).__module__.startswith("_pytest")
            ]


def _writing(descriptor: int, errors: str = "strict") -> io.TextIOWrapper:
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        open(descriptor, "wb", buffering=0 if at_once else -1, closefd=False),
        errors=errors,
        write_through=at_once,
        line_buffering=descriptor == 2 and not at_once,
    )


def _restore_libraries() -> None:
    """What the tests have changed of libraries."""
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    np.random.seed()
    torch.set_num_threads(_threads)
    torch.seed()


def _filters_of_numpy() -> list[Any]:
    """Where a plugin of pytest loads NumPy, pytest puts back the filters of before."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("always", np.exceptions.RankWarning)
        for kind in ("dtype", "ufunc", "ndarray"):
            warnings.filterwarnings("ignore", message=f"numpy.{kind} size changed")
        return list(warnings.filters)


def _filters_of_libraries() -> list[Any]:
    """Those that libraries have set as they were loaded, and Python's own at the end."""
    ours = ("error", "always")  # what pytest and our settings say of all warnings of these
    kinds = (Warning, DeprecationWarning, PendingDeprecationWarning)
    filters: list[Any] = [*warnings.filters]
    theirs = [each for each in filters if (each[0] not in ours or each[2] not in kinds)]
    if not any(issubclass(each[2], np.exceptions.RankWarning) for each in theirs):
        theirs += _filters_of_numpy()
    own: list[tuple[str, type[Warning], str | None]]
    own = [("default", DeprecationWarning, "__main__")]
    own += [
        ("ignore", kind, None)
        for kind in (
            DeprecationWarning,
            PendingDeprecationWarning,
            ImportWarning,
            ResourceWarning,
        )
    ]
    pythons = [(action, None, kind, module, 0) for action, kind, module in own]
    return [*(each for each in theirs if each not in pythons), *pythons]


def _module_anew(name: str) -> Any:
    """A copy of a module of Python's as it is in its file, whatever has been put in its place."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Kept:
    """What a child puts back, as it was when this process loaded its libraries."""

    modules: dict[str, types.ModuleType]
    show_warning = staticmethod(_module_anew("warnings")._showwarnmsg_impl)
    filters = _filters_of_libraries()


def _ended(program: Callable[[], None]) -> int:
    """Run a program as the interpreter does, and return its exit code."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = _exit_code(end)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        kind, error, frames = sys.exc_info()
        sys.excepthook(kind, error, _below_this(frames))  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    return code


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _below_this(frames: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that the program itself would have."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames
