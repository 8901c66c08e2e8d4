"""LBFGS with a closure, on all data at once: a recurrent network continues sine waves.

Changes from the plain loop:

- `trainer.gradient` replaces `zero_grad`, forward and `backward` in the closure: each
  call is distributed over the devices.
- The script owns the optimizer, so the update is inside `with trainer.modifying():` on every
  device, and `extra=` saves its state in checkpoints.

    python examples/ports/lbfgs.py
    onefold run --devices 2 examples/ports/lbfgs.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import onefold

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
    return F.mse_loss(model(waves[:, :-1]), waves[:, 1:], reduction="none").mean(dim=1)


def score(model, batch):
    """Return the error of the second half of a wave, given only the first half."""
    (waves,) = batch
    half = LENGTH // 2
    said = model(waves[:, :half], future=half - 1)[:, half - 1 :]
    return {"off": (said - waves[:, half:]).abs().mean(dim=1)}


def main(epochs=8, checkpoint=None):
    waves, held_out = (make_waves(32, seed=1),), torch.utils.data.TensorDataset(make_waves(16, 2))
    torch.manual_seed(0)
    model = Continues().double()
    trainer = onefold.Trainer(model, None, loss, shards=4, seed=0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    found = None if checkpoint is None else trainer.load(checkpoint, if_any=True)
    if found is not None:
        optimizer.load_state_dict(found.extra)
    while trainer.steps < epochs:  # each epoch is one step over all data
        with trainer.modifying():
            value = optimizer.step(lambda: trainer.gradient(waves).loss)
        scores = trainer.evaluate(score, held_out, batch_size=16)
        print(f"epoch {trainer.steps}: loss {value:.6f}, continued {scores['off']:.4f} off")
        if checkpoint is not None:
            trainer.save(checkpoint, extra=optimizer.state_dict())
    return trainer.fingerprint()


if __name__ == "__main__":
    main()
