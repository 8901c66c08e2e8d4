"""torchvision's detection loop: images of different sizes, and a dict of targets for each.

Changes from the plain loop:

- The batch is the result of `collate`: a tuple of images and a tuple of dicts. The trainer
  moves all tensors in it to the device of the shard.
- The model returns a dict of losses, each with its own denominator; their sum is trained, and each
  loss is logged.
- `trainer.predict` returns boxes and scores of each image, in the order of the dataset, however
  many there are. A metric such as COCO's does not have to gather anything.

    python examples/ports/detection.py
    onefold run --devices 2 examples/ports/detection.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

CELL, LARGEST = 8, 48


def draw(generator):
    """Make an image of 32 to 48 pixels with one to three bright rectangles, and their boxes."""
    height, width = (8 * torch.randint(4, 7, (2,), generator=generator)).tolist()
    picture, boxes = 0.3 * torch.rand(1, height, width, generator=generator), []
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        tall, wide = torch.randint(8, 15, (2,), generator=generator).tolist()
        y = int(torch.randint(height - tall, (), generator=generator))
        x = int(torch.randint(width - wide, (), generator=generator))
        picture[:, y : y + tall, x : x + wide] = 0.9
        boxes.append([x, y, x + wide, y + tall])
    return picture, {"boxes": torch.tensor(boxes, dtype=torch.float32)}


def make_pictures(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return [draw(generator) for _ in range(size)]


def collate(samples):
    return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    """Returns a dict of losses in training, like torchvision's models; else a dict per image."""

    def __init__(self, width=32):
        super().__init__()
        layers, before = [], 1
        for after in (width // 2, width, width):
            layers += [nn.Conv2d(before, after, 3, 2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
            before = after
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 5, 1))

    def forward(self, pictures, targets=None):
        # Pad all images to one size, so that an image's result does not depend on the others.
        padded = [F.pad(p, (0, LARGEST - p.shape[2], 0, LARGEST - p.shape[1])) for p in pictures]
        said = self.layers(torch.stack(padded)).permute(0, 2, 3, 1)  # (n, cells, cells, 5)
        row, column = torch.meshgrid(*(torch.arange(s) for s in said.shape[1:3]), indexing="ij")
        middle = (torch.stack([column, row], dim=-1) + 0.5).to(said) * CELL
        reach = F.softplus(said[..., :4]) * CELL  # from the center of the cell to the four sides
        boxes = torch.cat([middle - reach[..., :2], middle + reach[..., 2:]], dim=-1)
        if targets is None:
            return [self.found(*each) for each in zip(boxes, said[..., 4].sigmoid(), strict=True)]
        return self.losses(boxes, said[..., 4], targets)

    @staticmethod
    def losses(boxes, logits, targets):
        numbers = torch.cat([torch.full((len(t["boxes"]),), n) for n, t in enumerate(targets)])
        wanted = torch.cat([t["boxes"] for t in targets])
        column, row = ((wanted[:, :2] + wanted[:, 2:]) / 2 / CELL).long().unbind(dim=1)
        is_object = torch.zeros_like(logits)
        is_object[numbers, row, column] = 1
        off = (boxes[numbers, row, column] - wanted).abs() / CELL
        objectness = F.binary_cross_entropy_with_logits(logits, is_object, reduction="sum")
        return {
            "box": onefold.Mean(off.sum(), off.numel()),
            "objectness": onefold.Mean(objectness, len(wanted)),
        }

    @staticmethod
    def found(boxes, scores):
        kept = scores > 0.5
        return {"boxes": boxes[kept], "scores": scores[kept]}


def loss(model, batch):
    losses = model(*batch)
    return losses["box"] + losses["objectness"], losses


def predictions(model, batch):
    pictures, _ = batch
    return {"found": model(pictures)}


def recall(found, dataset):
    """Return the fraction of true boxes that a predicted box overlaps by half."""
    hits = boxes = 0
    for each, (_, target) in zip(found, dataset, strict=True):
        true, said = target["boxes"][:, None], each["boxes"][None]
        low, high = torch.maximum(true, said)[..., :2], torch.minimum(true, said)[..., 2:]
        shared = (high - low).clamp(min=0).prod(dim=-1)
        areas = [(b[..., 2:] - b[..., :2]).prod(dim=-1) for b in (true, said)]
        hits += int((shared / (sum(areas) - shared) > 0.5).any(dim=1).sum())
        boxes += len(true)
    return hits / boxes


def main(epochs=8):
    train_set, held_out = make_pictures(320, seed=1), make_pictures(80, seed=2)
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    trainer = onefold.Trainer(model, optimizer, loss, shards=4, seed=0, scheduler=scheduler)
    loader = trainer.loader(train_set, batch_size=32, shuffle=True, collate=collate)
    for epoch in trainer.epochs(epochs):
        step = None
        for batch in loader:
            step = trainer.step(batch)
        found = trainer.predict(predictions, held_out, batch_size=40, collate=collate)["found"]
        if step is not None:
            values = ", ".join(f"{name} {value:.3f}" for name, value in step.values.items())
            print(f"epoch {epoch}: loss {step.loss:.4f} ({values}), {recall(found, held_out):.1%}")
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
