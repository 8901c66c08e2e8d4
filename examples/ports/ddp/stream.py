"""The script of ../stream.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

WORDS, LENGTH, BUFFER = 50, 8, 64


class Sentences(IterableDataset):
    """Sentences like those from a pipe, shuffled in a buffer.

    Each is a dict of words (LENGTH,) and the next word, which follows a pattern of the
    invented language: twice the second-to-last word plus the last.
    """

    def __init__(self, samples):
        self.samples = samples

    def lines(self):
        generator = torch.Generator().manual_seed(3)
        rank, world = dist.get_rank(), dist.get_world_size()
        for number in range(self.samples):
            words = torch.randint(12, (LENGTH,), generator=generator)
            if number % world == rank:
                yield {"words": words, "next": (2 * words[-2] + words[-1]) % WORDS}

    def __iter__(self):
        waiting = []
        for line in self.lines():
            if len(waiting) < BUFFER:
                waiting.append(line)
                continue
            place = int(torch.randint(BUFFER, ()))
            yield waiting[place]
            waiting[place] = line
        for place in torch.randperm(len(waiting)).tolist():
            yield waiting[place]


class NextWord(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(nn.Linear(LENGTH * width, 96), nn.ReLU(), nn.Linear(96, WORDS))

    def forward(self, words):
        return self.layers(self.words(words).flatten(1))


def loss(model, batch):
    logits = model(batch["words"])
    return F.cross_entropy(logits, batch["next"]), {
        "accuracy": (logits.argmax(dim=1) == batch["next"]).float().mean()
    }


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


def main(epochs=5):
    rank, world, device = set_up()
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = NextWord().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(Sentences(1600), batch_size=64 // world)
    for epoch in range(epochs):
        total = right = samples = 0
        for batch in loader:
            batch = {name: each.to(device) for name, each in batch.items()}
            optimizer.zero_grad()
            value, values = loss(ddp, batch)
            value.backward()
            optimizer.step()
            count = len(batch["next"])
            value = mean_over_ranks(value)
            total, samples = total + value.item() * count, samples + count
            right = right + mean_over_ranks(values["accuracy"]) * count
        if rank == 0:
            print(
                f"epoch {epoch}: loss {total / max(samples, 1):.4f}, {right / max(samples, 1):.1%}"
            )
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
