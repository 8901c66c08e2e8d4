"""Sharpness-aware minimization: two gradients per batch, the second one slightly uphill.

Changes from the plain loop:

- `trainer.gradient` leaves the gradient of the whole batch in `.grad`, on every device. Both calls
  see the same batch and the same random numbers: they are one step.
- The script climbs and updates inside `with trainer.modifying():` on every device.

    python examples/ports/sam.py
    onefold run --devices 2 examples/ports/sam.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

RADIUS, CLASSES = 0.05, 3


def make_spirals(size, seed):
    """Make noisy points on three arms of a spiral: (size, 2) float32 and (size,) int64."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    along = torch.rand(size, generator=generator)
    turn = 6.283 * (labels / CLASSES + 0.6 * along)
    points = torch.stack([turn.cos(), turn.sin()], dim=1) * (0.2 + along[:, None])
    noise = 0.08 * torch.randn(size, 2, generator=generator)
    return torch.utils.data.TensorDataset(points + noise, labels)


@torch.no_grad()
def climb(parameters):
    """Move the parameters uphill by RADIUS; return their previous values."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    before = [p.clone() for p in parameters]
    for parameter in parameters:
        parameter.add_(parameter.grad, alpha=float(RADIUS / (norm + 1e-12)))
    return before


@torch.no_grad()
def go_back(parameters, before):
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)


def loss(model, batch):
    points, labels = batch
    logits = model(points)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1), {
        "accuracy": logits.argmax(dim=1) == labels
    }


def score(model, batch):
    points, labels = batch
    return {"accuracy": model(points).argmax(dim=1) == labels}


def main(epochs=8, checkpoint=None):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3)
    )
    parameters = list(model.parameters())
    base = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    trainer = onefold.Trainer(model, None, loss, shards=4, seed=0)
    loader = trainer.loader(make_spirals(480, seed=1), batch_size=60, shuffle=True)
    held_out = make_spirals(200, seed=2)
    found = None if checkpoint is None else trainer.load(checkpoint, if_any=True)
    if found is not None:
        base.load_state_dict(found.extra)
    for epoch in trainer.epochs(epochs):
        first = None
        for batch in loader:
            with trainer.modifying():
                first = trainer.gradient(batch)
                before = climb(parameters)
                trainer.gradient(batch)
                go_back(parameters, before)
                base.step()
        scores = trainer.evaluate(score, held_out, batch_size=100)
        if first is not None:
            print(
                f"epoch {epoch}: loss {first.loss:.4f}, accuracy "
                f"{first.values['accuracy']:.1%}, held out {scores['accuracy']:.1%}"
            )
        if checkpoint is not None:
            trainer.save(checkpoint, extra=base.state_dict())
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
