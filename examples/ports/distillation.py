"""Distillation: a large teacher, and a small student that learns from the teacher's outputs.

Changes from the plain loop:

- Trainer receives both networks by name, so that the buffers of both belong to the model, are
  compared between devices and are saved in checkpoints.
- Usually the teacher is loaded from a file. Here the first epochs train it: the same
  trainer with another loss.
- Each network keeps its mode: the teacher stays in `eval()` while the student trains.

    python examples/ports/distillation.py
    onefold run --devices 2 examples/ports/distillation.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

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
    return F.cross_entropy(models["teacher"](points), labels, reduction="none")


def student_loss(models, batch):
    points, labels = batch
    with torch.no_grad():
        wanted = (models["teacher"](points) / TEMPERATURE).softmax(dim=1)
    logits = models["student"](points)
    said = (logits / TEMPERATURE).log_softmax(dim=1)
    soft = F.kl_div(said, wanted, reduction="none").sum(dim=1) * TEMPERATURE**2
    hard = F.cross_entropy(logits, labels, reduction="none")
    agrees = logits.argmax(dim=1) == wanted.argmax(dim=1)
    return SOFT * soft + (1 - SOFT) * hard, {"soft": soft, "hard": hard, "agrees": agrees}


def score(network, batch):
    points, labels = batch
    return {"accuracy": network(points).argmax(dim=1) == labels}


def main(epochs=10):
    train_set, held_out = make_points(800, seed=1), make_points(300, seed=2)
    torch.manual_seed(0)
    models = {"teacher": make_network(96), "student": make_network(16)}
    optimizers = {n: torch.optim.Adam(m.parameters(), lr=5e-3) for n, m in models.items()}
    losses = {"teacher": teacher_loss, "student": student_loss}
    trainer = onefold.Trainer(models, optimizers, losses, shards=4, seed=0)
    loader = trainer.loader(train_set, batch_size=40, shuffle=True)
    for epoch in trainer.epochs(epochs):
        name = "teacher" if epoch < epochs // 2 else "student"
        models["teacher"].train(name == "teacher")
        step = None
        for batch in loader:
            step = trainer.step(batch, name)
        scores = trainer.evaluate(score, held_out, batch_size=100, model=name)
        if step is not None:
            values = "".join(f", {key} {value:.3f}" for key, value in step.values.items())
            print(
                f"epoch {epoch}: {name}, loss {step.loss:.4f}{values}, "
                f"accuracy {scores['accuracy']:.1%}"
            )
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
