"""A variational autoencoder: a loss that is a sum, and noise drawn inside the model.

Changes from the plain loop:

- `onefold.losses` supports `reduction="sum"`, and the divergence is an `onefold.Sum`: neither is
  divided by anything, on any number of devices. (A plain scalar would count as a mean.)
- The noise needs no change: each shard of each step has its own random numbers.

    python examples/ports/vae.py
    onefold run --devices 2 examples/ports/vae.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold


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
    likeness = onefold.losses.binary_cross_entropy_with_logits(logits, pictures, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return likeness + onefold.Sum(divergence)


def score(model, batch):
    (pictures,) = batch
    logits, mean, log_variance = model(pictures)
    likeness = F.binary_cross_entropy_with_logits(logits, pictures, reduction="none").sum(dim=1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
    return {"likeness": likeness, "divergence": divergence}


def main(epochs=12):
    train_set = torch.utils.data.TensorDataset(make_pictures(1000, seed=1))
    held_out = torch.utils.data.TensorDataset(make_pictures(200, seed=2))
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0)
    loader = trainer.loader(train_set, batch_size=50, shuffle=True)
    for epoch in trainer.epochs(epochs):
        total = samples = 0
        for batch in loader:
            step = trainer.step(batch)  # the loss is the sum over the batch
            total, samples = total + step.loss, samples + step.samples
        scores = trainer.evaluate(score, held_out, batch_size=100)
        print(
            f"epoch {epoch}: loss of a picture {total / max(samples, 1):.2f}, held out "
            f"{scores['likeness']:.2f} + {scores['divergence']:.2f}"
        )
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
