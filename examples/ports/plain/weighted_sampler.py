"""The plain loop of ../weighted_sampler.py, on one device."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

SHARES = (0.9, 0.07, 0.03)


def make_points(size, seed):
    """Make points in three overlapping clouds, most of them in the first: (size, 8), (size,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(SHARES), size, True, generator=generator)
    centers = 0.8 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centers[labels] + torch.randn(size, 8, generator=generator), labels)


def loss(model, batch):
    points, labels = batch
    logits = model(points)
    values = {"accuracy": logits.argmax(dim=1) == labels, "rare": labels > 0}
    values = {name: value.float().mean() for name, value in values.items()}
    return F.cross_entropy(logits, labels), values


def score(model, batch):
    """Return the recall of each class; a class missing from a shard has weight 0 there."""
    points, labels = batch
    right = model(points).argmax(dim=1) == labels
    of_class = [labels == each for each in range(len(SHARES))]
    return {f"class {each}": ((right & own).sum(), own.sum()) for each, own in enumerate(of_class)}


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    totals = {}
    for batch in batches:
        for name, (right, own) in score(model, batch).items():
            before = totals.get(name, (0, 0))
            totals[name] = before[0] + right, before[1] + own
    model.train()
    return {name: right / own for name, (right, own) in totals.items()}


def main(epochs=8):
    train_set, held_out = make_points(1000, seed=1), make_points(600, seed=2)
    labels = train_set.tensors[1]
    weights = 1 / labels.bincount(minlength=3).float()[labels]
    sampler = WeightedRandomSampler(weights.tolist(), len(train_set))
    plain = DataLoader(train_set, batch_size=50, sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, len(SHARES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(plain))
    for epoch in range(epochs):
        for batch in plain:
            optimizer.zero_grad()
            value, values = loss(model, batch)
            value.backward()
            optimizer.step()
            scheduler.step()
        scores = evaluate(model, DataLoader(held_out, batch_size=200))
        found = ", ".join(f"{name} {share:.1%}" for name, share in scores.items())
        print(f"epoch {epoch}: loss {value:.4f}, {values['rare']:.0%} rare; found of {found}")
    return model


if __name__ == "__main__":
    main()
