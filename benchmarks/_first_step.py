"""The programs that `start.py` starts: each builds a small model, trains a step, and notes the
time.

Each program imports only what it needs, as a separate script would.
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
    """Train one step on one device; return whether this process leads."""
    model, optimizer, batch = made()
    train_step(model, optimizer, batch)
    return True


def ddp() -> bool:
    """Train one step of DistributedDataParallel; return whether this process leads."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, optimizer, (inputs, labels) = made()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(model)
    train_step(model, optimizer, (inputs.tensor_split(size)[rank], labels.tensor_split(size)[rank]))
    return rank == 0


def onefolded() -> bool:
    """Train one step of onefold; return whether this process leads."""
    import onefold

    model, optimizer, batch = made()
    trainer = onefold.Trainer(model, optimizer, mean_loss, shards=2, threads=1)
    float(trainer.step(batch).loss)
    return trainer.is_lead


def made() -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Return a model, its optimizer, and a batch."""
    torch.manual_seed(0)
    model = new_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return model, optimizer, (torch.randn(SAMPLES, 64), torch.randint(10, (SAMPLES,)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Train a step of plain PyTorch."""
    loss = mean_loss(model, batch)
    loss.backward()
    optimizer.step()
    loss.item()


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss of a batch or a shard."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def leave() -> None:
    """Leave DistributedDataParallel's process group, together with the others."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


PROGRAMS = {"plain": plain, "ddp": ddp, "onefold": onefolded}


def main() -> None:
    """Run the named program; the lead writes the time of its first step to the file."""
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
