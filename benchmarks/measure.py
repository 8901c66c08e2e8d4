"""Shared parts of the benchmarks: alternating measurements, medians, tables and JSON records.

Nothing here knows what is measured. A benchmark passes named measurements, which are taken in the
order A B C C B A ... and compared round by round, so that disturbances affect all of them equally
and none has the better position.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

__all__ = [
    "Spread",
    "add_output",
    "busy_s",
    "cpu_model",
    "deliver",
    "in_turn",
    "machine_busy_s",
    "middle_half",
    "print_disturbance",
    "print_table",
    "ratio",
    "record",
    "spread",
    "write_record",
]

K = TypeVar("K")
T = TypeVar("T")

DISTURBED_CORES = 0.1
"""Number of cores used by other programs above which a measurement is disturbed."""
VERSIONS_OF = ("onefold", "torch", "accelerate", "lightning-fabric")
"""Packages whose versions a record contains, if they are installed."""
TABLE_COLUMNS = 180
"""Width of tables if the output is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of several measurements, with their minimum and maximum."""

    median: float
    low: float
    high: float

    def text(self, decimals: int) -> str:
        """Format the three numbers as `median (low-high)`."""
        median, low, high = (
            f"{value:,.{decimals}f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low}-{high})"


def spread(values: Iterable[float]) -> Spread:
    """Return median, minimum and maximum of `values`; raises `ValueError` if there are none."""
    taken = sorted(values)
    if not taken:
        raise ValueError("expected at least one measurement, but got none")
    return Spread(median=statistics.median(taken), low=taken[0], high=taken[-1])


def middle_half(values: Sequence[float]) -> Spread:
    """Return median and quartiles of many `values`, of which single ones are noise."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=median, low=low, high=high)


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the spread of `over / under`, computed round by round instead of from medians."""
    return spread(a / b for a, b in zip(over, under, strict=True))


def in_turn(measurements: Mapping[K, Callable[[], T]], *, rounds: int) -> dict[K, list[T]]:
    """Take every measurement once per round, in the given order and every second time backwards."""
    if rounds < 1:
        raise ValueError(f"expected at least one round, but got {rounds}")
    taken: dict[K, list[T]] = {name: [] for name in measurements}
    for number in range(rounds):
        row = list(measurements.items())
        for name, measure in reversed(row) if number % 2 else row:
            taken[name].append(measure())
    return taken


def busy_s(stat: str, *, ticks_per_s: int) -> float:
    """Return the total busy seconds of all cores since boot, given the text of /proc/stat.

    Time stolen by the host of a virtual machine counts as busy, because it is lost in the same way.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / ticks_per_s


def machine_busy_s() -> float:
    """Return the total busy seconds of all cores of this machine."""
    stat = Path("/proc/stat").read_text(encoding="utf-8")
    return busy_s(stat, ticks_per_s=os.sysconf("SC_CLK_TCK"))


def cpu_model(cpuinfo: str) -> str:
    """Return the CPU's name given the text of /proc/cpuinfo, or "unknown"."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown"


def record(
    benchmark: str, *, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the complete record of a benchmark run, with its environment, ready for JSON."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": hardware(),
        "settings": dict(settings),
        "results": list(results),
    }


def versions() -> dict[str, str]:
    """Return the versions that affect speed."""
    installed = {one.name: one.version for one in metadata.distributions()}
    packages = {name: installed[name] for name in VERSIONS_OF if name in installed}
    return {"python": platform.python_version(), **packages}


def hardware() -> dict[str, Any]:
    """Return the CPU's name, and the number of cores available to this process."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    return {"cpu": cpu_model(text), "cores": len(os.sched_getaffinity(0))}


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print `rows` under `columns`; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    console.print(table)


def print_disturbance(others_cores: float, what: str) -> None:
    """Report if other programs were active during the measurements of `what`."""
    if others_cores > DISTURBED_CORES:
        print(f"Disturbed: other programs kept {others_cores:.2f} cores busy during {what}")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option for the record's file to a command line."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="file for the record")


def deliver(found: Mapping[str, Any], output: Path | None) -> None:
    """Print `found` as one line of JSON, and write it to `output` if given."""
    print(json.dumps(found, default=asdict), flush=True)
    if output is not None:
        write_record(found, output)


def write_record(found: Mapping[str, Any], path: Path) -> None:
    """Write `found` as indented JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(json.dumps(found, default=asdict, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
