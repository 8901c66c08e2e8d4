"""Models that a pipeline can compute, and runs of them; also in launched processes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import onefold
from tests.bits import large

STEPS = 3
SHARDS = 8


class Text(large.GPT):
    """A text model with a mask that all layers share, made of the batch itself."""

    def __init__(self, *, grouped: bool = False) -> None:
        super().__init__(tied=False)
        self.grouped = grouped
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        # A table that is read, and not called.
        y = self.tokens(x) + self.places.weight[: x.shape[1]] * self.scale
        y = F.dropout(y, 0.1, self.training)
        if self.grouped:
            # Several layers in one checkpoint, which a line may cut.
            y = checkpoint(self.middle, y, mask, use_reentrant=False)
        else:
            y = self.middle(y, mask)
        b, length, width = y.shape
        return self.head(self.norm(y).view(b * length, width)).view(b, -1)

    def middle(self, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpoints:
                y = checkpoint(self.masked, block, y, mask, use_reentrant=False)
            else:
                y = self.masked(block, y, mask)
        return y

    @staticmethod
    def masked(block: nn.Module, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(y.masked_fill(mask[0][None, :, None], 0.5))
        return out


class Checkpointed(Text):
    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = True


class Residual(nn.Module):
    """Two convolutions with batch norm, and what came in added in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm1d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv1d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm1d(outputs),
        )
        self.other = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.125  # what another stage has made, perhaps on another device
        y: torch.Tensor = self.convolutions(x)
        y += self.other(x)
        return y.relu_() * 1.5


class ResNet(nn.Module):
    """Batch norm in every block, and layers that write in place to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(large.TOKENS, 8)
        self.blocks = nn.ModuleList([Residual(8, 8), Residual(8, 12), Residual(12, 12)])
        self.drop = nn.Dropout(0.2, inplace=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).transpose(1, 2) * 2.0
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean(dim=2)))


class Adapted(nn.Module):
    """A frozen layer with a small trained product beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.low, self.high = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, pair: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = pair["x"]
        return {"x": self.frozen(x).tanh() + self.high(self.low(x)), "seen": pair["seen"] + 1}


class LoRA(nn.Module):
    """Layers that pass on containers, of tensors with a gradient and without."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(large.TOKENS, 16).requires_grad_(False)
        self.layers = nn.Sequential(*[Adapted(16) for _ in range(4)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.layers({"x": self.tokens(x), "seen": torch.zeros(x.shape[0])})
        return self.head(pair["x"] * pair["seen"][:, None, None]).flatten(1)


class Drawing(nn.Linear):
    """A layer that draws from all generators, and is left out now and then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = random.random() + np.random.rand()
        return x if factor < 0.6 else super().forward(x) * factor + torch.randn(())


class Noisy(nn.Module):
    """Layers that draw, and a buffer of the model's own that counts its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Drawing(10, 10) for _ in range(5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x


class Shouting(nn.Module):
    """A layer that leaves something in a buffer, in an attribute and in a list that it is given."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.rows = 0
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: torch.Tensor, beside: list[Any], *others: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[0]
        y: torch.Tensor = self.linear(x).tanh() * 0.3 + others[1].sin() * 1.7
        y = y + (self.linear(others[0]) * others[0]).cos()
        self.mean.mul_(0.5).add_(y.detach().mean(dim=0))
        beside.append(y.square().mean())
        return y


class Listening(nn.Module):
    """Layers that are given the same tensor three times, and a model that looks at what is left."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shouting() for _ in range(5))
        self.register_buffer("total", torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, beside = x.float() / large.TOKENS, [torch.zeros(())]
        for layer in self.layers:
            x = layer(x, beside, x, x)
            self.total = self.total * 0.5 + x.detach().mean(dim=0)
        shouting: Any = self.layers
        rows = sum(layer.rows for layer in shouting)
        return x * rows + shouting[0].mean + self.total + torch.stack(beside).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "text": Text,
    "checkpoints": Checkpointed,
    "grouped": lambda: Text(grouped=True),
    "resnet": ResNet,
    "lora": LoRA,
    "noisy": Noisy,
    "listening": Listening,
}


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    optimizer: str = "adamw"
    samples: int = 13
    microbatch: int | None = None
    precision: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"microbatch": self.microbatch, "precision": self.precision}


CASES = [
    *(Case(model) for model in MODELS),
    *(Case(model, "sgd", 5) for model in MODELS),
    *(Case(model, "adamw-fused", 21, microbatch=2) for model in MODELS),
    Case("text", "muon"),
    Case("text", precision="bf16"),
    Case("resnet", precision="bf16-params", microbatch=1),
]


def run(case: Case, devices: Sequence[str] | None = None, stop: int = STEPS) -> tuple[str, ...]:
    """Train for some steps; the fingerprint, the last loss and what is beside it, bit by bit."""
    torch.manual_seed(5)
    model = MODELS[case.model]()
    optimizer = large.OPTIMIZERS[case.optimizer](model)

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        if case.model == "noisy":
            x = torch.randn(batch.shape)
            y = model(x)
            return (y - x).square().mean(dim=1), {"far": y.detach().abs().mean()}
        out = model(batch)
        far = onefold.Mean(out.detach().abs().sum(), out.numel())
        return out.square().mean(dim=1), {"far": far}

    trainer = onefold.Trainer(
        model,
        optimizer,
        loss,
        shards=SHARDS,
        seed=2,
        devices=devices,
        threads=1,
        clip_norm=0.5,
        **case.options,
    )
    generator = torch.Generator().manual_seed(1)
    values: dict[str, float] = {}
    for number in range(stop):
        batch = torch.randint(0, large.TOKENS, (case.samples - number, 10), generator=generator)
        with set_checkpoint_early_stop(True):
            step = trainer.step(batch)
        values = {name: float(value) for name, value in step.values.items()}
    buffers = [float(buffer.double().sum()).hex() for buffer in model.buffers()]
    found = trainer.fingerprint(), float(step.loss).hex(), repr(values), *buffers
    trainer.close()
    return found
