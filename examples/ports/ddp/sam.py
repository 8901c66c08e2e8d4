"""The script of ../sam.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

RADIUS, CLASSES = 0.05, 3


def make_spirals(size, seed):
    """Make noisy points on three arms of a spiral: (size, 2) float32 and (size,) int64."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    along = torch.rand(size, generator=generator)
    turn = 6.283 * (labels / CLASSES + 0.6 * along)
    points = torch.stack([turn.cos(), turn.sin()], dim=1) * (0.2 + along[:, None])
    noise = 0.08 * torch.randn(size, 2, generator=generator)
    return torch.utils.data.TensorDataset(points + noise, labels)


@torch.no_grad()
def climb(parameters):
    """Move the parameters uphill by RADIUS; return their previous values."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    before = [p.clone() for p in parameters]
    for parameter in parameters:
        parameter.add_(parameter.grad, alpha=float(RADIUS / (norm + 1e-12)))
    return before


@torch.no_grad()
def go_back(parameters, before):
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)


def loss(model, batch):
    points, labels = batch
    logits = model(points)
    return F.cross_entropy(logits, labels, label_smoothing=0.1), {
        "accuracy": (logits.argmax(dim=1) == labels).float().mean()
    }


def score(model, batch):
    points, labels = batch
    return {"accuracy": model(points).argmax(dim=1) == labels}


def evaluate(model, batches, device):
    model.eval()
    totals, samples = {}, torch.zeros((), device=device)
    with torch.no_grad():
        for batch in batches:
            batch = [each.to(device) for each in batch]
            for name, values in score(model, batch).items():
                totals[name] = totals.get(name, 0.0) + values.float().sum()
            samples += len(values)
    model.train()
    for total in (*totals.values(), samples):
        dist.all_reduce(total)
    return {name: float(total / samples) for name, total in totals.items()}


def set_up():
    """Join torchrun's process group; return rank, world size and device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main(epochs=8, checkpoint=None):
    rank, world, device = set_up()
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = nn.Sequential(
        nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3)
    )
    model = model.to(device)
    ddp = DistributedDataParallel(model)
    parameters = list(model.parameters())
    base = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    train_set, held_out = make_spirals(480, seed=1), make_spirals(200, seed=2)
    sampler = DistributedSampler(train_set)
    loader = torch.utils.data.DataLoader(train_set, batch_size=60 // world, sampler=sampler)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    held_loader = torch.utils.data.DataLoader(shard, batch_size=100)
    start = 0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        base.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = [each.to(device) for each in batch]
            base.zero_grad()
            first, values = loss(ddp, batch)
            first.backward()
            before = climb(parameters)
            base.zero_grad()
            loss(ddp, batch)[0].backward()
            go_back(parameters, before)
            base.step()
        scores = evaluate(model, held_loader, device)
        first, accuracy = mean_over_ranks(first), mean_over_ranks(values["accuracy"])
        if rank == 0:
            print(
                f"epoch {epoch}: loss {first:.4f}, accuracy "
                f"{accuracy:.1%}, held out {scores['accuracy']:.1%}"
            )
        if checkpoint is not None and rank == 0:
            state = {"model": model.state_dict(), "optimizer": base.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
