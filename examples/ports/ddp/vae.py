"""The script of ../vae.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


def make_pictures(size, seed):
    """Make bright rectangles on a dark, noisy background: (size, 144) float32, 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(1, 6, (size, 2, 1), generator=generator)
    last = first + torch.randint(2, 6, (size, 2, 1), generator=generator)
    places = torch.arange(12)
    inside = ((places >= first) & (places < last)).float()  # by rows and by columns
    pictures = inside[:, 0, :, None] * inside[:, 1, None, :]
    noise = 0.1 * torch.rand(size, 12, 12, generator=generator)
    return (0.9 * pictures + noise).flatten(1)


class VAE(nn.Module):
    def __init__(self, pixels=144, width=128, latent=6):
        super().__init__()
        self.inside = nn.Linear(pixels, width)
        self.mean, self.log_variance = nn.Linear(width, latent), nn.Linear(width, latent)
        self.outside = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, pictures):
        hidden = F.relu(self.inside(pictures))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = torch.randn_like(mean) if self.training else 0
        return self.outside(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def loss(model, batch):
    (pictures,) = batch
    logits, mean, log_variance = model(pictures)
    likeness = F.binary_cross_entropy_with_logits(logits, pictures, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return likeness + divergence


def score(model, batch):
    (pictures,) = batch
    logits, mean, log_variance = model(pictures)
    likeness = F.binary_cross_entropy_with_logits(logits, pictures, reduction="none").sum(dim=1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
    return {"likeness": likeness, "divergence": divergence}


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


def main(epochs=12):
    rank, world, device = set_up()
    train_set = torch.utils.data.TensorDataset(make_pictures(1000, seed=1))
    held_out = torch.utils.data.TensorDataset(make_pictures(200, seed=2))
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = VAE().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sampler = DistributedSampler(train_set)
    loader = torch.utils.data.DataLoader(train_set, batch_size=50 // world, sampler=sampler)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    held_loader = torch.utils.data.DataLoader(shard, batch_size=100)
    for epoch in range(epochs):
        total = samples = 0
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = [each.to(device) for each in batch]
            optimizer.zero_grad()
            value = loss(ddp, batch)
            (value * world).backward()  # DDP would average the sum
            optimizer.step()
            total, samples = total + mean_over_ranks(value).item(), samples + len(batch[0])
        scores = evaluate(model, held_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch}: loss of a picture {total / max(samples, 1):.2f}, held out "
                f"{scores['likeness']:.2f} + {scores['divergence']:.2f}"
            )
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
