"""SimCLR: two augmented views of each image, compared with all others in the batch.

Changes from the plain loop:

- `onefold.gather` inside the loss: a shard sees the features of all shards, with gradients.
- The second view needs no separate loader: the dataset returns both, each with its own random
  numbers.
- `trainer.predict` returns the features of all images, for the nearest neighbors.

    python examples/ports/simclr.py
    onefold run --devices 2 examples/ports/simclr.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

KINDS, TEMPERATURE = 8, 0.2


def make_pictures(size, seed):
    """Make shifted images of eight blurred patterns: (size, 1, 12, 12), (size,)."""
    patterns = torch.randn(KINDS, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    patterns = 2 * F.avg_pool2d(patterns, 3, stride=1, padding=1)
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (size,), generator=generator)
    shifts = torch.randint(-2, 3, (size, 2), generator=generator).tolist()
    pictures = [patterns[k].roll(shift, (1, 2)) for k, shift in zip(kinds, shifts, strict=True)]
    return torch.stack(pictures) + torch.randn(size, 1, 12, 12, generator=generator), kinds


class TwoViews(torch.utils.data.Dataset):
    """Two views of an image: shifted, brighter or darker, and partly covered."""

    def __init__(self, pictures):
        self.pictures = pictures

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.view(self.pictures[index]), self.view(self.pictures[index])

    @staticmethod
    def view(picture):
        down, right, row, column = torch.randint(-1, 2, (4,)).tolist()
        seen = picture.roll((down, right), (-2, -1)) * (0.7 + 0.6 * torch.rand(()))
        seen[:, 4 + 3 * row : 7 + 3 * row, 4 + 3 * column : 7 + 3 * column] = 0
        return seen


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 36, width),
        )
        self.project = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.last = nn.Linear(width, 32)

    def forward(self, pictures):
        return F.normalize(self.last(self.project(self.features(pictures))), dim=1)


def loss(model, batch):
    """Return NT-Xent over the whole batch, the same in every shard."""
    first, second = (onefold.gather(model(view)) for view in batch)
    both = torch.cat([first, second])  # (2N, 32): all first views, then all second ones
    alike = both @ both.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(both), dtype=torch.bool, device=both.device), -1e9)
    partners = torch.arange(len(both), device=both.device).roll(len(first))
    return F.cross_entropy(alike, partners)


def features(model, pictures):
    return {"features": F.normalize(model.features(pictures), dim=1)}


def neighbors(trainer, known, asked):
    """Return the fraction of images whose nearest neighbor is of the same kind."""
    (pictures, kinds), (others, answers) = known, asked
    known_features = trainer.predict(features, pictures, batch_size=100)["features"]
    asked_features = trainer.predict(features, others, batch_size=100)["features"]
    nearest = (asked_features @ known_features.T).argmax(dim=1)
    return (kinds[nearest] == answers).float().mean()


def main(epochs=6):
    known, asked = make_pictures(512, seed=1), make_pictures(200, seed=2)
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0)
    loader = trainer.loader(TwoViews(known[0]), batch_size=128, shuffle=True, drop_last=True)
    print(f"before: {neighbors(trainer, known, asked):.1%} have a neighbor of their kind")
    for epoch in trainer.epochs(epochs):
        step = None
        for batch in loader:
            step = trainer.step(batch)
        share = neighbors(trainer, known, asked)
        if step is not None:
            print(f"epoch {epoch}: loss {step.loss:.4f}, {share:.1%} have a neighbor")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
