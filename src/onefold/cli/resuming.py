"""Stops a script at random steps, resumes it on other device counts, and compares the ends.

Note: what is compared
----------------------
Each way ends with a checkpoint and a record. Two ways are alike if the models have the same bits,
and if all steps and all results that the record has are the same: losses, norms, digests of
gradients, scores, predictions. What `Trainer.gather` returns has an entry for each device, and is
left out.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.table import Table

from onefold import Outcome, RunOptions, select_devices, supervise
from onefold.cli.running import print_json, screen
from onefold.cli.verify import RunSettings
from onefold.record import Record, alike
from onefold.record.entries import BlockEntry, Result, StepEntry
from onefold.system.process import STOPPED_CODE
from onefold.system.safe_files import PrivateFolder
from onefold.system.words import tell

__all__ = ["verify_resume"]

_AGREE, _DIFFER, _FAILED = 0, 1, 2
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
    console, rows = screen(as_json=as_json), []
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
            first = _first_difference(whole[1], entries)
            same = fingerprint == whole[0]
            differ |= not same or bool(first)
            rows.append(
                {
                    "step": step,
                    "stopped_on": str(before),
                    "resumed_on": str(after),
                    "fingerprint": fingerprint,
                    "difference": first or None,
                }
            )
            shown = "equal" if same else "[bold red]differs[/]"
            table.add_row(
                f"step {step}", str(before), str(after), shown, first or f"{len(entries)} equal"
            )
        console.print(table)
    words = "[bold red]The ends differ.[/]" if differ else "[bold green]All ends are equal.[/]"
    console.print(words)
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
    print(outcome.traceback, file=sys.stderr, end="")
    tell(f"{where}: {outcome.message}")
    return typer.Exit(_FAILED)


def _first_difference(whole: Sequence[_ENTRIES], other: Sequence[_ENTRIES]) -> str:
    """Where two records differ first, in words; empty if they do not."""
    for one, two in zip(whole, other, strict=False):
        if one != two:
            kinds = {StepEntry: "step", BlockEntry: "a block of modifying after step"}
            what = kinds.get(type(one)) or f"{getattr(one, 'call', '')} after step"
            return f"differ first in {what} {one.step}"
    return "" if len(whole) == len(other) else f"{len(other)} in place of {len(whole)}"
