"""A model with all that averages and gradients must keep apart, its data, and trainers for it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from tests.small import Batch


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer, a layer of several segments, and odd buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.wide = nn.Linear(20, 1000)
        self.out = nn.Linear(1000, 4)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.frozen(self.norm(inputs))).relu()
        return self.out(F.dropout(hidden, 0.1, self.training))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def batch_of(step: int, samples: int = 14) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(samples, 20, generator=generator)
    return inputs, torch.randint(0, 4, (samples,), generator=generator)


def data() -> TensorDataset:
    return TensorDataset(*batch_of(99, samples=30))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def trainer_of(
    devices: int | None = 1,
    *,
    model: nn.Module | None = None,
    function: Callable[..., object] = loss,
    updates: bool = True,
    **options: Any,
) -> Any:
    """With None for devices, a process finds its own; without updates, the script makes them."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2) if updates else None
    named = ["cpu"] * devices if devices else None
    options = {"shards": 4, "threads": 1, "devices": named, **options}
    return onefold.Trainer(model, optimizer, function, **options)
