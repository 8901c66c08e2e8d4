"""Runs a script on several device counts and compares the models, bit for bit, after every step."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onefold.devices import select_devices
from onefold.launch import LaunchOptions, supervise
from onefold.record import read_record

__all__ = ["Difference", "first_difference", "verify_script"]

_UNSEEDED_START = (
    "the models differ before the first step: seed the initial values, for instance with "
    "torch.manual_seed(0) before the model is built"
)
_NOT_REPEATABLE = (
    "{count} twice differs as well, so the run does not repeat itself: something draws from a "
    "generator that is not seeded (numpy.random.default_rng() without a seed, a torch.Generator of "
    "its own, os.urandom, the clock), or a kernel does not repeat its bits. Inside the loss and "
    "the data set, use torch's, random's and NumPy's global generators: they are seeded for every "
    "shard and every sample"
)
_DEVICE_DEPENDENT = (
    "{count} twice gives the same bits, so the result depends on who computes what: the script "
    "reads the rank or the number of devices (RANK, trainer.is_lead, torch.distributed), keeps "
    "state from one shard to the next, or changes parameters between steps on every device"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part."""

    step: int
    tensor: str
    """Name of the first parameter or buffer that differs."""
    tensors: int
    """How many differ in that step."""
    largest: float | None
    """Largest difference in ``tensor``; None if the shapes differ."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run left behind."""

    devices: str
    lines: list[dict[str, Any]]


def first_difference(
    reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> Difference | None:
    """The first step after which two runs do not have the same bits."""
    for mine, theirs in zip(reference, other, strict=False):
        differing = [
            name
            for name, digest in mine["digests"].items()
            if theirs["digests"].get(name) != digest
        ]
        if differing:
            largest = (theirs.get("differences") or {}).get(differing[0])
            return Difference(mine["step"], differing[0], len(differing), largest)
    return None


def verify_script(
    command: Sequence[str], devices: str, *, steps: int, options: LaunchOptions
) -> int:
    """Run, compare, and print a verdict.

    Args:
        command: the script and its arguments.
        devices: device counts, such as ``1,2,3``; the first is what the others are compared with.
        steps: how many steps to compare.
        options: of every run.

    Returns:
        0 if all agree, 1 if not, 2 if a run failed.
    """
    counts = _read_counts(devices)
    if steps < 1:
        raise ValueError(f"--steps {steps}: expected at least one step")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="onefold-verify-") as folder:
        compare = _Comparison(command, Path(folder), steps, options)
        runs: list[_Run] = []
        for count in counts:
            with console.status(f"{count} device{'s' if count > 1 else ''}, {steps} steps"):
                run = compare.run(count)
            if run is None:
                return 2
            runs.append(run)
        differences = [first_difference(runs[0].lines, run.lines) for run in runs]
        console.print(_table(runs, differences))
        return _judge(console, compare, counts[0], runs, differences)


class _Comparison:
    """Runs of one script, recorded in one folder."""

    def __init__(
        self, command: Sequence[str], folder: Path, steps: int, options: LaunchOptions
    ) -> None:
        self._command = command
        self._folder = folder
        self._steps = steps
        self._options = options
        self._runs = 0

    def run(self, count: int) -> _Run | None:
        """One run; the first is what the others are compared with."""
        logs = self._folder / f"{self._runs}"
        options = replace(
            self._options,
            probe=str(self._folder),
            probe_steps=self._steps,
            probe_records=self._runs == 0,
            logs=str(logs),
        )
        self._runs += 1
        outcome = supervise(self._command, select_devices(count), options)
        if outcome.exit_code:
            print(outcome.traceback, file=sys.stderr, end="")
            print(f"onefold: on {count} devices, {outcome.message}", file=sys.stderr)
            return None
        lines = read_record(self._folder, logs.name)
        if len(lines) < 2:
            print("onefold: the script made no step of a Trainer", file=sys.stderr)
            return None
        return _Run(str(count), lines)


def _judge(
    console: Console,
    compare: _Comparison,
    count: int,
    runs: Sequence[_Run],
    differences: Sequence[Difference | None],
) -> int:
    steps = {len(run.lines) - 1 for run in runs}
    if len(steps) > 1:
        console.print(f"[bold red]The runs made different numbers of steps: {sorted(steps)}.[/]")
        return 1
    found = next((difference for difference in differences if difference), None)
    if found is None:
        console.print(f"[bold green]The bits agree[/] after each of {steps.pop()} steps.")
        return 0
    largest = (
        "another shape" if found.largest is None else f"largest difference {found.largest:.3g}"
    )
    console.print(
        f"[bold red]The bits differ[/], first after step {found.step}, in {found.tensor}: "
        f"{largest}; {found.tensors} tensors differ there."
    )
    console.print(f"Hint: {_hint(compare, count, runs[0], found)}.")
    return 1


def _hint(compare: _Comparison, count: int, reference: _Run, found: Difference) -> str:
    if found.step == 0:
        return _UNSEEDED_START
    again = compare.run(count)
    text = f"{count} device{'s' if count > 1 else ''}"
    if again is not None and first_difference(reference.lines, again.lines) is None:
        return _DEVICE_DEPENDENT.format(count=text)
    return _NOT_REPEATABLE.format(count=text)


def _table(runs: Sequence[_Run], differences: Sequence[Difference | None]) -> Table:
    table = Table()
    for heading in ("devices", "steps", "last loss", "last fingerprint", "bits"):
        table.add_column(heading)
    for number, (run, difference) in enumerate(zip(runs, differences, strict=True)):
        last = run.lines[-1]
        verdict = "reference" if number == 0 else "the same"
        if difference is not None:
            verdict = f"differ from step {difference.step}"
        loss = f"{last['loss']:.6g}"
        table.add_row(run.devices, str(last["step"]), loss, last["fingerprint"], verdict)
    return table


def _read_counts(devices: str) -> list[int]:
    parts = [part.strip() for part in devices.split(",")]
    if len(parts) < 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--devices {devices!r}: expected two or more device counts, such as 1,2,3"
        )
    return [int(part) for part in parts]
