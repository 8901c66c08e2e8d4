"""DCGAN: two networks, two optimizers, and two updates per batch.

Changes from the plain loop:

- Trainer receives both networks, both optimizers and both losses by name;
  `trainer.step(batch, NAME)` updates only the parameters of the optimizer with that name.
- Each loss draws its own fakes. Such scripts often reuse the fakes of the first update for the
  second; here a loss depends only on parameters and samples.
- The losses also return the logged metrics.

    python examples/ports/dcgan.py
    onefold run --devices 2 examples/ports/dcgan.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

LATENT, WIDTH, BATCH = 16, 16, 40


def make_pictures(size):
    """Make bright discs of different positions and sizes: (size, 1, 16, 16) float32, -1 to 1."""
    generator = torch.Generator().manual_seed(1)
    center = 5 + 6 * torch.rand(size, 2, 1, 1, generator=generator)
    radius = 2 + 3 * torch.rand(size, 1, 1, generator=generator)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    distance = ((row - center[:, 0]).square() + (column - center[:, 1]).square()).sqrt()
    return (radius - distance).clamp(-1, 1).unsqueeze(1)


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 2 * WIDTH, 4, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 4, 2, padding=1, bias=False),
        nn.Tanh(),
    )


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, padding=1, bias=False),
        nn.BatchNorm2d(2 * WIDTH),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * WIDTH, 1, 4, bias=False),
        nn.Flatten(0),
    )


def start_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def against(logits, truth):
    """Return one loss per sample, for logits (n,) that should all be true or all be false."""
    wanted = torch.full_like(logits, float(truth))
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")


def draw_fakes(models, real):
    noise = torch.randn(len(real), LATENT, 1, 1, device=real.device, dtype=real.dtype)
    return models["generator"](noise)


def discriminator_loss(models, batch):
    (real,) = batch
    fake = draw_fakes(models, real).detach()
    on_real, on_fake = models["discriminator"](real), models["discriminator"](fake)
    values = {"D(x)": on_real.sigmoid(), "D(G(z))": on_fake.sigmoid()}
    return against(on_real, True) + against(on_fake, False), values


def generator_loss(models, batch):
    (real,) = batch
    return against(models["discriminator"](draw_fakes(models, real)), True)


def main(epochs=8):
    torch.manual_seed(0)
    models = {"generator": make_generator(), "discriminator": make_discriminator()}
    optimizers = {}
    for name, model in models.items():
        model.apply(start_weights)
        optimizers[name] = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
    losses = {"generator": generator_loss, "discriminator": discriminator_loss}
    trainer = onefold.Trainer(models, optimizers, losses, shards=4, seed=0)
    pictures = torch.utils.data.TensorDataset(make_pictures(400))
    loader = trainer.loader(pictures, batch_size=BATCH, shuffle=True)
    for epoch in trainer.epochs(epochs):
        both = None
        for batch in loader:
            both = trainer.step(batch, "discriminator"), trainer.step(batch, "generator")
        if both is not None:
            said = ", ".join(f"{name} {value:.3f}" for name, value in both[0].values.items())
            print(f"epoch {epoch}: loss D {both[0].loss:.4f}, loss G {both[1].loss:.4f}, {said}")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
