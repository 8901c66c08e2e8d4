"""How near two CPU devices come to the most that two cores can do.

    python benchmarks/limit.py [--workload lenet ...] [--memory default kept] [--sides ddp-2 ...]
        [--repeats 5] [--seconds 2.5] [--output FILE]

The limit is the speed of two independent processes with one thread each. Each trains half of every
batch, updates half of every parameter, and exchanges nothing. All other sides are compared with it,
round by round:

- onefold / limit: what remains after exchange, imbalance and onefold's own work.
- limit / twice one of its processes alone: what is lost to the memory that two cores share.

By default, the C allocator returns large blocks to the system and gets them back in every step,
cleared page by page. onefold keeps its memory; with `--memory kept`, the other sides do too. The
processes of the limit always keep theirs.

Afterwards, the limit and onefold run some more steps to time their phases: the differences are the
reasons for a speed below the limit.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from catalog import LIMITS, PEERS, SIDES
from measure import (
    Spread,
    add_output,
    deliver,
    print_disturbance,
    print_table,
    ratio,
    record,
    spread,
)
from sides import Side
from training import Run, best_of, drop_absent, speeds_of, started
from workloads import WORKLOADS

__all__ = ["main"]

LIMIT, ALONE = LIMITS
PLAIN, ONE, OURS = "plain-1", "onefold-1-two-shards", "onefold-2-shared"
NEAR = 0.98
"""Part of the limit that two devices should reach."""
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "THP_MEM_ALLOC_ENABLE": "0",
}
"""Make glibc allocate all memory from the heap and never return it, and PyTorch not request huge
pages, as `onefold run` does by default."""
RATIOS = {
    "onefold, 2 devices / limit": (OURS, (LIMIT,)),
    "best of the others / limit": (PEERS, (LIMIT,)),
    "onefold, 2 devices / best of the others": (OURS, PEERS),
    "onefold, 1 device, 2 shards / plain": (ONE, (PLAIN,)),
    "limit / twice one process alone": (LIMIT, (ALONE,)),
}
"""Ratios of speeds: each of a side, or the best of several, to the best of others."""


def main() -> None:
    """Measure the workloads named on the command line, each with both kinds of memory."""
    args = arguments()
    absent = drop_absent(args)
    results = []
    for workload in args.workload:
        for memory in args.memory:
            print(f"measuring {WORKLOADS[workload].title}, {memory} memory ...", file=sys.stderr)
            with started(workload, args, partial(environment, memory)) as sides:
                results.append(measured(workload, memory, sides, args))
    show(results)
    settings = {
        "repeats": args.repeats,
        "seconds": args.seconds,
        "sides": {name: SIDES[name].description for name in args.sides},
        "left_out": absent,
    }
    deliver(record("limit", settings=settings, results=results), args.output)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = ["cnn-adam", "transformer", "resnet18", "lenet"]
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=usual, metavar="NAME")
    memory = ["default", "kept"]
    parser.add_argument("--memory", nargs="+", choices=memory, default=memory)
    sides = [LIMIT, ALONE, PLAIN, ONE, OURS, *PEERS]
    parser.add_argument("--sides", nargs="+", choices=sides, default=sides, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per side")
    parser.add_argument(
        "--seconds", type=float, default=2.5, help="approximate duration of a measurement"
    )
    add_output(parser)
    return parser.parse_args(
        namespace=argparse.Namespace(devices="cpu", precision=["fp32"], batch_size_factor=1.0)
    )


def environment(memory: str, side: str) -> dict[str, str]:
    """Return the environment variables of a side, which decide whether it keeps its memory."""
    return KEEP_MEMORY if memory == "kept" or side in LIMITS else {}


def measured(
    workload: str, memory: str, sides: Mapping[Run, Side], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure all sides of a workload alternately, and the phases of a step."""
    steps, taken, speeds = speeds_of(workload, sides, args)
    by_side = {name: speed for (_, name), speed in speeds.items()}
    return {
        "workload": workload,
        "memory": memory,
        "samples_per_s": {name: spread(speed) for name, speed in by_side.items()},
        "ratios": ratios(by_side),
        "phases_ms": {
            name: phases_ms(side, steps[run])
            for run, side in sides.items()
            if (name := run[1]) in (LIMIT, OURS)
        },
        "others_cores": spread(one.others_cores for ones in taken.values() for one in ones),
    }


def ratios(speeds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return the ratios whose sides were measured, by title, with the names of the sides."""
    found = {}
    for title, (over, under) in RATIOS.items():
        names = [best_of([of] if isinstance(of, str) else of, speeds) for of in (over, under)]
        if None not in names:
            of, to = map(str, names)
            found[title] = {"over": of, "under": to, "ratio": ratio(speeds[of], speeds[to])}
    return found


def phases_ms(side: Side, steps: int) -> list[dict[str, float]]:
    """Return the milliseconds of each phase of a step, for each process."""
    done = side.train(steps, by_phase=True)
    return [{name: 1e3 * s / steps for name, s in each.items()} for each in done.phases_s]


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the speeds, the ratios, and the phases of a step."""
    columns = [f"{found['workload']}, {found['memory']}" for found in results]
    names = [name for name in SIDES if any(name in each["samples_per_s"] for each in results)]
    rows = [[name, *(cell(r["samples_per_s"].get(name), 1) for r in results)] for name in names]
    print_table("Samples per second: median (least-greatest)", ["side", *columns], rows)
    titles = [title for title in RATIOS if any(title in found["ratios"] for found in results)]
    rows = [
        [title, *(cell(found["ratios"].get(title, {}).get("ratio"), 3) for found in results)]
        for title in titles
    ]
    print_table("Ratios, round by round: median (least-greatest)", ["ratio", *columns], rows)
    phases = dict.fromkeys(
        phase for r in results for side in r["phases_ms"].values() for one in side for phase in one
    )
    rows = [
        [f"{name}, {phase}", *(phase_cell(r["phases_ms"].get(name, []), phase) for r in results)]
        for phase in phases
        for name in (LIMIT, OURS)
    ]
    print_table("Milliseconds a step by phase, in each process", ["phase", *columns], rows)
    for found, column in zip(results, columns, strict=True):
        print_disturbance(found["others_cores"].high, column)
        ours = found["ratios"].get("onefold, 2 devices / limit")
        if ours and ours["ratio"].median < NEAR:
            print(f"{column}: two devices reach {ours['ratio'].median:.3f} of the limit")


def cell(value: Spread | None, decimals: int) -> str:
    """Return a cell of a table; empty if it was not measured."""
    return value.text(decimals) if value else ""


def phase_cell(processes: Sequence[Mapping[str, float]], phase: str) -> str:
    """Return the milliseconds of a phase in each process; empty if the side has no such phase."""
    return ", ".join(f"{each[phase]:.2f}" for each in processes if phase in each)


if __name__ == "__main__":
    main()
