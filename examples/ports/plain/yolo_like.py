"""The plain loop of ../yolo_like.py, on one device."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

CLASSES, SIZES = 3, (32, 40, 48)


def draw(generator):
    """Make an image (3, 48, 48) with up to four squares of three colors, and their boxes:
    (objects, 5) class, center, width and height, relative to the image."""
    picture, boxes = 0.3 * torch.rand(3, 48, 48, generator=generator), []
    for _ in range(int(torch.randint(5, (), generator=generator))):
        kind = int(torch.randint(CLASSES, (), generator=generator))
        edge = int(torch.randint(8, 17, (), generator=generator))
        x, y = torch.randint(48 - edge, (2,), generator=generator).tolist()
        picture[:, y : y + edge, x : x + edge] = 0.1
        picture[kind, y : y + edge, x : x + edge] = 0.9
        center = [(place + edge / 2) / 48 for place in (x, y)]
        boxes.append([kind, *center, edge / 48, edge / 48])
    return picture, torch.tensor(boxes).view(-1, 5)


def make_pictures(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return [draw(generator) for _ in range(size)]


def collate(samples):
    """Return images (n, 3, 48, 48), and all boxes with their image's number: (objects, 6)."""
    boxes = [F.pad(boxes, (1, 0), value=place) for place, (_, boxes) in enumerate(samples)]
    return torch.stack([picture for picture, _ in samples]), torch.cat(boxes)


def make_detector(width=32):
    """Make a network that predicts box (4), objectness and class of each 8 x 8 cell."""
    return nn.Sequential(
        nn.Conv2d(3, width // 2, 3, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 5 + CLASSES, 1),
    )


def overlap(boxes, others):
    """Return the IoU of each pair of boxes, (objects, 4) each: center, width and height."""
    low = torch.maximum(boxes[:, :2] - boxes[:, 2:] / 2, others[:, :2] - others[:, 2:] / 2)
    high = torch.minimum(boxes[:, :2] + boxes[:, 2:] / 2, others[:, :2] + others[:, 2:] / 2)
    shared = (high - low).clamp(min=0).prod(dim=1)
    return shared / (boxes[:, 2:].prod(dim=1) + others[:, 2:].prod(dim=1) - shared)


def resized(pictures):
    """Resize the images to one of three sizes, the same for the whole batch."""
    size = random.choice(SIZES)
    return F.interpolate(pictures, (size, size), mode="bilinear", align_corners=False)


def compare(model, pictures, targets):
    """Return predictions and targets of the cells with objects, and of all cells."""
    said = model(pictures).permute(0, 2, 3, 1)  # (n, cells, cells, 8)
    cells = said.shape[1]
    place, kind, boxes = targets[:, 0].long(), targets[:, 1].long(), targets[:, 2:]
    column, row = (boxes[:, :2] * cells).long().unbind(dim=1)
    here = said[place, row, column]
    corner = torch.stack([column, row], dim=1) + here[:, :2].sigmoid()
    found = torch.cat([corner / cells, here[:, 2:4].sigmoid()], dim=1)
    is_object = torch.zeros_like(said[..., 4])
    is_object[place, row, column] = 1
    return overlap(found, boxes), (here[:, 5:], kind), (said[..., 4], is_object)


def loss(model, batch):
    pictures, targets = batch
    overlaps, classes, objects = compare(model, resized(pictures), targets)
    terms = {
        "box": (1 - overlaps).sum() / max(len(overlaps), 1),
        "class": F.cross_entropy(*classes),  # its denominator is the number of objects
        "object": F.binary_cross_entropy_with_logits(*objects),
    }
    return 2 * terms["box"] + terms["class"] + 4 * terms["object"], terms


def score(model, batch):
    overlaps, (logits, kind), _ = compare(model, *batch)
    right = (logits.argmax(dim=1) == kind).sum()
    return {
        "overlap": overlaps.sum(),
        "class": right,
        "objects": len(kind),
    }


def evaluate(model, batches):
    model.eval()
    totals = dict.fromkeys(("overlap", "class", "objects"), 0.0)
    with torch.no_grad():
        for batch in batches:
            for name, value in score(model, batch).items():
                totals[name] += float(value)
    model.train()
    return {name: total / totals["objects"] for name, total in totals.items()}


def main(epochs=8):
    torch.manual_seed(0)
    model = make_detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_pictures(320, seed=1), batch_size=32, shuffle=True, collate_fn=collate)
    held_out = make_pictures(100, seed=2)
    for epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            value, values = loss(model, batch)
            value.backward()
            optimizer.step()
        scores = evaluate(model, DataLoader(held_out, batch_size=50, collate_fn=collate))
        terms = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        print(
            f"epoch {epoch}: loss {value:.4f} ({terms}); held out: "
            f"overlap {scores['overlap']:.3f}, right class {scores['class']:.1%}"
        )
    return model


if __name__ == "__main__":
    main()
