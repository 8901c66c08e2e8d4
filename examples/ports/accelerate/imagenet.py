"""The script of ../imagenet.py with Accelerate, for `accelerate launch`."""

import math
import os
import shutil

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

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


def train(model, loader, optimizer, epoch, accelerator):
    for number, batch in enumerate(loader):
        losses, values = loss(model, batch)
        optimizer.zero_grad()
        accelerator.backward(losses.mean())
        optimizer.step()
        if number % 4 == 3:
            losses, top1 = accelerator.gather((losses.detach(), values["top1"].float()))
            accelerator.print(f"epoch {epoch}: loss {losses.mean():.4f}, top1 {top1.mean():.1%}")


def evaluate(model, batches, accelerator):
    model.eval()
    totals, samples = {}, 0
    with torch.no_grad():
        for batch in batches:
            for name, values in score(model, batch).items():
                values = accelerator.gather_for_metrics(values)
                totals[name] = totals.get(name, 0.0) + float(values.float().sum())
            samples += len(values)
    model.train()
    return {name: total / samples for name, total in totals.items()}


def main(epochs=6, checkpoint=None):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    train_set = Gratings(400, seed=1, augment=True)
    held_out = Gratings(200, seed=2, augment=False)
    set_seed(0, device_specific=True)  # different noise on each process
    model = small_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    dev = DataLoader(held_out, batch_size=100)
    first, best = 0, 0.0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first, best = saved["epoch"], saved["best"]
    model, optimizer, loader, dev, scheduler = accelerator.prepare(
        model, optimizer, loader, dev, scheduler
    )
    for epoch in range(first, epochs):
        train(model, loader, optimizer, epoch, accelerator)
        scores = evaluate(model, dev, accelerator)
        scheduler.step()
        accelerator.print(f"held out: top1 {scores['top1']:.1%}, top2 {scores['top2']:.1%}")
        if checkpoint is not None:
            is_best, best = scores["top1"] > best, max(scores["top1"], best)
            state = {"model": accelerator.unwrap_model(model).state_dict()}
            state |= {"optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1, "best": best}
            accelerator.save(state, checkpoint)
            if is_best and accelerator.is_main_process:
                shutil.copyfile(checkpoint, checkpoint + ".best")
    accelerator.end_training()
    return model


if __name__ == "__main__":
    main()
