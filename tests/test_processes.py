"""Whatever happens to a process, the run ends soon, says why once, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.started import StartedRun
from tests.tables import some
from tests.warm import SCRIPTS

LIMIT_S = 300
"""For a run to end: half of what devices wait for each other."""
pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("faults"),  # they watch the clock: one at a time
]


class Run(StartedRun):
    """A run of the script with a fault."""

    def workers(self) -> list[int]:
        """Process ids of the devices, in their order."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return sorted(int(pid) for pid in path.read_text().split())

    def finish(self) -> tuple[int, str]:
        """Exit code, and what stands on the screen besides the output."""
        return self.process.wait(LIMIT_S), self.errors.read_text()


Start = Callable[..., Run]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    started: list[Run] = []

    def start(*fault: str, options: tuple[str, ...] = ()) -> Run:
        started.append(
            Run(tmp_path, ["--devices", "cpu:3", *options], [str(SCRIPTS / "faulty.py"), *fault])
        )
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()


FAILED = r"device 1 \(cpu, process \d+\) failed {}: ArithmeticError: the fault"
FAULTS = {
    "kill": (r"device 1 \(cpu, process \d+\) was killed by SIGKILL .*after step 3", 137),
    "stop": (r"device 1 .*suspended.*(after step 3|in step 4)", 1),
    "raise": (FAILED.format("after step 3"), 1),
    "inside": (FAILED.format("in step 4"), 1),
    "exit": (r"device 1 \(cpu, process \d+\) ended with exit code 3 after step 3", 3),
    "leave": (r"device 1 .*ended.* its script finished before the others'", 1),
}
CASES = [("shared", kind) for kind in ("kill", "stop", "raise", "exit", "leave")]
CASES += [("collective", kind) for kind in ("kill", "stop", "inside")]


@pytest.mark.parametrize(("exchange", "kind"), some(CASES, 2))
def test_a_fault_of_one_device_ends_the_run(run: Start, exchange: str, kind: str) -> None:
    message, code = FAULTS[kind]
    this = run(kind, "1", "4", options=("--exchange", exchange))
    this.wait_until_ready()
    exit_code, errors = this.finish()
    assert re.search(message, errors), errors
    assert exit_code == code
    assert errors.count("Traceback (most recent call last)") == (kind in ("raise", "inside"))
    assert len([line for line in errors.splitlines() if line.startswith("onefold:")]) <= 2


LEFT = "remove init_process_group, DistributedDataParallel and DistributedSampler"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))", LEFT),
        ("torch.utils.data.DistributedSampler([1])", LEFT),
        ("torch.distributed.get_rank()", LEFT),
        ("torch.distributed.init_process_group('gloo')", LEFT),
        (
            "torch.amp.GradScaler('cpu').unscale_(torch.optim.SGD([torch.ones(1)]))",
            "precision='fp16'",
        ),
        ("input('How many epochs? ')", "ask before the run starts"),
        ("raise __import__('bdb').BdbQuit", "BdbQuit (a device reads no input: ask before"),
    ],
)
def test_a_line_that_other_launchers_need_is_named(tmp_path: Path, line: str, hint: str) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    done = subprocess.run(
        [sys.executable, "-m", "onefold", "run", "--devices", "cpu:1", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert hint in done.stderr.splitlines()[-1]


WHEN = r"((in|after) step \d+|before the first step)"
SIGNALS = {signal.SIGINT: ("Ctrl-C", 130), signal.SIGTERM: ("SIGTERM", 143)}


@pytest.mark.parametrize(("sent", "starts"), [*((each, False) for each in SIGNALS), (15, True)])
def test_a_signal_to_the_launcher_leaves_no_worker_and_no_folder(
    run: Start, tmp_path: Path, sent: int, starts: bool
) -> None:
    this, (name, expected) = run("none", "0", "-1"), SIGNALS[signal.Signals(sent)]
    while not list(tmp_path.glob("onefold-*")):
        time.sleep(0.001)
    if not starts:
        this.wait_until_ready()
    workers = this.workers()
    this.process.send_signal(sent)
    code, errors = this.finish()
    assert code == expected
    assert re.fullmatch(rf"onefold: stopped by {name} {WHEN} \(device 0\)\n", errors), errors
    assert not any(map(lives, workers))
    assert list(tmp_path.glob("onefold-*")) == []


def test_the_workers_end_with_their_launcher(run: Start) -> None:
    this = run("none", "0", "-1")
    this.wait_until_ready()
    workers = this.workers()
    assert len(workers) == 3
    os.kill(this.process.pid, signal.SIGKILL)
    limit = time.monotonic() + LIMIT_S
    while any(map(lives, workers)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(lives, workers))


def lives(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
