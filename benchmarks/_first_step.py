"""The programs that `start.py` starts: each builds a small model, trains one step, and notes when.

What is imported depends on which one it is, as it would in a program of its own.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from small_models import new_mlp

__all__ = ["main"]

Batch = tuple[torch.Tensor, torch.Tensor]
SAMPLES = 64


def plain() -> bool:
    """One step on one device; whether this process leads."""
    model, optimizer, batch = made()
    train_step(model, optimizer, batch)
    return True


def ddp() -> bool:
    """One step of DistributedDataParallel; whether this process leads."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, optimizer, (inputs, labels) = made()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(model)
    train_step(model, optimizer, (inputs.tensor_split(size)[rank], labels.tensor_split(size)[rank]))
    return rank == 0


def onefolded() -> bool:
    """One step of onefold; whether this process leads."""
    import onefold

    model, optimizer, batch = made()
    trainer = onefold.Trainer(model, optimizer, mean_loss, shards=2, threads=1)
    float(trainer.step(batch).loss)
    return trainer.is_lead


def made() -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """A model, its optimizer, and a batch."""
    torch.manual_seed(0)
    model = new_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, (torch.randn(SAMPLES, 64), torch.randint(10, (SAMPLES,)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """A step of plain PyTorch."""
    loss = mean_loss(model, batch)
    loss.backward()
    optimizer.step()
    loss.item()


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch, or of a shard."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def leave() -> None:
    """Leave the process group that DistributedDataParallel needed, together with the others."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


PROGRAMS = {"plain": plain, "ddp": ddp, "onefold": onefolded}


def main() -> None:
    """Run the program named first; the lead writes the time of its first step to the file."""
    name, note = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    leads = PROGRAMS[name]()
    done_s = time.monotonic()
    if leads:
        note.write_text(repr(done_s), encoding="utf-8")
    if name == "ddp":
        leave()


if __name__ == "__main__":
    main()
