"""The script of ../yolo_like.py with DistributedDataParallel, for torchrun."""

import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

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


def objects_of_a_rank(targets):
    """Return the mean number of objects per rank, because DDP averages the ranks' gradients."""
    count = torch.tensor(float(len(targets)), device=targets.device)
    dist.all_reduce(count)
    return count.clamp(min=1) / dist.get_world_size()


def loss(model, batch):
    pictures, targets = batch
    divisor = objects_of_a_rank(targets)
    overlaps, classes, objects = compare(model, resized(pictures), targets)
    terms = {
        "box": (1 - overlaps).sum() / divisor,
        "class": F.cross_entropy(*classes, reduction="sum") / divisor,
        "object": F.binary_cross_entropy_with_logits(*objects),  # equal cells on all ranks
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


def evaluate(model, batches, device):
    model.eval()
    totals = {name: torch.zeros((), device=device) for name in ("overlap", "class", "objects")}
    with torch.no_grad():
        for batch in batches:
            batch = [each.to(device) for each in batch]
            for name, value in score(model, batch).items():
                totals[name] += value
    model.train()
    for total in totals.values():
        dist.all_reduce(total)
    return {name: float(total / totals["objects"]) for name, total in totals.items()}


def set_up():
    """Join torchrun's process group; return rank, world size and device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main(epochs=8):
    rank, world, device = set_up()
    random.seed(0)  # the same sizes on all ranks
    torch.manual_seed(0)
    model = make_detector().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_set, held_out = make_pictures(320, seed=1), make_pictures(100, seed=2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32 // world, sampler=sampler, collate_fn=collate)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    dev = DataLoader(shard, batch_size=50, collate_fn=collate)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = [each.to(device) for each in batch]
            optimizer.zero_grad()
            value, values = loss(ddp, batch)
            value.backward()
            optimizer.step()
        scores = evaluate(model, dev, device)
        value = mean_over_ranks(value)
        values = {name: mean_over_ranks(each) for name, each in values.items()}
        terms = ", ".join(f"{name} {each:.3f}" for name, each in values.items())
        if rank == 0:
            print(
                f"epoch {epoch}: loss {value:.4f} ({terms}); held out: "
                f"overlap {scores['overlap']:.3f}, right class {scores['class']:.1%}"
            )
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
