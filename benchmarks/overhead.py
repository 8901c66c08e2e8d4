"""The overhead of onefold in a step: the step without forward, backward and optimizer.

    python benchmarks/overhead.py [--workload mlp thousand] [--shards 1 2] [--seconds 15]
        [--output FILE]

In one process with one thread, on one device, loops train equal models alternately, in blocks of a
few steps: for each number of shards, `Trainer.step` and a plain PyTorch loop over as many parts of
the batch. The result is the difference between neighbors, and their ratio, block by block. With one
shard, the bits of both must agree at the end, so that nothing can be left out.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from loops import Step, losses, onefold_step, part, plain_step
from measure import (
    Spread,
    add_output,
    deliver,
    in_turn,
    machine_busy_s,
    middle_half,
    print_disturbance,
    print_table,
    record,
)
from workloads import WORKLOADS, Batch, Workload

__all__ = ["main"]

BLOCK_S = 0.01
"""Approximate duration of a plain block: short, so that disturbances affect neighbors equally."""
WARM_UP_STEPS = 5
LEAST_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """onefold and the plain loop over the same parts of a batch, each with its own model."""

    ours: Step
    bare: Step
    our_model: nn.Module
    bare_model: nn.Module


def main() -> None:
    """Measure the workloads named on the command line, or the two small ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=["mlp", "thousand"], metavar="NAME"
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2], metavar="V")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds per workload")
    add_output(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    each = [(name, WORKLOADS[name], args.shards, args.seconds) for name in args.workload]
    results = [measured(*one) for one in each]
    show(results)
    settings = {"seconds": args.seconds, "shards": args.shards, "threads": 1}
    deliver(record("overhead", settings=settings, results=results), args.output)


def measured(
    name: str, workload: Workload, numbers: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Measure all loops of a workload, for several numbers of shards, alternately."""
    batches = workload.batches()
    pairs = {shards: new_pair(workload, shards) for shards in numbers}
    steps = {
        label: step
        for shards, pair in pairs.items()
        for label, step in ((ours(shards), pair.ours), (bare(shards), pair.bare))
    }
    for step in steps.values():
        step_us(step, batches, WARM_UP_STEPS)
    trial_s = {label: step_us(step, batches, WARM_UP_STEPS) / 1e6 for label, step in steps.items()}
    block = max(1, round(BLOCK_S / trial_s[bare(numbers[0])]))
    rounds = max(LEAST_ROUNDS, math.ceil(seconds / (block * sum(trial_s.values()))))
    taken, others_cores = watched(
        lambda: in_turn(
            {label: partial(step_us, step, batches, block) for label, step in steps.items()},
            rounds=rounds,
        )
    )
    if 1 in pairs:
        check_bits(pairs[1])
    return summary(name, taken, numbers, block=block, others_cores=others_cores)


def ours(shards: int) -> str:
    """Return the name of onefold's loop with this number of shards."""
    return f"onefold, {shards} shard{'s' if shards > 1 else ''}"


def bare(shards: int) -> str:
    """Return the name of the plain loop over this number of parts."""
    return f"bare loop, {shards} part{'s' if shards > 1 else ''}"


def new_pair(workload: Workload, shards: int) -> Pair:
    """Make both loops for a number of shards, with the same start."""
    our_model, our_optimizer = workload.build()
    trainer = onefold.Trainer(
        our_model, our_optimizer, losses, shards=shards, devices=["cpu"], threads=1
    )
    bare_model, bare_optimizer = workload.build()
    bare_model.train()
    bare_step = (
        plain_step(bare_model, bare_optimizer)
        if shards == 1
        else parts_step(bare_model, bare_optimizer, shards)
    )
    return Pair(
        ours=onefold_step(trainer), bare=bare_step, our_model=our_model, bare_model=bare_model
    )


def parts_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int) -> Step:
    """Make a plain step that processes a batch part by part and adds the gradients."""

    def step(batch: Batch) -> Callable[[], float]:
        optimizer.zero_grad()
        for number in range(parts):
            inputs, labels = part(batch, number, parts)
            loss = F.cross_entropy(model(inputs), labels, reduction="sum") / len(batch[1])
            loss.backward()
        optimizer.step()
        return loss.detach().item

    return step


def step_us(step: Step, batches: Sequence[Batch], steps: int) -> float:
    """Return the mean microseconds per step over `steps` steps."""
    start_s = time.perf_counter()
    for number in range(steps):
        step(batches[number % len(batches)])
    return (time.perf_counter() - start_s) / steps * 1e6


def watched(measure: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `measure`, and the number of cores that other programs used
    meanwhile."""
    before_s, cpu_before_s, start_s = machine_busy_s(), time.process_time(), time.perf_counter()
    found = measure()
    elsewhere_s = machine_busy_s() - before_s - (time.process_time() - cpu_before_s)
    return found, max(0.0, elsewhere_s / (time.perf_counter() - start_s))


def check_bits(pair: Pair) -> None:
    """Raise `RuntimeError` unless both loops have the same parameters."""
    trained = zip(pair.our_model.parameters(), pair.bare_model.parameters(), strict=True)
    if not all(torch.equal(our, bare) for our, bare in trained):
        raise RuntimeError("with one shard, onefold and the bare loop have different bits")


def summary(
    name: str,
    taken: Mapping[str, Sequence[float]],
    numbers: Sequence[int],
    *,
    block: int,
    others_cores: float,
) -> dict[str, Any]:
    """Return the microseconds of every loop, and onefold's overhead for each number of shards."""
    return {
        "workload": name,
        "steps_a_block": block,
        "rounds": len(next(iter(taken.values()))),
        "step_us": {label: middle_half(times) for label, times in taken.items()},
        "own_us": {ours(n): difference(taken[ours(n)], taken[bare(n)]) for n in numbers},
        "to_bare": {ours(n): quotient(taken[ours(n)], taken[bare(n)]) for n in numbers},
        "others_cores": others_cores,
    }


def difference(longer: Sequence[float], shorter: Sequence[float]) -> Spread:
    """Return median and quartiles of `longer - shorter`, block by block."""
    return middle_half([a - b for a, b in zip(longer, shorter, strict=True)])


def quotient(longer: Sequence[float], shorter: Sequence[float]) -> Spread:
    """Return median and quartiles of `longer / shorter`, block by block."""
    return middle_half([a / b for a, b in zip(longer, shorter, strict=True)])


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each workload."""
    for found in results:
        rows = [[label, times.text(0)] for label, times in found["step_us"].items()]
        rows += [[f"{label}: itself", own.text(0)] for label, own in found["own_us"].items()]
        rows += [[f"{label} / bare loop", of.text(2)] for label, of in found["to_bare"].items()]
        print(WORKLOADS[found["workload"]].title)
        print_table("median (quartiles)", ["loop", "microseconds a step"], rows)
    for found in results:
        print_disturbance(found["others_cores"], WORKLOADS[found["workload"]].title)


if __name__ == "__main__":
    main()
