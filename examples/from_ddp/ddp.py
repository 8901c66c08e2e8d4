"""LeNet on MNIST with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/from_ddp/ddp.py --data DIR

DIR holds the four files of MNIST: train-images-idx3-ubyte.gz and so on.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from onefold_jobs.data import mnist
from onefold_jobs.models import LeNet


def choose_device():
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device, "nccl"
    return torch.device("cpu"), "gloo"


def train_epoch(model, optimizer, loader, device):
    """Train for an epoch; return the mean loss over the samples of all ranks."""
    model.train()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += len(labels)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def evaluate(model, loader, device):
    """Return loss and accuracy over the whole test set, counting each sample once."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        # The unwrapped module: DDP's forward would wait for ranks with fewer batches.
        logits = model.module(images)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main():
    parser = argparse.ArgumentParser(description="LeNet on MNIST with DDP")
    parser.add_argument("--data", required=True, help="folder with the four IDX files of MNIST")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="global batch size")
    parser.add_argument("--lr", type=float, default=4e-3, help="initial learning rate")
    parser.add_argument("--output", default="lenet.pt", help="file for the trained weights")
    options = parser.parse_args()

    device, backend = choose_device()
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.batch_size % world_size:
        raise ValueError(f"the batch of {options.batch_size} does not divide by {world_size} ranks")

    torch.manual_seed(0)  # the same initial weights on all ranks
    model = DistributedDataParallel(
        LeNet().to(device), device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    torch.manual_seed(1 + rank)  # different random numbers on each rank from here on

    train_set = mnist(options.data, train=True)
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    train_loader = DataLoader(
        train_set,
        batch_size=options.batch_size // world_size,
        sampler=sampler,
        pin_memory=device.type == "cuda",
    )
    # DistributedSampler would repeat samples to equalize the ranks' shares.
    test_set = mnist(options.data, train=False)
    own_share = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(own_share, batch_size=1000)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, optimizer, train_loader, device)
        scheduler.step()
        test_loss, accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{options.epochs}: train loss {train_loss:.4f}, "
                f"test loss {test_loss:.4f}, test accuracy {accuracy:.2%}"
            )

    if rank == 0:
        torch.save(model.module.state_dict(), options.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
