"""Runs a script on several device counts, and compares the models bit for bit after every step.

It is then run once more, to compare what V shards compute with what a single one would.

Note: how runs are compared
---------------------------
Every run writes digests of its tensors after each step into a folder of its own name; the first
also keeps the tensors themselves, so that later ones can measure how far they are from it. The
comparison reads these files only, after the runs have ended: nothing of one run is in the memory of
another. A script that makes several Trainers has a file for each, numbered as they were made.

Where bits differ, `hints_of` finds what may have made them differ, in what the devices recorded.

Note: why a difference is one
-----------------------------
With the same bits on any number of devices, a shard's result cannot depend on who computes it. What
breaks this is nearly always something that outlives a shard: a generator, an attribute, a clock.
One device runs all shards in a row, several run some of them each, so whatever one shard leaves for
the next differs from there on.

Note: how resuming is verified
------------------------------
`verify_resume` stops a script at random steps and resumes it on other device counts. Each run ends
with a checkpoint and a record. Two are equal if the models have the same bits, and if all recorded
steps and results are the same: losses, norms, digests of gradients, scores, predictions. What
`Trainer.gather` returns has an entry for each device, and is left out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import compress, product
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from onefold import Outcome, RunOptions, select_devices, supervise
from onefold.cli import Screen, print_json
from onefold.cli.plan import read_counts
from onefold.cli.running import DEFAULT_PLACEMENT
from onefold.cli.verdicts import GUESSES, State, hints_of, report_mathematics, unequal_passes
from onefold.record import Record, alike
from onefold.record.entries import BlockEntry, Result, StepEntry
from onefold.system.process import STOPPED_CODE
from onefold.system.safe_files import PrivateFolder, read_record
from onefold.system.words import counted, show_traceback, tell

__all__ = [
    "Difference",
    "RunSettings",
    "first_difference",
    "read_ways",
    "verify_resume",
    "verify_script",
]


_AGREE, _DIFFER, _FAILED = 0, 1, 2
_SHOWN = (
    *("step", "loss", "alone", "loss_difference", "gradient_difference", "tolerance", "causes"),
)
"""What ``--json`` prints of each step of the mathematics."""
_REFUSALS = re.compile(r": (DisagreementError|GradientError|LossError|StateError): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two runs differ."""

    step: int
    tensor: str
    """Name of the first parameter or buffer that differs."""
    tensors: int
    """How many tensors differ after that step."""
    largest: float | None
    """Largest difference in ``tensor``; None if the shapes differ."""

    def __str__(self) -> str:
        shape = self.largest is None
        largest = "another shape" if shape else f"largest difference {self.largest:.3g}"
        return (
            f"first after step {self.step}, in {self.tensor}: {largest}; {self.tensors} tensors "
            f"differ there."
        )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How the script is run."""

    devices: int
    placement: str
    on: str
    """``cpu:`` for processes on the processor also where there are GPUs, else empty."""

    @property
    def chosen(self) -> str:
        """The devices, as ``--devices`` takes them."""
        return f"{self.on}{self.devices}"

    def __str__(self) -> str:
        kept = "" if self.placement == DEFAULT_PLACEMENT else f" with placement {self.placement}"
        return f"{self.devices} device{'s' if self.devices > 1 else ''}{kept}"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What one run recorded."""

    way: RunSettings
    trainers: list[list[dict[str, Any]]]
    """The lines of each trainer; the first is about the model before the first step."""
    states: list[dict[int, list[State]]]
    """The states that each device recorded, by trainer and device."""
    passes: list[list[dict[str, Any]]]
    """The passes of streams that came to their end, by trainer."""


def first_difference(
    reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> Difference | None:
    """Find the first step after which two runs do not have the same bits.

    Args:
        reference: the lines of a trainer in one run.
        other: its lines in the other.
    """
    # Runs of different lengths are reported elsewhere; here what both have is compared.
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
    command: Sequence[str],
    devices: str,
    *,
    options: RunOptions,
    placement: str = DEFAULT_PLACEMENT,
    as_json: bool = False,
) -> int:
    """Run a script on several device counts, compare the runs, and print a verdict.

    Args:
        command: the script and its arguments.
        devices: device counts, such as ``1,2,3``, or ``cpu:1,2,3`` for processes on the processor;
            the others are compared with the first.
        options: the options of every run; those of ``verify`` say how many steps of each
            trainer are compared.
        placement: one or several, such as ``replicate,partition``: each with every count.
        as_json: print one JSON object; the text goes to stderr.

    Returns:
        0 if all agree, 1 if bits or mathematics differ.

    Raises:
        typer.Exit: a run failed, which was reported; carries the exit code.
        LaunchError: this machine has fewer GPUs than one of the counts.
        ValueError: the device counts or the placements cannot be used.
    """
    ways = read_ways(devices, placement)
    with PrivateFolder("onefold-verify-") as private:
        comparison = _Comparison(command, private.path, options, Screen(as_json=as_json))
        bits = comparison.of_bits(ways)
        # Even if bits differ: the mathematics may name the cause.
        mathematics = comparison.of_mathematics(ways[0])
    if as_json:
        agree = {"bits_agree": bits == _AGREE, "mathematics_agree": mathematics == _AGREE}
        print_json({**agree, **comparison.found})
    return max(bits, mathematics)


@dataclass
class _Comparison:
    """Runs a script again and again, records every run in one folder, and compares them."""

    command: Sequence[str]
    """The script and its arguments."""
    folder: Path
    """Where the runs are recorded."""
    options: RunOptions
    """Of every run."""
    console: Screen
    number: int = 0
    """Runs so far."""
    found: dict[str, Any] = field(default_factory=dict)
    """What was found, as ``--json`` prints it."""

    @property
    def _steps(self) -> int:
        """Number of steps that are compared."""
        steps: int = self.options.tools["verify"]["steps"]
        return steps

    def of_bits(self, ways: Sequence[RunSettings]) -> int:
        """Compare runs bit for bit, and print a verdict; return the exit code.

        Raises:
            typer.Exit: a run failed, or made no step.
        """
        runs = [self._recorded(way) for way in ways]
        reference = runs[0].trainers
        differences = [[*map(first_difference, reference, run.trainers)] for run in runs]
        self.console.print(_table(runs, differences))
        self.found["runs"] = [
            _run_as_json(run, found) for run, found in zip(runs, differences, strict=True)
        ]
        if (alike := {len(run.trainers) for run in runs}) != {len(reference)}:
            words = f"The runs made different numbers of Trainers: {sorted(alike)}."
            self.console.print(words, style="bold red")
            return _DIFFER
        codes = [self._judge(trainer, runs, differences) for trainer in range(len(reference))]
        made = [len(lines) - 1 for lines in reference]
        several = f"{len(made)} Trainers, at most {self._steps} of each"
        of = several if len(made) > 1 else "1 Trainer"
        self.console.print(f"Compared: {counted(sum(made), 'step')} of {of}.")
        return max(codes)

    def of_mathematics(self, way: RunSettings) -> int:
        """Compare V shards with one, on one device of ``way``; return the exit code.

        Raises:
            typer.Exit: the script failed in both precisions.
        """
        # In float64 rounding is far below any true difference. A script that insists on float32, by
        # a cast or a kernel of its own, fails there, and is compared as it is.
        alone = replace(way, devices=1, placement=DEFAULT_PLACEMENT)
        for precision in ("float64", "float32"):
            name, outcome = self._run(f"V shards and one, {precision}", alone, precision)
            if not outcome.exit_code or self._is_compared(outcome, name):
                trainers = self._lines(name, "-mathematics")
                scores = self._beside(name, trainers, "scores")
                self.found["mathematics"] = {
                    "precision": precision,
                    "trainers": [
                        [{name: line.get(name) for name in _SHOWN} for line in lines[1:]]
                        for lines in trainers
                    ],
                    "scores": scores,
                }
                agree = report_mathematics(self.console, precision, trainers, scores)
                return _AGREE if agree else _DIFFER
        raise self._failed(outcome, "computing every batch as one shard as well")

    def _recorded(self, way: RunSettings) -> _Recorded:
        """Run the script once; the first run is what the others are compared with."""
        name, outcome = self._run(str(way), way, "")
        trainers = self._lines(name, "")
        if outcome.exit_code:
            if not self._is_compared(outcome, name):
                raise self._failed(outcome, f"on {way}")
            self._note("The script failed after the compared steps", way, outcome.message)
        if (cut := self.folder / f"{name}-cut").exists():
            self._note("The script was cut short", way, cut.read_text())
        if not any(len(lines) > 1 for lines in trainers):
            tell("the script made no step of a Trainer")
            raise typer.Exit(_FAILED)
        states: list[dict[int, list[State]]] = [{} for _ in trainers]
        for trainer, device in product(range(len(trainers)), range(way.devices)):
            rows = read_record(self.folder, f"{name}-{trainer}-state-{device}")
            states[trainer][device] = [State(**row) for row in rows]
        return _Recorded(way, trainers, states, self._beside(name, trainers, "passes"))

    def _run(self, title: str, way: RunSettings, mathematics: str) -> tuple[str, Outcome]:
        name = str(self.number)
        asked = {
            **self.options.tools["verify"],
            "folder": str(self.folder),
            "run": name,
            # Only the first run keeps every tensor of every step: they take much space.
            "records": self.number == 0,
            "mathematics": mathematics,
        }
        options = replace(
            self.options,
            placement=way.placement,
            tools={"verify": asked},
            logs=str(self.folder / name),
        )
        # Counted before it starts: a run that fails must not share its name with the next.
        self.number += 1
        # Its thread is for the screen alone, and a file shows nothing of it.
        words, shown = f"{title}, {self._steps} steps", self.console.is_terminal
        with self.console.status(words) if shown else nullcontext():
            return name, supervise(self.command, select_devices(way.chosen), options)

    def _is_compared(self, outcome: Outcome, name: str) -> bool:
        """Whether a run that failed had made all steps, and is not one that onefold refuses."""
        done = (self.folder / f"{name}-done").exists()
        return done and _REFUSALS.search(outcome.message) is None

    def _note(self, what: str, way: RunSettings, text: str) -> None:
        self.console.headed("yellow", what, f" on {way}:")
        self.console.print(*text.split("\n"), sep="\n")

    def _failed(self, outcome: Outcome, where: str) -> typer.Exit:
        """Report a failed run, and return what is raised for it."""
        # What onefold refuses is a finding about the script; anything else is a run that failed.
        refusal = _REFUSALS.search(outcome.message)
        if refusal is not None:
            why = f" {where}: {refusal[1]}: {refusal[2]}"
            self.console.headed("bold red", "onefold refuses the script", why)
            return typer.Exit(_DIFFER)
        return _failed(outcome, where)

    def _lines(self, name: str, what: str) -> list[list[dict[str, Any]]]:
        # Numbered without gaps, so the first number that is missing is the number of Trainers.
        found: list[list[dict[str, Any]]] = []
        while lines := read_record(self.folder, f"{name}-{len(found)}{what}"):
            found.append(lines)
        return found

    def _beside(self, name: str, trainers: Sequence[object], what: str) -> list[list[Any]]:
        """What else a run recorded of each trainer."""
        numbers = range(len(trainers))
        return [read_record(self.folder, f"{name}-{number}-{what}") for number in numbers]

    def _judge(
        self,
        trainer: int,
        runs: Sequence[_Recorded],
        differences: Sequence[Sequence[Difference | None]],
    ) -> int:
        """Print a verdict on the bits of one trainer; return the exit code."""
        who = f" of trainer {trainer}" if len(runs[0].trainers) > 1 else ""
        lines = runs[0].trainers[trainer]
        steps = sorted({len(run.trainers[trainer]) - 1 for run in runs})
        if len(steps) > 1:
            words = f"The runs made different numbers of steps{who}: {steps}."
            self.console.print(words, style="bold red")
            return _DIFFER
        if unequal := unequal_passes({str(run.way): run.passes[trainer] for run in runs}):
            self.console.headed("bold red", f"The data{who} differ", f": {unequal}.")
            return _DIFFER
        for run, each in zip(runs, differences, strict=True):
            if (found := each[trainer]) is not None:
                self.console.headed("bold red", f"The bits{who} differ", f", {found}")
                for hint in self._hints(trainer, runs[0], run, found):
                    self.console.print(f"Hint: {hint}.")
                return _DIFFER
        if not steps[0]:
            # That no Trainer made any was refused before.
            self.console.headed(
                "yellow",
                f"Trainer {trainer} made no step",
                " while the others made theirs: it was not compared.",
            )
            return _AGREE
        if self._nothing_trained(lines, who):
            return _DIFFER
        after = f" after each of {steps[0]} steps."
        self.console.headed("bold green", f"The bits{who} agree", after)
        return _AGREE

    def _nothing_trained(self, lines: Sequence[dict[str, Any]], who: str) -> bool:
        """Report if no parameter changed; return True if that makes the comparison worthless."""
        # If the loss was never 0, a learning rate of 0 may be intended: only a warning.
        first, last, done = lines[0]["digests"], lines[-1]["digests"], len(lines) - 1
        if any(first[name] != last[name] for name in lines[0]["parameters"]):
            return False
        if all(line["loss"] == 0 for line in lines[1:]):
            self.console.headed(
                "bold red",
                "Nothing was trained",
                f"{who}: the loss was exactly 0 in each of {done} "
                f"steps and no parameter changed, so that equal bits say nothing. Look at what the "
                f"loss returns, and at the data that it is given.",
            )
            return True
        self.console.headed(
            "yellow", "No parameter changed", f"{who} in {done} steps: is the learning rate 0?"
        )
        return False

    def _hints(
        self, trainer: int, reference: _Recorded, other: _Recorded, found: Difference
    ) -> list[str]:
        """Return hints from what was recorded, or else from whether the run repeats its bits."""
        # That takes one more run, and separates two kinds of cause; so only where nothing was
        # recorded.
        named = hints_of(found.step, reference.states[trainer], other.states[trainer])
        if named:
            return named
        again, lines = self._recorded(reference.way).trainers, reference.trainers[trainer]
        repeats = (
            trainer < len(again)
            and len(again[trainer]) == len(lines)
            and first_difference(lines, again[trainer]) is None
        )
        return [GUESSES[repeats].format(count=reference.way)]


def _run_as_json(run: _Recorded, differences: Sequence[Difference | None]) -> dict[str, Any]:
    """What is known of a run: where each of its Trainers ended, and where it differs."""
    # A run may have made other numbers of Trainers than the first.
    found = {number: asdict(each) for number, each in enumerate(differences) if each is not None}
    trainers = [
        {
            "steps": lines[-1]["step"],
            "loss": lines[-1]["loss"],
            "fingerprint": lines[-1]["fingerprint"],
            "difference": found.get(number),
        }
        for number, lines in enumerate(run.trainers)
    ]
    return {"devices": run.way.devices, "placement": run.way.placement, "trainers": trainers}


def _table(runs: Sequence[_Recorded], differences: Sequence[Sequence[Difference | None]]) -> Table:
    several = max(len(run.trainers) for run in runs) > 1
    placed = any(run.way.placement != DEFAULT_PLACEMENT for run in runs)
    shown = (several, True, placed, True, True, True, True)
    headings = "trainer", "devices", "placement", "steps", "last loss", "last fingerprint", "bits"
    table = Table(*compress(headings, shown))
    for trainer in range(len(runs[0].trainers)):
        for run, found in zip(runs, differences, strict=True):
            # A run may have made fewer than the first, which the caller reports after the table.
            if trainer < len(run.trainers):
                last, difference = run.trainers[trainer][-1], found[trainer]
                verdict = "reference" if run is runs[0] else "the same"
                if difference is not None:
                    verdict = f"differ from step {difference.step}"
                loss = "" if last["loss"] is None else f"{last['loss']:.6g}"
                who = str(trainer), str(run.way.devices), run.way.placement
                row = *who, str(last["step"]), loss, last["fingerprint"], verdict
                table.add_row(*compress(row, shown))
    return table


def read_ways(devices: str, placement: str) -> list[RunSettings]:
    """Read the ways to run a script that are to be compared: each placement with each count.

    Raises:
        LaunchError: this machine has fewer GPUs than one of the counts.
        ValueError: the device counts or the placements cannot be used.
    """
    # To be refused before anything runs, as are devices that do not exist.
    kept = [RunOptions(placement=part.strip()) for part in placement.split(",")]
    on = "cpu:" if devices.strip().startswith("cpu:") else ""
    counts = read_counts(devices.replace(on, ""))
    ways: list[RunSettings] = []
    for each, count in product(kept, counts):
        # With `pipeline:2`, an odd number of devices makes no whole pipelines.
        with suppress(ValueError):
            each.pipeline_of(count)
            ways.append(RunSettings(count, each.placement, on))
    if len(ways) < 2 or {each.placement for each in kept} != {way.placement for way in ways}:
        raise ValueError(
            f"--devices {devices} --placement {placement}: expected two or more ways to compare, "
            f"such as --devices 1,2,3 or cpu:1,2,3, and for pipeline:N a multiple of N among them"
        )
    select_devices(f"{on}{max(way.devices for way in ways)}")
    return ways


_NEVER = 1 << 30
"""From one checkpoint to the next, so that there are those of stops and ends alone."""
_ENTRIES = StepEntry | Result | BlockEntry


def verify_resume(
    command: Sequence[str],
    ways: Sequence[RunSettings],
    *,
    options: RunOptions,
    stops: int,
    as_json: bool,
) -> int:
    """Run a script as a whole, and again with a stop; print whether all ends are equal.

    Args:
        command: the script and its arguments.
        ways: how to run it: as a whole in the first way, and with stops in each in turn.
        options: of every run.
        stops: how many stops are tried, at most.
        as_json: print one JSON object; the text goes to stderr.

    Returns:
        0 if all ends are equal, 1 if not.

    Raises:
        typer.Exit: a run failed, which was reported; carries the exit code.
    """
    console, rows = Screen(as_json=as_json), []
    with PrivateFolder("onefold-verify-") as private:
        runs = _Runs(command, private.path, options)
        whole = runs.end("whole", ways[0])
        steps = [entry.step for entry in whole[1] if isinstance(entry, StepEntry)]
        if len(steps) < 2:
            tell("expected a script of at least two steps, which can be stopped between them")
            raise typer.Exit(_FAILED)
        chosen = random.Random(0).sample(steps[:-1], min(stops, len(steps) - 1))
        table = Table("stopped after", "on", "resumed on", "model", "steps and results")
        differ = False
        for number, step in enumerate(sorted(chosen)):
            before, after = (ways[(number + n) % len(ways)] for n in (0, 1))
            runs.stop(f"stop-{step}", before, step)
            fingerprint, entries = runs.end(f"stop-{step}", after)
            first = _words_of_difference(whole[1], entries)
            same = fingerprint == whole[0]
            differ |= not same or bool(first)
            shown = "equal" if same else Text("differs", "bold red")
            ended = first or f"{len(entries)} equal"
            table.add_row(f"step {step}", str(before), str(after), shown, ended)
            row = {"step": step, "stopped_on": str(before), "resumed_on": str(after)}
            rows.append({**row, "fingerprint": fingerprint, "difference": first or None})
        console.print(table)
    console.print(
        "The ends differ." if differ else "All ends are equal.",
        style="bold red" if differ else "bold green",
    )
    if as_json:
        print_json({"agree": not differ, "fingerprint": whole[0], "stops": rows})
    return _DIFFER if differ else _AGREE


class _Runs:
    """Runs of a script, each with its checkpoints and its record in a folder.

    Args:
        command: the script and its arguments.
        folder: of all of them.
        options: of every run.
    """

    def __init__(self, command: Sequence[str], folder: Path, options: RunOptions) -> None:
        self._command, self._folder, self._options = command, folder, options

    def stop(self, name: str, way: RunSettings, step: int) -> None:
        """Run the script up to a step, and save it there."""
        outcome = self._run(name, way, stops_after=step)
        if outcome.exit_code != STOPPED_CODE:
            raise _failed(outcome, f"stopped after step {step} on {way}")

    def end(self, name: str, way: RunSettings) -> tuple[str, list[_ENTRIES]]:
        """Run the script to its end; return the model's fingerprint, and what was recorded."""
        outcome = self._run(name, way, stops_after=0)
        if outcome.exit_code:
            raise _failed(outcome, f"on {way}")
        folder = self._folder / name
        record = Record(folder)
        last = folder / str(record.checkpoints["folder"][-1]) / "run.json"
        kept = alike(record, StepEntry, Result, BlockEntry)
        return str(json.loads(last.read_text())["fingerprint"]), kept

    def _run(self, name: str, way: RunSettings, *, stops_after: int) -> Outcome:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        options = replace(
            self._options,
            placement=way.placement,
            checkpoint=str(folder),
            save_every=_NEVER,
            stops_after=stops_after,
            logs=str(folder / f"logs-{stops_after}"),
        )
        return supervise(self._command, select_devices(way.chosen), options)


def _failed(outcome: Outcome, where: str) -> typer.Exit:
    show_traceback(outcome.traceback)
    tell(f"{where}: {outcome.message}")
    return typer.Exit(_FAILED)


def _words_of_difference(whole: Sequence[_ENTRIES], other: Sequence[_ENTRIES]) -> str:
    """Where two records differ first, in words; empty if they do not."""
    for one, two in zip(whole, other, strict=False):
        if one != two:
            kinds = {StepEntry: "step", BlockEntry: "a block of modifying after step"}
            what = kinds.get(type(one)) or f"{getattr(one, 'call', '')} after step"
            return f"differ first in {what} {one.step}"
    return "" if len(whole) == len(other) else f"{len(other)} in place of {len(whole)}"
