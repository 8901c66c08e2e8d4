"""Hooks as scripts put them on parameters, modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["HOOKS", "HookTraits"]

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
    "normalised": (_at_step("pre", lambda p: p.grad.div_(p.grad.norm() + 1e-3)), HookTraits()),
    "bounded": (_at_step("post", lambda p: p.clamp_(-0.9, 0.9)), HookTraits()),
}
