"""Fixtures for all tests: real data, and a watch over what a test leaves behind."""

import os
from typing import Any

# Before PyTorch is loaded, which reads them then. One of two test workers computes as a processor
# without AVX-512 does, so that what is found here does not depend on the machine.
AVX2_ALONE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
    for name, value in AVX2_ALONE.items():
        os.environ.setdefault(name, value)

import gc
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import tables, warm

SEMAPHORE_IN_THE_MAKING = re.compile(r"sem\.[A-Za-z0-9]{6}")
"""The C library's own: it stays where a process is killed in the very moment of making one."""

OWN_SEMAPHORES = f"mp{os.getpid()}"
"""What names of Python's semaphores begin with here, and in what is forked from here."""
multiprocessing.current_process()._config["semprefix"] = f"/{OWN_SEMAPHORES}"  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parent.parent
USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}

subprocess.Popen = warm.Popen  # type: ignore[misc]

# Machines that stall for a second fail no test, and a commit has one result. New examples are
# looked for by hand, with `--hypothesis-profile explore`.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", _UNTIMED)
settings.register_profile("same", _UNTIMED, derandomize=True)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """Test workers start with the order of sets that launched devices have, so as to be forked."""
    os.environ.setdefault("PYTHONHASHSEED", "0")
    tables.wanted[:] = [] if "not full" in config.getoption("markexpr") else ["full"]
    # Ignored under nohup and in the background of a script, and then by whatever a test starts.
    for number, handler in USUAL.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where the start of a process is what matters, it is started as by a user."""
    warm.start_by_fork(item.get_closest_marker("fresh") is not None)


MOST_CPU_S = 5.0  # of a test that is not marked full, with the processes that it starts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note the processor time of a test: unlike that of a clock it does not depend on the load."""
    before = os.times()
    try:
        return (yield)
    finally:
        used = sum(after - first for after, first in zip(os.times()[:4], before[:4], strict=True))
        if used > MOST_CPU_S and item.get_closest_marker("full") is None:
            item.user_properties.append(("processor seconds", round(used, 1)))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what takes too long for `make test`, and the seed of the order."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "when")]
    slow = [(dict(r.user_properties), r.nodeid) for r in reports if r.when == "call"]
    slow = [(p["processor seconds"], name) for p, name in slow if "processor seconds" in p]
    for seconds, name in sorted(slow, reverse=True):
        terminalreporter.write_line(
            f"{name} took {seconds} processor seconds: mark it full, or make it smaller"
        )
    seed = config.getoption("randomly_seed", None)
    terminalreporter.write_line(f"order of the tests: --randomly-seed={seed}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets, beside the project or where ONEFOLD_DATA says."""
    path = Path(os.environ.get("ONEFOLD_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data sets at {path}: set ONEFOLD_DATA to their folder")
    return path


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, threads, files in shared memory or other settings."""
    torch.set_num_threads(1)
    # Whatever earlier tests have drawn.
    torch.default_generator.manual_seed(torch.Generator().initial_seed())
    before, open_before = _surroundings(), len(open_files())
    modules = {name: id(module) for name, module in sys.modules.items()}
    mkldnn: Any = torch.backends.mkldnn
    products = mkldnn.matmul, torch.backends.cuda.matmul
    precisions = [backend.fp32_precision for backend in products]
    settings = _settings()
    environment = _environment()
    yield
    # An older setting writes to these as well, and has no way to put them back.
    for backend, precision in zip(products, precisions, strict=True):
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision
    # What other fixtures gave was needed up to here. It may hold files open until it is collected,
    # which are not to count against the limit of a later test.
    request.node.funcargs.clear()
    if len(open_files()) > open_before:
        gc.collect()
    deadline = time.monotonic() + 5
    # Shared memory is everybody's: what comes and goes there while this looks is another process's.
    left = _surroundings() - before
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
        left &= _surroundings()
    left = {name for name in left if not _is_anothers(name)}
    assert not left, f"left behind: {sorted(left)}"
    assert _environment() == environment, "the test changed the environment"
    assert _settings() == settings, "the test changed global settings of PyTorch or NumPy"
    replaced = [n for n, number in modules.items() if id(sys.modules.get(n)) != number]
    assert not replaced, f"the test replaced modules: {replaced}"


def _settings() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        type(np.random.mtrand.get_bit_generator()).__name__,
    )


def _environment() -> dict[str, str]:
    """But for what pytest sets and, when it is first used, PyTorch's compiler or a Trainer."""
    own = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in own}


def _surroundings() -> set[str]:
    """Children, threads and files in shared memory, as words."""
    children = {f"process {pid}" for pid in _children()}
    threads = {f"thread {thread.name}" for thread in threading.enumerate()}
    names = [name for name in os.listdir("/dev/shm") if not SEMAPHORE_IN_THE_MAKING.fullmatch(name)]
    memory = {f"shared memory {name}" for name in names}
    return children | threads | memory


def open_files() -> set[str]:
    """Descriptors of this process with what they lead to, but for files of installed packages."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder which is being read
            target = os.readlink(f"/proc/self/fd/{number}")
            if not target.startswith((os.path.realpath(sys.prefix), "/proc/")):
                found.add(f"descriptor {number} of {target}")
    return found


def _is_anothers(name: str) -> bool:
    """Whether a file in shared memory belongs to a process that this one has not started."""
    kind, _, file = name.rpartition(" ")
    if kind != "shared memory":
        return False
    if file.startswith("sem.loky-"):
        return True  # joblib's, for a moment of its import: a process that is killed then leaves it
    try:
        # By inode: the C library maps a semaphore under one name and then gives it another.
        inode = str(Path("/dev/shm", file).stat().st_ino)
    except FileNotFoundError:
        return True  # gone while this looked, and so not of a process that is still ours
    families = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            maps = [line.split() for line in (process / "maps").read_text().splitlines()]
            if any(m[4] == inode and m[5].startswith("/dev/shm/") for m in maps if len(m) > 5):
                families.append(_ancestors(int(process.name)))
    if not families and file.startswith("sem.mp"):
        # Of a process that was killed: a test's, or any other on this machine.
        return not file.startswith(f"sem.{OWN_SEMAPHORES}-")
    if not families and (made := re.fullmatch(r"torch_(\d+)_.*", file)):
        # PyTorch takes the name away in the call that makes it. A process was killed in between.
        return not Path("/proc", made[1]).exists()
    # An orphan may be one that the test has left behind.
    return bool(families) and all(
        os.getpid() not in family and len(family) > 2 for family in families
    )


def _ancestors(pid: int) -> set[int]:
    """A process, its parent, and so on."""
    found = set()
    while pid > 1:
        found.add(pid)
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pid = int(words[1])
    return found


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            pids.update(map(int, (task / "children").read_text().split()))
    return pids
