"""The training workloads that are measured: a model, its optimizer and batches of random data.

Every side of a benchmark builds its workload here, so all of them train the same model from the
same start, with the same optimizer settings, on the same samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from onefold.models import DenseCNN, LeNet, TransformerClassifier, resnet18

__all__ = ["WORKLOADS", "Batch", "Workload"]

Batch = tuple[torch.Tensor, torch.Tensor]

SEED = 0
CLASSES = 10
BATCHES = 4
"""How many different batches a side goes round in."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The fused Adam that every side uses."""
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The fused SGD that every side uses."""
    return torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def sgd_with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """The fused SGD that every side uses, with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One thing to train, and how."""

    title: str
    """What the table calls it."""
    new_model: Callable[[], nn.Module]
    """Builds the model with PyTorch's default generator."""
    new_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Builds the optimizer over the parameters of a model."""
    batch_size: int
    """Samples in a global batch."""
    new_inputs: Callable[[int], torch.Tensor]
    """Draws the inputs of so many samples."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model at its fixed start, and its optimizer."""
        torch.manual_seed(SEED)
        model = self.new_model()
        return model, self.new_optimizer(model)

    def batches(self) -> list[Batch]:
        """The same few global batches each time."""
        torch.manual_seed(SEED)
        return [self._draw() for _ in range(BATCHES)]

    def _draw(self) -> Batch:
        labels = torch.randint(CLASSES, (self.batch_size,))
        return self.new_inputs(self.batch_size), labels


def images(count: int) -> torch.Tensor:
    """Grey images (count, 1, 28, 28) float32."""
    return torch.randn(count, 1, 28, 28)


def tokens(count: int) -> torch.Tensor:
    """Sequences of tokens (count, 64) int64."""
    return torch.randint(1000, (count, 64))


WORKLOADS = {
    "cnn-adam": Workload(
        title="26M-parameter CNN, Adam, batch 128",
        new_model=DenseCNN,
        new_optimizer=adam,
        batch_size=128,
        new_inputs=images,
    ),
    "cnn-sgd": Workload(
        title="26M-parameter CNN, SGD with momentum, batch 128",
        new_model=DenseCNN,
        new_optimizer=sgd_with_momentum,
        batch_size=128,
        new_inputs=images,
    ),
    "transformer": Workload(
        title="transformer 4x256, Adam, batch 64",
        new_model=TransformerClassifier,
        new_optimizer=adam,
        batch_size=64,
        new_inputs=tokens,
    ),
    "resnet18": Workload(
        title="ResNet-18 on 28x28, SGD, batch 64",
        new_model=lambda: resnet18(in_channels=1),
        new_optimizer=sgd,
        batch_size=64,
        new_inputs=images,
    ),
    "lenet": Workload(
        title="LeNet, SGD, batch 256",
        new_model=LeNet,
        new_optimizer=sgd,
        batch_size=256,
        new_inputs=images,
    ),
}
"""The workloads by name, in the order of the table."""
