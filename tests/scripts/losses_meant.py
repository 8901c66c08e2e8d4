"""A script for ``onefold verify``: a trainer that is right, and two ways of being wrong.

The bits agree on any number of devices; what differs is the number that was meant.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold


class OneSeries(nn.Module):
    """Takes time first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(8, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.layer(x)[0])


def right(model: nn.Module, batch: Any) -> object:
    weight = torch.tensor([1.0, 3.0, 0.2])
    return onefold.losses.cross_entropy(model(batch[0]), batch[1], weight=weight, ignore_index=2)


def summed(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def along_time(model: nn.Module, batch: Any) -> object:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def main() -> None:
    torch.manual_seed(0)
    kinds = [
        (loss, nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)))
        for loss in (right, summed)
    ]
    first, second, timed = (
        onefold.Trainer(model, torch.optim.Adam(model.parameters()), loss, shards=3)
        for loss, model in (*kinds, (along_time, OneSeries()))
    )
    data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.arange(40) % 3)
    loaders = [each.loader(data, batch_size=13, shuffle=True) for each in (first, second)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        for one, other in zip(*loaders, strict=True):
            first.step(one)
            second.step(other)
            x = torch.randn(9, 4, 8, generator=generator)  # time, samples, values
            timed.step((x, torch.randint(0, 3, (9, 4), generator=generator)))
    raise AssertionError("verify ends the script after the steps that it was asked for")


if __name__ == "__main__":
    main()
