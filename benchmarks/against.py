"""Compare the speed of two versions of onefold, measured alternately in one run.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before/src [--workload lenet ...] [--sides onefold-1 ...]
        [--starts 4] [--repeats 3] [--seconds 1] [--output FILE]

Both versions run the loops of this checkout; a ratio above 1 means that this version is faster.

The differences are smaller than the random effects of a process's memory layout, and than the
effect of running second. So both versions are restarted several times, each of them first in turn,
and every measurement is in the order this, other, other, this. `--starts` must be even.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from catalog import SIDES
from measure import (
    add_output,
    deliver,
    in_turn,
    print_disturbance,
    print_table,
    ratio,
    record,
    spread,
)
from sides import Side
from training import WARM_UP_STEPS, command_of, step_time_s, steps_for
from workloads import WORKLOADS

__all__ = ["main"]

OURS = Path(__file__).resolve().parent.parent / "src"
COMPARED = ("onefold-1", "onefold-1-two-shards", "onefold-2-shared")
"""Default sides of the comparison."""


def main() -> None:
    """Measure the workloads named on the command line, or all of them."""
    args = arguments()
    results = []
    for workload in args.workload:
        print(f"measuring {WORKLOADS[workload].title} ...", file=sys.stderr)
        results += [measured(workload, side, args) for side in args.sides]
    rows = [
        [WORKLOADS[found["workload"]].title, found["side"], found["ratio"].text(3)]
        for found in results
    ]
    print_table(
        "this version / the other one", ["workload", "side", "median (least-greatest)"], rows
    )
    for found in results:
        print_disturbance(found["others_cores"].high, f"{found['workload']}, {found['side']}")
    settings = {"starts": args.starts, "repeats": args.repeats, "seconds": args.seconds}
    deliver(record("against", settings=settings, results=results), args.output)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="src folder of the other version")
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(COMPARED), metavar="NAME")
    parser.add_argument("--starts", type=int, default=4, help="number of starts of both")
    parser.add_argument("--repeats", type=int, default=3, help="measurements per start")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a quarter")
    add_output(parser)
    args = parser.parse_args()
    if args.starts < 2 or args.starts % 2:
        parser.error(f"--starts: expected an even number, but got {args.starts}")
    if not (args.source / "onefold").is_dir():
        parser.error(f"{args.source}: expected the folder that contains the package onefold")
    return args


@contextmanager
def started(workload: str, side: str, sources: Mapping[str, Path]) -> Iterator[dict[str, Side]]:
    """Start and warm up a side in both versions, in the order of `sources`."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        versions = {}
        for name, path in sources.items():
            version = Side(
                name,
                command_of(side, workload),
                processes=SIDES[side].processes,
                folder=Path(folder),
                environment={"PYTHONPATH": str(path)},
            )
            versions[name] = running.enter_context(version)
            versions[name].train(WARM_UP_STEPS)
        yield versions


def measured(workload: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure both versions over the same number of steps, for each of `args.starts` starts."""
    sources = [("this", OURS), ("other", args.source.resolve())]
    steps = 0
    seconds: dict[str, list[float]] = {"this": [], "other": []}
    others_cores: list[float] = []
    for number in range(args.starts):
        order = dict(reversed(sources) if number % 2 else sources)
        with started(workload, side, order) as versions:
            steps = steps or steps_for(args.seconds, step_time_s(versions["other"]))
            taken = in_turn(
                {name: partial(version.train, steps) for name, version in versions.items()},
                rounds=2 * args.repeats,
            )
        for name, ones in taken.items():
            seconds[name] += there_and_back([one.seconds for one in ones])
            others_cores += [one.others_cores for one in ones]
    return {
        "workload": workload,
        "side": side,
        "steps": steps,
        "step_ms": {n: spread(1e3 * s / (2 * steps) for s in ss) for n, ss in seconds.items()},
        "ratio": ratio(seconds["other"], seconds["this"]),
        "others_cores": spread(others_cores),
    }


def there_and_back(seconds: Sequence[float]) -> list[float]:
    """Return the sums of two consecutive rounds, one in each order."""
    return [there + back for there, back in zip(seconds[::2], seconds[1::2], strict=True)]


if __name__ == "__main__":
    main()
