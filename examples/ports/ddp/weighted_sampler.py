"""The script of ../weighted_sampler.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

SHARES = (0.9, 0.07, 0.03)


def make_points(size, seed):
    """Make points in three overlapping clouds, most of them in the first: (size, 8), (size,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(SHARES), size, True, generator=generator)
    centers = 0.8 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centers[labels] + torch.randn(size, 8, generator=generator), labels)


def loss(model, batch):
    points, labels = batch
    logits = model(points)
    values = {"accuracy": logits.argmax(dim=1) == labels, "rare": labels > 0}
    values = {name: value.float().mean() for name, value in values.items()}
    return F.cross_entropy(logits, labels), values


def score(model, batch):
    """Return the recall of each class; a class missing from a shard has weight 0 there."""
    points, labels = batch
    right = model(points).argmax(dim=1) == labels
    of_class = [labels == each for each in range(len(SHARES))]
    return {f"class {each}": ((right & own).sum(), own.sum()) for each, own in enumerate(of_class)}


@torch.no_grad()
def evaluate(model, batches, device):
    model.eval()
    totals = {}
    for batch in batches:
        batch = [each.to(device) for each in batch]
        for name, (right, own) in score(model, batch).items():
            before = totals.get(name, (0, 0))
            totals[name] = before[0] + right, before[1] + own
    model.train()
    for right, own in totals.values():
        dist.all_reduce(right)
        dist.all_reduce(own)
    return {name: right / own for name, (right, own) in totals.items()}


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


class ShareOfSampler(torch.utils.data.Sampler):
    """Draws the same indices on every rank, and keeps every world-th one."""

    def __init__(self, sampler, rank, world):
        self.sampler, self.rank, self.world = sampler, rank, world

    def __iter__(self):
        whole = len(self) * self.world
        return iter(list(self.sampler)[self.rank : whole : self.world])

    def __len__(self):
        return len(self.sampler) // self.world


def main(epochs=8):
    rank, world, device = set_up()
    train_set, held_out = make_points(1000, seed=1), make_points(600, seed=2)
    labels = train_set.tensors[1]
    weights = 1 / labels.bincount(minlength=3).float()[labels]
    alike = torch.Generator().manual_seed(0)
    drawn = WeightedRandomSampler(weights.tolist(), len(train_set), generator=alike)
    sampler = ShareOfSampler(drawn, rank, world)
    plain = DataLoader(train_set, batch_size=50 // world, sampler=sampler)
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, len(SHARES))).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(plain))
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    for epoch in range(epochs):
        for batch in plain:
            batch = [each.to(device) for each in batch]
            optimizer.zero_grad()
            value, values = loss(ddp, batch)
            value.backward()
            optimizer.step()
            scheduler.step()
        scores = evaluate(model, DataLoader(shard, batch_size=200), device)
        found = ", ".join(f"{name} {share:.1%}" for name, share in scores.items())
        value, rare = mean_over_ranks(value), mean_over_ranks(values["rare"])
        if rank == 0:
            print(f"epoch {epoch}: loss {value:.4f}, {rare:.0%} rare; found of {found}")
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
