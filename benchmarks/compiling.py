"""The gain of `Trainer(compile=True)` per step, and its cost at the start.

    python benchmarks/compiling.py [--workload lenet transformer] [--seconds 30] [--start NAME]
                                   [--output FILE]

On one device with one thread, compiled and uncompiled loops train equal models alternately, in
blocks of a few steps, with one shard and with eight. Ratios compare neighboring blocks. Steps are
timed in CPU time, which equals wall time on an idle machine, and is more reliable on a shared one.

With `--start`, the first step of a workload is timed in fresh processes, on one device and on two:
with an empty compiler cache, and then with the cache of the first run.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import onefold
from loops import Step, losses, onefold_step
from measure import (
    Spread,
    add_output,
    deliver,
    in_turn,
    middle_half,
    print_disturbance,
    print_table,
    record,
)
from overhead import watched
from workloads import WORKLOADS, Batch, Workload

__all__ = ["main"]

BLOCK_S = 0.05
"""Approximate duration of a block of steps, in seconds."""
LEAST_ROUNDS = 5
WARM_UP_STEPS = 4
"""Beyond the steps that rehearse a shard."""
SHARDS = (1, 8)
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def main() -> None:
    """Measure the workloads named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["lenet", "transformer", "resnet18", "cnn-adam"]
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=names, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds per workload")
    parser.add_argument("--start", nargs="*", choices=WORKLOADS, default=[], metavar="NAME")
    add_output(parser)
    args = parser.parse_args()
    results = [measured(name, WORKLOADS[name], args.seconds) for name in args.workload]
    results += [started(name) for name in args.start]
    for found in results:
        show(found)
    settings = {"seconds": args.seconds, "threads": 1}
    deliver(record("compiling", settings=settings, results=results), args.output)


def label(shards: int, *, compiled: bool) -> str:
    """Return the name of a loop."""
    words = "compiled" if compiled else "as written"
    return f"{words}, {shards} shard{'s' if shards > 1 else ''}"


def new_step(workload: Workload, shards: int, *, compiled: bool) -> Step:
    """Make a loop at the workload's start, on one device with one thread."""
    model, optimizer = workload.build()
    options: dict[str, Any] = {"devices": ["cpu"], "threads": 1}
    trainer = onefold.Trainer(model, optimizer, losses, shards=shards, compile=compiled, **options)
    return onefold_step(trainer)


def measured(name: str, workload: Workload, seconds: float) -> dict[str, Any]:
    """Measure all loops of a workload, alternately."""
    batches = workload.batches()
    steps = {
        label(shards, compiled=compiled): new_step(workload, shards, compiled=compiled)
        for shards in SHARDS
        for compiled in (False, True)
    }
    for step in steps.values():
        step_ms(step, batches, WARM_UP_STEPS)
    trial_s = [step_ms(step, batches, 1) / 1e3 for step in steps.values()]
    block = max(1, round(BLOCK_S / min(trial_s)))
    rounds = max(LEAST_ROUNDS, math.ceil(seconds / (block * sum(trial_s))))
    blocks = {name: partial(step_ms, step, batches, block) for name, step in steps.items()}
    taken, others_cores = watched(lambda: in_turn(blocks, rounds=rounds))
    return summary(name, taken, block=block, others_cores=others_cores)


def step_ms(step: Step, batches: Sequence[Batch], steps: int) -> float:
    """Return this process's mean milliseconds per step over `steps` steps."""
    start_s = time.process_time()
    for number in range(steps):
        step(batches[number % len(batches)])
    return (time.process_time() - start_s) / steps * 1e3


def summary(
    name: str, taken: Mapping[str, Sequence[float]], *, block: int, others_cores: float
) -> dict[str, Any]:
    """Summarize the milliseconds of every loop, and the speedup of compiled ones."""
    return {
        "workload": name,
        "steps_a_block": block,
        "rounds": len(next(iter(taken.values()))),
        "step_ms": {loop: middle_half(times) for loop, times in taken.items()},
        "faster": {str(n): gain(taken, n) for n in SHARDS},
        "others_cores": others_cores,
    }


def gain(taken: Mapping[str, Sequence[float]], shards: int) -> Spread:
    """Return the ratio of uncompiled to compiled time, block by block."""
    written, compiled = (taken[label(shards, compiled=each)] for each in (False, True))
    return middle_half([a / b for a, b in zip(written, compiled, strict=True)])


def started(name: str) -> dict[str, Any]:
    """Return the seconds to the end of the first step, cold and warm, on one and two devices."""
    return {
        "workload": name,
        "first_step_s": {
            "as written, 1 device": first_step_s(name, 1, compiled=False),
            **cold_and_warm(name, 1),
            **cold_and_warm(name, 2),
        },
    }


def cold_and_warm(name: str, devices: int) -> dict[str, float]:
    """Time the first step with an empty compiler cache, and with the cache that it leaves."""
    before = os.environ.get(FOLDER)
    words = f"{devices} device{'s' if devices > 1 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        try:
            return {
                f"compiled, {words}, {state}": first_step_s(name, devices, compiled=True)
                for state in ("cold", "warm")
            }
        finally:
            del os.environ[FOLDER]
            if before is not None:
                os.environ[FOLDER] = before


def first_step_s(name: str, devices: int, *, compiled: bool) -> float:
    """Return the seconds of the first step in fresh processes, after Trainer is created."""
    taken: float = onefold.launch(first_step, devices=f"cpu:{devices}", args=(name, compiled))
    return taken


def first_step(name: str, compiled: bool) -> float:
    """Return the seconds of the first step with two shards. Called in each process."""
    workload = WORKLOADS[name]
    model, optimizer = workload.build()
    trainer = onefold.Trainer(model, optimizer, losses, shards=2, threads=1, compile=compiled)
    batch = workload.batches()[0]
    start_s = time.perf_counter()
    float(trainer.step(batch).loss)
    return time.perf_counter() - start_s


def show(found: Mapping[str, Any]) -> None:
    """Print a table for a workload."""
    title = WORKLOADS[found["workload"]].title
    print(title)
    if "first_step_s" in found:
        rows = [[name, f"{seconds:.1f}"] for name, seconds in found["first_step_s"].items()]
        print_table("one start each", ["run", "seconds of the first step"], rows)
        return
    rows = [[loop, times.text(1)] for loop, times in found["step_ms"].items()]
    print_table("median (quartiles)", ["loop", "milliseconds a step"], rows)
    rows = [[shards, times.text(2)] for shards, times in found["faster"].items()]
    print_table("as written / compiled", ["shards", "ratio"], rows)
    print_disturbance(found["others_cores"], title)


if __name__ == "__main__":
    main()
