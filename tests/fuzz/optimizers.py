"""Optimizers of every kind, in several groups, and schedules for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

__all__ = ["OPTIMIZERS", "SCHEDULES", "UNSTABLE", "make_optimizer"]

Groups = list[dict[str, Any]]
Optimizer = torch.optim.Optimizer


class Lion(Optimizer):
    """Not one of PyTorch's own, so nothing is known of it; keeps a number beside a tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(count=0, average=torch.zeros_like(p))
                    state["count"] += 1
                    average = state["average"]
                    p.add_((0.9 * average + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    average.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Groups], Optimizer]] = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.05),
    "sgd-momentum": lambda g: torch.optim.SGD(g, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda g: torch.optim.Adam(g, lr=1e-2),
    "adam-tensor": lambda g: torch.optim.Adam(g, lr=torch.tensor(1e-2), foreach=False),
    "adamw": lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
    "adamw-fused": lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
    "adamax": lambda g: torch.optim.Adamax(g, lr=1e-2),
    "rprop": lambda g: torch.optim.Rprop(g, lr=1e-3),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=1e-3, momentum=0.9, centered=True),
    "adagrad-fused": lambda g: torch.optim.Adagrad(g, lr=1e-2, fused=True),
    "muon": lambda g: torch.optim.Muon(g, lr=0.02),
    "lion": lambda g: Lion(g, lr=1e-3),
}
UNSTABLE = {"muon", "rprop", "lion"}
"""What rounding is made large by: signs, and an iteration in bfloat16."""

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.3, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[2],
    ),
}


def make_optimizer(name: str, model: nn.Module, groups: int, seed: int) -> Optimizer:
    """The optimizer of that name, on parameters dealt out to so many groups at random."""
    parameters = [p for p in model.parameters() if name != "muon" or (p.dim() == 2 and p.numel())]
    rng = random.Random(seed)
    dealt: list[list[nn.Parameter]] = [[] for _ in range(groups)]
    for parameter in parameters:
        rng.choice(dealt).append(parameter)
    settings: Groups = [{"params": group} for group in dealt if group]
    for number, group in enumerate(settings):
        if name == "adam-tensor":
            group["lr"] = torch.tensor(1e-2)
        elif number:
            group["lr"] = 0.01 / number
    return OPTIMIZERS[name](settings)
