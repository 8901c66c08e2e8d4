"""Runs a script on several device counts, and compares the models bit for bit after every step.

Another run then compares the results of V shards with those of a single one.

Note: how runs are compared
---------------------------
Every run writes digests of its tensors after each step to a separate folder. The first run also
saves the tensors themselves, so that later runs can measure their differences from it. The
comparison reads only these files, after the runs have ended, so no run has anything of another in
memory. A script that creates several Trainers writes one file for each, numbered in order of
creation.

If bits differ, `hints_of` searches the devices' recorded states for the cause.

Note: why bits differ
---------------------
A shard's result must not depend on the device that computes it. What breaks this is nearly always
something that outlives a shard: a generator, an attribute, a clock. One device runs all shards in
sequence, several devices run some of them each, so whatever one shard leaves for the next differs
from there on.

Note: how resuming is verified
------------------------------
`verify_resume` stops a script at random steps and resumes it on other device counts. Each run ends
with a checkpoint and a record. Two runs are equal if the models have the same bits, and if all
recorded steps and results are the same: losses, norms, digests of gradients, scores, predictions.
Results of `Trainer.gather` are excluded, because they have one entry per device.
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
from onefold.cli import Screen, print_json, tell_failure
from onefold.cli.plan import read_counts
from onefold.cli.running import DEFAULT_PLACEMENT
from onefold.cli.verdicts import GUESSES, State, hints_of, report_mathematics, unequal_passes
from onefold.record import Record, alike
from onefold.record.entries import BlockEntry, Result, StepEntry
from onefold.system.process import STOPPED_CODE
from onefold.system.safe_files import PrivateFolder, read_record
from onefold.system.words import counted, tell

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
"""Fields of a step that ``--json`` prints for the comparison of shards with the whole batch."""
_REFUSALS = re.compile(r": (DisagreementError|GradientError|LossError|StateError): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs."""

    step: int
    tensor: str
    """Name of the first parameter or buffer that differs."""
    tensors: int
    """Number of tensors that differ after that step."""
    largest: float | None
    """Largest absolute difference in ``tensor``; None if the shapes differ."""

    def __str__(self) -> str:
        shape = self.largest is None
        largest = "another shape" if shape else f"largest difference {self.largest:.3g}"
        return (
            f"first after step {self.step}, in {self.tensor}: {largest}; {self.tensors} tensors "
            f"differ there."
        )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A device count and a placement for one run of the script."""

    devices: int
    placement: str
    on: str
    """``cpu:`` to use CPU processes even if there are GPUs, else empty."""

    @property
    def chosen(self) -> str:
        """The devices, as a value of ``--devices``."""
        return f"{self.on}{self.devices}"

    def __str__(self) -> str:
        kept = "" if self.placement == DEFAULT_PLACEMENT else f" with placement {self.placement}"
        return f"{self.devices} device{'s' if self.devices > 1 else ''}{kept}"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The records of one run."""

    way: RunSettings
    trainers: list[list[dict[str, Any]]]
    """Lines of each Trainer; the first describes the model before the first step."""
    states: list[dict[int, list[State]]]
    """States that each device recorded, by Trainer and device."""
    passes: list[list[dict[str, Any]]]
    """Completed passes over streams, by Trainer."""


def first_difference(
    reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> Difference | None:
    """Find the first step after which the bits of two runs differ.

    Args:
        reference: lines of a Trainer in one run.
        other: lines of the same Trainer in the other run.
    """
    # Different lengths are reported elsewhere; here only steps of both runs are compared.
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
        devices: device counts, such as ``1,2,3``, or ``cpu:1,2,3`` for CPU processes; the others
            are compared with the first.
        options: options of every run; ``verify`` in its tools has the number of steps to compare.
        placement: one or several, such as ``replicate,partition``, each with every count.
        as_json: print one JSON object; the text goes to stderr.

    Returns:
        0 if everything agrees, 1 if bits or mathematics differ.

    Raises:
        typer.Exit: a run failed, which has been reported; carries the exit code.
        LaunchError: this machine has fewer GPUs than one of the counts.
        ValueError: the device counts or the placements are not valid.
    """
    ways = read_ways(devices, placement)
    with PrivateFolder("onefold-verify-") as private:
        comparison = _Comparison(command, private.path, options, Screen(as_json=as_json))
        bits = comparison.of_bits(ways)
        # Do this even if bits differ, because the mathematics may show the cause.
        mathematics = comparison.of_mathematics(ways[0])
    if as_json:
        agree = {"bits_agree": bits == _AGREE, "mathematics_agree": mathematics == _AGREE}
        print_json({**agree, **comparison.found})
    return max(bits, mathematics)


@dataclass
class _Comparison:
    """Runs a script several times, records every run in one folder, and compares the records."""

    command: Sequence[str]
    """The script and its arguments."""
    folder: Path
    """Folder of the records."""
    options: RunOptions
    """Options of every run."""
    console: Screen
    number: int = 0
    """Number of runs so far."""
    found: dict[str, Any] = field(default_factory=dict)
    """Results, as printed by ``--json``."""

    @property
    def _steps(self) -> int:
        """Number of steps to compare."""
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
            words = f"The runs created different numbers of Trainers: {sorted(alike)}."
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
        # In float64, rounding is far smaller than any true difference. A script that requires
        # float32, through a cast or a kernel, fails in float64 and is then compared in float32.
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
        raise self._failed(outcome, "computing every batch as one shard")

    def _recorded(self, way: RunSettings) -> _Recorded:
        """Run the script once; the others are compared with the first run."""
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
            # Only the first run saves every tensor of every step, because they need much space.
            "records": self.number == 0,
            "mathematics": mathematics,
        }
        options = replace(
            self.options,
            placement=way.placement,
            tools={"verify": asked},
            logs=str(self.folder / name),
        )
        # Count before the start, so that a failed run does not share its name with the next.
        self.number += 1
        # The status display starts a thread, and shows nothing in a file.
        words, shown = f"{title}, {self._steps} steps", self.console.is_terminal
        with self.console.status(words) if shown else nullcontext():
            return name, supervise(self.command, select_devices(way.chosen), options)

    def _is_compared(self, outcome: Outcome, name: str) -> bool:
        """Whether a failed run had made all steps, and was not rejected by onefold."""
        done = (self.folder / f"{name}-done").exists()
        return done and _REFUSALS.search(outcome.message) is None

    def _note(self, what: str, way: RunSettings, text: str) -> None:
        self.console.headed("yellow", what, f" on {way}:")
        self.console.print(*text.split("\n"), sep="\n")

    def _failed(self, outcome: Outcome, where: str) -> typer.Exit:
        """Report a failed run, and return the exception to raise."""
        # An error that onefold raises about the script is a finding; other errors are failed runs.
        refusal = _REFUSALS.search(outcome.message)
        if refusal is not None:
            why = f" {where}: {refusal[1]}: {refusal[2]}"
            self.console.headed("bold red", "onefold rejects the script", why)
            return typer.Exit(_DIFFER)
        return _failed(outcome, where)

    def _lines(self, name: str, what: str) -> list[list[dict[str, Any]]]:
        # Files are numbered without gaps: the first missing number is the number of Trainers.
        found: list[list[dict[str, Any]]] = []
        while lines := read_record(self.folder, f"{name}-{len(found)}{what}"):
            found.append(lines)
        return found

    def _beside(self, name: str, trainers: Sequence[object], what: str) -> list[list[Any]]:
        """Read other records of each Trainer in a run."""
        numbers = range(len(trainers))
        return [read_record(self.folder, f"{name}-{number}-{what}") for number in numbers]

    def _judge(
        self,
        trainer: int,
        runs: Sequence[_Recorded],
        differences: Sequence[Sequence[Difference | None]],
    ) -> int:
        """Print a verdict on the bits of one Trainer; return the exit code."""
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
            # A script in which no Trainer made a step was rejected before.
            self.console.headed(
                "yellow",
                f"Trainer {trainer} made no step",
                " while others made theirs, so it was not compared.",
            )
            return _AGREE
        if self._nothing_trained(lines, who):
            return _DIFFER
        after = f" after each of {steps[0]} steps."
        self.console.headed("bold green", f"The bits{who} agree", after)
        return _AGREE

    def _nothing_trained(self, lines: Sequence[dict[str, Any]], who: str) -> bool:
        """Report if no parameter changed; return True if the comparison is then worthless."""
        # If the loss was not 0, a learning rate of 0 may be intended, so only warn.
        first, last, done = lines[0]["digests"], lines[-1]["digests"], len(lines) - 1
        if any(first[name] != last[name] for name in lines[0]["parameters"]):
            return False
        if all(line["loss"] == 0 for line in lines[1:]):
            self.console.headed(
                "bold red",
                "Nothing was trained",
                f"{who}: the loss was exactly 0 in each of {done} "
                f"steps and no parameter changed, so equal bits prove nothing. Check what the loss "
                f"returns, and the data that it receives.",
            )
            return True
        self.console.headed(
            "yellow", "No parameter changed", f"{who} in {done} steps: is the learning rate 0?"
        )
        return False

    def _hints(
        self, trainer: int, reference: _Recorded, other: _Recorded, found: Difference
    ) -> list[str]:
        """Return hints from the recorded states, or from whether the run repeats its bits."""
        # Repeating takes one more run, and separates two kinds of causes. Do so only if nothing was
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
    """Return the results of a run: where each Trainer ended, and where it differs."""
    # A run may have created a different number of Trainers than the first.
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
            # A run may have fewer Trainers than the first; the caller reports that later.
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
    """Parse the ways to run a script that are to be compared: each placement with each count.

    Raises:
        LaunchError: this machine has fewer GPUs than one of the counts.
        ValueError: the device counts or the placements are not valid.
    """
    # Validate placements before anything runs; devices are validated below.
    kept = [RunOptions(placement=part.strip()) for part in placement.split(",")]
    on = "cpu:" if devices.strip().startswith("cpu:") else ""
    counts = read_counts(devices.replace(on, ""))
    ways: list[RunSettings] = []
    for each, count in product(kept, counts):
        # With `pipeline:2`, an odd number of devices does not form whole pipelines.
        with suppress(ValueError):
            each.pipeline_of(count)
            ways.append(RunSettings(count, each.placement, on))
    if len(ways) < 2 or {each.placement for each in kept} != {way.placement for way in ways}:
        raise ValueError(
            f"verify compares two or more runs, but got --devices {devices} --placement "
            f"{placement}. Pass several counts, such as --devices 1,2,3 or cpu:1,2,3; for "
            f"pipeline:N, include a multiple of N"
        )
    select_devices(f"{on}{max(way.devices for way in ways)}")
    return ways


_NEVER = 1 << 30
"""A checkpoint interval that is never reached: only stops and ends write checkpoints."""
_ENTRIES = StepEntry | Result | BlockEntry


def verify_resume(
    command: Sequence[str],
    ways: Sequence[RunSettings],
    *,
    options: RunOptions,
    stops: int,
    as_json: bool,
) -> int:
    """Run a script to its end, and again with stops; print whether all ends are equal.

    Args:
        command: the script and its arguments.
        ways: how to run it: without a stop in the first way, and with stops in each in turn.
        options: options of every run.
        stops: maximum number of stops.
        as_json: print one JSON object; the text goes to stderr.

    Returns:
        0 if all ends are equal, 1 if not.

    Raises:
        typer.Exit: a run failed, which has been reported; carries the exit code.
    """
    console, rows = Screen(as_json=as_json), []
    with PrivateFolder("onefold-verify-") as private:
        runs = _Runs(command, private.path, options)
        whole = runs.end("whole", ways[0])
        steps = [entry.step for entry in whole[1] if isinstance(entry, StepEntry)]
        if len(steps) < 2:
            tell("verify --resume needs a script of at least two steps, to stop between them")
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
        folder: parent of the runs' folders.
        options: options of every run.
    """

    def __init__(self, command: Sequence[str], folder: Path, options: RunOptions) -> None:
        self._command, self._folder, self._options = command, folder, options

    def stop(self, name: str, way: RunSettings, step: int) -> None:
        """Run the script up to a step, and save it there."""
        outcome = self._run(name, way, stops_after=step)
        if outcome.exit_code != STOPPED_CODE:
            raise _failed(outcome, f"stopped after step {step} on {way}")

    def end(self, name: str, way: RunSettings) -> tuple[str, list[_ENTRIES]]:
        """Run the script to its end; return the model's fingerprint and the record's entries."""
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
    tell_failure(f"{where}: {outcome.message}", outcome.traceback)
    return typer.Exit(_FAILED)


def _words_of_difference(whole: Sequence[_ENTRIES], other: Sequence[_ENTRIES]) -> str:
    """Describe the first difference between two records; empty if there is none."""
    for one, two in zip(whole, other, strict=False):
        if one != two:
            kinds = {StepEntry: "step", BlockEntry: "a block of modifying after step"}
            what = kinds.get(type(one)) or f"{getattr(one, 'call', '')} after step"
            return f"differ first in {what} {one.step}"
    return "" if len(whole) == len(other) else f"{len(other)} instead of {len(whole)}"
