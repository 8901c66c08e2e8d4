"""What a Trainer can be asked for, alone and in pairs, on three models. Also called in launched
processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.token_models import TransformerClassifier
from torch import nn

import onefold
from onefold_jobs.models import DenseCNN, resnet18

STEPS = 3
SPOILT_STEP = 2
"""A sample of its batch has a loss that is not finite, where such steps are skipped."""
SPOILT = 9
SHARDS = 4
BATCH = 9

OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16-params": {"precision": "bf16-params"},
    "fp16-params": {"precision": "fp16-params"},
    "microbatch": {"microbatch": 2},
    "compile": {"compile": True},
    "clip-norm": {"clip_norm": 0.1},
    "clip-value": {"clip_value": 1e-3},
    "skip": {"on_nonfinite": "skip"},
    "decay": {},
    "mean": {},
    "gather": {},
    "sync-batch-norm": {},
}
"""The settings of each; those without are a call or another model, see `_trainer` and `loss`."""
PRECISIONS = ("bf16", "fp16", "bf16-params", "fp16-params")
REFUSED = (
    *(("compile", "gather"), ("compile", "sync-batch-norm")),
    *(("microbatch", "gather"), ("microbatch", "sync-batch-norm")),
)
"""Pairs that cannot be had, see test_compile and test_gather."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: DenseCNN(image_size=14),
    "resnet18": lambda: resnet18(in_channels=1, width=16),
    "transformer": lambda: TransformerClassifier(50, width=32, layers=2, length=12),
}


def pairs() -> list[tuple[str, ...]]:
    """Those that go together: of precisions and of averages there is one."""
    alike = (PRECISIONS, ("decay", "mean"))
    return [
        pair
        for pair in combinations(OPTIONS, 2)
        if pair not in REFUSED and not any(set(pair) <= set(kind) for kind in alike)
    ]


@dataclass(frozen=True)
class Case:
    """A model and what its Trainer is asked for."""

    model: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Loss:
    """Cross-entropy; with `gather` also what a sample has in common with the whole batch."""

    gathers: bool

    def __call__(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        logits = model(inputs)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        losses = losses * torch.where(labels == SPOILT, torch.inf, 1.0)
        if self.gathers:
            every = onefold.gather(logits.float())
            losses = losses + 0.1 * (logits.float() - every.mean(dim=0)).square().mean(dim=1)
        return losses


def batch_of(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(n, 1, 14, 14)`` images or ``(n, 12)`` tokens, and ``(n,)`` labels below `SPOILT`."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, SPOILT, (BATCH,), generator=generator)
    if "skip" in case.options and step == SPOILT_STEP:
        labels[5] = SPOILT
    if case.model == "transformer":
        return torch.randint(0, 50, (BATCH, 12), generator=generator), labels
    return torch.randn(BATCH, 1, 14, 14, generator=generator), labels


def _trainer(case: Case, devices: Sequence[str] | None) -> onefold.Trainer:
    torch.manual_seed(7)
    model = MODELS[case.model]()
    if "sync-batch-norm" in case.options:
        if case.model == "transformer":  # which has none
            model = nn.Sequential(model, nn.BatchNorm1d(10))
        model = onefold.SyncBatchNorm.convert(model)
    settings = {name: value for option in case.options for name, value in OPTIONS[option].items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onefold.Trainer(
        model,
        optimizer,
        Loss("gather" in case.options),
        shards=SHARDS,
        seed=3,
        devices=devices,
        threads=1,
        **settings,
    )
    if "decay" in case.options:
        trainer.average(decay=0.9)
    if "mean" in case.options:
        trainer.average(mean=True)
    return trainer


def run_part(
    case: Case,
    folder: Path | None,
    stop_after: int,
    devices: Sequence[str] | None = None,
    *,
    uneven: bool = True,
) -> str:
    """Go on from a folder if there is something in it, save there, and tell the fingerprints."""
    trainer = _trainer(case, devices)
    shares = {2: (3, 1), 3: (1, 3, 0)}.get(len(trainer.devices)) if uneven else None
    if shares is not None:
        trainer.shares = shares
    if folder is not None and folder.is_dir():
        trainer.load(folder)
    for step in range(trainer.steps + 1, stop_after + 1):
        done = trainer.step(batch_of(case, step))
        # A loss scale that is still too large skips steps as well.
        if not any(option.startswith("fp16") for option in case.options):
            assert bool(done.skipped) == ("skip" in case.options and step == SPOILT_STEP)
    if folder is not None:
        trainer.save(folder)
    found = trainer.fingerprint()
    if "decay" in case.options or "mean" in case.options:
        with trainer.averaged():
            found += f" {trainer.fingerprint()}"
    trainer.close()
    return found
