"""How fast training goes: plain PyTorch, onefold, and DistributedDataParallel, measured in turn.

    python benchmarks/training.py [--workload lenet ...] [--repeats 5] [--seconds 4] [--keep-memory]

Four sides train the same model on the same batches, each process with one thread: plain PyTorch
and onefold on one device, DistributedDataParallel (gloo) and onefold on two processes. All sides
are started once per workload, warmed up, and then measured one after the other, round after round;
while one trains, the others wait.

By default the C allocator hands large blocks back to the system and gets them anew in every step,
cleared page by page. How often depends on the sizes, so it favours one side here and another one
there; `--keep-memory` has the processes of all sides keep what they once got.
"""

import argparse
import math
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from measure import in_turn, print_disturbance, print_record, print_table, ratio, record, spread
from sides import Side
from workloads import WORKLOADS

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_side.py")
ONEFOLD = Path(sysconfig.get_path("scripts"), "onefold")
WARM_UP_STEPS = 3
TRIAL_STEPS = 2

LAUNCHERS: dict[str, tuple[list[str], int]] = {
    "plain": ([], 1),
    "onefold-1": ([], 1),
    "ddp-2": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2),
    "onefold-2": ([str(ONEFOLD), "run", "--devices", "cpu:2"], 2),
}
"""What starts the processes of each side, and how many they are."""

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "THP_MEM_ALLOC_ENABLE": "0",
}
"""Tells glibc to get all memory from the heap and never to give it back, and PyTorch not to ask for
large pages, which `onefold run` does by itself."""

RATIOS = [
    ("onefold-1", "plain"),
    ("ddp-2", "plain"),
    ("onefold-2", "ddp-2"),
    ("onefold-2", "onefold-1"),
]


def main() -> None:
    """Measure the workloads named on the command line, all if none is."""
    args = arguments()
    results = []
    for workload in args.workload:
        print(f"measuring {WORKLOADS[workload].title} ...", file=sys.stderr)
        with started(workload, KEEP_MEMORY if args.keep_memory else {}) as sides:
            results.append(measured(workload, sides, rounds=args.repeats, seconds=args.seconds))
    show(results)
    chosen = {"repeats": args.repeats, "seconds": args.seconds, "keep_memory": args.keep_memory}
    settings = {**chosen, "threads": 1, "shards": 2}
    print_record(record("training", settings=settings, results=results))


def arguments() -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each side")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="least seconds of a measurement of any side"
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="no side returns memory to the system"
    )
    return parser.parse_args()


@contextmanager
def started(workload: str, environment: Mapping[str, str]) -> Iterator[dict[str, Side]]:
    """The four sides of a workload, their processes running and warmed up."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        sides = {}
        for name, (launcher, processes) in LAUNCHERS.items():
            command = [sys.executable, *launcher, str(PROGRAM), name.split("-")[0], workload]
            side = Side(
                name, command, processes=processes, folder=Path(folder), environment=environment
            )
            sides[name] = running.enter_context(side)
            sides[name].train(WARM_UP_STEPS)
        yield sides


def measured(
    workload: str, sides: Mapping[str, Side], *, rounds: int, seconds: float
) -> dict[str, Any]:
    """Every side measured in turn over the same number of steps."""
    trials = [side.train(TRIAL_STEPS).seconds / TRIAL_STEPS for side in sides.values()]
    steps = steps_for(seconds, trials)
    taken = in_turn(
        {name: partial(side.train, steps) for name, side in sides.items()}, rounds=rounds
    )
    samples = steps * WORKLOADS[workload].batch_size
    speeds = {name: [samples / one.seconds for one in ones] for name, ones in taken.items()}
    return {
        "workload": workload,
        "steps": steps,
        "samples_per_s": {name: spread(speed) for name, speed in speeds.items()},
        "ratios": {f"{a}/{b}": ratio(speeds[a], speeds[b]) for a, b in RATIOS},
        "others_cores": spread(one.others_cores for ones in taken.values() for one in ones),
    }


def steps_for(seconds: float, step_times: Sequence[float]) -> int:
    """Steps that keep even the fastest side busy for `seconds`."""
    return max(1, math.ceil(seconds / min(step_times)))


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Two tables: samples per second, and the ratios."""
    for title, key, decimals in (
        ("Samples per second: median (least-greatest)", "samples_per_s", 1),
        ("Ratios of speeds, round by round: median (least-greatest)", "ratios", 3),
    ):
        rows = [
            [WORKLOADS[found["workload"]].title, *(s.text(decimals) for s in found[key].values())]
            for found in results
        ]
        print_table(title, ["workload", *results[0][key]], rows)
    for found in results:
        print_disturbance(found["others_cores"].high, WORKLOADS[found["workload"]].title)


if __name__ == "__main__":
    main()
