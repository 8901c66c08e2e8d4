"""``onefold run --checkpoint``: any script is saved, stopped and gone on with."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold
from onefold.record import FILE
from tests.checkpoint.folders import steps_in
from tests.started import StartedRun
from tests.warm import SCRIPTS

SCRIPT = str(SCRIPTS / "stopped.py")
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("faults")]


class Run(StartedRun):
    """A run of the script, with what it says."""

    def finish(self) -> tuple[int, str, str]:
        """Exit code, the last line of output, and what stands on the screen besides."""
        code = self.process.wait(300)
        lines = self.output.read_text().splitlines()
        return code, lines[-1] if lines else "", self.errors.read_text()


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder, self.directory = folder, folder / "checkpoints"
        self.started: list[Run] = []

    def start(self, *arguments: str, devices: int = 2, options: str = "--save-every 3") -> Run:
        whole = ["--devices", f"cpu:{devices}", "--checkpoint", str(self.directory)]
        self.started.append(Run(self.folder, [*whole, *options.split()], [SCRIPT, *arguments]))
        return self.started[-1]

    def whole(self, steps: int) -> str:
        """The fingerprint of a run that nobody stops."""
        run = Run(self.folder, ["--devices", "cpu:1"], [SCRIPT, "steps", "0", str(steps)])
        self.started.append(run)
        code, fingerprint, errors = run.finish()
        assert (code, errors) == (0, "")
        return fingerprint


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tmp_path)
    yield found
    for run in found.started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


@pytest.mark.parametrize(
    ("number", "exchange"),
    [
        (signal.SIGTERM, "collective"),
        (signal.SIGINT, "shared"),
        pytest.param(signal.SIGHUP, "shared", marks=pytest.mark.full),
    ],
)
def test_a_signal_saves_and_all_goes_on(runs: Runs, number: signal.Signals, exchange: str) -> None:
    whole = runs.whole(40)
    options = f"--save-every 1000 --exchange {exchange}"
    first = runs.start("steps", "0.05", "40", options=options)
    first.wait_until_ready()
    first.process.send_signal(number)
    code, _, errors = first.finish()
    (step,) = steps_in(runs.directory)
    assert 1 <= step < 40
    assert code == 75
    assert errors == (
        f"onefold: stopped by {number.name} after step {step} and saved in {runs.directory}. Run "
        f"the same command to resume\n"
    )
    second = runs.start("steps", "0", "40", devices=1, options=options)
    code, fingerprint, errors = second.finish()
    assert (code, fingerprint) == (0, whole)
    assert f"resuming after step {step}: {runs.directory}/step-{step:08d}" in errors
    assert onefold.Record(runs.directory).steps["step"].tolist() == list(range(1, 41))


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_to_every_process_saves_once(runs: Runs, number: signal.Signals) -> None:
    """As Slurm sends it, to loader workers too, and again, and the end soon after."""
    run = runs.start("workers", "0.05", "1000", options="--save-every 1000 --max-restarts 1")
    run.wait_until_ready()
    time.sleep(0.5)  # into the loop, where the loader's workers are
    for pid in (*descendants(run.process.pid), run.process.pid):
        os.kill(pid, number)
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.finish()
    assert code == 75, errors
    assert len(steps_in(runs.directory)) == 1
    assert f"onefold: stopped by {number.name} after step" in errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("exchange", "devices", "more"),
    [("shared", 3, " --restart-devices fewer"), ("collective", 2, "")],
)
def test_as_many_crashes_are_survived(runs: Runs, exchange: str, devices: int, more: str) -> None:
    """With as many devices, or without the one that was killed."""
    whole = runs.whole(15)
    (runs.folder / "crashes").mkdir()
    arguments = ["crash", str(runs.folder / "crashes"), "2", str(runs.directory)]
    options = f"--save-every 3 --max-restarts 2 --exchange {exchange}{more}"
    code, fingerprint, errors = runs.start(*arguments, devices=devices, options=options).finish()
    assert (code, fingerprint) == (0, whole)
    assert "was killed by SIGKILL" in errors
    assert "onefold: restarting (1 of 2)" + (", with 2 devices" if more else "\n") in errors
    # The second one does not count where a newer checkpoint had been written meanwhile.
    assert errors.count("onefold: restarting (") == 2
    # What was being written as the crash came may or may not be there.
    assert set(re.findall(r"resuming after step (\d+)", errors)) <= {"3", "6"}
    assert errors.count("resuming after step") == 2


def test_a_crash_too_many_ends_the_run(runs: Runs) -> None:
    (runs.folder / "crashes").mkdir()
    arguments = ["crash", str(runs.folder / "crashes"), "9", str(runs.directory)]
    code, _, errors = runs.start(*arguments, options="--save-every 6 --max-restarts 1").finish()
    assert (code, errors.count("onefold: restarting (")) == (137, 1)
    assert (runs.directory / "step-00000006").is_dir()


@pytest.mark.full
def test_a_directory_belongs_to_one_run_at_a_time(runs: Runs, tmp_path: Path) -> None:
    first = runs.start("steps", "0.05", "1000")
    first.wait_until_ready()
    (tmp_path / "other").mkdir()
    other = Runs(tmp_path / "other")
    other.directory = runs.directory
    code, _, errors = other.start("steps", "0", "3", options="--grace-period 1").finish()
    assert code == 2
    words = r"(?s).*waiting for .*\n.*: another process is using this folder .*; waited for 1 s\. "
    assert re.match(words, errors)
    first.process.send_signal(signal.SIGTERM)
    # Before that has saved itself, perhaps. A run of fewer steps cannot be answered by its record.
    (runs.directory / FILE).unlink()
    code, _, errors = other.start("steps", "0", "3").finish()
    assert code == 0, errors
    assert first.finish()[0] == 75
    assert not (runs.directory / ".lock").exists()
    killed = runs.start("steps", "0.05", "1000")  # holds nothing up
    killed.wait_until_ready()
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.process.wait(300)
    code, _, errors = other.start("steps", "0", "3").finish()
    assert code == 0, errors
