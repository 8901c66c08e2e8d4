"""The cost of onefold on one GPU, compared with a plain loop, DDP and compiled PyTorch.

    python benchmarks/gpu.py --workload resnet50 [--device cuda:0] [--seconds 60] [--lines FILE]

Matrix products and convolutions in float32 do not use TF32. Every side trains the same model on the
same batches, which are on the device. The sides of a group are measured alternately, in blocks of
steps, always together with plain PyTorch; the measured time ends when the device has finished the
block. A line of JSON is written for a side after its first two steps, and another one with the
medians at the end of its group, which replaces the first one, because later sides may take too long
or fail. Sides without remaining time are listed.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import onefold
from loops import losses
from workloads import LARGE, WORKLOADS, Batch, Workload

__all__ = ["GROUPS", "Side", "main", "measured"]

PLAIN = "plain PyTorch"
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP_STEPS = 6
"""Checks that wait for the device run in the first three steps."""
FIRST_STEPS = 2
BLOCK_S = 0.15
"""Approximate duration of a block of steps if there is enough time, in seconds."""
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to train a workload."""

    shards: int = 0
    """Number of shards; 0 for a plain loop of PyTorch."""
    precision: str | None = None
    devices: int = 1
    compiled: bool = False
    graphs: bool = False
    """Whether shards are captured and replayed."""
    ddp: bool = False
    """Whether the plain loop uses DistributedDataParallel, with one process."""
    repeatable: bool = False
    """Whether the plain loop is restricted to deterministic kernels, like onefold."""

    @property
    def name(self) -> str:
        """Name in the table."""
        words = [f"V = {self.shards}" if self.shards else "DDP" if self.ddp else PLAIN]
        words += [f"{self.devices} devices of the card"] if self.devices > 1 else []
        words += ["repeatable kernels"] if self.repeatable else []
        words += ["compiled"] if self.compiled else []
        words += ["graphs"] if self.graphs else []
        words += [self.precision] if self.precision else []
        return ", ".join(words)


def _group(precision: str | None) -> list[Side]:
    # Deterministic kernels have a cost of their own.
    kinds: tuple[dict[str, bool], ...] = ({}, {"repeatable": True}, {"ddp": True})
    plain = [Side(precision=precision, **kind) for kind in kinds]
    of_onefold = ((1, 1), (4, 1), (4, 2))
    sides = [Side(shards=v, devices=d, precision=precision) for v, d in of_onefold]
    return [*plain, *sides]


GROUPS: dict[str, list[Side]] = {
    "float32": _group(None),
    "bf16": _group("bf16"),
    "compiled, bf16": [
        Side(precision="bf16"),
        *(Side(precision="bf16", shards=shards, compiled=True) for shards in (0, 1)),
    ],
}
"""Groups of sides to compare; the first side of each is the reference."""


def main() -> None:
    """Measure one workload, group by group."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = WORKLOADS | LARGE
    parser.add_argument("--workload", choices=every, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for all groups")
    parser.add_argument("--batch-size", type=int, help="override the workload's batch size")
    parser.add_argument("--lines", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # PyTorch reads it once, at the first use of cuBLAS, which here is in a plain loop.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    workload = every[args.workload]
    if args.batch_size:
        workload = workload.scaled(args.batch_size / workload.batch_size)
    device = torch.device(args.device)
    torch.backends.cudnn.allow_tf32 = False
    # Only detects reads of uninitialized memory, and costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    end = time.monotonic() + args.seconds
    # torch.compile supports few types of devices.
    groups = {
        name: sides
        for name, sides in GROUPS.items()
        if device.type in ("cpu", "cuda") or not any(side.compiled for side in sides)
    }
    for number, (group, sides) in enumerate(groups.items()):
        left = len(groups) - number
        # The last side compiles, which takes as long as two others.
        seconds = (end - time.monotonic()) / (left + (left > 1))
        for found in measured(workload, sides, device, seconds):
            line = {"workload": args.workload, "group": group, **found}
            print(json.dumps(line), flush=True)
            if args.lines:
                with args.lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def measured(
    workload: Workload, sides: Sequence[Side], device: torch.device, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measure sides alternately; yield a record of each side, or of its failure."""
    batches = workload.batches(device)
    end = time.monotonic() + seconds
    steps: dict[Side, Callable[[Batch], object]] = {}
    bytes_of: dict[Side, int] = {}
    taken: dict[Side, list[tuple[float, float]]] = {}
    for side in sides:
        if time.monotonic() > end:
            yield {"side": side.name, "left_out": "no time was left for it"}
            continue
        before = allocated(device)
        try:
            step = new_step(workload, side, device)
            train(step, batches, WARM_UP_STEPS, device)
            taken[side] = [train(step, batches, FIRST_STEPS, device)]
        except Exception as error:
            yield {"side": side.name, "failed": f"{type(error).__name__}: {error}"}
            continue
        steps[side], bytes_of[side] = step, peak(device) - before
        yield record(side, taken, workload, bytes_of)
    block_s = min(BLOCK_S, seconds / len(sides) / LEAST_ROUNDS)
    blocks = {side: max(1, round(block_s / first[0])) for side, (first,) in taken.items()}
    rounds: dict[Side, list[tuple[float, float]]] = {side: [] for side in steps}
    while time.monotonic() < end:
        for side, step in steps.items():
            rounds[side].append(train(step, batches, blocks[side], device))
    if any(rounds.values()):
        yield from (record(side, rounds, workload, bytes_of) for side in steps)
    del steps
    gc.collect()


def record(
    side: Side,
    taken: Mapping[Side, Sequence[tuple[float, float]]],
    workload: Workload,
    bytes_of: Mapping[Side, int],
) -> dict[str, Any]:
    """Return the medians of a side, and its ratios to the first side, round by round."""
    whole = [seconds for seconds, _ in taken[side]]
    first = [seconds for seconds, _ in next(iter(taken.values()))]
    return {
        "side": side.name,
        "shards": side.shards,
        "precision": side.precision,
        "compiled": side.compiled,
        "devices": side.devices,
        "samples_s": workload.batch_size / median(whole),
        "step_ms": median(whole) * 1e3,
        "least_ms": min(whole) * 1e3,
        "greatest_ms": max(whole) * 1e3,
        "queued_ms": median(queued for _, queued in taken[side]) * 1e3,
        "of_first": median(a / b for a, b in zip(first, whole, strict=True)),
        "peak_bytes": bytes_of[side],
        "rounds": len(whole),
    }


def new_step(workload: Workload, side: Side, device: torch.device) -> Callable[[Batch], object]:
    """Make a step of a side, with its own model."""
    if not side.shards:
        return plain_step(workload, side, device)
    model, optimizer = workload.build(device)
    trainer = onefold.Trainer(
        model,
        optimizer,
        losses,
        shards=side.shards,
        devices=[device] * side.devices,
        threads=1,
        precision=side.precision,  # type: ignore[arg-type]
        compile=side.compiled,
        graphs=side.graphs,
    )
    return trainer.step


def plain_step(workload: Workload, side: Side, device: torch.device) -> Callable[[Batch], object]:
    """Make the plain PyTorch loop, with autocast and a gradient scaler if needed."""
    model, optimizer = workload.build(device)
    model.train()
    if side.ddp:
        model = DistributedDataParallel(model, process_group=group_of_one(device))
    if side.compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    precision = side.precision
    low = LOW.get(precision or "")
    scaler = torch.amp.GradScaler(device.type, enabled=low is torch.float16)

    def step(batch: Batch) -> object:
        torch.use_deterministic_algorithms(side.repeatable)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=low, enabled=low is not None):
            loss = losses(model, batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


@cache
def group_of_one(device: torch.device) -> dist.ProcessGroup:
    """Make a process group of this process only."""
    backend = dist.Backend.default_device_backend_map[device.type]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def train(
    step: Callable[[Batch], object], batches: Sequence[Batch], steps: int, device: torch.device
) -> tuple[float, float]:
    """Return seconds per step until the device has finished, and until the host has submitted
    it."""
    synchronize(device)
    start = time.perf_counter()
    for number in range(steps):
        step(batches[number % len(batches)])
    queued = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / steps, queued / steps


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device.index)


def allocated(device: torch.device) -> int:
    """Return the device's allocated bytes, and reset the peak."""
    if device.type == "cpu":
        return 0
    torch.accelerator.reset_peak_memory_stats(device.index)
    return int(torch.accelerator.memory_allocated(device.index))


def peak(device: torch.device) -> int:
    """Return the peak of the device's allocated bytes since `allocated`."""
    if device.type == "cpu":
        return 0
    return int(torch.accelerator.max_memory_allocated(device.index))


if __name__ == "__main__":
    main()
