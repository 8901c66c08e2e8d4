"""Domain-adversarial training: a labeled source domain and an unlabeled target domain.

Changes from the plain loop:

- `trainer.step` takes the pair of batches from `zip`; both have the same number of samples
  in each shard, so the losses of their samples can be added.
- `trainer.evaluate` scores the target domain, and visits each sample once.

    python examples/ports/domains.py
    onefold run --devices 2 examples/ports/domains.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import onefold

SIZE, BATCH = 240, 24


def make_points(turn, seed):
    """Make two rotated half moons: points (SIZE, 2) float32 and the moon of each (SIZE,)."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(2, (SIZE,), generator=generator)
    angle = math.pi * torch.rand(SIZE, generator=generator)
    x = torch.where(kinds == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(kinds == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.1 * torch.randn(SIZE, 2, generator=generator)
    turned = [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]
    return points @ torch.tensor(turned), kinds


class Reversal(torch.autograd.Function):
    """Passes values on unchanged, and reverses the sign of gradients."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.kinds = nn.Linear(16, 2)
        self.domains = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def domain(self, points, factor):
        return self.domains(Reversal.apply(self.features(points), factor)).squeeze(1)


def loss(model, batch):
    (points, kinds), (others,) = batch
    said = model.kinds(model.features(points))
    here, there = model.domain(points, 0.3), model.domain(others, 0.3)
    told = F.binary_cross_entropy_with_logits(here, torch.ones_like(here), reduction="none")
    told = told + F.binary_cross_entropy_with_logits(
        there, torch.zeros_like(there), reduction="none"
    )
    return F.cross_entropy(said, kinds, reduction="none") + told


def right(model, batch):
    points, kinds = batch
    return {"right": model.kinds(model.features(points)).argmax(1) == kinds}


def main(epochs=8):
    torch.manual_seed(0)
    model = Adversarial()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    source = torch.utils.data.TensorDataset(*make_points(0.0, seed=1))
    target = torch.utils.data.TensorDataset(*make_points(0.6, seed=2))
    unknown = torch.utils.data.TensorDataset(target.tensors[0])
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0)
    known = trainer.loader(source, batch_size=BATCH, shuffle=True)
    others = trainer.loader(unknown, batch_size=BATCH, shuffle=True)
    for epoch in trainer.epochs(epochs):
        step = None
        for batch in zip(known, others, strict=True):
            step = trainer.step(batch)
        accuracy = trainer.evaluate(right, target, batch_size=SIZE)["right"]
        if step is not None:
            print(f"epoch {epoch}: loss {step.loss:.4f}, on the target {accuracy:.3f}")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
