"""``onefold record``: what was written down of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onefold.cli.running import print_json
from onefold.record import Record, shards_of
from onefold.record.entries import Result, StartEntry, StepEntry
from onefold.system.words import counted, in_shell

__all__ = ["show_record"]

_LAST = 10


def show_record(run: Path, *, as_json: bool, step: int | None) -> None:
    """Print the record of a run, or one step of it.

    Args:
        run: the folder, or the file.
        as_json: print one JSON object for each entry.
        step: the number of the only step that is shown.
    """
    record = Record(run)
    entries = record.entries if step is None else [record.step(step)]
    if as_json:
        results = iter(record.results)
        for entry in entries:
            # What a call returned, in place of the bytes that it is kept as.
            value = {"value": next(results)["value"]} if isinstance(entry, Result) else {}
            print_json(_plain(entry, value))
    elif step is None:
        _show(record)
    else:
        _show_step(record.step(step))


def _plain(entry: Any, value: dict[str, Any]) -> dict[str, Any]:
    """The fields of an entry, by name."""
    found = {"kind": entry.__struct_config__.tag}
    found |= {name: getattr(entry, name) for name in entry.__struct_fields__}
    if isinstance(entry, StepEntry):
        names = ("totals", "weights", "digests")
        found |= dict(zip(names, (each.tolist() for each in shards_of(entry)), strict=True))
    return {**found, **value}


def _show(record: Record) -> None:
    console, begins = Console(highlight=False), record.begins
    for begun in begins:
        console.print(
            f"{begun['time']}  from step {begun['step']} on {', '.join(begun['devices'])}: "
            f"{in_shell(*begun['command'])}",
            markup=False,
        )
    steps, others = (
        record.steps,
        [each for each in record.entries if not isinstance(each, StartEntry)],
    )
    table = Table("step", "epoch", "samples", "loss", "norm", "")
    for row in range(max(0, len(steps["step"]) - _LAST), len(steps["step"])):
        table.add_row(*(str(steps[name][row]) for name in ("step", "epoch", "samples")),
                      *(f"{steps[name][row]:.6g}" for name in ("loss", "norm")),
                      str(steps["skipped"][row]))  # fmt: skip
    console.print(table)
    console.print(
        f"{counted(len(steps['step']), 'step')}, {counted(len(record.results), 'result')}, "
        f"{counted(len(record.blocks['step']), 'block')} of modifying, "
        f"{counted(len(record.checkpoints['step']), 'checkpoint')}, {len(others)} entries in all"
    )


def _show_step(entry: StepEntry) -> None:
    console = Console(highlight=False)
    console.print(
        f"step {entry.step}, epoch {entry.epoch}: {entry.samples} samples, loss {entry.loss!r}, "
        f"norm {entry.norm!r}, rates {entry.rates}{', skipped: ' if entry.skipped else ''}"
        f"{entry.skipped}",
        markup=False,
    )
    for name, value in entry.values.items():
        console.print(f"{name}: {value!r}", markup=False)
    for loader, number, stop, samples in entry.place:
        console.print(f"loader {loader}, pass {number}: {samples} samples up to {stop}")
    table = Table("shard", "loss", "weight", "digest")
    for shard, (total, weight, digest) in enumerate(zip(*shards_of(entry), strict=True)):
        mean = total / weight if weight > 0 else total
        table.add_row(str(shard), f"{mean:.9g}", f"{weight:g}", f"{digest:016x}")
    console.print(table)
