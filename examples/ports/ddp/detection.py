"""The script of ../detection.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

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


def moved(batch, device):
    pictures, targets = batch
    targets = [{name: each.to(device) for name, each in t.items()} for t in targets]
    return [picture.to(device) for picture in pictures], targets


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
        # DDP averages over the ranks, so divide by a rank's mean number of boxes.
        boxes_in_all = torch.tensor(len(wanted), device=logits.device)
        dist.all_reduce(boxes_in_all)
        divisor = boxes_in_all / dist.get_world_size()
        objectness = F.binary_cross_entropy_with_logits(logits, is_object, reduction="sum")
        return {
            "box": off.sum() / (4 * divisor),
            "objectness": objectness / divisor,
        }

    @staticmethod
    def found(boxes, scores):
        kept = scores > 0.5
        return {"boxes": boxes[kept], "scores": scores[kept]}


def loss(model, batch):
    losses = model(*batch)
    return losses["box"] + losses["objectness"], losses


@torch.no_grad()
def predictions(model, batches, device):
    model.eval()
    found = [each for batch in batches for each in model(moved(batch, device)[0])]
    model.train()
    return found


def recall(found, dataset):
    """Return the fraction of true boxes that a predicted box overlaps by half."""
    hits = boxes = 0
    for each, (_, target) in zip(found, dataset, strict=True):
        true, said = target["boxes"][:, None].to(each["boxes"]), each["boxes"][None]
        low, high = torch.maximum(true, said)[..., :2], torch.minimum(true, said)[..., 2:]
        shared = (high - low).clamp(min=0).prod(dim=-1)
        areas = [(b[..., 2:] - b[..., :2]).prod(dim=-1) for b in (true, said)]
        hits += int((shared / (sum(areas) - shared) > 0.5).any(dim=1).sum())
        boxes += len(true)
    counts = torch.tensor([hits, boxes], device=found[0]["boxes"].device)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


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
    train_set, held_out = make_pictures(320, seed=1), make_pictures(80, seed=2)
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    model = Detector().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32 // world, sampler=sampler, collate_fn=collate)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    dev = DataLoader(shard, batch_size=40, collate_fn=collate)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            value, values = loss(ddp, moved(batch, device))
            value.backward()
            optimizer.step()
            scheduler.step()
        found = predictions(model, dev, device)
        value, share = mean_over_ranks(value), recall(found, shard)
        values = {name: mean_over_ranks(each) for name, each in values.items()}
        values = ", ".join(f"{name} {each:.3f}" for name, each in values.items())
        if rank == 0:
            print(f"epoch {epoch}: loss {value:.4f} ({values}), {share:.1%}")
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
