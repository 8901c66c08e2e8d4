"""The script of ../reinforce.py with DistributedDataParallel, for torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPISODES = 16 // int(os.environ.get("WORLD_SIZE", "1"))  # on this rank
LONGEST, DISCOUNT = 60, 0.97


class Balance:
    """Many poles at once, each with (angle, speed), pushed to the left (0) or right (1)."""

    def __init__(self, generator):
        self.generator = generator
        self.state = 0.2 * torch.randn(EPISODES, 2, generator=generator)

    def push(self, actions):
        angle, speed = self.state.unbind(dim=1)
        wind = 0.05 * torch.randn(EPISODES, generator=self.generator)
        speed = speed + 0.3 * angle + 0.15 * (2 * actions - 1) + wind
        self.state = torch.stack([angle + 0.2 * speed, speed], dim=1)
        return self.state[:, 0].abs() < 1  # still up


@torch.no_grad()
def play(policy, step, device):
    """Play all episodes to the end; states (n, 2), actions (n,), returns (n,), mean length."""
    seed = 7000 + step * dist.get_world_size() + dist.get_rank()  # different episodes on each rank
    generator = torch.Generator().manual_seed(seed)
    game = Balance(generator)
    up = torch.ones(EPISODES, dtype=torch.bool)
    states, actions, alive = [], [], []
    while up.any() and len(states) < LONGEST:
        chances = policy(game.state.to(device)).softmax(dim=1).cpu()
        states.append(game.state)
        actions.append(torch.multinomial(chances, 1, generator=generator).squeeze(1))
        alive.append(up)
        up = up & game.push(actions[-1])
    played = torch.stack(alive)
    returns, later = [], torch.zeros(EPISODES)
    for moment in reversed(played.float()):  # one point per push
        later = moment * (1 + DISCOUNT * later)
        returns.insert(0, later)
    episodes = torch.stack(states)[played], torch.stack(actions)[played]
    found = *episodes, torch.stack(returns)[played], played.sum() / EPISODES
    return [each.to(device) for each in found]


@torch.no_grad()
def normalized(returns):
    """Return the returns, normalized over all ranks, and their number on all ranks."""
    sums = torch.stack([torch.ones_like(returns), returns, returns.square()]).sum(dim=1)
    dist.all_reduce(sums)
    count, total, squares = sums
    mean = total / count
    deviation = ((squares - count * mean.square()) / (count - 1)).sqrt()
    return (returns - mean) / (deviation + 1e-6), count


def loss(policy, batch):
    states, actions, advantages, count = batch
    logits = policy(states)
    entropy = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)
    losses = advantages * F.cross_entropy(logits, actions, reduction="none")
    # DDP averages over ranks, which have unequal numbers of pushes.
    return (losses - 0.01 * entropy).sum() * dist.get_world_size() / count


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


def main(steps=60, checkpoint=None):
    rank, _, device = set_up()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    ddp = DistributedDataParallel(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    first = 0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, map_location=device)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, steps):
        states, actions, returns, length = play(policy, step, device)
        advantages, count = normalized(returns)
        optimizer.zero_grad()
        value = loss(ddp, (states, actions, advantages, count))
        value.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 10 == 0:
            length = mean_over_ranks(length)
            if rank == 0:
                print(f"step {step + 1}: {count:.0f} pushes, {length:.1f} in an episode")
            if checkpoint is not None and rank == 0:
                state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1}, checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    return policy


if __name__ == "__main__":
    main()
