"""Policy gradients: episodes in a custom environment, and batches of different sizes.

Changes from the plain loop:

- Every device plays the same episodes, with a generator that is seeded by the step number,
  and `trainer.step` splits the whole batch. Only learning is distributed, playing is not.
- Returns are normalized before the step over all samples, so shards stay independent.
- Batches whose size changes from step to step need no change.

    python examples/ports/reinforce.py
    onefold run --devices 2 examples/ports/reinforce.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

EPISODES, LONGEST, DISCOUNT = 16, 60, 0.97


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
def play(policy, step):
    """Play all episodes to the end; states (n, 2), actions (n,), returns (n,), mean length."""
    generator = torch.Generator().manual_seed(7000 + step)
    game = Balance(generator)
    up = torch.ones(EPISODES, dtype=torch.bool)
    states, actions, alive = [], [], []
    while up.any() and len(states) < LONGEST:
        chances = policy(game.state).softmax(dim=1)
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
    return *episodes, torch.stack(returns)[played], played.sum() / EPISODES


def loss(policy, batch):
    states, actions, advantages = batch
    logits = policy(states)
    entropy = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)
    return advantages * F.cross_entropy(logits, actions, reduction="none") - 0.01 * entropy


def main(steps=60, checkpoint=None):
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    trainer = onefold.Trainer(policy, optimizer, loss, shards=4, seed=0, clip_norm=1.0)
    if checkpoint is not None:
        trainer.load(checkpoint, if_any=True)
    while trainer.steps < steps:
        states, actions, returns, length = play(trainer.model, trainer.steps)
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        step = trainer.step((states, actions, advantages))
        if step.number % 10 == 0:
            print(f"step {step.number}: {step.samples} pushes, {length:.1f} in an episode")
            if checkpoint is not None:
                trainer.save(checkpoint)
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
