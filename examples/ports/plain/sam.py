"""The plain loop of ../sam.py, on one device."""

import os

import torch
import torch.nn.functional as F
from torch import nn

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
    return F.cross_entropy(logits, labels, label_smoothing=0.1), {
        "accuracy": (logits.argmax(dim=1) == labels).float().mean()
    }


def score(model, batch):
    points, labels = batch
    return {"accuracy": model(points).argmax(dim=1) == labels}


def evaluate(model, batches):
    model.eval()
    totals, samples = {}, 0
    with torch.no_grad():
        for batch in batches:
            for name, values in score(model, batch).items():
                totals[name] = totals.get(name, 0.0) + float(values.float().sum())
            samples += len(values)
    model.train()
    return {name: total / samples for name, total in totals.items()}


def main(epochs=8, checkpoint=None):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3)
    )
    parameters = list(model.parameters())
    base = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    loader = torch.utils.data.DataLoader(make_spirals(480, seed=1), batch_size=60, shuffle=True)
    held_out = make_spirals(200, seed=2)
    start = 0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        base.load_state_dict(saved["optimizer"])
        start = saved["epoch"]
    for epoch in range(start, epochs):
        for batch in loader:
            base.zero_grad()
            first, values = loss(model, batch)
            first.backward()
            before = climb(parameters)
            base.zero_grad()
            loss(model, batch)[0].backward()
            go_back(parameters, before)
            base.step()
        scores = evaluate(model, torch.utils.data.DataLoader(held_out, batch_size=100))
        print(
            f"epoch {epoch}: loss {first:.4f}, accuracy "
            f"{values['accuracy']:.1%}, held out {scores['accuracy']:.1%}"
        )
        if checkpoint is not None:
            state = {"model": model.state_dict(), "optimizer": base.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, checkpoint)
    return model


if __name__ == "__main__":
    main()
