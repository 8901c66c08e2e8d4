"""A variational autoencoder with two latent numbers: a map of all digits.

    onefold run --devices 2 examples/gallery/vae.py

Learns from scikit-learn's 1,797 scanned digits. Writes vae.png: what is decoded at each place of
the plane.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import onefold

SIDE = 14


class VAE(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )
        self.decoder = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)
        )

    def forward(self, pixels):
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else 0
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def loss(model, batch):
    """Return the negative evidence lower bound of each sample (n,)."""
    (pixels,) = batch
    logits, mean, log_variance = model(pixels)
    likeness = F.binary_cross_entropy_with_logits(logits, pixels, reduction="none").sum(dim=1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
    return likeness + divergence


def score(model, batch):
    return {"loss": loss(model, batch)}


def decode(model, batch):
    return {"pixels": model.decoder(batch[0]).sigmoid().view(-1, 8, 8)}


def main(epochs=50):
    data = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 16)
    train_set, test_set = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0, threads=1)
    loader = trainer.loader(train_set, batch_size=100, shuffle=True)
    before = trainer.evaluate(score, test_set, batch_size=99)["loss"]
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch)
    after = trainer.evaluate(score, test_set, batch_size=99)["loss"]
    places = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.03, 0.97, SIDE))
    plane = torch.cartesian_prod(places, places)
    pixels = trainer.predict(decode, TensorDataset(plane), batch_size=98)["pixels"]
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(f"test loss {before:.1f} before and {after:.1f} after training")
        print(f"fingerprint {fingerprint}")
        tiles = F.pad(pixels, [1, 1, 1, 1]).view(SIDE, SIDE, 10, 10)
        rows = tiles.permute(0, 2, 1, 3).reshape(SIDE * 10, SIDE * 10)
        larger = rows.repeat_interleave(3, dim=0).repeat_interleave(3, dim=1)
        plt.imsave("vae.png", larger.numpy(), cmap="gray")
    return fingerprint


if __name__ == "__main__":
    main()
