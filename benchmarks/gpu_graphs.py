"""The cost of captured shards on one GPU, compared with eager shards and plain PyTorch.

    python benchmarks/gpu_graphs.py [--device cuda:0] [--seconds 300] [--lines FILE]

GPT-2 and ResNet-50 in bf16, and the CNN in float32, with plain PyTorch on the same deterministic
kernels. First each workload trains 12 steps with and without graphs, and the fingerprints must be
equal. The targets: GPT-2 and ResNet-50 take at most 1.25 times as long as plain PyTorch with V = 4
and 1.4 times with V = 8; the CNN 1.2 times with V = 1 and twice with V = 4.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

import onefold
from gpu import Side, measured
from loops import losses
from workloads import LARGE, WORKLOADS, Workload

__all__ = ["main"]

STEPS = 12
"""Three steps with checks, two eager ones, a capture, a comparison, and replays."""
TARGETS: dict[str, tuple[str | None, dict[int, float]]] = {
    "gpt2": ("bf16", {1: 0.0, 4: 1.25, 8: 1.4}),
    "resnet50": ("bf16", {4: 1.25, 8: 1.4}),
    "cnn-adam": (None, {1: 1.2, 4: 2.0}),
}
"""Precision of each workload, and the target for each number of shards; 0 if it has none."""


def main() -> int:
    """Compare bits and measure each workload; return 1 if bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds for all workloads")
    parser.add_argument("--batch-size", type=int, help="override the workloads' batch sizes")
    parser.add_argument("--workloads", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--lines", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32 = False
    torch.utils.deterministic.fill_uninitialized_memory = False
    device, differs = torch.device(args.device), False
    end = time.monotonic() + args.seconds
    for number, name in enumerate(args.workloads):
        precision, targets = TARGETS[name]
        workload = (WORKLOADS | LARGE)[name]
        if args.batch_size:
            workload = workload.scaled(args.batch_size / workload.batch_size)
        fingerprints = {
            graphs: fingerprint(workload, device, precision, max(targets), graphs=graphs)
            for graphs in (False, True)
        }
        differs |= fingerprints[False] != fingerprints[True]
        show({"workload": name, "fingerprints": list(fingerprints.values())}, args.lines)
        sides = [
            Side(precision=precision, repeatable=True),
            *(
                Side(shards=shards, precision=precision, graphs=graphs)
                for shards in targets
                for graphs in (False, True)
            ),
        ]
        seconds = (end - time.monotonic()) / (len(args.workloads) - number)
        for found in measured(workload, sides, device, seconds):
            target = targets.get(found.get("shards", 0), 0.0)
            show({"workload": name, "target": 1 / target if target else None, **found}, args.lines)
    return int(differs)


def fingerprint(
    workload: Workload, device: torch.device, precision: str | None, shards: int, *, graphs: bool
) -> str:
    """Train a few steps; return the fingerprint of the model."""
    model, optimizer = workload.build(device)
    trainer = onefold.Trainer(
        model,
        optimizer,
        losses,
        shards=shards,
        devices=[device],
        threads=1,
        precision=precision,  # type: ignore[arg-type]
        graphs=graphs,
    )
    batches = workload.batches(device)
    for number in range(STEPS):
        trainer.step(batches[number % len(batches)])
    found = trainer.fingerprint()
    trainer.close()
    return found


def show(line: dict[str, object], file: Path | None) -> None:
    """Print a line of JSON, and append it to the file."""
    print(json.dumps(line), flush=True)
    if file:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
