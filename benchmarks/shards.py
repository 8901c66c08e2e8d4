"""The cost of many shards: on one device, and as gradient accumulation on several.

    python benchmarks/shards.py [--workload lenet ...] [--shards 1 2 4 8 16] [--rounds 5]
    python benchmarks/shards.py --accumulation [--devices 2] [--each 1 2 5 10]

The first form trains with the same batch split into more and more shards, on one device with one
thread, alternately with a plain PyTorch loop over the same number of parts: the slowdown of the
plain loop is the cost of small kernels, and the rest is onefold's.

The second form gives every device more and more shards of a fixed size, as gradient accumulation
does: the batch grows, and one exchange serves more samples. It also alternates, within one run.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import onefold
from loops import Step, losses, onefold_step
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
from overhead import parts_step, watched
from workloads import WORKLOADS, Batch

__all__ = ["accumulated", "main", "measured"]

BLOCK_S = 1.0
"""Approximate duration of a block of steps with one shard, in seconds."""
WARM_UP_STEPS = 2
ACCUMULATED = "transformer"
"""The text model."""


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=WORKLOADS,
        default=["cnn-adam", "resnet18", "transformer", "lenet", "mlp"],
        metavar="NAME",
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="V")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accumulation", action="store_true", help="run the second form")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--each", type=int, nargs="+", default=[1, 2, 5, 10], metavar="SHARDS")
    parser.add_argument("--samples", type=int, default=8, help="samples per shard")
    add_output(parser)
    args = parser.parse_args()
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    if args.accumulation:
        results = over_devices(args)
        show_accumulation(results, args.devices)
        deliver(record("accumulation", settings=settings, results=results), args.output)
        return
    torch.set_num_threads(1)
    results = [measured(name, args.shards, rounds=args.rounds) for name in args.workload]
    show(results)
    deliver(record("shards", settings=settings, results=results), args.output)


# On one device


def measured(name: str, shards: Sequence[int], *, rounds: int) -> dict[str, Any]:
    """Measure a workload with each number of shards, and the plain loops, alternately."""
    workload = WORKLOADS[name]
    batches = workload.batches()
    steps: dict[str, Step] = {}
    for number in shards:
        model, optimizer = workload.build()
        trainer = onefold.Trainer(
            model, optimizer, losses, shards=number, devices=["cpu"], threads=1
        )
        steps[f"onefold {number}"] = onefold_step(trainer)
        bare_model, bare_optimizer = workload.build()
        steps[f"bare {number}"] = parts_step(bare_model.train(), bare_optimizer, number)
    for step in steps.values():
        seconds(step, batches, WARM_UP_STEPS)
    trial_s = seconds(steps[f"bare {shards[0]}"], batches, WARM_UP_STEPS) / WARM_UP_STEPS
    block = max(1, round(BLOCK_S / trial_s))
    taken, others = watched(
        lambda: in_turn(
            {label: partial(seconds, step, batches, block) for label, step in steps.items()},
            rounds=rounds,
        )
    )
    first = f"onefold {shards[0]}"
    return {
        "workload": name,
        "steps_a_block": block,
        "step_s": {label: spread(t / block for t in times) for label, times in taken.items()},
        "to_one": {str(v): ratio(taken[first], taken[f"onefold {v}"]) for v in shards},
        "bare_to_one": {
            str(v): ratio(taken[f"bare {shards[0]}"], taken[f"bare {v}"]) for v in shards
        },
        "to_bare": {str(v): ratio(taken[f"bare {v}"], taken[f"onefold {v}"]) for v in shards},
        "others_cores": others,
    }


def seconds(step: Step, batches: Sequence[Batch], steps: int) -> float:
    """Return the seconds of several steps."""
    start_s = time.perf_counter()
    for number in range(steps):
        step(batches[number % len(batches)])
    return time.perf_counter() - start_s


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print speeds as multiples of the first number of shards."""
    for found in results:
        rows = [
            [
                number,
                found["to_one"][number].text(3),
                found["bare_to_one"][number].text(3),
                found["to_bare"][number].text(3),
            ]
            for number in found["to_one"]
        ]
        columns = ["shards", "onefold / 1 shard", "bare loop / 1 part", "onefold / bare loop"]
        print_table(f"{WORKLOADS[found['workload']].title}: speed", columns, rows)
        print_disturbance(found["others_cores"], found["workload"])


# Accumulation


def over_devices(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each number of shards per device, alternately, within one run."""
    choices = (args.devices, args.each, args.samples, args.rounds)
    taken: dict[str, list[tuple[float, float]]] = onefold.launch(
        accumulated, devices=f"cpu:{args.devices}", args=choices, timeout_s=300
    )
    return [
        {
            "shards_a_device": each,
            "samples_per_s": spread(
                args.devices * each * args.samples / step_s for step_s, _ in taken[str(each)]
            ),
            "exchange_s": spread(exchange_s for _, exchange_s in taken[str(each)]),
        }
        for each in args.each
    ]


def accumulated(
    devices: int, each: Sequence[int], samples: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return seconds per step and per exchange, by shards per device. Runs in a device's
    process."""
    sides: dict[str, Callable[[], tuple[float, float]]] = {}
    for number in each:
        workload = WORKLOADS[ACCUMULATED].scaled(
            devices * number * samples / WORKLOADS[ACCUMULATED].batch_size
        )
        model, optimizer = workload.build()
        trainer = onefold.Trainer(
            model, optimizer, losses, shards=devices * number, threads=1, timeout_s=300
        )
        # The same number of samples in every block: fewer steps with more shards.
        steps = max(each) // number
        sides[str(number)] = partial(block_of, trainer, workload.batches(), steps)
    for side in sides.values():
        side()
    return in_turn(sides, rounds=rounds)


def block_of(trainer: onefold.Trainer, batches: Sequence[Batch], steps: int) -> tuple[float, float]:
    """Return mean seconds per step, and per exchange."""
    start_s, exchange_s = time.perf_counter(), 0.0
    for number in range(steps):
        exchange_s += trainer.step(batches[number % len(batches)]).seconds.exchange
    return (time.perf_counter() - start_s) / steps, exchange_s / steps


def show_accumulation(results: Sequence[Mapping[str, Any]], devices: int) -> None:
    """Print samples and exchange by shards per device."""
    rows = [
        [
            str(found["shards_a_device"]),
            found["samples_per_s"].text(1),
            in_ms(found["exchange_s"]).text(1),
        ]
        for found in results
    ]
    columns = ["shards a device", "samples/s", "exchange of a step, ms"]
    print_table(f"{WORKLOADS[ACCUMULATED].title}, {devices} devices", columns, rows)


def in_ms(found: Spread) -> Spread:
    """Convert seconds to milliseconds."""
    return Spread(median=found.median * 1e3, low=found.low * 1e3, high=found.high * 1e3)


if __name__ == "__main__":
    main()
