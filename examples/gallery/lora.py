"""LoRA: a frozen vision transformer learns to read rotated digits, by small adapters.

    onefold run --devices 2 examples/gallery/lora.py

The transformer first learns scikit-learn's digits upright, and then no longer changes: without the
adapters it still reads those. Writes lora.png: the accuracy after each epoch of both parts.
"""

import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

import onefold


class Layer(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        inside = self.norm1(x)
        split = (
            each(inside).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A vision transformer on 16 patches of 2x2 pixels."""

    def __init__(self, width=48, layers=3):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.layers(x)).mean(dim=1))


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank one that is initially zero."""

    def __init__(self, frozen, rank=4):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)


def add_adapters(model):
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("query", "value", "out"):
            setattr(layer, name, Adapted(getattr(layer, name)))
        layer.mlp[0], layer.mlp[2] = Adapted(layer.mlp[0]), Adapted(layer.mlp[2])


def loss(model, batch):
    images, labels = batch
    return onefold.losses.cross_entropy(model(images), labels)


def score(model, batch):
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


def train(model, train_set, test_set, epochs):
    """Train what is not frozen; return the trainer, and the accuracies in percent."""
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=2, seed=0, threads=1)
    loader = trainer.loader(train_set, batch_size=50, shuffle=True)
    accuracies = []
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
        scores = trainer.evaluate(score, test_set, batch_size=99)
        accuracies.append(100 * float(scores["accuracy"]))
    return trainer, accuracies


def draw(curves):
    figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for name, curve in curves.items():
        axis.plot(range(1, len(curve) + 1), curve, marker=".", label=name)
    axis.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100))
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    figure.savefig("lora.png")


def main(epochs=10):
    digits = load_digits()
    upright = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    parts = []
    for images in (upright, upright.rot90(1, (2, 3))):
        data = TensorDataset(images[order], torch.tensor(digits.target)[order])
        parts.append((Subset(data, range(1500)), Subset(data, range(1500, 1797))))
    torch.manual_seed(0)
    model = Transformer()
    base, first = train(model, *parts[0], epochs)
    before = base.evaluate(score, parts[1][1], batch_size=99)["accuracy"]
    add_adapters(model)
    trainer, second = train(model, *parts[1], epochs)
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"on their side: {before:.1%} before, {second[-1]:.1f}% with adapters, which have")
        print(f"{adapters:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
        print(f"fingerprint {fingerprint}")
        draw({"upright, all parameters": first, "on their side, adapters alone": second})
    return fingerprint


if __name__ == "__main__":
    main()
