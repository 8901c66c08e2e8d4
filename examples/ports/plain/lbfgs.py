"""The plain loop of ../lbfgs.py, on one device."""

import os

import torch
import torch.nn.functional as F
from torch import nn

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


def main(epochs=8, checkpoint=None):
    waves, held_out = (make_waves(32, seed=1),), torch.utils.data.TensorDataset(make_waves(16, 2))
    torch.manual_seed(0)
    model = Continues().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    first = 0
    if checkpoint is not None and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    def closure():
        optimizer.zero_grad()
        value = loss(model, waves)
        value.backward()
        return value

    for epoch in range(first, epochs):
        value = optimizer.step(closure)
        with torch.no_grad():
            scores = score(model, held_out.tensors)
        print(f"epoch {epoch + 1}: loss {value:.6f}, continued {scores['off']:.4f} off")
        if checkpoint is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, checkpoint)
    return model


if __name__ == "__main__":
    main()
