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
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onefold import Outcome, RunOptions, select_devices, supervise
from onefold.cli.mathematics import report_mathematics
from onefold.system.ownfiles import PrivateFolder
from onefold.system.record import read_record
from onefold.system.words import listed

__all__ = ["Difference", "first_difference", "verify_script"]


_UNSEEDED_START = (
    "the models differ before the first step: seed the initial values, for instance with "
    "torch.manual_seed(0) before the model is built"
)


@dataclass(frozen=True, slots=True)
class State:
    """What a device saw in one step of a trainer."""

    step: int
    states: Mapping[str, str]
    """Digests of the global generators' states before the step, by name."""
    unseeded: Sequence[str]
    """The calls so far that seeded a generator from the system's entropy."""
    attributes: Sequence[str]
    """The attributes of modules that the step changed."""
    generators: Sequence[str]
    """The script's own generators that the step changed."""


_States = Mapping[int, Sequence[State]]


def hints_of(step: int, reference: _States, other: _States) -> list[str]:
    """Return sentences about likely causes, the most telling first.

    Args:
        step: the step after which the bits differ; 0 for before the first.
        reference: what each device of the one run recorded.
        other: what each device of the other run recorded.
    """
    everyone = [s for run in (reference, other) for lines in run.values() for s in lines]
    calls = listed(dict.fromkeys(call for state in everyone for call in state.unseeded))
    hints = [_UNSEEDED_START] if step == 0 else []
    if calls:
        hints.append(
            f"{calls}: seeded by the system, so that it gives other numbers in every process. Give "
            f"it a seed. Inside the loss and the data set, use the global generators of torch, "
            f"random and NumPy: they are seeded for every shard and every sample"
        )
    # Before the first step nothing was computed: only initial values can differ.
    if step == 0:
        return hints
    generators = listed(dict.fromkeys(g for state in everyone for g in state.generators))
    if generators:
        hints.append(
            f"{generators}: a generator of its own, which goes on from one shard or sample to the "
            f"next and so depends on what else this device computed. Use the global generators of "
            f"torch, random and NumPy: they are seeded for every shard and every sample"
        )
    attributes = listed(dict.fromkeys(a for state in everyone for a in state.attributes))
    if attributes:
        hints.append(
            f"{attributes}: changed while the shards were computed, and no buffer, so that a shard "
            f"sees how many this device computed before it. Register it as a buffer, or set it "
            f"between steps"
        )
    # Reversed, so that of each generator the first step stays: from there on all steps differ.
    uneven = dict(reversed([*_uneven(reference), *_uneven(other)]))
    globals_ = listed(dict.fromkeys(f"{name} before step {step}" for name, step in uneven.items()))
    if globals_:
        hints.append(
            f"{globals_}: it was drawn from between steps on some devices and not on others (under "
            f"trainer.is_lead?), so that from there on every device has other random numbers. Draw "
            f"on all devices, or from a generator that nothing else uses"
        )
    return hints


def _uneven(run: _States) -> Iterator[tuple[str, int]]:
    """Find the global generators that were drawn from between steps on some devices only."""
    if len(run) < 2:
        return
    for rows in zip(*run.values(), strict=False):
        for name in rows[0].states:
            digests = {row.states[name] for row in rows}
            # Only torch's begin alike in all processes. Those of random and NumPy are seeded by the
            # system until a script does it, so that of them only changes can be compared.
            if name.startswith("torch") and len(digests) > 1:
                yield name, rows[0].step
    for before, after in pairwise(zip(*run.values(), strict=False)):
        for name in after[0].states:
            changed = {b.states[name] != a.states[name] for b, a in zip(before, after, strict=True)}
            if len(changed) > 1 and not name.startswith("torch"):
                yield name, after[0].step


_AGREE, _DIFFER, _FAILED = 0, 1, 2
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


@dataclass(frozen=True, slots=True)
class _Way:
    """How the script is run."""

    devices: int
    keep: str
    tells_keep: bool
    """Whether there are runs that keep something else."""
    on: str
    """``cpu:`` for processes on the processor also where there are GPUs, else empty."""

    def __str__(self) -> str:
        kept = f" that keep {self.keep}" if self.tells_keep else ""
        return f"{self.devices} device{'s' if self.devices > 1 else ''}{kept}"


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run recorded."""

    way: _Way
    trainers: list[list[dict[str, Any]]]
    """The lines of each trainer; the first is about the model before the first step."""
    states: list[dict[int, list[State]]]
    """The states that each device recorded, by trainer and device."""


class _Failed(Exception):
    """Raised after a failed run was reported; carries the exit code."""


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
    command: Sequence[str], devices: str, *, steps: int, options: RunOptions, keep: str = "all"
) -> int:
    """Run a script on several device counts, compare the runs, and print a verdict.

    Args:
        command: the script and its arguments.
        devices: device counts, such as ``1,2,3``, or ``cpu:1,2,3`` for processes on the processor;
            the others are compared with the first.
        steps: how many steps of each trainer to compare.
        options: the options of every run.
        keep: what devices keep, such as ``all,span``: each with every count.

    Returns:
        0 if all agree, 1 if bits or mathematics differ, 2 if a run failed.

    Raises:
        LaunchError: this machine has fewer GPUs than one of the counts.
        ValueError: the device counts, the steps, or what is kept cannot be used.
    """
    ways = _read_ways(devices, keep)
    if steps < 1:
        raise ValueError(f"--steps {steps}: expected at least one step")
    console = Console(highlight=False)
    with PrivateFolder("onefold-verify-") as private:
        compare = _Comparison(console, command, private.path, steps, options)
        try:
            bits = _verify_bits(console, compare, ways)
            # Even if bits differ: the mathematics may name the cause.
            return max(bits, _verify_mathematics(console, compare, ways[0]))
        except _Failed as failed:
            return int(failed.args[0])


class _Comparison:
    """Runs a script again and again, and records every run in one folder."""

    def __init__(
        self,
        console: Console,
        command: Sequence[str],
        folder: Path,
        steps: int,
        options: RunOptions,
    ) -> None:
        self._console = console
        self._command = command
        self._folder = folder
        self.steps = steps
        self._options = options
        self._runs = 0

    def run(self, way: _Way) -> _Run:
        """Run the script once; the first run is what the others are compared with.

        Raises:
            _Failed: the run failed, or made no step.
        """
        name, outcome = self._run(str(way), way, "")
        trainers = self._lines(name, "")
        if outcome.exit_code:
            if not self._is_compared(outcome, name):
                self._report(outcome, f"on {way}")
            self._note("The script failed after the compared steps", way, outcome.message)
        if (cut := self._folder / f"{name}-cut").exists():
            self._note("The script was cut short", way, cut.read_text())
        if not any(len(lines) > 1 for lines in trainers):
            print("onefold: the script made no step of a Trainer", file=sys.stderr)
            raise _Failed(_FAILED)
        states = [self._states(name, trainer, way.devices) for trainer in range(len(trainers))]
        return _Run(way, trainers, states)

    def mathematics(self, way: _Way) -> tuple[str, list[list[dict[str, Any]]]]:
        """Compare V shards with one, on one device of ``way``.

        Returns:
            The precision used, and the lines of each trainer.

        Raises:
            _Failed: the script failed in both precisions.
        """
        # In float64 rounding is far below any true difference. A script that insists on float32, by
        # a cast or a kernel of its own, fails there, and is compared as it is.
        alone = replace(way, devices=1, keep="all", tells_keep=False)
        for precision in ("float64", "float32"):
            name, outcome = self._run(f"V shards and one, {precision}", alone, precision)
            trainers = self._lines(name, "-mathematics")
            if not outcome.exit_code or self._is_compared(outcome, name):
                return precision, trainers
        self._report(outcome, "computing every batch as one shard as well")
        return "", []

    def _run(self, title: str, way: _Way, mathematics: str) -> tuple[str, Outcome]:
        name = str(self._runs)
        options = replace(
            self._options,
            keep=way.keep,
            probe=str(self._folder),
            probe_run=name,
            probe_steps=self.steps,
            # Kept by the first run alone: with every tensor of every step, they take much room.
            probe_records=self._runs == 0,
            probe_mathematics=mathematics,
            logs=str(self._folder / name),
        )
        # Counted before it starts: a run that fails must not share its name with the next.
        self._runs += 1
        # Its thread is for the screen alone, and a file shows nothing of it.
        shown = self._console.is_terminal
        with self._console.status(f"{title}, {self.steps} steps") if shown else nullcontext():
            return name, supervise(self._command, select_devices(f"{way.on}{way.devices}"), options)

    def _is_compared(self, outcome: Outcome, name: str) -> bool:
        """Whether a run that failed had made all steps, and is not one that onefold refuses."""
        done = (self._folder / f"{name}-done").exists()
        return done and _REFUSALS.search(outcome.message) is None

    def _note(self, what: str, way: _Way, text: str) -> None:
        self._console.print(f"[yellow]{what}[/] on {way}:", end=" ")
        self._console.print(text, markup=False)

    def _report(self, outcome: Outcome, where: str) -> None:
        # What onefold refuses is a finding about the script; anything else is a run that failed.
        refusal = _REFUSALS.search(outcome.message)
        if refusal is not None:
            self._console.print(f"[bold red]onefold refuses the script[/] {where}:", end=" ")
            self._console.print(f"{refusal[1]}: {refusal[2]}", markup=False)
            raise _Failed(_DIFFER)
        print(outcome.traceback, file=sys.stderr, end="")
        print(f"onefold: {where}: {outcome.message}", file=sys.stderr)
        raise _Failed(_FAILED)

    def _lines(self, name: str, what: str) -> list[list[dict[str, Any]]]:
        # Numbered without gaps, so the first number that is missing is the number of Trainers.
        found: list[list[dict[str, Any]]] = []
        while lines := read_record(self._folder, f"{name}-{len(found)}{what}"):
            found.append(lines)
        return found

    def _states(self, name: str, trainer: int, count: int) -> dict[int, list[State]]:
        return {
            device: [
                State(**line)
                for line in read_record(self._folder, f"{name}-{trainer}-state-{device}")
            ]
            for device in range(count)
        }


def _verify_bits(console: Console, compare: _Comparison, ways: Sequence[_Way]) -> int:
    runs = [compare.run(way) for way in ways]
    differences = [_first_differences(runs[0], run) for run in runs]
    console.print(_table(runs, differences))
    if (alike := {len(run.trainers) for run in runs}) != {len(runs[0].trainers)}:
        console.print(f"[bold red]The runs made different numbers of Trainers: {sorted(alike)}.[/]")
        return _DIFFER
    codes = [
        _judge(console, compare, trainer, runs, differences)
        for trainer in range(len(runs[0].trainers))
    ]
    made = [len(lines) - 1 for lines in runs[0].trainers]
    each = (
        f"{len(made)} Trainers, at most {compare.steps} of each" if len(made) > 1 else "1 Trainer"
    )
    console.print(f"Compared: {sum(made)} steps of {each}.")
    return max(codes)


def _first_differences(reference: _Run, run: _Run) -> list[Difference | None]:
    pairs = zip(reference.trainers, run.trainers, strict=False)
    return [first_difference(mine, theirs) for mine, theirs in pairs]


def _judge(
    console: Console,
    compare: _Comparison,
    trainer: int,
    runs: Sequence[_Run],
    differences: Sequence[Sequence[Difference | None]],
) -> int:
    several = len(runs[0].trainers) > 1
    who = f" of trainer {trainer}" if several else ""
    steps = {len(run.trainers[trainer]) - 1 for run in runs}
    if len(steps) > 1:
        console.print(
            f"[bold red]The runs made different numbers of steps{who}: {sorted(steps)}.[/]"
        )
        return _DIFFER
    done = steps.pop()
    number, found = next(
        ((n, each[trainer]) for n, each in enumerate(differences) if each[trainer]), (0, None)
    )
    if found is not None:
        largest = (
            "another shape" if found.largest is None else f"largest difference {found.largest:.3g}"
        )
        console.print(
            f"[bold red]The bits{who} differ[/], first after step {found.step}, in {found.tensor}: "
            f"{largest}; {found.tensors} tensors differ there."
        )
        for hint in _hints(compare, trainer, runs[0], runs[number], found):
            console.print(f"Hint: {escape(hint)}.")
        return _DIFFER
    if not done:
        # That no Trainer made any was refused before.
        console.print(
            f"[yellow]Trainer {trainer} made no step[/] while the others made theirs: it was not "
            f"compared."
        )
        return _AGREE
    if _nothing_trained(console, runs[0].trainers[trainer], who):
        return _DIFFER
    console.print(f"[bold green]The bits{who} agree[/] after each of {done} steps.")
    return _AGREE


def _nothing_trained(console: Console, lines: Sequence[dict[str, Any]], who: str) -> bool:
    """Report if no parameter changed; return True if that makes the comparison worthless."""
    # If the loss was never 0, a learning rate of 0 may be intended: only a warning.
    first, last = lines[0]["digests"], lines[-1]["digests"]
    if any(first[name] != last[name] for name in lines[0]["parameters"]):
        return False
    if all(line["loss"] == 0 for line in lines[1:]):
        console.print(
            f"[bold red]Nothing was trained[/]{who}: the loss was exactly 0 in each of "
            f"{len(lines) - 1} steps and no parameter changed, so that equal bits say nothing. "
            f"Look at what the loss returns, and at the data that it is given."
        )
        return True
    console.print(
        f"[yellow]No parameter changed[/]{who} in {len(lines) - 1} steps: is the learning rate 0?"
    )
    return False


def _hints(
    compare: _Comparison, trainer: int, reference: _Run, other: _Run, found: Difference
) -> list[str]:
    """Return hints from what was recorded, or else from whether the run repeats its bits."""
    # That takes one more run, and separates two kinds of cause; so only where nothing was recorded.
    named = hints_of(found.step, reference.states[trainer], other.states[trainer])
    if named:
        return named
    again = compare.run(reference.way)
    return [_GUESSES[_repeats(reference, again, trainer)].format(count=reference.way)]


def _repeats(reference: _Run, again: _Run, trainer: int) -> bool:
    """Whether a trainer made the same steps in both runs, with the same bits."""
    if trainer >= len(again.trainers):
        return False
    mine, theirs = reference.trainers[trainer], again.trainers[trainer]
    return len(mine) == len(theirs) and first_difference(mine, theirs) is None


_GUESSES = {
    False: (
        "{count} twice differs as well, so the run does not repeat itself: something draws from a "
        "generator that is not seeded (a torch.Generator or random.Random of its own, os.urandom, "
        "the clock), or a kernel does not repeat its bits. Inside the loss and the data set, use "
        "torch's, random's and NumPy's global generators: they are seeded for every shard and "
        "every sample"
    ),
    True: (
        "{count} twice gives the same bits, so the result depends on who computes what: the script "
        "reads the rank or the number of devices (RANK, trainer.is_lead, torch.distributed), keeps "
        "state from one shard to the next, or changes parameters between steps on every device"
    ),
}
"""The hints that remain, by whether a run repeats its bits."""


def _verify_mathematics(console: Console, compare: _Comparison, way: _Way) -> int:
    precision, trainers = compare.mathematics(way)
    return _AGREE if report_mathematics(console, precision, trainers) else _DIFFER


def _table(runs: Sequence[_Run], differences: Sequence[Sequence[Difference | None]]) -> Table:
    table = Table()
    several = max(len(run.trainers) for run in runs) > 1
    kept = ("keep",) if runs[0].way.tells_keep else ()
    headings = ("devices", *kept, "steps", "last loss", "last fingerprint", "bits")
    for heading in (("trainer",) if several else ()) + headings:
        table.add_column(heading)
    for trainer in range(len(runs[0].trainers)):
        for number, (run, found) in enumerate(zip(runs, differences, strict=True)):
            # A run may have made fewer than the first, which the caller reports after the table.
            if trainer < len(run.trainers):
                row = _row(run, trainer, found[trainer], reference=number == 0)
                table.add_row(*([str(trainer)] if several else []), *row)
    return table


def _row(run: _Run, trainer: int, found: Difference | None, *, reference: bool) -> list[str]:
    last = run.trainers[trainer][-1]
    verdict = "reference" if reference else "the same"
    if found is not None:
        verdict = f"differ from step {found.step}"
    loss = "" if last["loss"] is None else f"{last['loss']:.6g}"
    kept = [run.way.keep] if run.way.tells_keep else []
    return [str(run.way.devices), *kept, str(last["step"]), loss, last["fingerprint"], verdict]


def _read_ways(devices: str, keep: str) -> list[_Way]:
    kept = [part.strip() for part in keep.split(",")]
    for each in kept:
        RunOptions(keep=each)  # to be refused before anything runs
    on = "cpu:" if devices.strip().startswith("cpu:") else ""
    counts = [part.strip().removeprefix(on) for part in devices.split(",")]
    usable = all(part.isdecimal() and int(part) > 0 for part in counts)
    if not usable or len(counts) * len(kept) < 2:
        raise ValueError(
            f"--devices {devices!r}: expected two or more counts, such as 1,2,3 or cpu:1,2,3"
        )
    # With `stages:2`, an odd number of devices makes no whole lines.
    ways = [
        _Way(int(count), each, tells_keep=len(kept) > 1, on=on)
        for each in kept
        for count in counts
        if _makes_lines(each, int(count))
    ]
    for each in kept:
        if not any(way.keep == each for way in ways):
            raise ValueError(
                f"--keep {each}: expected a multiple of that among --devices {devices}"
            )
    if len(ways) < 2:
        raise ValueError(
            f"--devices {devices} --keep {keep}: expected two ways to compare, got one"
        )
    select_devices(f"{on}{max(way.devices for way in ways)}")  # likewise
    return ways


def _makes_lines(keep: str, devices: int) -> bool:
    try:
        RunOptions(keep=keep).line_of(devices)
    except ValueError:
        return False
    return True
