"""Reinforcement learning: policy gradients keep a pole upright on a cart.

    onefold run --devices 2 examples/gallery/reinforce.py

The physics are those of Gymnasium's CartPole. Every device plays the same episodes, and the
devices share the step. Writes reinforce.png: how long the pole stays up.
"""

import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import onefold

EPISODES, LONGEST, DISCOUNT = 16, 200, 0.99


def push(state, right):
    """Push all carts for a fiftieth of a second; state (n, 4): place, speed, angle, turn."""
    place, speed, angle, turn = state.unbind(dim=1)
    force = 20.0 * right - 10.0
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + 0.05 * turn.square() * sine) / 1.1
    twist = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    pull = pushed - 0.05 * twist * cosine / 1.1
    moved = (place + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * twist)
    return torch.stack(moved, dim=1)


@torch.no_grad()
def play(policy, number):
    """Play all episodes; return states (n, 4), actions (n,), returns (n,), and the mean length."""
    generator, device = torch.Generator().manual_seed(number), policy[0].weight.device
    state = 0.1 * torch.rand(EPISODES, 4, generator=generator) - 0.05
    up = torch.ones(EPISODES, dtype=torch.bool)
    states, actions, played = [], [], []
    while up.any() and len(states) < LONGEST:
        chances = policy(state.to(device)).softmax(dim=1).cpu()
        action = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        states.append(state)
        actions.append(action)
        played.append(up)
        state = push(state, action)
        up = up & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < math.radians(12))
    returns, later = [], torch.zeros(EPISODES)
    for moment in reversed(played):  # one point for each push
        later = moment * (1 + DISCOUNT * later)
        returns.insert(0, later)
    alive = torch.stack(played)
    episodes = (torch.stack(each)[alive] for each in (states, actions, returns))
    return *episodes, float(alive.sum() / EPISODES)


def loss(policy, batch):
    states, actions, advantages = batch
    return advantages * F.cross_entropy(policy(states), actions, reduction="none")


def draw(lengths):
    figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    axis.plot(range(1, len(lengths) + 1), lengths)
    axis.set(xlabel="step", ylabel="pushes until the pole falls", ylim=(0, LONGEST + 5))
    axis.grid(alpha=0.3)
    figure.savefig("reinforce.png")


def main(steps=70):
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    trainer = onefold.Trainer(policy, optimizer, loss, shards=4, seed=0, threads=1, clip_norm=1.0)
    lengths = []
    while trainer.steps < steps:
        states, actions, returns, length = play(trainer.model, trainer.steps)
        trainer.step((states, actions, (returns - returns.mean()) / (returns.std() + 1e-6)))
        lengths.append(length)
    fingerprint = trainer.fingerprint()
    if trainer.is_lead:
        print(f"up for {lengths[0]:.0f} of {LONGEST} pushes at first, {lengths[-1]:.0f} at the end")
        print(f"fingerprint {fingerprint}")
        draw(lengths)
    return fingerprint


if __name__ == "__main__":
    main()
