"""The script of ../lora.py with DistributedDataParallel, for torchrun."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

WORDS, LENGTH, CLASSES = 60, 16, 4


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        inside = self.norm1(x)
        split = (
            each(inside).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        x = x + F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        return x + self.mlp(self.norm2(x))


class Base(nn.Module):
    """A small transformer that classifies words (n, time) int64 into one of four classes."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words):
        return self.head(self.layers(self.words(words)).mean(dim=1))


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank layer that is initially zero."""

    def __init__(self, frozen, rank=4, scale=2.0):
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return self.frozen(x) + self.scale * F.linear(F.linear(self.dropout(x), self.down), self.up)


def add_adapters(model):
    model.requires_grad_(False)
    for layer in model.layers:
        layer.query, layer.value = Adapted(layer.query), Adapted(layer.value)
    model.head.requires_grad_(True)


def make_texts(size, seed):
    """Make texts in which the words of one class are slightly more frequent than others."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    words = torch.randint(WORDS, (size, LENGTH), generator=generator)
    own = torch.randint(WORDS // CLASSES, (size, LENGTH), generator=generator) * CLASSES
    chosen = torch.rand(size, LENGTH, generator=generator) < 0.25
    return torch.utils.data.TensorDataset(words.where(~chosen, own + labels[:, None]), labels)


def loss(model, batch):
    words, labels = batch
    return F.cross_entropy(model(words), labels)


def score(model, batch):
    words, labels = batch
    return {"accuracy": model(words).argmax(dim=1) == labels}


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


def main(epochs=6, output=None):
    rank, world, device = set_up()
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = Base()
    add_adapters(model)
    model = model.to(device)
    ddp = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    everything = sum(p.numel() for p in model.parameters())
    if rank == 0:
        print(f"{sum(p.numel() for p in trained)} of {everything} numbers are trained")
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    train_set, held_out = make_texts(640, seed=1), make_texts(300, seed=2)
    sampler = DistributedSampler(train_set)
    loader = torch.utils.data.DataLoader(train_set, batch_size=64 // world, sampler=sampler)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    held_loader = torch.utils.data.DataLoader(shard, batch_size=100)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = [each.to(device) for each in batch]
            optimizer.zero_grad()
            value = loss(ddp, batch)
            value.backward()
            optimizer.step()
        scores = evaluate(model, held_loader, device)
        value = mean_over_ranks(value)
        if rank == 0:
            print(f"epoch {epoch}: loss {value:.4f}, accuracy {scores['accuracy']:.1%}")
    if output is not None and rank == 0:
        state = model.named_parameters()
        torch.save({name: p.detach().clone() for name, p in state if p.requires_grad}, output)
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
