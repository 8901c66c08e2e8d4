"""The training workloads of the benchmarks: a model, its optimizer and batches of random data.

Every side of a benchmark builds its workload here, so all of them train the same model from the
same start, with the same optimizer settings, on the same samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import nn

from catalog import Precision
from onefold_jobs.models import DenseCNN, LeNet, UNet, resnet18, resnet50
from small_models import Ladder, new_mlp
from token_models import GPT, TransformerClassifier

__all__ = ["LARGE", "WORKLOADS", "Batch", "Workload"]

Batch = tuple[torch.Tensor, torch.Tensor]

CPU = torch.device("cpu")
SEED = 0
CLASSES = 10
BATCHES = 4
"""Number of different batches that a side cycles through."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the fused Adam of every side."""
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the fused SGD of every side."""
    return torch.optim.SGD(model.parameters(), lr=0.01, fused=True)


def sgd_with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return the fused SGD of every side, with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how to train it."""

    title: str
    """Name in the table."""
    new_model: Callable[[], nn.Module]
    """Builds the model, with PyTorch's default generator."""
    new_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Builds the optimizer for the parameters of a model."""
    batch_size: int
    """Global batch size."""
    new_inputs: Callable[[int], torch.Tensor]
    """Draws the inputs of several samples."""
    new_labels: Callable[[int], torch.Tensor] = lambda count: torch.randint(CLASSES, (count,))
    """Draws the labels of several samples."""
    precision: Precision = "fp32"
    """Precision of all sides."""

    def build(self, device: torch.device = CPU) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model with its fixed initial weights on `device`, and its optimizer."""
        torch.manual_seed(SEED)
        model = self.new_model().to(device)
        return model, self.new_optimizer(model)

    def batches(self, device: torch.device = CPU) -> list[Batch]:
        """Return the same few global batches each time, on `device`."""
        torch.manual_seed(SEED)
        return [self._draw(device) for _ in range(BATCHES)]

    def scaled(self, factor: float) -> Self:
        """Return the same workload with `factor` times the samples per batch, an even number."""
        return replace(self, batch_size=max(1, round(self.batch_size * factor / 2)) * 2)

    def _draw(self, device: torch.device) -> Batch:
        labels = self.new_labels(self.batch_size)
        return self.new_inputs(self.batch_size).to(device), labels.to(device)


def images(count: int) -> torch.Tensor:
    """Draw grayscale images (count, 1, 28, 28) float32."""
    return torch.randn(count, 1, 28, 28)


def features(width: int, count: int) -> torch.Tensor:
    """Draw features (count, width) float32."""
    return torch.randn(count, width)


def tokens(count: int) -> torch.Tensor:
    """Draw token sequences (count, 64) int64."""
    return torch.randint(1000, (count, 64))


def pictures(pixels: int, count: int) -> torch.Tensor:
    """Draw color images (count, 3, pixels, pixels) float32."""
    return torch.randn(count, 3, pixels, pixels)


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
    "mlp": Workload(
        title="perceptron 64-128-128-10, SGD, batch 64",
        new_model=new_mlp,
        new_optimizer=sgd,
        batch_size=64,
        new_inputs=partial(features, 64),
    ),
    "thousand": Workload(
        title="1,000 small parameters, Adam, batch 64",
        new_model=Ladder,
        new_optimizer=adam,
        batch_size=64,
        new_inputs=partial(features, 16),
    ),
}
"""The workloads by name, in the order of the table."""
LARGE = {
    "resnet50": Workload(
        title="ResNet-50 on 224x224, SGD with momentum, batch 128",
        new_model=partial(resnet50, num_classes=1000, small_images=False),
        new_optimizer=sgd_with_momentum,
        batch_size=128,
        new_inputs=partial(pictures, 224),
    ),
    "gpt2": Workload(
        title="GPT-2 124M, Adam, batch 16 x 1,024 tokens",
        new_model=GPT,
        new_optimizer=adam,
        batch_size=16,
        new_inputs=lambda count: torch.randint(50_304, (count, 1024)),
        new_labels=lambda count: torch.randint(50_304, (count, 1024)),
    ),
    "unet": Workload(
        title="U-Net with ResNet-34 on 256x256, Adam, batch 32",
        new_model=partial(UNet, out_channels=CLASSES),
        new_optimizer=adam,
        batch_size=32,
        new_inputs=partial(pictures, 256),
        new_labels=lambda count: torch.randint(CLASSES, (count, 256, 256)),
    ),
}
"""Workloads that fill a GPU."""
