"""Optimizers of every kind, in several groups, schedulers for them, and hooks."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

Groups = list[dict[str, Any]]
Optimizer = torch.optim.Optimizer


class Lion(Optimizer):
    """Not one of PyTorch's own, so nothing is known of it; keeps a number beside a tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
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


Attach = Callable[[Any, torch.optim.Optimizer], object]


@dataclass(frozen=True)
class HookTraits:
    """What may be expected with a hook."""

    exact: bool = True
    """It treats the sum of gradients as the sum of what it makes of each."""
    laid_out: bool = True
    """It leaves gradients in the order of their parameters, which fused optimizers rely on."""


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def _on_gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> Attach:
    return lambda model, _: [parameter.register_hook(change) for parameter in _weights(model)]


def _after(change: Callable[[torch.Tensor], torch.Tensor]) -> Attach:
    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # no other hook has taken it away
            parameter.grad = change(parameter.grad)

    return lambda model, _: [p.register_post_accumulate_grad_hook(hook) for p in _weights(model)]


def _dropped(model: Any, _: torch.optim.Optimizer) -> None:
    """None where a gradient was."""
    model.head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def _at_step(when: str, change: Callable[[Any], object]) -> Attach:
    """Goes through the parameters before or after the optimizer's step."""

    @torch.no_grad()
    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p.numel():
                change(p)

    return lambda _, optimizer: getattr(optimizer, f"register_step_{when}_hook")(hook)


TURNED = HookTraits(laid_out=False)
HOOKS: dict[str, tuple[Attach, HookTraits]] = {
    "scaled": (_on_gradients(lambda g: g * 1.5), HookTraits()),
    "clamped": (_on_gradients(lambda g: g.clamp(-0.02, 0.02)), HookTraits(exact=False)),
    "after": (_after(lambda g: g * 0.5), HookTraits()),
    "turned": (_after(lambda g: g.t().contiguous().t() if g.dim() == 2 else g), TURNED),
    "dropped": (_dropped, HookTraits()),
    "normalized": (_at_step("pre", lambda p: p.grad.div_(p.grad.norm() + 1e-3)), HookTraits()),
    "bounded": (_at_step("post", lambda p: p.clamp_(-0.9, 0.9)), HookTraits()),
}
