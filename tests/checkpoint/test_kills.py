"""Runs that are killed at any moment go on to the very end of the run that never was."""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from onefold.checkpoint.folder import find_checkpoint, has_checkpoints

SCRIPT = Path(__file__).parent.parent / "scripts" / "kept.py"
SAMPLES, STEPS, EPOCHS, SHARDS = 131, 24, 4, 4
WIDTH = 60_000  # 16 MB in each checkpoint
PAUSE_S = 0.02
SAVING_S = 0.05
LIMIT_S = 60
MOMENTS = ("any", "any", "inside a save", "inside a save", "inside a save")
BESIDE = re.compile(r"\.step-\d{8}\.[0-9a-f]{8}\.(part|old|gone)")
pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.xdist_group("faults")]


class Run:
    """``onefold run`` of the script, from its start until all its processes have ended."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self._output, self._errors = folder / f"{name}.out", folder / f"{name}.err"
        script = [str(SCRIPT), str(folder / "record"), str(PAUSE_S), str(WIDTH)]
        with self._output.open("wb") as out, self._errors.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onefold", "run", *options, *script],
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(folder)},
            )
        self._workers: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._wait_for_workers()

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self) -> None:
        while "ready" not in self.output:
            assert not self.has_ended, self.errors
            time.sleep(0.01)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._workers = [os.pidfd_open(int(pid)) for pid in children.read_text().split()]

    def kill(self, whom: str, rng: random.Random) -> bool:
        """Whether the run had not ended by itself before."""
        if whom == "launcher":
            self._process.kill()
        else:
            worker = self._workers[0] if whom == "lead" else rng.choice(self._workers)
            try:
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            except ProcessLookupError:
                assert self._process.wait(LIMIT_S) == 0, self.errors
        code = self._process.wait(LIMIT_S)
        self._wait_for_workers()
        if code == 0:
            assert "end" in self.output
            return False
        assert code == (-signal.SIGKILL if whom == "launcher" else 128 + signal.SIGKILL), (
            self.errors
        )
        return True

    def finish(self) -> tuple[int, str]:
        """How many steps it had done in the end, and the fingerprint."""
        assert self._process.wait(LIMIT_S) == 0, self.errors
        _, steps, fingerprint = self.output.splitlines()[-1].split()
        return int(steps), fingerprint

    def _wait_for_workers(self) -> None:
        for worker in self._workers:
            poller = select.poll()
            poller.register(worker, select.POLLIN)
            assert poller.poll(LIMIT_S * 1000), "a worker has outlived its launcher"
            os.close(worker)
        self._workers = []


@dataclass(frozen=True)
class Whole:
    """The run that nobody kills."""

    fingerprint: str
    lines: frozenset[str]
    """Of the record."""
    duration_s: float
    """From the time when it was ready."""


@dataclass
class Kills:
    """What was done to a run."""

    whom: Counter[str] = field(default_factory=Counter)
    inside_a_save: int = 0
    """A folder that was being written was left."""

    @property
    def number(self) -> int:
        return self.whom.total()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    with Run(folder, "whole", "--devices", "cpu:1") as run:
        run.wait_until_ready()
        began = time.monotonic()
        steps, fingerprint = run.finish()
    assert steps == STEPS
    lines = (folder / "record").read_text().splitlines()
    assert len(lines) == STEPS * SHARDS
    check_samples(lines)
    return Whole(fingerprint, frozenset(lines), time.monotonic() - began)


def check_samples(lines: list[str]) -> None:
    """Every sample once an epoch; a step that was done again used what it had used before."""
    used: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for step, *samples in (map(int, line.split()) for line in set(lines)):
        used[(step - 1) * EPOCHS // STEPS].update(samples)
    assert sorted(used) == list(range(EPOCHS))
    for epoch, times in used.items():
        assert times == Counter(range(SAMPLES)), f"epoch {epoch}"


def left_beside(directory: Path) -> list[str]:
    """What a kill has left of the folders that were being written, replaced or deleted."""
    if not directory.exists():
        return []
    return [match[1] for name in os.listdir(directory) if (match := BESIDE.fullmatch(name))]


def saved_step(directory: Path) -> int:
    return find_checkpoint(directory).run["step"] if has_checkpoints(directory) else 0


def wait_for_moment(run: Run, rng: random.Random, directory: Path, remaining_s: float) -> str:
    """Wait, and say who is to be killed."""
    moment = rng.choice(MOMENTS)
    time.sleep(rng.uniform(0, remaining_s))
    if moment == "any":
        return rng.choice(("launcher", "worker"))
    while "part" not in left_beside(directory) and not run.has_ended:
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, SAVING_S))
    return rng.choice(("lead", "lead", "launcher"))


def start(rng: random.Random, folder: Path, name: str) -> Run:
    return Run(
        folder,
        name,
        "--devices",
        f"cpu:{rng.randint(1, 3)}",
        "--exchange",
        rng.choice(("shared", "collective")),
        "--checkpoint",
        str(folder / "checkpoints"),
        "--every",
        rng.choice(("1", "1", "2", "3")),
    )


def check_goes_on(run: Run, step: int) -> None:
    """It has gone on from the newest checkpoint that is whole, without a word about others."""
    told = re.findall(r"onefold: going on after step (\d+)", run.errors)
    assert told == ([str(step)] if step else [])
    assert "damaged" not in run.errors


def killed_and_continued(rng: random.Random, folder: Path, kills: int, whole: Whole) -> Kills:
    """Kill a run so many times, unless it comes to its end before, and let it go on to its end."""
    directory = folder / "checkpoints"
    done, step = Kills(), 0
    for number in range(kills):
        with start(rng, folder, f"killed-{number}") as run:
            run.wait_until_ready()
            check_goes_on(run, step)
            remaining_s = whole.duration_s * (STEPS - step) / STEPS
            whom = wait_for_moment(run, rng, directory, remaining_s)
            if run.kill(whom, rng):
                done.whom[whom] += 1
                done.inside_a_save += "part" in left_beside(directory)
        assert saved_step(directory) >= step
        step = saved_step(directory)
    with start(rng, folder, "last") as run:
        assert run.finish() == (STEPS, whole.fingerprint)
        check_goes_on(run, step)
    lines = (folder / "record").read_text().splitlines()
    assert set(lines) == whole.lines
    check_samples(lines)
    check_tidy(directory, whole, saved_since=step < STEPS)
    return done


def check_tidy(directory: Path, whole: Whole, *, saved_since: bool) -> None:
    """All that is left is whole; and what kills had left has gone with the next save."""
    last = find_checkpoint(directory)
    assert (last.run["step"], last.run["fingerprint"]) == (STEPS, whole.fingerprint)
    folders = list(directory.glob("step-*"))
    assert [find_checkpoint(folder).folder for folder in folders] == folders
    if saved_since:
        assert left_beside(directory) == []
        assert len(folders) <= 3


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_was_killed_twice_ends_like_the_whole_one(
    tmp_path: Path, whole: Whole, seed: int
) -> None:
    killed_and_continued(random.Random(seed), tmp_path, 2, whole)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path: Path, whole: Whole) -> None:
    whom: Counter[str] = Counter()
    inside_a_save = runs = 0
    while whom.total() < 100:
        folder = tmp_path / str(runs)
        folder.mkdir()
        kills = min(5, 100 - whom.total())
        done = killed_and_continued(random.Random(1000 + runs), folder, kills, whole)
        whom += done.whom
        inside_a_save += done.inside_a_save
        shutil.rmtree(folder)
        runs += 1
        print(f"{runs} runs, kills {dict(whom)}, {inside_a_save} inside a save", flush=True)
    assert whom.total() == 100
    assert inside_a_save >= 10
