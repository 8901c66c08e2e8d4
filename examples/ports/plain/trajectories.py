"""The plain loop of ../trajectories.py, on one device."""

import torch
from torch import nn

TIMES, PATHS, BATCH, WINDOW = 60, 40, 24, 10


def make_paths():
    """Make spirals: observation times (TIMES,) and positions (TIMES, PATHS, 2), float32."""
    times = torch.linspace(0, 4, TIMES)
    start = torch.randn(PATHS, 2, generator=torch.Generator().manual_seed(1))
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    grown = torch.linalg.matrix_exp(times.view(-1, 1, 1) * turn)
    return times, torch.einsum("tij,pj->tpi", grown, start)


class Field(nn.Module):
    """Velocity at a position: (n, 2) to (n, 2)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, place):
        return self.layers(place)


def solved(field, start, times):
    """Integrate positions (n, 2) over times (t,) with the Runge-Kutta method: (t, n, 2)."""
    found = [start]
    for step in times.diff():
        here = found[-1]
        first = field(here)
        second = field(here + step / 2 * first)
        third = field(here + step / 2 * second)
        fourth = field(here + step * third)
        found.append(here + step / 6 * (first + 2 * second + 2 * third + fourth))
    return torch.stack(found)


def loss(field, batch):
    start, times, places = batch
    return (solved(field, start, times) - places).abs().mean()


def draw(times, places):
    """Draw segments of paths: starts (n, 2), times (t,) and positions (t, n, 2)."""
    begin = torch.randint(TIMES - WINDOW, (BATCH,))
    path = torch.randint(PATHS, (BATCH,))
    rows = begin + torch.arange(WINDOW).unsqueeze(1)
    seen = places[rows, path]
    return seen[0], times[:WINDOW], seen


def main(steps=60):
    torch.manual_seed(0)
    times, places = make_paths()
    field = Field()
    optimizer = torch.optim.RMSprop(field.parameters(), lr=3e-3)
    for number in range(steps):
        optimizer.zero_grad()
        total = loss(field, draw(times, places))
        total.backward()
        optimizer.step()
        if number % 20 == 0:
            print(f"step {number}: loss {total:.4f}")
    return field


if __name__ == "__main__":
    main()
