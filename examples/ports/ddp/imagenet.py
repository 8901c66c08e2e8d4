"""The script of ../imagenet.py with DistributedDataParallel, for torchrun."""

import math
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

CLASSES, BATCH = 6, 50


class Gratings(torch.utils.data.Dataset):
    """Noisy stripes in one of six directions; training flips them and draws new noise."""

    def __init__(self, size, *, seed, augment):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        phase = torch.rand(size, 1, 1, generator=generator) * 2 * math.pi
        angle = (self.labels * math.pi / CLASSES)[:, None, None]
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        stripes = torch.sin(x * angle.cos() + y * angle.sin() + phase)
        noise = torch.randn(size, 3, 16, 16, generator=generator)
        self.images = stripes[:, None] + 1.5 * noise
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image, label = self.images[index], self.labels[index]
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1, -2)  # rotated by 180 degrees: the direction stays the same
        return image, label


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        inside = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inside)) + self.short(x))


def small_resnet():
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 6))


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    best = logits.topk(2, dim=1).indices == labels[:, None]
    values = {"top1": best[:, 0], "top2": best.any(dim=1)}
    return F.cross_entropy(logits, labels, reduction="none"), values


def score(model, batch):
    losses, values = loss(model, batch)
    return {"loss": losses, **values}


def train(model, loader, optimizer, epoch, device):
    for number, batch in enumerate(loader):
        batch = [each.to(device) for each in batch]
        losses, values = loss(model, batch)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        if number % 4 == 3:
            top1 = mean_over_ranks(values["top1"].float().mean())
            value = mean_over_ranks(losses.mean())
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {value:.4f}, top1 {top1:.1%}")


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


def main(epochs=6, checkpoint=None):
    rank, world, device = set_up()
    train_set = Gratings(400, seed=1, augment=True)
    held_out = Gratings(200, seed=2, augment=False)
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = small_resnet().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=BATCH // world, sampler=sampler)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    first, best = 0, 0.0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first, best = saved["epoch"], saved["best"]
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        train(ddp, loader, optimizer, epoch, device)
        scores = evaluate(model, DataLoader(shard, batch_size=100), device)
        scheduler.step()
        if rank == 0:
            print(f"held out: top1 {scores['top1']:.1%}, top2 {scores['top2']:.1%}")
        if checkpoint is not None and rank == 0:
            is_best, best = scores["top1"] > best, max(scores["top1"], best)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1, "best": best}
            torch.save(state, checkpoint)
            if is_best:
                shutil.copyfile(checkpoint, checkpoint + ".best")
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
