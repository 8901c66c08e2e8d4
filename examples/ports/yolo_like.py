"""A one-stage detector in YOLO's manner: losses with several divisors, pictures of changing size.

What changes against the plain loop:

- Each term says what it is divided by: boxes by the objects of the whole batch, cells by its
  cells. A plain mean within a shard would weigh objects by how many their shard happens to have.
- `collate` joins the boxes of a shard's pictures with their places, as such scripts do; onefold
  never cuts what `collate` has made.
- The size of a batch follows from the number of its step, so all shards and devices have the same.

    python examples/ports/yolo_like.py
    onefold run --devices 2 examples/ports/yolo_like.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

CLASSES, CELL, SIZES = 3, 8, (32, 40, 48)


class Squares(torch.utils.data.Dataset):
    """Up to four squares, each of one of three colours, on noise.

    An item is a picture (3, 48, 48), and boxes (objects, 5): class, centre, width and height, as
    parts of the picture. Some pictures are empty.
    """

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.items = [self.draw(generator) for _ in range(size)]

    @staticmethod
    def draw(generator):
        picture = 0.3 * torch.rand(3, 48, 48, generator=generator)
        boxes = []
        for _ in range(int(torch.randint(5, (), generator=generator))):
            kind = int(torch.randint(CLASSES, (), generator=generator))
            edge = int(torch.randint(8, 17, (), generator=generator))
            x, y = torch.randint(48 - edge, (2,), generator=generator).tolist()
            picture[:, y : y + edge, x : x + edge] = 0.1
            picture[kind, y : y + edge, x : x + edge] = 0.9
            boxes.append(
                [kind, *((place + edge / 2) / 48 for place in (x, y)), edge / 48, edge / 48]
            )
        return picture, torch.tensor(boxes).view(-1, 5)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(samples):
    """Pictures (n, 3, 48, 48), and all boxes with the place of their picture: (objects, 6)."""
    boxes = [F.pad(boxes, (1, 0), value=place) for place, (_, boxes) in enumerate(samples)]
    return torch.stack([picture for picture, _ in samples]), torch.cat(boxes)


class Detector(nn.Module):
    """For each cell of 8 x 8 pixels: a box (4), whether there is an object, and its class."""

    def __init__(self, width=32):
        super().__init__()
        self.size = SIZES[-1]
        layers, before = [], 3
        for after in (width // 2, width, width):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
            before = after
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 5 + CLASSES, 1))

    def forward(self, pictures):
        if self.training:
            size = (self.size, self.size)
            pictures = F.interpolate(pictures, size, mode="bilinear", align_corners=False)
        return self.layers(pictures).permute(0, 2, 3, 1)  # (n, cells, cells, 8)


def overlap(boxes, others):
    """Intersection over union, box by box, of (objects, 4) each: centre, width and height."""
    low = torch.maximum(boxes[:, :2] - boxes[:, 2:] / 2, others[:, :2] - others[:, 2:] / 2)
    high = torch.minimum(boxes[:, :2] + boxes[:, 2:] / 2, others[:, :2] + others[:, 2:] / 2)
    shared = (high - low).clamp(min=0).prod(dim=1)
    return shared / (boxes[:, 2:].prod(dim=1) + others[:, 2:].prod(dim=1) - shared)


def compare(model, batch):
    """What is said of the cells with objects and what is true, and the same of all cells."""
    pictures, targets = batch
    said = model(pictures)
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
    overlaps, classes, objects = compare(model, batch)
    boxes = onefold.Mean((1 - overlaps).sum(), len(overlaps))
    kinds = onefold.losses.cross_entropy(*classes)  # knows its divisor: the objects
    return 2 * boxes + kinds + 4 * onefold.losses.binary_cross_entropy_with_logits(*objects)


def score(model, batch):
    overlaps, (logits, kind), _ = compare(model, batch)
    right = (logits.argmax(dim=1) == kind).sum()
    return {
        "overlap": onefold.Mean(overlaps.sum(), len(overlaps)),
        "class": onefold.Mean(right, len(kind)),
    }


def main(epochs=8):
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0)
    loader = trainer.loader(Squares(320, seed=1), batch_size=32, shuffle=True, collate=collate)
    held_out = Squares(100, seed=2)
    for epoch in trainer.epochs(epochs):
        step = None
        for batch in loader:
            model.size = SIZES[trainer.steps % len(SIZES)]
            step = trainer.step(batch)
        scores = trainer.evaluate(score, held_out, batch_size=50, collate=collate)
        if step is not None:
            print(
                f"epoch {epoch}: loss {step.loss:.4f}, overlap {scores['overlap']:.3f}, "
                f"right class {scores['class']:.1%}"
            )
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
