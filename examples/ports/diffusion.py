"""A diffusion model: it learns to separate noise from data, and its EMA weights draw samples.

Changes from the plain loop:

- `trainer.average` keeps an exponential moving average of the weights, also in checkpoints.
- Inside `trainer.averaged`, the model has the averaged weights, to draw samples or to save them.
- The loss draws noise and timesteps. This needs no change: each shard has its own random numbers.
- Samples are drawn between steps, with a separate generator.

    python examples/ports/diffusion.py
    onefold run --devices 2 examples/ports/diffusion.py
"""

import math

import torch
from torch import nn

import onefold

MOMENTS = 40


def centers():
    """Return the centers of the data: six points on a circle, (6, 2) float32."""
    turn = torch.arange(6) * math.pi / 3
    return torch.stack([turn.cos(), turn.sin()], dim=1)


def make_points(size, seed):
    """Make points near the six centers: (size, 2) float32."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(6, (size,), generator=generator)
    return centers()[chosen] + 0.05 * torch.randn(size, 2, generator=generator)


class NoiseModel(nn.Module):
    """Predicts the noise in points (n, 2) at timesteps (n,)."""

    def __init__(self, width=128):
        super().__init__()
        self.moments = nn.Embedding(MOMENTS, width)
        self.inside = nn.Linear(2, width)
        self.middle = nn.Sequential(nn.SiLU(), nn.Linear(width, width))
        self.outside = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.last = nn.Linear(width, 2)
        kept = (1 - torch.linspace(1e-3, 0.2, MOMENTS)).cumprod(dim=0)
        self.register_buffer("kept", kept)  # (MOMENTS,) remaining fraction of the data

    def forward(self, points, moments):
        hidden = self.inside(points) + self.moments(moments)
        hidden = hidden + self.middle(hidden)
        return self.last(self.outside(hidden))


def loss(model, points):
    moments = torch.randint(MOMENTS, (len(points),), device=points.device)
    noise = torch.randn_like(points)
    kept = model.kept[moments].unsqueeze(1)
    said = model(kept.sqrt() * points + (1 - kept).sqrt() * noise, moments)
    return (said - noise).square().mean(dim=1)


@torch.no_grad()
def draw_points(model, size):
    """Start from noise and remove it step by step: (size, 2) float32 on the host."""
    generator = torch.Generator().manual_seed(5)  # separate, so that no other random numbers change
    device = model.kept.device
    points = torch.randn(size, 2, generator=generator).to(device)
    for moment in reversed(range(MOMENTS)):
        said = model(points, torch.full((size,), moment, device=device))
        kept = model.kept[moment]
        before = model.kept[moment - 1] if moment else torch.ones_like(kept)
        share = kept / before
        points = (points - (1 - share) / (1 - kept).sqrt() * said) / share.sqrt()
        if moment:
            noise = torch.randn(size, 2, generator=generator).to(device)
            points = points + ((1 - before) / (1 - kept) * (1 - share)).sqrt() * noise
    return points.cpu()


def main(epochs=15):
    data = make_points(4000, seed=1)
    torch.manual_seed(0)
    model = NoiseModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0)
    trainer.average(decay=0.98)
    loader = trainer.loader(data, batch_size=200, shuffle=True)
    for epoch in trainer.epochs(epochs):
        total = samples = 0
        for batch in loader:
            step = trainer.step(batch)
            total, samples = total + step.loss * step.samples, samples + step.samples
        near = 0.0
        if not trainer.replaying:  # the record of a stopped run does not contain these draws
            with trainer.averaged():
                distances = torch.cdist(draw_points(trainer.model, 300), centers()).amin(dim=1)
            near = float((distances < 0.2).float().mean())
        near = trainer.state("near", near)
        print(f"epoch {epoch}: loss {total / max(samples, 1):.4f}, {near:.1%} of samples are near")
    with trainer.averaged():
        return trainer.fingerprint()


if __name__ == "__main__":
    main()
