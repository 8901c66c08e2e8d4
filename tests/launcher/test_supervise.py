"""What the launcher does with its workers, with workers that load nothing and end at once."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onefold.core.options import RunOptions
from onefold.errors import LaunchError
from onefold.launcher.devices import Selection
from onefold.launcher.launch import supervise
from onefold.launcher.workers import Outcome
from tests.tables import for_each

Start = Callable[..., Outcome]
HEAD = """
import json, os, pathlib, shutil, subprocess, sys, time
context = json.loads(os.environ["ONEFOLD_CONTEXT"])
folder = pathlib.Path(context["directory"])
print("words of a device", flush=True)
"""
pytestmark = pytest.mark.processes


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    def run(lines: str, *, devices: int = 2, **options: Any) -> Outcome:
        popen: Any = subprocess.Popen

        def replaced(command: list[str], **how: Any) -> Any:
            if "ONEFOLD_CONTEXT" in (how.get("env") or {}):
                command = [*command[:3], HEAD + lines]
            return popen(command, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", replaced)
            return supervise(["no script"], Selection(("cpu",) * devices), RunOptions(**options))

    return run


@contextmanager
def handled(number: signal.Signals, how: Any) -> Iterator[None]:
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture
def signalled() -> Iterator[Callable[..., None]]:
    """Sends signals to this process as soon as a file is there."""
    threads = []

    def send(ready: Path, *numbers: signal.Signals) -> None:
        def wait() -> None:
            while not ready.exists():
                time.sleep(0.01)
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield send
    for thread in threads:
        thread.join()
    assert before == {number: signal.getsignal(number) for number in before}


def is_collected(pid: int) -> bool:
    """Whether the number of a child may be another process's by now."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


@for_each(
    ("lines", "code", "words"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, "ended with exit code 7 before the first step"),
        ("os.kill(os.getpid(), 15)", 143, "was killed by SIGTERM before the first step"),
    ],
)
def test_how_a_worker_ended_is_known_and_no_number_is_used_that_may_be_anothers(
    start: Start, monkeypatch: pytest.MonkeyPatch, lines: str, code: int, words: str
) -> None:
    real, sent = os.killpg, []

    def killpg(group: int, number: int) -> None:
        sent.append((group, is_collected(group)))
        real(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    with handled(signal.SIGCHLD, signal.SIG_IGN):  # as some programs do
        outcome = start(lines)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    assert (outcome.exit_code, words in outcome.message) == (code, True)
    assert [collected for _, collected in sent] == [False, False]
    assert all(is_collected(group) for group, _ in sent)


REPORT = """
report = dict(time_s=0.0, kind={kind!r}, text="CUDA error: uncorrectable",
    traceback="", caused_by_peer={by_peer})
if context["rank"] == 1:
    os.write(context["report_descriptor"], json.dumps(report).encode() + b"\\n")
    sys.exit(1)
"""


@for_each(
    ("kind", "by_peer", "lost", "final"),
    [
        ("AcceleratorError", False, 1, False),
        ("AcceleratorError", True, -1, False),
        ("ValueError", False, -1, False),
        ("LaunchError", False, -1, True),
    ],
)
def test_a_gpu_that_failed_is_lost(
    start: Start, kind: str, by_peer: bool, lost: int, final: bool
) -> None:
    outcome = start(REPORT.format(kind=kind, by_peer=by_peer))
    assert (outcome.lost, outcome.final, outcome.exit_code) == (lost, final, 1)


@for_each(("traces", "named"), [("'T'", 0), ("str(context['rank'])", 1)])
def test_of_devices_that_raise_the_same_the_lowest_is_named(
    start: Start, traces: str, named: int
) -> None:
    """Device 1 reports first."""
    outcome = start(f"""
report = dict(time_s=-float(context["rank"]), kind="LossError", text="the loss is nan",
    traceback={traces}, caused_by_peer=False)
os.write(context["report_descriptor"], json.dumps(report).encode() + b"\\n")
sys.exit(1)
""")
    assert outcome.message.startswith(f"device {named} ("), outcome.message


def test_children_of_a_worker_that_has_ended_are_ended(start: Start, tmp_path: Path) -> None:
    lines = f"""
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
os._exit(0)
"""
    assert start(lines, devices=1).exit_code == 0
    stat = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    limit = time.monotonic() + 10
    while stat.exists() and ") Z" not in stat.read_text() and time.monotonic() < limit:
        time.sleep(0.02)
    assert not stat.exists() or ") Z" in stat.read_text()


@for_each(
    ("saved", "code", "left_out"),
    [
        ([-1, -1], 0, [0, 0, 1]),
        ([-1, -1, -1], 1, [0, 0, 1]),
        ([3, 3, 3], 1, [0, 0, 1]),
        ([3, 6, 9, 12], 0, [0, 0, 1, 2, 3]),
        ([3, 6, 6, 6, 9], 1, [0, 0, 1, 2]),
    ],
)
def test_failures_are_counted_since_the_last_progress(
    start: Start, saved: list[int], code: int, left_out: list[int], tmp_path: Path
) -> None:
    """Though each further one in the same step goes back by one checkpoint."""
    tries = tmp_path / "tries"
    lines = f"""
tries, saved = pathlib.Path({str(tries)!r}), {saved}
with tries.open("a") as file:
    print(context["leave_out"], file=file)
number = len(tries.read_text().split())
if number > len(saved):
    sys.exit(0)
if saved[number - 1] >= 0:
    pathlib.Path(context["options"]["checkpoint"], f"step-{{saved[number - 1]:08d}}").mkdir(
        parents=True, exist_ok=True)
sys.exit(1)
"""
    outcome = start(lines, devices=1, checkpoint=str(tmp_path / "checkpoints"), max_restarts=2)
    assert (outcome.exit_code, list(map(int, tries.read_text().split()))) == (code, left_out)


@for_each(
    ("lost", "options", "devices"),
    [
        ([1, 0], {}, [3, 3, 3]),
        ([1, 0, 0, 0], {"restart_devices": "fewer"}, [3, 2, 1, 1, 1]),
        ([2], {"restart_devices": "fewer", "placement": "pipeline"}, [3, 2]),
        ([2, 1], {"restart_devices": "fewer", "placement": "pipeline:2"}, [4, 2, 2]),
    ],
)
def test_a_device_that_was_lost_may_be_left_out(
    start: Start,
    lost: list[int],
    options: dict[str, Any],
    devices: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = f"""
place, lost = pathlib.Path({str(tmp_path)!r}), {lost}
place.joinpath("runs", context["run_id"]).mkdir(parents=True, exist_ok=True)
number = len(os.listdir(place / "runs")) - 1
struck = place / f"size-{{number}}"
if context["rank"] == (lost[number] if number < len(lost) else 0):
    struck.write_text(str(context["size"]))
    if number < len(lost):
        os.kill(os.getpid(), 9)
while not struck.exists():
    time.sleep(0.01)
"""
    folder = str(tmp_path / "checkpoints")
    outcome = start(lines, devices=devices[0], checkpoint=folder, max_restarts=9, **options)
    sizes = [int((tmp_path / f"size-{n}").read_text()) for n in range(len(devices))]
    assert (outcome.exit_code, sizes) == (0, devices)
    assert (", with 2 devices" in capsys.readouterr().err) == (2 in devices)


def test_a_good_run_leaves_nothing_and_a_bad_one_its_logs(start: Start, temporary: Path) -> None:
    assert start("").logs == ""
    assert list(temporary.iterdir()) == []
    outcome = start("sys.exit(1)")
    (left,) = temporary.rglob("*.log")
    assert left == Path(outcome.logs, "device-1.log")
    assert left.read_text() == "words of a device\n"
    assert [path.name for path in temporary.iterdir()] == [left.parent.name]


def test_what_is_not_ours_is_refused(start: Start, tmp_path: Path) -> None:
    notes = tmp_path / "timeline.json"
    notes.write_text("Buy milk.\n")
    began = f"pathlib.Path({str(tmp_path / 'began')!r}).touch()"
    with pytest.raises(LaunchError, match=r"--profile .* was not written by onefold"):
        start(began, profile=str(tmp_path))
    assert notes.read_text() == "Buy milk.\n"
    assert not (tmp_path / "began").exists()


def test_a_worker_gets_a_folder_and_memory_of_its_owner_alone(start: Start, tmp_path: Path) -> None:
    said = tmp_path / "said"
    lines = f"""
modes = [oct(folder.stat().st_mode & 0o777), sys.flags.safe_path, context["safe_path"]]
modes += [os.readlink(f"/proc/self/fd/{{context[name]}}")
          for name in ("progress_descriptor", "report_descriptor")]
pathlib.Path({str(said)!r}).write_text(json.dumps(modes))
"""
    assert start(lines, devices=1).exit_code == 0
    names = ["/memfd:onefold-progress (deleted)", "/memfd:onefold-report-0 (deleted)"]
    assert json.loads(said.read_text()) == ["0o700", True, False, *names]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_workers_and_leaves_nothing(
    start: Start,
    temporary: Path,
    tmp_path: Path,
    signalled: Callable[..., None],
    number: signal.Signals,
) -> None:
    with handled(signal.SIGINT, signal.default_int_handler):
        signalled(tmp_path / "ready", number)
        outcome = start(f"pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(600)")
    assert (outcome.exit_code, outcome.stopped_by) == (128 + number, number)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert outcome.message.startswith(f"stopped by {name} before the first step")
    assert list(temporary.iterdir()) == []


@for_each("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_workers_start_leaves_none(
    start: Start, temporary: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """At the worst moment: a worker is there, and Popen has not returned."""
    real: Any = subprocess.Popen
    started: list[int] = []

    def popen(*arguments: Any, **how: Any) -> Any:
        process = real(*arguments, **how)
        started.append(process.pid)
        signal.raise_signal(number)
        return process

    def handle(number: int, frame: object) -> None:
        raise LookupError("of the program")

    monkeypatch.setattr(subprocess, "Popen", popen)
    if number == signal.SIGTERM:
        assert start("time.sleep(600)", devices=3).exit_code == 128 + number
    else:
        with handled(number, handle), pytest.raises(LookupError, match="of the program"):
            start("time.sleep(600)")
    assert len(started) == 1
    assert is_collected(started[0])
    assert list(temporary.iterdir()) == []


STOPS = """
from onefold.exchange.progress import Progress
table = Progress(context["progress_descriptor"], context["size"])
pathlib.Path({ready!r}).touch()
while not table.stop_requested():
    time.sleep(0.01)
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_saves_itself_is_asked_to(
    start: Start, tmp_path: Path, signalled: Callable[..., None], number: signal.Signals
) -> None:
    ready = tmp_path / "ready"
    signalled(ready, number)
    outcome = start(STOPS.format(ready=str(ready)), saves=True)
    assert outcome.exit_code == 75
    assert outcome.message == f"stopped by {number.name} after step -2 and saved"
