"""The script of ../diffusion.py with Accelerate, for `accelerate launch`."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


def loss(model, points, kept):
    moments = torch.randint(MOMENTS, (len(points),), device=points.device)
    noise = torch.randn_like(points)
    kept = kept[moments].unsqueeze(1)
    said = model(kept.sqrt() * points + (1 - kept).sqrt() * noise, moments)
    return (said - noise).square().mean()


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
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    data = make_points(4000, seed=1)
    set_seed(0, device_specific=True)  # different noise on each process
    model = NoiseModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=200, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    for epoch in range(epochs):
        total = samples = 0
        for batch in loader:
            optimizer.zero_grad()
            value = loss(prepared, batch, model.kept)
            accelerator.backward(value)
            optimizer.step()
            averaged.update_parameters(model)
            value = accelerator.reduce(value.detach(), "mean")
            total, samples = total + value.item() * len(batch), samples + len(batch)
        if not accelerator.is_main_process:
            continue
        distances = torch.cdist(draw_points(averaged.module, 300), centers()).amin(dim=1)
        near = (distances < 0.2).float().mean()
        print(f"epoch {epoch}: loss {total / max(samples, 1):.4f}, {near:.1%} of samples are near")
    accelerator.end_training()
    return averaged


if __name__ == "__main__":
    main()
