"""A GAN that draws digits: two networks and two optimizers in one Trainer.

    onefold run --devices 2 examples/gallery/gan.py

Learns from scikit-learn's 1,797 scanned digits. Writes gan.png: digits that were drawn.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import onefold

LATENT, WIDTH = 32, 24


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 2 * WIDTH, 4, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 1, 3, padding=1),
        nn.Tanh(),
    )


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Conv2d(2 * WIDTH, 1, 4),
        nn.Flatten(0),
    )


def make_fakes(models, real):
    noise = torch.randn(len(real), LATENT, 1, 1, device=real.device)
    return models["generator"](noise)


def against(logits, truth):
    """Return one loss per sample, for logits (n,) that should all be `truth`."""
    wanted = torch.full_like(logits, truth)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")


def discriminator_loss(models, batch):
    (real,) = batch
    judge, fake = models["discriminator"], make_fakes(models, real).detach()
    return against(judge(real), 0.9) + against(judge(fake), 0.0)


def generator_loss(models, batch):
    (real,) = batch
    return against(models["discriminator"](make_fakes(models, real)), 1.0)


def draw(models, batch):
    return {"digits": models["generator"](batch[0])}


def main(epochs=18):
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset(images / 8 - 1)
    torch.manual_seed(0)
    models = {"generator": make_generator(), "discriminator": make_discriminator()}
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
        for name, model in models.items()
    }
    losses = {"generator": generator_loss, "discriminator": discriminator_loss}
    trainer = onefold.Trainer(models, optimizers, losses, shards=2, seed=0, threads=1)
    loader = trainer.loader(data, batch_size=64, shuffle=True)
    for _ in trainer.epochs(epochs):
        for batch in loader:
            trainer.step(batch, "discriminator")
            trainer.step(batch, "generator")
    noise = torch.randn(5 * 16, LATENT, 1, 1, generator=torch.Generator().manual_seed(1))
    drawn = trainer.predict(draw, TensorDataset(noise), batch_size=80)["digits"]
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(f"fingerprint {fingerprint}")
        tiles = F.pad(drawn, [1, 1, 1, 1], value=-1)
        rows = tiles.view(5, 16, 10, 10).permute(0, 2, 1, 3).reshape(50, 160)
        larger = rows.repeat_interleave(4, dim=0).repeat_interleave(4, dim=1)
        plt.imsave("gan.png", larger.numpy(), cmap="gray")
    return fingerprint


if __name__ == "__main__":
    main()
