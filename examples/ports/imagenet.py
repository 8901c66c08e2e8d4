"""Like the official ImageNet example: a residual network, SGD, and a learning rate schedule.

Changes from the plain loop:

- `train` and `validate` no longer move data to devices or average meters over devices.
- `batch_size` is the global batch size, for any number of devices.
- The loss function also returns the training accuracy.
- The trainer steps the scheduler at the end of an epoch, and saves it in checkpoints.
- Saving the last checkpoint, saving the best one, and resuming take one line each.

    python examples/ports/imagenet.py
    onefold run --devices 2 examples/ports/imagenet.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import onefold

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


def train(trainer, loader, epoch):
    for number, batch in enumerate(loader):
        step = trainer.step(batch)
        if number % 4 == 3:
            print(f"epoch {epoch}: loss {step.loss:.4f}, top1 {step.values['top1']:.1%}")


def main(epochs=6, checkpoint=None):
    train_set = Gratings(400, seed=1, augment=True)
    held_out = Gratings(200, seed=2, augment=False)
    torch.manual_seed(0)
    model = small_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    trainer = onefold.Trainer(
        model, optimizer, loss, shards=4, seed=0, scheduler=scheduler, scheduler_every="epoch"
    )
    loader = trainer.loader(train_set, batch_size=BATCH, shuffle=True)
    if checkpoint is not None:
        trainer.load(checkpoint, if_any=True)
    for epoch in trainer.epochs(epochs):
        train(trainer, loader, epoch)
        scores = trainer.evaluate(score, held_out, batch_size=100)
        print(f"held out: top1 {scores['top1']:.1%}, top2 {scores['top2']:.1%}")
        if checkpoint is not None:
            trainer.save(checkpoint, scores=scores, best="highest top1")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
