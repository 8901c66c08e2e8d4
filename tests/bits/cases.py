"""Runs whose bits must not depend on who computes what. Also called in launched processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.token_models import LSTMClassifier, TransformerClassifier
from torch import nn

import onefold
from onefold.core.settings import Precision, PrecisionName
from onefold_jobs.models import DenseCNN, LeNet, resnet18
from tests.capabilities import has_lstm

STEPS = 5
SAMPLES = 40
BATCH = 9


class Mixed(nn.Module):
    """Tied weights, a branch that no sample or few samples use, frozen layers, odd buffers."""

    seen: torch.Tensor
    most: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 33)
        self.stem = nn.Linear(33, 33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.norm = nn.BatchNorm1d(33)
        self.rare = nn.Linear(33, 33)
        self.unused = nn.Linear(33, 7)
        self.decoder = nn.Linear(33, 50, bias=False)
        self.decoder.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(50))
        self.register_buffer("most", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.stem(self.tokens(tokens))).relu()
        hidden = self.norm(hidden.transpose(1, 2)).mean(dim=2)
        if bool((tokens[:, 0] < 12).any()):
            hidden = hidden + self.rare(hidden)
        if self.training:
            self.seen = self.seen * 0.9 + F.one_hot(tokens[:, 0], 50).float().mean(dim=0)
            self.most.fill_(int(tokens.max()))
        return self.decoder(F.dropout(hidden, 0.1, self.training))


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images, augmented with every generator that a data set may draw from."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._images = torch.randn(SAMPLES, 1, 28, 28, generator=generator)
        self._labels = torch.randint(0, 10, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self._images[index] + 0.1 * torch.randn(1, 28, 28)
        image = image.roll(random.randint(-2, 2), dims=2) * float(np.random.uniform(0.9, 1.1))
        return image, self._labels[index]


class Texts(Images):
    """Random tokens, some of them replaced."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self._tokens = torch.randint(0, 50, (SAMPLES, 12), generator=generator)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._tokens[index].clone()
        tokens[torch.randint(0, 12, (2,))] = random.randrange(50)
        return tokens, self._labels[index]


class Pairs(nn.Module):
    """Two towers, whose images and labels find each other in the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, stride=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(0.2), nn.Linear(216, 12)),
        )
        self.labels = nn.Embedding(10, 12)
        self.sharpness = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        image, rows = onefold.gather(F.normalize(self.images(images)), rows=True)
        label = onefold.gather(F.normalize(self.labels(labels)))
        logits = image @ label.T * self.sharpness.exp()
        targets = torch.arange(len(logits), device=logits.device)
        losses = F.cross_entropy(logits, targets, reduction="none")
        losses = losses + F.cross_entropy(logits.T, targets, reduction="none")
        return F.dropout(losses, 0.1, self.training)[rows]


def synced() -> nn.Module:
    """Batch norm over the whole batch."""
    return onefold.SyncBatchNorm.convert(
        nn.Sequential(
            *(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(4), nn.Dropout(0.1)),
            *(nn.Flatten(), nn.Linear(216, 30), nn.BatchNorm1d(30), nn.Linear(30, 10)),
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Images]]] = {
    "lenet": (LeNet, Images),
    "cnn": (DenseCNN, Images),
    "resnet18": (lambda: resnet18(in_channels=1), Images),
    "transformer": (lambda: TransformerClassifier(50, width=32, layers=2, length=12), Texts),
    "lstm": (lambda: LSTMClassifier(50, width=24), Texts),
    "mixed": (Mixed, Texts),
    "pairs": (Pairs, Images),
    "synced": (synced, Images),
}
LIGHT = ("lenet", "transformer", "lstm", "mixed")
HEAVY = ("cnn", "resnet18")
LOW: dict[str, tuple[str, PrecisionName]] = {
    "lenet": ("sgd", "fp16"),
    "transformer": ("adamw", "bf16-params"),
    "lstm": ("adamw-fused", "bf16"),
    "mixed": ("muon", "fp16-params"),
    "resnet18": ("sgd", "bf16-params"),
}
"""The optimizer and the precision of each model that is also run in a lower one."""


def _sgd(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(model), lr=0.05, momentum=0.9, fused=fused)


def _adamw(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(model), lr=1e-3, fused=fused)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return torch.optim.Muon(matrices, lr=0.02)


def _groups(model: nn.Module) -> list[dict[str, object]]:
    """Two parameter groups of other settings each."""
    parameters = list(model.parameters())
    half = len(parameters) // 2
    return [{"params": parameters[:half]}, {"params": parameters[half:], "weight_decay": 0.01}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: _sgd(model, fused=False),
    "sgd-fused": lambda model: _sgd(model, fused=True),
    "adamw": lambda model: _adamw(model, fused=False),
    "adamw-fused": lambda model: _adamw(model, fused=True),
    "muon": _muon,
}


@dataclass(frozen=True)
class Case:
    """One run; ``reference`` tells those whose bits must agree."""

    model: str
    optimizer: str
    shards: int
    workers: int = 0
    uneven: bool = False
    clip: bool = False
    precision: PrecisionName | None = None
    microbatch: int | None = None
    average: bool = False

    @property
    def reference(self) -> Case:
        """The same on one device, read in this process."""
        return replace(self, workers=0, uneven=False)

    def shares(self, devices: int) -> tuple[int, ...] | None:
        """Uneven shares for so many devices, or None for even ones."""
        if not self.uneven or devices == 1:
            return None
        counts = [1] * devices
        counts[-1] = 0 if devices == 3 else 1
        counts[devices // 2] += self.shards - sum(counts)
        return tuple(counts)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    if isinstance(model, Pairs):
        return model(inputs, labels)
    return F.cross_entropy(model(inputs), labels, reduction="none")


def run(case: Case, devices: Sequence[str] | None = None) -> tuple[str, str]:
    """Train for some steps; the fingerprint and the last loss, to the last bit."""
    build, data = MODELS[case.model]
    torch.manual_seed(7)
    model = build()
    trainer = onefold.Trainer(
        model,
        OPTIMIZERS[case.optimizer](model),
        loss,
        shards=case.shards,
        seed=3,
        devices=devices,
        threads=1,
        clip_norm=0.5 if case.clip else None,
        precision=case.precision,
        microbatch=case.microbatch,
    )
    shares = case.shares(len(trainer.devices))
    if shares is not None:
        trainer.shares = shares
    if case.average:
        trainer.average(decay=0.99, every=2)
    batches = trainer.loader(data(), batch_size=BATCH, shuffle=True, workers=case.workers)
    for _ in trainer.epochs(2):
        for batch in batches:
            step = trainer.step(batch)
            if step.number == STEPS + 1:  # one step into the second epoch
                break
    result = trainer.fingerprint(), float(step.loss).hex()
    if case.average:
        with trainer.averaged(update_bn=data(), batch_size=BATCH):
            result = f"{trainer.fingerprint()} {result[0]}", result[1]
        assert trainer.fingerprint() in result[0]
    trainer.close()
    return result


def covering() -> list[Case]:
    """Every model with both numbers of shards; the other choices take turns.

    Without those that the processor has no kernels for; see `left_out`.
    """
    return [case for case in _covering() if case not in left_out()]


def left_out() -> list[Case]:
    """Covering cases that this processor has no kernels for."""
    low = [case for case in _covering() if case.model == "lstm" and case.precision is not None]
    return [
        case
        for case in low
        if (dtype := Precision(case.precision).compute) is not None and not has_lstm(dtype)
    ]


def _covering() -> list[Case]:
    optimizers = {
        **{name: tuple(OPTIMIZERS) for name in LIGHT},
        "cnn": ("adamw-fused", "sgd-fused"),
        "resnet18": ("sgd", "adamw"),
    }
    cases = []
    for name, choices in optimizers.items():
        for turn, optimizer in enumerate(choices):
            for shards in (4, 7):
                if name in HEAVY and (turn == 0) != (shards == 4):
                    continue
                odd = (turn + shards) % 2 == 1
                case = Case(name, optimizer, shards, workers=2 if odd else 0, uneven=not odd)
                cases.append(replace(case, clip=turn == 2))
    for name, (optimizer, precision) in LOW.items():
        for shards in (4, 7):
            odd = shards == 7
            cases.append(
                Case(
                    name, optimizer, shards, 2 * odd, uneven=not odd, clip=odd, precision=precision
                )
            )
    # Losses and layers that see the whole batch.
    cases.append(Case("pairs", "adamw", 4, uneven=True, clip=True))
    cases.append(Case("pairs", "sgd", 7, workers=2, precision="fp16"))
    cases.append(Case("synced", "adamw", 7, uneven=True))
    cases.append(Case("synced", "sgd-fused", 4, workers=2, precision="bf16"))
    # In segments of one sample, the odd and the even count of devices with one each.
    cases.append(Case("mixed", "adamw", 4, uneven=True, microbatch=1))
    cases.append(Case("transformer", "sgd", 4, workers=2, clip=True, microbatch=1))
    cases.append(Case("mixed", "adamw", 4, uneven=True, average=True))
    cases.append(Case("mixed", "sgd", 7, precision="bf16-params", average=True))
    return cases
