"""One process of one side of `training.py`: it trains when told to, and says how long it took.

`training.py` starts it: by itself for one device, under `torchrun` for DistributedDataParallel,
under `onefold run` for onefold on several devices. Between measurements it waits in a blocking
read, so a side that is not being measured takes no processor time.
"""

import argparse
import itertools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onefold
from workloads import WORKLOADS, Batch, Workload

__all__ = ["main"]

Step = Callable[[Batch], Callable[[], float]]
"""Trains on one batch; returns what tells the loss to whoever asks for it."""


def plain(workload: Workload) -> tuple[Step, list[Batch]]:
    """One device, the loop that every PyTorch user knows."""
    model, optimizer = workload.build()
    return plain_step(model.train(), optimizer), workload.batches()


def ddp(workload: Workload) -> tuple[Step, list[Batch]]:
    """DistributedDataParallel on gloo, each process with its own part of every batch."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = workload.build()
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    mine = [part(batch, rank, world_size) for batch in workload.batches()]
    return plain_step(model.train(), optimizer), mine


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A step of plain PyTorch."""

    def step(batch: Batch) -> Callable[[], float]:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach().item

    return step


def part(batch: Batch, rank: int, world_size: int) -> Batch:
    """The share of `batch` that belongs to `rank`."""
    inputs, labels = batch
    return inputs.tensor_split(world_size)[rank], labels.tensor_split(world_size)[rank]


def onefolded(workload: Workload) -> tuple[Step, list[Batch]]:
    """onefold on the devices that this process was started for."""
    model, optimizer = workload.build()
    trainer = onefold.Trainer(model, optimizer, losses, shards=2, seed=0, threads=1)

    def step(batch: Batch) -> Callable[[], float]:
        done = trainer.step(batch)
        return lambda: done.loss.item()

    return step, workload.batches()


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of every sample of a shard."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


KINDS: dict[str, Callable[[Workload], tuple[Step, list[Batch]]]] = {
    "plain": plain,
    "ddp": ddp,
    "onefold": onefolded,
}


def train(step: Step, batches: list[Batch], steps: int) -> dict[str, float]:
    """Run `steps` steps; returns their seconds, processor seconds, and the loss of the last."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for batch in itertools.islice(itertools.cycle(batches), steps):
        loss_of_last = step(batch)
    seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss_of_last()}


def serve(path: Path, step: Step, batches: list[Batch]) -> None:
    """Do what the driver at `path` asks for, until it hangs up."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        with link.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                done = train(step, batches, int(line))
                lines.write(json.dumps(done) + "\n")
                lines.flush()


def main() -> None:
    """Build the side named on the command line, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("socket", type=Path, help="where the driver listens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    step, batches = KINDS[args.kind](WORKLOADS[args.workload])
    serve(args.socket, step, batches)
    if dist.is_initialized() and args.kind == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
