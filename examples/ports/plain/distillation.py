"""The plain loop of ../distillation.py, on one device."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, TEMPERATURE, SOFT = 5, 4.0, 0.7


def make_points(size, seed):
    """Make points in rings around the origin, with two irrelevant features: (size, 4)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    turn = 6.283 * torch.rand(size, generator=generator)
    radius = 0.4 * (1 + labels) + 0.1 * torch.randn(size, generator=generator)
    place = torch.stack([turn.cos(), turn.sin()], dim=1) * radius[:, None]
    nothing = torch.randn(size, 2, generator=generator)
    return torch.utils.data.TensorDataset(torch.cat([place, nothing], dim=1), labels)


def make_network(width):
    return nn.Sequential(
        nn.Linear(4, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, CLASSES),
    )


def teacher_loss(models, batch):
    points, labels = batch
    return F.cross_entropy(models["teacher"](points), labels), {}


def student_loss(models, batch):
    points, labels = batch
    with torch.no_grad():
        wanted = (models["teacher"](points) / TEMPERATURE).softmax(dim=1)
    logits = models["student"](points)
    said = (logits / TEMPERATURE).log_softmax(dim=1)
    soft = F.kl_div(said, wanted, reduction="batchmean") * TEMPERATURE**2
    hard = F.cross_entropy(logits, labels)
    agrees = (logits.argmax(dim=1) == wanted.argmax(dim=1)).float().mean()
    return SOFT * soft + (1 - SOFT) * hard, {"soft": soft, "hard": hard, "agrees": agrees}


def score(network, batch):
    points, labels = batch
    return {"accuracy": network(points).argmax(dim=1) == labels}


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


def main(epochs=10):
    train_set, held_out = make_points(800, seed=1), make_points(300, seed=2)
    torch.manual_seed(0)
    models = {"teacher": make_network(96), "student": make_network(16)}
    optimizers = {n: torch.optim.Adam(m.parameters(), lr=5e-3) for n, m in models.items()}
    losses = {"teacher": teacher_loss, "student": student_loss}
    loader = torch.utils.data.DataLoader(train_set, batch_size=40, shuffle=True)
    for epoch in range(epochs):
        name = "teacher" if epoch < epochs // 2 else "student"
        models["teacher"].train(name == "teacher")
        for batch in loader:
            optimizers[name].zero_grad()
            value, values = losses[name](models, batch)
            value.backward()
            optimizers[name].step()
        scores = evaluate(models[name], torch.utils.data.DataLoader(held_out, batch_size=100))
        values = "".join(f", {key} {value:.3f}" for key, value in values.items())
        print(f"epoch {epoch}: {name}, loss {value:.4f}{values}, accuracy {scores['accuracy']:.1%}")
    return models


if __name__ == "__main__":
    main()
