"""Translation between two kinds of images, with a discriminator that sees a pool of earlier images.

Changes from the plain loop:

- The first loss returns its generated images as per-sample outputs; `step.outputs["made"]`
  has those of the whole batch on every device. The script owns the pool, equal on all devices.
- `batch.whole()` returns the real images of the whole batch, for a batch next to the pool's.
- The pool is saved with the run as ``extra``.

    python examples/ports/pool.py
    onefold run --devices 2 examples/ports/pool.py
"""

import torch
from torch import nn

import onefold

SIZE, BATCH, ROOM = 160, 16, 24


def make_strokes(slanted, seed):
    """Make strokes that are upright or slanted: (SIZE, 1, 12, 12) float32, -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    shift = 3 + 6 * torch.rand(SIZE, 1, 1, generator=generator)
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    middle = shift + (0.5 * (row - 5.5) if slanted else 0.0)
    return (2.0 - (column - middle).abs()).clamp(-1, 1).unsqueeze(1)


def make_translator():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.InstanceNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.InstanceNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1),
        nn.Tanh(),
    )


def make_judge():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 3),
        nn.Flatten(0),
    )


class Pool:
    """Pool of earlier images: half of the requested images are exchanged with it."""

    def __init__(self):
        self.kept = []

    def state(self):
        return [picture.tolist() for picture in self.kept]

    def load(self, state):
        self.kept = [torch.tensor(picture) for picture in state]

    def exchange(self, pictures):
        given = []
        for picture in pictures:
            if len(self.kept) < ROOM:
                self.kept.append(picture)
                given.append(picture)
            elif torch.rand(()) < 0.5:
                place = int(torch.randint(ROOM, ()))
                given.append(self.kept[place])
                self.kept[place] = picture
            else:
                given.append(picture)
        return torch.stack(given)


def translation_loss(models, batch):
    ours, _ = batch
    made = models["there"](ours)
    fooled = (models["judge"](made) - 1).square()
    returned = (models["back"](made) - ours).abs().mean((1, 2, 3))
    return fooled + 5 * returned, {}, {"made": made}


def judge_loss(models, batch):
    theirs, made = batch
    real, false = models["judge"](theirs), models["judge"](made)
    return (real - 1).square() + false.square()


def main(epochs=4, checkpoint=None):
    torch.manual_seed(0)
    models = {"there": make_translator(), "back": make_translator(), "judge": make_judge()}
    both = [*models["there"].parameters(), *models["back"].parameters()]
    optimizers = {
        "translation": torch.optim.Adam(both, lr=2e-3, betas=(0.5, 0.999)),
        "judge": torch.optim.Adam(models["judge"].parameters(), lr=2e-3, betas=(0.5, 0.999)),
    }
    pairs = torch.utils.data.TensorDataset(make_strokes(False, 1), make_strokes(True, 2))
    losses = {"translation": translation_loss, "judge": judge_loss}
    trainer = onefold.Trainer(models, optimizers, losses, shards=4, seed=0)
    loader = trainer.loader(pairs, batch_size=BATCH, shuffle=True)
    pool = Pool()
    saved = trainer.load(checkpoint, if_any=True) if checkpoint else None
    if saved is not None:
        pool.load(saved.extra["pool"])
    for epoch in trainer.epochs(epochs):
        for batch in loader:
            _, theirs = batch.whole()
            moved = trainer.step(batch, "translation")
            torch.manual_seed(moved.number)
            judged = trainer.step((theirs, pool.exchange(moved.outputs["made"])), "judge")
        print(
            f"epoch {epoch}: loss of translation {moved.loss:.4f}, of the judge {judged.loss:.4f}"
        )
        if checkpoint:
            trainer.save(checkpoint, extra={"pool": pool.state()})
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
