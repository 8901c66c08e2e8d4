"""The parts of `make gpu`: each a process of its own with a limit, so that none can lose another.

A part writes a line of JSON for each of its results as soon as there is one. A part that hangs is
ended with all that it has started, and what it had written counts.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Part", "Result", "missing", "parts_of", "run_part"]

ROOT = Path(__file__).resolve().parents[2]
TEST_LIMIT_S = 200.0
DEMO_LIMIT_S = 90.0
BENCHMARK_S = 120.0
"""What a benchmark has, models and compilation included, but for its last side begun in time."""
WORKLOADS = ("gpt2", "resnet50", "unet")
TAIL_LINES = 25
COMMANDS = ("typer", "rich", "cloudpickle", "pynvml")
"""What the command line and the launcher need beside what a Trainer does."""
TRIES = ("cpu", "pretend")
"""Kinds of devices on which the command itself is tried, with tiny sizes."""
DEMO = ("sklearn", "matplotlib", *COMMANDS)
RUN_DEMO = """
import sys
from pathlib import Path
from onefold.cli.demo import demo
sys.exit(demo(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""
"""The command of that name, which has no choice of epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process of `make gpu`."""

    name: str
    command: Sequence[str]
    """LINES and FOLDER stand for a file for the results, and for a folder of the part's own."""
    limit_s: float
    needs: Sequence[str] = ()
    """Packages without which it is left out."""
    alone: bool = False
    """Whether nothing else may run beside it, as it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a part."""

    name: str
    ended: str
    """In words: well, with an exit code, or cut off."""
    seconds: float
    lines: list[dict[str, Any]] = field(default_factory=list)
    tail: str = ""
    """The last lines of its output, where it did not end well."""


def parts_of(device: str) -> list[Part]:
    """All parts, in the order in which they are begun."""
    on_gpu = not device.startswith(TRIES)
    modules = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    # The longest first, so that the others run beside it.
    modules.sort(key=lambda name: name != "test_bits")
    where = "cpu:2" if device == "cpu" else device
    demo = ["-c", RUN_DEMO, "FOLDER", where, "12" if on_gpu else "1"]
    return [
        *(
            Part(
                name=f"tests: {module.removeprefix('test_')}",
                command=test_command(module),
                limit_s=TEST_LIMIT_S,
                needs=COMMANDS if module == "test_start" else (),
            )
            for module in modules
        ),
        Part(name="demo", command=demo, limit_s=DEMO_LIMIT_S, needs=DEMO),
        *(
            Part(
                name=f"benchmark: {workload}",
                command=benchmark_command(workload, device, tiny=not on_gpu),
                limit_s=BENCHMARK_S + 35,
                alone=True,
            )
            for workload in (WORKLOADS if on_gpu else ("mlp",))
        ),
    ]


def test_command(module: str) -> list[str]:
    """The command that runs a module of tests, by pytest where there is one."""
    if missing(["pytest"]):
        return ["-m", "tests.gpu.plain", module, "LINES"]
    # A warning of a library is no failure here: it may be of a version that nobody has seen.
    settings = ("addopts=", "filterwarnings=default", f"timeout={TEST_LIMIT_S:.0f}")
    options = [word for setting in settings for word in ("-o", setting)]
    return ["-m", "pytest", "-p", "no:cacheprovider", *options, "-q", f"tests/gpu/{module}.py"]


def benchmark_command(workload: str, device: str, *, tiny: bool) -> list[str]:
    """The command that measures a workload."""
    script = ["benchmarks/gpu.py", "--workload", workload, "--device", device, "--lines", "LINES"]
    if tiny:
        return [*script, "--seconds", "20", "--batch-size", "16"]
    return [*script, "--seconds", str(BENCHMARK_S)]


def missing(packages: Sequence[str]) -> list[str]:
    """Those of some packages that cannot be imported here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def run_part(part: Part, environment: Mapping[str, str], folder: Path, limit_s: float) -> Result:
    """Run a part in a process of its own, for as long as it may take."""
    own = folder / "".join(c if c.isalnum() else "-" for c in part.name)
    own.mkdir()
    lines, output = own / "lines", own / "output"
    places = {"LINES": str(lines), "FOLDER": str(own)}
    command = [sys.executable, *(places.get(word, word) for word in part.command)]
    start = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env={**environment, "ONEFOLD_GPU_LINES": str(lines)},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
            ended = "well" if code == 0 else f"with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {limit_s:.0f} s"
        finally:
            end_all(process)
    text = output.read_text(encoding="utf-8", errors="replace")
    return Result(
        name=part.name,
        ended=ended,
        seconds=round(time.monotonic() - start, 1),
        lines=read_lines(lines),
        tail="" if ended == "well" else "\n".join(text.splitlines()[-TAIL_LINES:]),
    )


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a part's process, and what it has left running in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of it has ended, as it should
        process.poll()
    process.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a part has written so far; a last line that was cut off is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]
