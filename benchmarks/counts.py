"""Counts a step's demands on devices, with mock devices: no times, and equal on any machine.

    python benchmarks/counts.py [--devices 1 2 3 8] [--shards 8] [--graphs] [--source DIR]

Counted are messages between processes (each drives one device), kernel launches, allocations, waits
of the host, bytes that a device holds, and the part of the gradients that is sent before backward
ends. All numbers are for device 0 and one step. ``--source`` names the tree of another commit,
whose onefold is counted instead. See `tests.pretended`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from loops import losses
from token_models import GPT
from workloads import WORKLOADS, Workload, adam

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, WARM_UP, STEPS = 16, 8, 2
"""The first steps learn the order of stages, and run checks."""
LIMIT_S = 900
SMALL = {
    "resnet18": WORKLOADS["resnet18"],
    "gpt": Workload(
        title="GPT of 6 blocks of 128, Adam",
        new_model=partial(GPT, vocabulary=1000, width=128, layers=6, heads=4, length=64),
        new_optimizer=adam,
        batch_size=SAMPLES,
        new_inputs=lambda count: torch.randint(1000, (count, 64)),
        new_labels=lambda count: torch.randint(1000, (count, 64)),
    ),
}
MIB = 1 << 20
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: row["workload"],
    "devices": lambda row: str(row["devices"]),
    "groups of messages": lambda row: f"{row['groups']:g}",
    "in the largest": lambda row: str(row["largest"]),
    "sent before backward ends": lambda row: _share(row["early"], row["gradients"]),
    "host waits": lambda row: f"{row['waits']:g}",
    "late reads": lambda row: f"{row['reads']:g}",
    "launches": lambda row: f"{row['launches']:g}",
    "beyond the model's own": lambda row: f"{row['launches'] - row['own_launches']:g}",
    "parameters": lambda row: str(row["parameters"]),
    "allocations": lambda row: f"{row['allocations'] - row['own_allocations']:g}",
    "MiB held": lambda row: f"{row['held'] / MIB:.1f}",
    "at most": lambda row: f"{row['peak'] / MIB:.1f}",
}


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 3, 8])
    parser.add_argument("--workloads", nargs="+", choices=SMALL, default=list(SMALL))
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--graphs", action="store_true", help="capture shards and replay them")
    parser.add_argument("--source", type=Path, default=ROOT)
    parser.add_argument("--output", type=Path, help="file for the rows, as JSON")
    parser.add_argument("--count", choices=SMALL, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(options.count, options.shards, graphs=options.graphs)
        return
    rows = []
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for name in options.workloads:
        for devices in options.devices:
            row = counted(name, devices, options.shards, options.source, graphs=options.graphs)
            print("| " + " | ".join(show(row) for show in COLUMNS.values()) + " |", flush=True)
            rows.append(row)
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def counted(name: str, devices: int, shards: int, source: Path, *, graphs: bool) -> dict[str, Any]:
    """Count in processes with mock devices."""
    sys.path.append(str(ROOT))  # a program only has its own folder in sys.path
    from tests.pretended import build

    environment = build.environment(devices)
    paths = [str(source.resolve() / "src"), environment["PYTHONPATH"]]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    named = ",".join(f"pretend:{number}" for number in range(devices))
    command = [sys.executable, "-m", "onefold", "run", "--devices", named, __file__]
    done = subprocess.run(
        [*command, "--count", name, "--shards", str(shards), *["--graphs"] * graphs],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def count(name: str, shards: int, *, graphs: bool) -> None:
    """Train as one process of a run; the process of device 0 prints its counts."""
    from tests.pretended import device

    workload = SMALL[name].scaled(SAMPLES / SMALL[name].batch_size)
    model, optimizer = workload.build()
    batches = workload.batches()
    # Trees of earlier commits have no graphs.
    options: dict[str, Any] = {"graphs": True} if graphs else {}
    trainer = onefold.Trainer(model, optimizer, losses, shards=shards, threads=1, **options)
    for number in range(WARM_UP):
        trainer.step(batches[number % len(batches)])
    torch.accelerator.synchronize()
    device.group_sizes()
    index = torch.accelerator.current_device_index()
    torch.accelerator.reset_peak_memory_stats(index)
    device.reset_counts()
    sent: dict[str, int] = {"early": 0, "gradients": 0}
    for number in range(STEPS):
        with watching(model, sent):
            trainer.step(batches[number % len(batches)])
    found, groups = device.counts(), device.group_sizes()
    device.reset_counts(counting=False)
    waits = [(what, number) for (_, what), number in found["waits"].items()]
    held = torch.accelerator.memory_allocated(index), torch.accelerator.max_memory_allocated(index)
    own = own_counts(workload, -(-shards // len(trainer.devices)), SAMPLES // shards, index)
    row = {
        "workload": name,
        "devices": len(trainer.devices),
        "groups": len(groups) / STEPS,
        "largest": max(groups, default=0),
        **{name: number / STEPS for name, number in sent.items()},
        "waits": sum(number for what, number in waits if what != "Event.synchronize") / STEPS,
        "reads": sum(number for what, number in waits if what == "Event.synchronize") / STEPS,
        "launches": sum(found["launches"].values()) / STEPS,
        "own_launches": own[0],
        "allocations": found["allocations"] / STEPS,
        "own_allocations": own[1],
        "parameters": len(list(model.parameters())),
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "held": held[0],
        "peak": held[1],
    }
    if trainer.is_lead:
        print(json.dumps(row), flush=True)
    trainer.close()


@contextmanager
def watching(model: torch.nn.Module, sent: dict[str, int]) -> Iterator[None]:
    """Add up the bytes of sent gradients, and of those that are sent before backward ends."""
    before: dict[str, Any] = {
        "batch_isend_irecv": dist.batch_isend_irecv,
        "backward": torch.autograd.backward,
    }
    left, at_end = [0], [0]
    # The memory that updated parameters are sent from.
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def send(messages: list[dist.P2POp]) -> Any:
        parts = [each.tensor for each in messages if each.op is dist.isend]
        left[0] += sum(p.nbytes for p in parts if p.untyped_storage().data_ptr() not in own)
        return before["batch_isend_irecv"](messages)

    def backward(*given: Any, **options: Any) -> None:
        before["backward"](*given, **options)
        at_end[0] = left[0]

    dist.batch_isend_irecv, torch.autograd.backward = send, backward
    try:
        yield
    finally:
        dist.batch_isend_irecv, torch.autograd.backward = before.values()
    sent["early"] += at_end[0]
    sent["gradients"] += left[0]


def own_counts(workload: Workload, shards: int, samples: int, index: int) -> tuple[float, float]:
    """Return launches and allocations of the shards and an update, in a loop without onefold."""
    from tests.pretended import device

    where = torch.device("pretend", index)
    model, optimizer = workload.build(where)
    inputs, labels = (part[:samples] for part in workload.batches(where)[0])

    def shard() -> None:
        losses(model, (inputs, labels)).sum().div(SAMPLES).backward()

    def numbers(call: Callable[[], object]) -> tuple[int, int]:
        device.reset_counts()
        call()
        found = device.counts()
        device.reset_counts(counting=False)
        return sum(found["launches"].values()), found["allocations"]

    for _ in range(2):
        optimizer.zero_grad()
        of_shard, of_update = numbers(shard), numbers(optimizer.step)
    launches, allocations = zip(of_shard, of_update, strict=True)
    return shards * launches[0] + launches[1], shards * allocations[0] + allocations[1]


if __name__ == "__main__":
    main()
