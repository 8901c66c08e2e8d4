"""How fast onefold trains beside another version of itself, measured in turn in one run.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before/src [--workload lenet ...] [--sides onefold-1 ...]
        [--repeats 9] [--seconds 1] [--output FILE]

Both versions run the loops of this checkout; a ratio above 1 says that this version is the faster.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
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
"""What is compared unless the command line says otherwise."""


def main() -> None:
    """Measure the workloads named on the command line, all if none is."""
    args = arguments()
    results = []
    for workload in args.workload:
        print(f"measuring {WORKLOADS[workload].title} ...", file=sys.stderr)
        for side in args.sides:
            with started(workload, side, args.source) as versions:
                results.append(measured(workload, side, versions, args))
    rows = [
        [WORKLOADS[found["workload"]].title, found["side"], found["ratio"].text(3)]
        for found in results
    ]
    print_table(
        "this version / the other one", ["workload", "side", "median (least-greatest)"], rows
    )
    for found in results:
        print_disturbance(found["others_cores"].high, f"{found['workload']}, {found['side']}")
    settings = {"repeats": args.repeats, "seconds": args.seconds}
    deliver(record("against", settings=settings, results=results), args.output)


def arguments() -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the src folder of the other version")
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(COMPARED), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each version")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long each takes")
    add_output(parser)
    return parser.parse_args()


@contextmanager
def started(workload: str, side: str, source: Path) -> Iterator[dict[str, Side]]:
    """A side in both versions, running and warmed up."""
    if not (source / "onefold").is_dir():
        raise SystemExit(f"{source}: expected the folder that holds the package onefold")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        versions = {}
        for name, path in (("this", OURS), ("other", source.resolve())):
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


def measured(
    workload: str, side: str, versions: Mapping[str, Side], args: argparse.Namespace
) -> dict[str, Any]:
    """Both versions in turn, over the same number of steps."""
    steps = steps_for(args.seconds, step_time_s(versions["other"]))
    taken = in_turn(
        {name: partial(version.train, steps) for name, version in versions.items()},
        rounds=args.repeats,
    )
    seconds = {name: [one.seconds for one in ones] for name, ones in taken.items()}
    return {
        "workload": workload,
        "side": side,
        "steps": steps,
        "step_ms": {n: spread(1e3 * s / steps for s in ss) for n, ss in seconds.items()},
        "ratio": ratio(seconds["other"], seconds["this"]),
        "others_cores": spread(one.others_cores for ones in taken.values() for one in ones),
    }


if __name__ == "__main__":
    main()
