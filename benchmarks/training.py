"""Training speed of plain PyTorch, onefold and other libraries, measured alternately.

    python benchmarks/training.py [--workload lenet ...] [--sides plain-1 ddp-2 ...]
        [--devices cpu|cuda] [--precision fp32 bf16] [--repeats 5] [--seconds 2.5]
        [--batch-size-factor 1] [--output FILE]

All sides (see `--help`) train the same model on the same batches. They are started once per
workload, warmed up, and then measured one after another, round by round; while one trains, the
others wait. Each trains as many steps as take about `--seconds`, so that the cost of the request is
negligible however short the steps are. Several precisions are measured alternately as well: each
side runs once per precision.

The C allocator returns large blocks to the system and gets them back in every step, cleared page by
page. How often depends on the sizes, so it favors different sides in different places; `limit.py`
also measures with memory that all sides keep.
"""

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from catalog import LIMITS, PEERS, SIDES, Kind, Precision, left_out
from measure import (
    Spread,
    add_output,
    deliver,
    in_turn,
    print_disturbance,
    print_table,
    ratio,
    record,
    spread,
)
from sides import Measurement, Side
from workloads import WORKLOADS

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_side.py")
WARM_UP_STEPS = 3
TRIAL_STEPS = 2
TRIAL_SECONDS = 0.1
"""Minimum duration for timing a step before the number of steps is chosen, in seconds."""
BASE = "plain-1"
"""Side that all speeds are compared with."""

Run = tuple[Precision, str]
"""A precision, and the name of the side that uses it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of speeds: of `over` to the side in `under` with the best median."""

    title: str
    over: str
    under: tuple[str, ...]


COMPARISONS = [
    Comparison("onefold, 1 device, 1 shard / plain", "onefold-1", (BASE,)),
    Comparison("onefold, 1 device, 2 shards / plain", "onefold-1-two-shards", (BASE,)),
    Comparison("onefold, 2 devices / 1 device", "onefold-2-shared", ("onefold-1-two-shards",)),
    Comparison("onefold, 2 devices / best of the others", "onefold-2-shared", PEERS),
    Comparison("onefold, 2 devices / plain, all threads", "onefold-2-shared", ("plain-all",)),
    Comparison("onefold, 2 devices, collective / DDP", "onefold-2-collective", ("ddp-2",)),
    Comparison("onefold, 2 devices, one process / plain", "onefold-2-one-process", (BASE,)),
]


def main() -> None:
    """Measure the workloads named on the command line, or all of them."""
    args = arguments()
    absent = drop_absent(args)
    results = []
    for workload in args.workload:
        print(f"measuring {WORKLOADS[workload].title} ...", file=sys.stderr)
        with started(workload, args) as sides:
            results += measured(workload, sides, args)
    show(results)
    settings = {
        "repeats": args.repeats,
        "seconds": args.seconds,
        "devices": args.devices,
        "precisions": args.precision,
        "batch_size_factor": args.batch_size_factor,
        "sides": {name: SIDES[name].description for name in args.sides},
        "left_out": absent,
    }
    deliver(record("training", settings=settings, results=results), args.output)


def drop_absent(args: argparse.Namespace) -> dict[str, str]:
    """Keep the sides that can run here; return the others, with the reason."""
    absent = left_out(args.sides, args.devices)
    for name, reason in absent.items():
        print(f"left out: {name} {reason}", file=sys.stderr)
    args.sides = [name for name in args.sides if name not in absent]
    if not args.sides:
        raise SystemExit(f"none of these sides can run here on {args.devices}")
    return absent


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    described = "\n".join(f"  {name:22}{spec.description}" for name, spec in SIDES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsides:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME"
    )
    usual = [name for name in SIDES if name not in LIMITS]
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=usual, metavar="NAME")
    parser.add_argument("--devices", choices=get_args(Kind), default="cpu")
    parser.add_argument(
        "--precision", nargs="+", choices=get_args(Precision), default=["fp32"], metavar="NAME"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements per side")
    parser.add_argument(
        "--seconds", type=float, default=2.5, help="approximate duration of a measurement"
    )
    parser.add_argument(
        "--batch-size-factor", type=float, default=1.0, help="factor of every batch size"
    )
    add_output(parser)
    return parser.parse_args()


def command_of(
    side: str,
    workload: str,
    devices: Kind = "cpu",
    precision: Precision = "fp32",
    batch_size_factor: float = 1.0,
) -> list[str]:
    """Return the command of a side's processes, except for the socket."""
    program = [str(PROGRAM), side, workload, devices, precision, str(batch_size_factor)]
    return [sys.executable, *SIDES[side].command(devices), *program]


@contextmanager
def started(
    workload: str,
    args: argparse.Namespace,
    environment: Callable[[str], Mapping[str, str]] = lambda side: {},
) -> Iterator[dict[Run, Side]]:
    """Start and warm up the sides of a workload in each precision.

    Args:
        workload: name of the workload.
        args: the options of the program.
        environment: returns additional environment variables of a side.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        sides = {}
        for run in itertools.product(args.precision, args.sides):
            precision, name = run
            factor = args.batch_size_factor
            side = Side(
                f"{name}-{precision}",
                command_of(name, workload, args.devices, precision, factor),
                processes=SIDES[name].processes,
                folder=Path(folder),
                environment=environment(name),
            )
            sides[run] = running.enter_context(side)
            sides[run].train(WARM_UP_STEPS)
        yield sides


def measured(
    workload: str, sides: Mapping[Run, Side], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure every side alternately, each over its own number of steps; a result per precision."""
    steps, taken, speeds = speeds_of(workload, sides, args)
    batch_size = WORKLOADS[workload].scaled(args.batch_size_factor).batch_size
    others_cores = spread(one.others_cores for ones in taken.values() for one in ones)
    first = args.precision[0]
    results = []
    for precision in args.precision:
        ours = {name: speeds[precision, name] for name in args.sides}
        results.append(
            {
                "workload": workload,
                "precision": precision,
                "batch_size": batch_size,
                "steps": {name: steps[precision, name] for name in ours},
                "samples_per_s": {name: spread(speed) for name, speed in ours.items()},
                "peak_bytes": {name: taken[precision, name][-1].peak_bytes for name in ours},
                "relative": relative(ours),
                "times_first": {n: ratio(speed, speeds[first, n]) for n, speed in ours.items()},
                "ratios": compared(ours),
                "others_cores": others_cores,
            }
        )
    return results


def speeds_of(
    workload: str, sides: Mapping[Run, Side], args: argparse.Namespace
) -> tuple[dict[Run, int], dict[Run, list[Measurement]], dict[Run, list[float]]]:
    """Measure every side alternately: steps, measurements, and samples per second by round."""
    steps = {run: steps_for(args.seconds, step_time_s(side)) for run, side in sides.items()}
    taken = in_turn(
        {run: partial(side.train, steps[run]) for run, side in sides.items()},
        rounds=args.repeats,
    )
    batch_size = WORKLOADS[workload].scaled(args.batch_size_factor).batch_size
    speeds = {run: [steps[run] * batch_size / one.seconds for one in taken[run]] for run in sides}
    return steps, taken, speeds


def step_time_s(side: Side) -> float:
    """Return the approximate duration of a step."""
    steps = TRIAL_STEPS
    while (seconds := side.train(steps).seconds) < TRIAL_SECONDS:
        steps *= 2
    return seconds / steps


def steps_for(seconds: float, step_s: float) -> int:
    """Return the number of steps that take `seconds`."""
    return max(1, math.ceil(seconds / step_s))


def relative(speeds: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Return every side's speed relative to the plain loop, if that was measured."""
    if BASE not in speeds:
        return {}
    return {name: ratio(speed, speeds[BASE]) for name, speed in speeds.items()}


def compared(speeds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return the comparisons whose sides were measured, by title."""
    found: dict[str, dict[str, Any]] = {}
    for one in COMPARISONS:
        under = best_of(one.under, speeds)
        if one.over in speeds and under:
            spread_of = ratio(speeds[one.over], speeds[under])
            found[one.title] = {"over": one.over, "under": under, "ratio": spread_of}
    return found


def best_of(names: Sequence[str], speeds: Mapping[str, Sequence[float]]) -> str | None:
    """Return the side with the best median over all rounds, not the best of each round."""
    there = [name for name in names if name in speeds]
    return max(there, key=lambda name: spread(speeds[name]).median, default=None)


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of every workload's speeds, and one of the ratios."""
    for found in results:
        rows = [speed_row(name, found) for name in found["samples_per_s"]]
        title = (
            f"{WORKLOADS[found['workload']].title}, {found['precision']}: median (least-greatest)"
        )
        times = [f"times {BASE}", f"times {results[0]['precision']}"]
        print_table(title, ["side", "samples per second", *times, "MB"], rows)
    titles = [one.title for one in COMPARISONS if any(one.title in r["ratios"] for r in results)]
    if titles:
        rows = [[title, *(ratio_cell(found, title) for found in results)] for title in titles]
        rows.append(["best of the others", *(best_peer(found) for found in results)])
        columns = [
            "speeds, round by round",
            *(f"{r['workload']}, {r['precision']}" for r in results),
        ]
        print_table("Ratios: median (least-greatest)", columns, rows)
    for found in results:
        print_disturbance(found["others_cores"].high, WORKLOADS[found["workload"]].title)


def speed_row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return a side's row in the table of a workload."""
    times_base = found["relative"].get(name)
    shown = times_base.text(3) if times_base else ""
    held = f"{found['peak_bytes'][name] / 1e6:,.0f}"
    times = [shown, found["times_first"][name].text(3)]
    return [SIDES[name].description, found["samples_per_s"][name].text(1), *times, held]


def ratio_cell(found: Mapping[str, Any], title: str) -> str:
    """Return a workload's cell in the table of ratios; empty if the sides were not measured."""
    one = found["ratios"].get(title)
    return one["ratio"].text(2) if one else ""


def best_peer(found: Mapping[str, Any]) -> str:
    """Return the best of the other libraries; empty if none was measured."""
    medians = {name: [one.median] for name, one in found["samples_per_s"].items()}
    return best_of(PEERS, medians) or ""


if __name__ == "__main__":
    main()
