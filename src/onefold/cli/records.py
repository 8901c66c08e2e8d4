"""``onefold record show`` and ``onefold compare``: print records, and find the first difference.

`find_commit` finds the commit that changed the bits of a command's runs.

Note: how the first difference is found
---------------------------------------
The records show the first step in which anything differs. Both runs are recomputed up to that step,
with a digest of each parameter before each step, of each sample, and of the result of each
operation. If parameters differ already before a step, the previous step is inspected instead,
because a record's digests cover only a part of each gradient.
"""

from __future__ import annotations

import difflib
import math
import os
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from onefold.cli import Screen, print_json
from onefold.cli.replay import StepReplay
from onefold.errors import LaunchError
from onefold.options import OF_OPTION
from onefold.record import Record, alike, shards_of
from onefold.record.entries import BlockEntry, Result, StartEntry, StepEntry
from onefold.record.findings import Findings, ShardFinding
from onefold.system.safe_files import PrivateFolder
from onefold.system.words import counted, in_shell, listed, tell

__all__ = ["compare_runs", "find_commit", "first_difference", "show_record"]

_OF_NO_ACCOUNT = {
    "the number of shards per device",
    "the placement",
    "a hash",
    "the host",
    "the stages",
}
"""Words of a description that do not affect the bits."""
_FEW = 8
_MOST_CAUSES = 200
"""Maximum number of causes: runs differ in few, but a forged record may differ in any number."""
_SHOWN = 100
"""Printed characters of a setting: the state of a scheduler may have thousands."""


class FirstDifference(NamedTuple):
    """The first difference between two records."""

    step: int
    """Number of the step; 0 if the difference is not in a step."""
    shards: list[int]
    """Shards that differ; empty if something else differs."""
    text: str
    is_length: bool = False
    """Whether everything is equal until one of the runs ends."""


def first_difference(one: Record, two: Record) -> FirstDifference | None:
    """Return the first difference between two records; None if there is none."""
    ones, twos = one.by_step, two.by_step
    for step in sorted(ones.keys() & twos.keys()):
        if found := _differs(ones[step], twos[step]):
            return found
    if ones.keys() != twos.keys():
        both = len(ones.keys() & twos.keys())
        text = f"the {both} steps of both runs are equal; the runs have {_range(ones)}, and "
        return FirstDifference(0, [], text + _range(twos), is_length=both > 0)
    for kind, name in ((Result, "results"), (BlockEntry, "blocks of trainer.modifying")):
        pair = [alike(record, kind) for record in (one, two)]
        for first, second in zip(*pair, strict=False):
            if (first.step, first.digest) != (second.step, second.digest):
                what = getattr(first, "call", "a block of trainer.modifying")
                text = f"the result of {what} after step {first.step} (line {first.line}) differs"
                return FirstDifference(0, [], text)
        if len(pair[0]) != len(pair[1]):
            return FirstDifference(0, [], f"the runs have {len(pair[0])} and {len(pair[1])} {name}")
    return None


def _range(steps: Collection[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no steps"


def _differs(one: StepEntry, two: StepEntry) -> FirstDifference | None:
    for what in ("name", "samples", "place", "rates"):
        first, second = getattr(one, what), getattr(two, what)
        if first != second:
            return FirstDifference(one.step, [], f"its {_WORDS[what]} is {first}, and {second}")
    if len(one.totals) != len(two.totals):
        return FirstDifference(one.step, [], "the batch has a different number of shards")
    for what, first, second in zip(
        ("loss", "weight", "gradient"), shards_of(one), shards_of(two), strict=True
    ):
        same = first.view("u8") == second.view("u8")
        if not same.all():
            shards = [shard for shard, equal in enumerate(same.tolist()) if not equal]
            return FirstDifference(one.step, shards, f"the {what} of {_named(shards)} differs")
    if one.skipped != two.skipped:
        return FirstDifference(
            one.step, [], f"it was skipped in only one of the runs: {one.skipped}{two.skipped}"
        )
    if repr((one.values, one.rows)) != repr((two.values, two.rows)):
        return FirstDifference(one.step, [], "the values that the loss returned differ")
    if one.norm != two.norm and not (math.isnan(one.norm) and math.isnan(two.norm)):
        return FirstDifference(one.step, [], f"the norm is {one.norm!r}, and {two.norm!r}")
    return None


_WORDS = {
    "name": "loss", "samples": "number of samples", "place": "place in the data",
    "rates": "learning rate",
}  # fmt: skip


def _named(shards: Sequence[int]) -> str:
    return f"shard{'s' * (len(shards) > 1)} {listed(map(str, shards), _FEW)}"


def compare_runs(
    one: Path, two: Path, *, devices: str, confirmed: bool, as_json: bool = False
) -> int:
    """Print the first difference between two runs, and its likely causes.

    Returns:
        0 if nothing differs, 1 if something does.
    """
    console = Screen(as_json=as_json, soft_wrap=True)
    runs = [StepReplay(each, devices=devices, confirmed=confirmed) for each in (one, two)]
    found = first_difference(runs[0].record, runs[1].record)
    steps = len(runs[0].record.by_step)
    if found is None:
        console.print(f"Same runs: {steps} steps and all results are equal.", style="bold green")
        causes = _print_causes(console, runs, 1, differ=False)
        if as_json:
            print_json({"equal": True, "steps": steps, "first": None, "causes": causes})
        return 0
    at = f"Step {found.step}: " if found.step else ""
    console.print(f"{at}{found.text}.", style="bold red")
    repeats = _look_closer(console, runs, found) if found.step else True
    causes = _print_causes(console, runs, found.step or 1, differ=not found.is_length)
    if not repeats:
        console.print(
            "A recomputed run has other bits than its record, so it depends on something that "
            "has changed since: the script, code that it imports, data, or the environment."
        )
    if as_json:
        first = {"step": found.step or None, "shards": found.shards, "text": found.text}
        print_json({"equal": False, "steps": steps, "first": first, "causes": causes})
    return 1


def _look_closer(console: Screen, runs: Sequence[StepReplay], found: FirstDifference) -> bool:
    """Recompute both runs; print the first parameter, sample and operation that differ.

    Returns:
        Whether both recomputed runs have the bits of their records.
    """
    step, shards = found.step, found.shards or None
    one, two = _both(console, runs, step, shards)
    while (earlier := _first_parameters(one, two)) is not None:
        before, names = earlier
        console.print(f"  Before step {before} the model differs in {listed(names, _FEW)}.")
        if before == 1:
            console.print(f"  No step has been made yet. {_blocks(runs, 0)}")
            return not (one.differs or two.differs)
        # The previous step left other parameters, so its gradients or its update differ.
        step = before - 1
        one, two = _both(console, runs, step, None)
    if not one.shards or not two.shards:
        console.print("  This loss gathers over the batch, so its shards cannot be inspected.")
        return not (one.differs or two.differs)
    differ = [_print_shard(console, *both) for both in zip(one.shards, two.shards, strict=False)]
    repeats = not (one.differs or two.differs)
    if not any(differ) and repeats:
        cause = _blocks(runs, step)
        console.print(f"  All operations of step {step} have equal results. {cause}")
    return repeats


def _blocks(runs: Sequence[StepReplay], step: int) -> str:
    """Describe what may have differed after a step: its update, or trainer.modifying."""
    ran = [[b.line for b in alike(run.record, BlockEntry) if b.step == step] for run in runs]
    # Compare counts instead of line numbers, which change if the script is edited above them.
    (fewer, _), (more, run) = sorted(zip(ran, runs, strict=True), key=lambda each: len(each[0]))
    lines = listed(dict.fromkeys(fewer + more))
    if len(more) > len(fewer):
        times = f" {len(more)} times, not {len(fewer)}" if fewer else ""
        return f"Only {run.record.path} then ran trainer.modifying{times}, at {lines}."
    what = "Its update differs" if step else "The models differ from the start"
    return what + (
        f", or the next change by trainer.modifying differs, at {lines}." if lines else "."
    )


def _both(
    console: Screen, runs: Sequence[StepReplay], step: int, shards: list[int] | None
) -> tuple[Findings, Findings]:
    """Inspect a step of both runs; print where a run has other bits than its record."""
    one, two = (run.inspect_step(step, shards=shards, digests=True) for run in runs)
    for looked, run in zip((one, two), runs, strict=True):
        for line in looked.differs[:1]:
            console.print(f"  {run.record.path}, recomputed: {line}")
    return one, two


def _first_parameters(one: Findings, two: Findings) -> tuple[int, list[str]] | None:
    for step in sorted(one.parameters.keys() & two.parameters.keys()):
        first, second = one.parameters[step], two.parameters[step]
        names = [name for name in first | second if first.get(name) != second.get(name)]
        if names:
            return step, names
    return None


def _print_shard(console: Screen, one: ShardFinding, two: ShardFinding) -> bool:
    """Print the first sample and the first operation that differ; return whether any does."""
    differ = False
    for first, second in zip(one.samples, two.samples, strict=False):
        if (first.number, first.digest) != (second.number, second.digest):
            differ = True
            words = f"sample {first.place} of the batch"
            if first.number is not None:
                words += f" (numbers {first.number}, {second.number} of the data)"
            words += f" is {first.words}, and {second.words}"
            console.print(f"  Shard {one.shard}: {words}")
            break
    for here, there in zip(one.operations, two.operations, strict=False):
        if (here.name, here.digest) != (there.name, there.digest):
            differ = True
            other = "" if here.name == there.name else f", in the other run {there}"
            console.print(
                f"  Shard {one.shard}: the first operation with a different result is {here}{other}"
            )
            break
    return differ


def _print_causes(
    console: Screen, runs: Sequence[StepReplay], step: int, *, differ: bool
) -> list[str]:
    """Print and return the recorded settings that differ between the runs."""
    one, two = (run.begun(step) for run in runs)
    lines = list(_causes(one, two))
    if lines:
        console.print("Likely causes:" if differ else "Differences that do not affect the bits:")
    for line in lines:
        console.print(f"  {line}")
    if differ and not lines:
        console.print(
            "The records show no cause: versions, flags, seed, settings, command and script are "
            "the same. Check the data, and code that the script imports"
        )
    return lines


def _causes(one: StartEntry, two: StartEntry) -> list[str]:
    lines, words = [], [in_shell(*each.command[1:]) or "none" for each in (one, two)]
    if words[0] != words[1]:
        lines.append(f"the arguments: {words[0]}, and {words[1]}")
    of_runs = ((b.description, b.libraries, b.flags) for b in (one, two))
    for first, second in zip(*of_runs, strict=True):
        for name in first | second:
            then, now = first.get(name, "none"), second.get(name, "none")
            if then != now and name not in _OF_NO_ACCOUNT and not name.startswith(OF_OPTION):
                lines.append(f"{name[:_SHOWN]}: {then[:_SHOWN]}, and {now[:_SHOWN]}")
    if len(lines) > _MOST_CAUSES:
        lines[_MOST_CAUSES:] = [f"and {counted(len(lines) - _MOST_CAUSES, 'more difference')}"]
    if one.python != two.python:
        lines.append(f"the interpreter: {one.python}, and {two.python}")
    if one.script_digest != two.script_digest:
        lines += [f"the script: {one.script}, and {two.script}", *_script_diff(one, two)]
    return lines


def _script_diff(one: StartEntry, two: StartEntry) -> list[str]:
    first, second = (
        path.read_text(errors="replace").splitlines() if path.is_file() else []
        for path in (Path(one.script), Path(two.script))
    )
    diff = difflib.unified_diff(first, second, one.script, two.script, lineterm="", n=0)
    return [line[:100] for line in diff if line[:3] not in ("---", "+++")][:20]


def find_commit(span: str, command: Sequence[str]) -> int:
    """Find the first commit of a range whose run has other bits than the first commit's run.

    The command runs in a worktree of each commit that is tried, with ``--record`` added.

    Args:
        span: ``GOOD..BAD``.
        command: starts with ``onefold run``.

    Returns:
        1 if there is such a commit, 0 if the last commit has the bits of the first.

    Raises:
        LaunchError: the range or the command is not valid.
    """
    good, dots, bad = span.partition("..")
    if not dots or not good or not bad:
        raise LaunchError(f"--git must be GOOD..BAD, two commits, but got {span}")
    if list(command[:2]) != ["onefold", "run"]:
        raise LaunchError(
            f"--git requires -- onefold run ..., but got {in_shell(*command) or 'no command'}"
        )
    commits = [_git("rev-parse", "--verify", f"{good}^{{commit}}").strip()]
    commits += _git("rev-list", "--reverse", "--first-parent", span).split()
    console = Screen(soft_wrap=True)
    top, here = Path(_git("rev-parse", "--show-toplevel").strip()), Path.cwd()
    with PrivateFolder("onefold-compare-") as private:
        known = Record(_recorded(commits[0], command, private.path, here.relative_to(top)))

        def same(number: int) -> bool:
            run = _recorded(commits[number], command, private.path, here.relative_to(top))
            found = first_difference(known, Record(run))
            words = "the same bits" if found is None else f"step {found.step}: {found.text}"
            console.print(f"{_title(commits[number])}: {words}")
            return found is None

        last = len(commits) - 1
        if same(last):
            return 0
        first = bisect_left(range(last), True, lo=1, key=lambda number: not same(number))
    console.print(f"{_title(commits[first])} is the first commit with other bits")
    return 1


def _recorded(commit: str, command: Sequence[str], folder: Path, below: Path) -> Path:
    """Run the command in a worktree of a commit; return the folder of its record."""
    tree, record = folder / f"tree-{commit}", folder / f"record-{commit}"
    _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
    try:
        place = tree / below
        # Use the commit's own version of onefold, if the repository contains it.
        paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-P", "-m", *command[:2], "--record", str(record), *command[2:]],
            cwd=place,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    finally:
        _git("worktree", "remove", "--force", str(tree))
    if done.returncode:
        tell(done.stdout.decode(errors="replace")[-2000:])
        raise LaunchError(
            f"the command failed in commit {commit[:12]}, with exit code {done.returncode}"
        )
    return record


def _title(commit: str) -> str:
    return _git("log", "-1", "--format=%h %an: %s", commit).strip()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


_LAST = 10


def show_record(run: Path, *, as_json: bool, step: int | None) -> None:
    """Print the record of a run, or one step of it.

    Args:
        run: the run's folder, or its record.
        as_json: print one JSON object per entry.
        step: number of the step to show; None for all.
    """
    record = Record(run)
    entries = record.entries if step is None else [record.step(step)]
    if as_json:
        results = iter(record.results)
        for entry in entries:
            # Print the value that a call returned, instead of the bytes that store it.
            value = {"value": next(results)["value"]} if isinstance(entry, Result) else {}
            print_json(_plain(entry, value))
    elif step is None:
        _show(record)
    else:
        _show_step(record.step(step))


def _plain(entry: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry, by name."""
    found = {"kind": entry.__struct_config__.tag}
    found |= {name: getattr(entry, name) for name in entry.__struct_fields__}
    if isinstance(entry, StepEntry):
        names = ("totals", "weights", "digests")
        found |= dict(zip(names, (each.tolist() for each in shards_of(entry)), strict=True))
    return {**found, **value}


def _show(record: Record) -> None:
    console = Screen()
    begins: Any = record.begins
    for begun in begins:
        console.print(
            f"{begun['time']}  from step {begun['step']} on {', '.join(begun['devices'])}: "
            f"{in_shell(*begun['command']) or 'a notebook, or a Python prompt'}"
        )
    steps = [each for each in record.entries if isinstance(each, StepEntry)]
    others = [each for each in record.entries if not isinstance(each, StartEntry)]
    table = Table("step", "epoch, from 0", "samples", "loss", "norm", "")
    for each in steps[-_LAST:]:
        numbers = (f"{each.loss:.6g}", f"{each.norm:.6g}")
        table.add_row(*map(str, (each.step, each.epoch, each.samples)), *numbers, each.skipped)
    console.print(table)
    console.print(
        f"{counted(len(steps), 'step')}, {counted(len(record.results), 'result')}, "
        f"{counted(len(record.blocks['step']), 'block')} of modifying, "
        f"{counted(len(record.checkpoints['step']), 'checkpoint')}, {len(others)} entries in all"
    )


def _show_step(entry: StepEntry) -> None:
    console = Screen()
    console.print(
        f"step {entry.step}, epoch {entry.epoch}: {entry.samples} samples, loss {entry.loss!r}, "
        f"norm {entry.norm!r}, rates {entry.rates}{', skipped: ' if entry.skipped else ''}"
        f"{entry.skipped}"
    )
    for name, value in entry.values.items():
        console.print(f"{name}: {value!r}")
    for loader, number, stop, samples in entry.place:
        console.print(f"loader {loader}, pass {number}: {samples} samples up to {stop}")
    table = Table("shard", "loss", "weight", "digest")
    for shard, (total, weight, digest) in enumerate(zip(*shards_of(entry), strict=True)):
        mean = total / weight if weight > 0 else total
        table.add_row(str(shard), f"{mean:.9g}", f"{weight:g}", f"{digest:016x}")
    console.print(table)
