"""The script of ../lbfgs.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LENGTH = 24


def make_waves(size, seed):
    """Make sine waves with random phases: (size, LENGTH) float64."""
    generator = torch.Generator().manual_seed(seed)
    starts = 6.283 * torch.rand(size, 1, generator=generator, dtype=torch.float64)
    return torch.sin(starts + torch.arange(LENGTH, dtype=torch.float64) / 4)


class Continues(nn.Module):
    """Predicts the next value of each wave (n, time), and ``future`` more."""

    def __init__(self, width=16):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, width), nn.Linear(width, 1)

    def forward(self, waves, future=0):
        said, state = [], None
        for value in waves.unsqueeze(2).unbind(dim=1):
            state = self.cell(value, state)
            said.append(self.head(state[0]))
        for _ in range(future):
            state = self.cell(said[-1], state)
            said.append(self.head(state[0]))
        return torch.cat(said, dim=1)


def loss(model, batch):
    (waves,) = batch
    return F.mse_loss(model(waves[:, :-1]), waves[:, 1:])


def score(model, batch):
    """Return the error of the second half of a wave, given only the first half."""
    (waves,) = batch
    half = LENGTH // 2
    said = model(waves[:, :half], future=half - 1)[:, half - 1 :]
    return {"off": (said - waves[:, half:]).abs().mean()}


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


def main(epochs=8, checkpoint=None):
    rank, world, device = set_up()
    waves = (make_waves(32, seed=1)[rank::world].to(device),)
    held_out = (make_waves(16, seed=2)[rank::world].to(device),)
    torch.manual_seed(0)
    model = Continues().double().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    first = 0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    def closure():
        optimizer.zero_grad()
        value = loss(ddp, waves)
        value.backward()
        return mean_over_ranks(value)  # LBFGS branches on it, so it must be equal on all ranks

    for epoch in range(first, epochs):
        value = optimizer.step(closure)
        with torch.no_grad():
            off = mean_over_ranks(score(model, held_out)["off"])
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {value:.6f}, continued {off:.4f} off")
        if checkpoint is not None and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
