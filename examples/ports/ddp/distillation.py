"""The script of ../distillation.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

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


def evaluate(model, batches, device):
    model.eval()
    totals, samples = {}, torch.zeros((), device=device)
    with torch.no_grad():
        for batch in batches:
            batch = [each.to(device) for each in batch]
            for name, values in score(model, batch).items():
                totals[name] = totals.get(name, 0.0) + values.float().sum()
            samples += len(values)
    model.train()
    for total in (*totals.values(), samples):
        dist.all_reduce(total)
    return {name: float(total / samples) for name, total in totals.items()}


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


def main(epochs=10):
    rank, world, device = set_up()
    train_set, held_out = make_points(800, seed=1), make_points(300, seed=2)
    torch.manual_seed(rank)  # different noise on each rank; DDP broadcasts rank 0's weights
    models = {"teacher": make_network(96), "student": make_network(16)}
    models = {name: DistributedDataParallel(model.to(device)) for name, model in models.items()}
    optimizers = {n: torch.optim.Adam(m.parameters(), lr=5e-3) for n, m in models.items()}
    losses = {"teacher": teacher_loss, "student": student_loss}
    sampler = DistributedSampler(train_set)
    loader = torch.utils.data.DataLoader(train_set, batch_size=40 // world, sampler=sampler)
    shard = torch.utils.data.Subset(held_out, range(rank, len(held_out), world))
    held_loader = torch.utils.data.DataLoader(shard, batch_size=100)
    for epoch in range(epochs):
        name = "teacher" if epoch < epochs // 2 else "student"
        models["teacher"].train(name == "teacher")
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = [each.to(device) for each in batch]
            optimizers[name].zero_grad()
            value, values = losses[name](models, batch)
            value.backward()
            optimizers[name].step()
        scores = evaluate(models[name].module, held_loader, device)
        value = mean_over_ranks(value)
        means = {key: mean_over_ranks(each) for key, each in values.items()}
        values = "".join(f", {key} {each:.3f}" for key, each in means.items())
        share = scores["accuracy"]
        if rank == 0:
            print(f"epoch {epoch}: {name}, loss {value:.4f}{values}, accuracy {share:.1%}")
    dist.barrier()
    dist.destroy_process_group()
    return models


if __name__ == "__main__":
    main()
