"""What the launcher does with its workers, with workers that load nothing and end at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold.core.options import RunOptions
from onefold.errors import LaunchError
from onefold.run.crew import Outcome
from onefold.run.devices import Selection
from onefold.run.launch import supervise
from onefold.watch.timeline import TimelinePart, name_row, slice_of

Start = Callable[..., Outcome]
HEAD = """
import json, os, pathlib, shutil, subprocess, sys, time
world = json.loads(os.environ["ONEFOLD_WORLD"])
folder = pathlib.Path(world["directory"])
print("words of a device", flush=True)
"""
pytestmark = pytest.mark.processes


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a run."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Has devices run a few lines of Python."""

    def run(lines: str, *, devices: int = 2, **options: object) -> Outcome:
        monkeypatch.setattr(sys.modules["onefold.run.launch"], "_START", HEAD + lines)
        chosen = RunOptions(**options)  # type: ignore[arg-type]
        return supervise(["no script"], Selection(("cpu",) * devices), chosen)

    return run


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


@pytest.mark.parametrize("lines", ["", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_no_signal_is_sent_to_a_number_that_may_be_anothers(
    start: Start, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    real, sent = os.killpg, []

    def killpg(group: int, number: int) -> None:
        sent.append((group, is_collected(group)))
        real(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    start(lines, devices=2)
    assert [collected for _, collected in sent] == [False, False]
    assert all(is_collected(group) for group, _ in sent)


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, "ended with exit code 7 in step 0 (before the first step)"),
        ("os.kill(os.getpid(), 15)", 143, "was killed by SIGTERM in step 0"),
    ],
)
def test_how_a_worker_ended_is_known(start: Start, lines: str, code: int, words: str) -> None:
    outcome = start(lines, devices=1)
    assert outcome.exit_code == code
    assert words in outcome.message


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


def test_a_worker_that_has_left_its_group_is_ended(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    lines = f"""
if world["rank"] == 1:
    time.sleep(0.5)
    sys.exit(1)
child = subprocess.Popen(["sleep", "600"], process_group=0)
os.setpgid(0, child.pid) if os.getpid() != os.getsid(0) else None
pathlib.Path({str(pid)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    assert start(lines).exit_code == 1
    worker, child = map(int, pid.read_text().split())
    assert is_collected(worker)
    os.kill(child, signal.SIGKILL)  # it has made itself independent, and is this test's to end


@pytest.mark.parametrize("lines", ["", "sys.exit(1)"])
def test_a_cleaner_that_removes_the_folders_changes_nothing(
    start: Start, temporary: Path, lines: str
) -> None:
    clean = f"for each in pathlib.Path({str(temporary)!r}).iterdir(): shutil.rmtree(each, True)\n"
    outcome = start(clean + lines)
    assert outcome.exit_code == (1 if lines else 0)
    assert outcome.logs == ""
    assert list(temporary.iterdir()) == []


def test_a_timeline_that_a_cleaner_has_removed_is_mentioned(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = start("shutil.rmtree(folder)", devices=1, profile=str(tmp_path))
    assert (outcome.exit_code, outcome.timeline) == (0, "")
    assert "was removed, and the timeline with it" in capsys.readouterr().err


def test_a_good_run_leaves_nothing_and_a_bad_one_its_logs(start: Start, temporary: Path) -> None:
    assert start("").logs == ""
    assert list(temporary.iterdir()) == []
    outcome = start("sys.exit(1)")
    (left,) = temporary.rglob("*.log")
    assert left == Path(outcome.logs, "device-1.log")
    assert left.read_text() == "words of a device\n"
    assert [path.name for path in temporary.iterdir()] == [left.parent.name]


def test_logs_of_two_runs_in_one_folder_stay_apart(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    assert start("", logs=str(logs)).exit_code == 0
    assert capsys.readouterr().err == ""
    (logs / "report-1.json").write_text("somebody's")
    (logs / "port").write_text("somebody's")
    outcome = start("sys.exit(1)", logs=str(logs))
    names = str(logs / "device-*.run-2.log")
    assert outcome.logs == names
    assert names in capsys.readouterr().err
    assert sorted(path.name for path in logs.iterdir()) == [
        "device-1.log",
        "device-1.run-2.log",
        "port",
        "report-1.json",
    ]
    assert (logs / "port").read_text() == "somebody's"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_workers_and_leaves_nothing(
    start: Start,
    temporary: Path,
    tmp_path: Path,
    signalled: Callable[..., None],
    number: signal.Signals,
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signalled(tmp_path / "ready", number)
        outcome = start(f"pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(600)")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.exit_code, outcome.stopped_by) == (128 + number, number)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert outcome.message.startswith(f"stopped by {name} in step 0")
    assert list(temporary.iterdir()) == []


def signalling_popen(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> list[int]:
    """Send a signal at the worst moment: a worker is there, and Popen has not returned.

    Returns the workers that were started so.
    """
    real: Any = subprocess.Popen
    started: list[int] = []

    def popen(*arguments: Any, **how: Any) -> Any:
        process = real(*arguments, **how)
        started.append(process.pid)
        signal.raise_signal(number)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def test_a_signal_while_the_workers_start_leaves_none(
    start: Start, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = signalling_popen(monkeypatch, signal.SIGTERM)
    outcome = start("time.sleep(600)", devices=3)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert len(started) == 1
    assert is_collected(started[0])
    assert list(temporary.iterdir()) == []


def test_ctrl_c_that_the_program_handles_itself_leaves_no_worker(
    start: Start, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = signalling_popen(monkeypatch, signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        raise LookupError("of the program")

    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(LookupError, match="of the program"):
            start("time.sleep(600)")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1
    assert is_collected(started[0])
    assert list(temporary.iterdir()) == []


STOPS = """
import mmap, struct
table = mmap.mmap(world["progress_descriptor"], 16 * (world["size"] + 1))
pathlib.Path(sys.argv[1]).touch()
while not struct.unpack_from("<q", table, 16 * world["size"])[0]:
    time.sleep(0.01)
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_saves_itself_is_asked_to(
    start: Start, tmp_path: Path, signalled: Callable[..., None], number: signal.Signals
) -> None:
    ready = tmp_path / "ready"
    signalled(ready, number)
    outcome = start(STOPS.replace("sys.argv[1]", repr(str(ready))), saves=True)
    assert outcome.exit_code == 75
    assert outcome.message == f"stopped by {number.name} after step -2 and saved"


def test_nohup_is_heeded(start: Start, tmp_path: Path, signalled: Callable[..., None]) -> None:
    ready = tmp_path / "ready"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signalled(ready, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
        outcome = start(STOPS.replace("sys.argv[1]", repr(str(ready))), saves=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome.message.startswith("stopped by SIGTERM")


def test_ends_are_known_where_the_program_ignores_those_of_children(start: Start) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert start("sys.exit(3)").exit_code == 3
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("option", ["trace", "profile"])
def test_what_is_not_ours_is_refused_before_any_work(
    start: Start, tmp_path: Path, option: str
) -> None:
    notes = tmp_path / ("timeline.json" if option == "profile" else "notes.txt")
    notes.write_text("Buy milk.\n")
    place = str(notes if option == "trace" else tmp_path)
    began = f"pathlib.Path({str(tmp_path / 'began')!r}).touch()"
    with pytest.raises(LaunchError, match=f"--{option} .* onefold wrote"):
        start(began, **{option: place})
    assert notes.read_text() == "Buy milk.\n"
    assert not (tmp_path / "began").exists()


def test_a_timeline_that_cannot_be_written_does_not_fail_the_run(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part"
    part.mkdir()
    TimelinePart(part, "0-0").append(
        [
            *name_row(group=0, row=0, name="device 0"),
            slice_of("a", "b", 0, 1, group=0, row=0, step=1),
        ]
    )
    profile = tmp_path / "profile"
    profile.mkdir()
    lines = f"""
shutil.copy({str(part / "0-0.part")!r}, world["timeline_parts"])
pathlib.Path({str(profile)!r}, "timeline.json").write_text("somebody's")
"""
    outcome = start(lines, devices=1, profile=str(profile))
    assert (outcome.exit_code, outcome.timeline) == (0, "")
    assert "the timeline could not be written" in capsys.readouterr().err
    assert (profile / "timeline.json").read_text() == "somebody's"


def test_a_worker_gets_a_folder_and_memory_of_its_owner_alone(start: Start, tmp_path: Path) -> None:
    said = tmp_path / "said"
    lines = f"""
modes = [oct(folder.stat().st_mode & 0o777), sys.flags.safe_path, world["safe_path"]]
modes += [os.readlink(f"/proc/self/fd/{{world[name]}}")
          for name in ("progress_descriptor", "report_descriptor")]
pathlib.Path({str(said)!r}).write_text(json.dumps(modes))
"""
    assert start(lines, devices=1).exit_code == 0
    names = ["/memfd:onefold-progress (deleted)", "/memfd:onefold-report-0 (deleted)"]
    assert json.loads(said.read_text()) == ["0o700", True, False, *names]
