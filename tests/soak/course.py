"""One course: a run to which something happens, and what becomes of it when it is run again.

Every run ends within its limit: with the result, to the last bit, or with one clear error. Nothing
of others is touched, and nothing stays behind. What was saved goes on to the very same result.
"""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.soak.faults import FAULTS, Fault
from tests.soak.place import Place, has_own_mounts

SCRIPT = Path(__file__).parent / "train.py"
ROOT = Path(__file__).parents[2]
LIMIT_S = 75.0
"""Of an attempt: all of it, the time for noticing what is silent, and that for saving."""
TIMEOUT_S, GRACE_S = 15, 20
NOTICES = re.compile(
    r"onefold: (resuming after step|restarting|output of the other devices|timeline:"
    r"|.* contains logs of an earlier run|stopping after|.* was removed, and the timeline with it"
    r"|the timeline could not be written)"
)


@dataclass(frozen=True)
class Course:
    """What is drawn from a seed."""

    seed: int
    fault: str
    devices: int
    exchange: str
    options: tuple[str, ...]
    workers: int
    after: int
    """Steps that the lead has begun when it happens; -1: anywhere before the first."""


class Whole(NamedTuple):
    """The run to which nothing happens: its last line, and how long it takes."""

    end: str
    seconds: float


@dataclass
class Told:
    """What came of a course."""

    course: Course
    kind: str = ""
    """How the first run ended, in few words."""
    message: str = ""
    """The error of that."""
    wrong: list[str] = field(default_factory=list)


def draw(seed: int) -> Course:
    """The course of a seed; the faults come in turn, so that each comes about as often."""
    rng = random.Random(seed)
    names = [name for name, fault in FAULTS.items() if has_own_mounts() or not fault.needs_mounts]
    options = [f"--save-every={rng.choice((1, 1, 2, 5))}", f"--keep-last={rng.choice((1, 2, 3))}"]
    options += [f"--max-restarts={rng.choice((1, 2))}"] * (rng.random() < 0.3)
    options += ["--logs=logs"] * (rng.random() < 0.3)
    options += ["--profile=profile"] * (rng.random() < 0.15)
    fault = names[seed % len(names)]
    devices, exchange = rng.choice((1, 2, 2, 3)), rng.choice(("shared", "collective"))
    workers = rng.choice((0, 0, 0, 1))
    if FAULTS[fault].script == "waits":
        devices = max(devices, 2)  # nobody waits for one alone
    if fault == "temporary files removed":
        workers = 0  # theirs hold sockets of Python's own, which it cannot do without
    return Course(
        seed=seed,
        fault=fault,
        devices=devices,
        exchange=exchange,
        options=tuple(options),
        workers=workers,
        after=rng.choice((-1, rng.randrange(24), rng.randrange(24), rng.randrange(24))),
    )


class _Run:
    """``onefold run`` of the script in a place."""

    def __init__(self, course: Course, place: Place, fault: Fault | None) -> None:
        self.place, self.rng = place, random.Random(course.seed)
        again = [word for word in course.options if word.startswith("--max-restarts=")]
        self._restarts = int(again[0].partition("=")[2]) if again else 0
        at = f"{self.rng.randrange(24)} {self.rng.randrange(course.devices)}"
        clean = {key: value for key, value in os.environ.items() if key != "SOAK_FAULT"}
        limited = None
        if fault and fault.limit:
            kind, most = fault.limit
            limited = partial(resource.setrlimit, kind, (most, most))
        self._output, self._errors = place.root / "output", place.root / "errors"
        self._begun = place.root / "begun"
        self._begun.write_bytes(b"")
        with self._output.open("wb") as out, self._errors.open("wb") as err:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "onefold", "run", f"--devices=cpu:{course.devices}"),
                    *(f"--exchange={course.exchange}", f"--timeout={TIMEOUT_S}"),
                    *(f"--grace-period={GRACE_S}", f"--checkpoint={place.checkpoints}"),
                    *course.options,
                    str(SCRIPT),
                ],
                stdout=out,
                stderr=err,
                cwd=place.root,
                env={
                    **clean,
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    "TMPDIR": str(place.temporary),
                    "TORCHINDUCTOR_CACHE_DIR": str(place.root / "compiled"),
                    "SOAK": place.name,
                    "SOAK_WORKERS": str(course.workers),
                    "SOAK_BEGUN": str(self._begun),
                    **({"SOAK_FAULT": f"{fault.script} {at}"} if fault and fault.script else {}),
                },
                preexec_fn=limited,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def workers(self) -> list[int]:
        """Processes that the launcher has started."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in children.split()]

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until the lead has begun so many steps, and a little; see `Course.after`."""
        while self.begun_steps <= step and not self.has_ended():
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.1 if step >= 0 else seconds / 3))

    @property
    def begun_steps(self) -> int:
        """Steps that the lead of this run has begun."""
        return self._begun.stat().st_size

    def wait(self) -> int | None:
        """The exit code; None where it has not ended within the limit."""
        try:
            return self._process.wait(LIMIT_S * (1 + self._restarts))
        except subprocess.TimeoutExpired:
            return None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_line(self) -> str:
        return (self._output.read_text().splitlines() or [""])[-1]

    @property
    def errors(self) -> list[str]:
        """What it says of its end."""
        said = self.said.splitlines()
        return [s for s in said if s.startswith("onefold: ") and not NOTICES.match(s)]

    @property
    def said(self) -> str:
        """All that came on the screen."""
        return self._errors.read_text(errors="replace")


def run_whole() -> Whole:
    """The result that every course must come to."""
    plain = Course(0, "nothing", 1, "shared", ("--save-every=5",), 0, 0)
    with Place(f"whole-{os.getpid()}") as place:
        began = time.monotonic()
        run = _Run(plain, place, None)
        if run.wait() != 0:
            raise AssertionError(run.said)
        return Whole(run.last_line, time.monotonic() - began)


def run_course(course: Course, whole: Whole) -> Told:
    """Run it, and judge it."""
    told, fault = Told(course), FAULTS[course.fault]
    with Place(f"{os.getpid()}-{course.seed}") as place:
        if fault.between:
            run = _Run(course, place, None)
            run.wait_for_step(max(course.after, 1), whole.seconds)
            os.kill(run.pid, signal.SIGTERM)
            code = run.wait()
            if code not in (0, 75, 128 + signal.SIGTERM):
                told.wrong.append(f"a run that is asked to stop has ended with {code}")
            fault.happens(run)
        run = _Run(course, place, fault)
        if not fault.between:
            run.wait_for_step(course.after, whole.seconds)
            if not run.has_ended():
                fault.happens(run)
        _judge(run, whole, told, fault)
        fault.mended(run)
        if not told.wrong:
            run = _Run(course, place, None)
            code = run.wait()
            if (code, run.last_line) != (0, whole.end):
                told.wrong.append(f"run again: code {code}, {run.last_line} and not {whole.end}")
            told.wrong += _left(run, fault)
        if told.wrong:
            told.wrong.append(run.said[-3000:])
    return told


def _judge(run: _Run, whole: Whole, told: Told, fault: Fault) -> None:
    code = run.wait()
    told.message = " | ".join(run.errors)
    told.kind = "well" if code == 0 else f"code {code}"
    if code is None:
        told.wrong.append(f"not ended within {LIMIT_S:g} s an attempt")
    elif code == 0:
        if run.last_line != whole.end:
            told.wrong.append(f"expected {whole.end}, got {run.last_line}")
    elif (code < 0 or code == 130) and run.begun_steps == 0 and not run.said:
        told.kind = "ended by the signal itself, as nothing had begun"
    elif fault.must_end_well:
        told.wrong.append("this should have made no difference")
    elif not fault.kills and len(run.errors) != 1 + run.said.count("onefold: restarting"):
        told.wrong.append(f"expected one error of each attempt, got {len(run.errors)}")
    told.wrong += _left(run, fault)


def _left(run: _Run, fault: Fault) -> list[str]:
    """What is wrong with the place; who is told by the kernel to end is given some seconds."""
    run.place.said += run.said
    until = time.monotonic() + 10
    while run.place.processes() and time.monotonic() < until:
        time.sleep(0.05)
    return run.place.wrong(killed=fault.kills, ended_well=fault.must_end_well)
