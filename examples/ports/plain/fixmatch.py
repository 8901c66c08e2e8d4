"""The plain loop of ../fixmatch.py, on one device."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, LABELED, RATIO, SURE = 4, 16, 3, 0.8


def make_bars(size, seed):
    """Make bars in one of four directions: (size, 1, 8, 8) float32 and directions (size,)."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(CLASSES, (size,), generator=generator)
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    lines = torch.stack([row - 3.5, column - 3.5, row - column, row + column - 7])
    shift = torch.rand(size, 1, 1, generator=generator) * 3 - 1.5
    pictures = (1.5 - (lines[kinds] - shift).abs()).clamp(0, 1)
    noise = 0.3 * torch.randn(size, 8, 8, generator=generator)
    return (pictures + noise).unsqueeze(1), kinds


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def weak(pictures):
    """Shift each image by up to one pixel."""
    moves = torch.randint(3, (2, len(pictures), 1), device=pictures.device)
    place = torch.arange(8, device=pictures.device)
    rows, columns = place + moves[0], place + moves[1]
    padded = F.pad(pictures[:, 0], (1, 1, 1, 1))
    each = torch.arange(len(pictures), device=pictures.device).view(-1, 1, 1)
    return padded[each, rows.unsqueeze(2), columns.unsqueeze(1)].unsqueeze(1)


def strong(pictures):
    hidden = torch.rand(len(pictures), 1, 4, 4, device=pictures.device) < 0.2
    hidden = hidden.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return weak(pictures).masked_fill(hidden, 0.0)


def loss(model, batch):
    (pictures, kinds), (unlabeled,) = batch
    supervised = F.cross_entropy(model(weak(pictures)), kinds)
    with torch.no_grad():
        sure, guessed = model(weak(unlabeled)).softmax(1).max(1)
    each = F.cross_entropy(model(strong(unlabeled)), guessed, reduction="none")
    used = (sure > SURE).to(each.dtype)
    return supervised + (used * each).mean(), {"used": used.mean()}


def main(epochs=6):
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    few = torch.utils.data.TensorDataset(*make_bars(LABELED * 10, seed=1))
    many = torch.utils.data.TensorDataset(make_bars(LABELED * RATIO * 10, seed=2)[0])
    labeled = torch.utils.data.DataLoader(few, batch_size=LABELED, shuffle=True)
    unlabeled = torch.utils.data.DataLoader(many, batch_size=LABELED * RATIO, shuffle=True)
    for epoch in range(epochs):
        for batch in zip(labeled, unlabeled, strict=True):
            optimizer.zero_grad()
            total, values = loss(model, batch)
            total.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {total:.4f}, used {values['used']:.2f}")
    return model


if __name__ == "__main__":
    main()
