"""Hooks as scripts put them on parameters and modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["HOOKS", "HookTraits"]


@dataclass(frozen=True)
class HookTraits:
    """What may be expected with a hook."""

    exact: bool = True
    """It treats the sum of gradients as the sum of what it makes of each."""
    laid_out: bool = True
    """It leaves gradients in the order of their parameters, which fused optimizers rely on."""


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def _scaled(model: nn.Module) -> None:
    for parameter in _weights(model)[::2]:
        parameter.register_hook(lambda g: g * 1.5)


def _clamped(model: nn.Module) -> None:
    for parameter in _weights(model):
        parameter.register_hook(lambda g: g.clamp(-0.02, 0.02))


def _after(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # no other hook has taken it away
            parameter.grad = change(parameter.grad)

    def attach(model: nn.Module) -> None:
        for parameter in _weights(model):
            parameter.register_post_accumulate_grad_hook(hook)

    return attach


def _turned(gradient: torch.Tensor) -> torch.Tensor:
    """The same values in memory of other strides."""
    if gradient.dim() < 2:
        return gradient
    return gradient.transpose(0, 1).contiguous().transpose(0, 1)


def _part_of_more(gradient: torch.Tensor) -> torch.Tensor:
    """A view of memory that holds more."""
    room = torch.zeros(2, *gradient.shape, dtype=gradient.dtype)
    room[1] = gradient
    return room[1]


def _lent(model: nn.Module) -> None:
    """A gradient of one parameter is another's too, in the same memory."""
    first = model.head.bias

    def hook(parameter: torch.Tensor) -> None:
        if first.grad is not None:
            parameter.grad = first.grad

    others = [p for p in _weights(model) if p.shape == first.shape and p is not first]
    for parameter in others:
        parameter.register_post_accumulate_grad_hook(hook)


def _beside(model: nn.Module) -> None:
    """Looks at the gradient of another parameter, which no optimizer may hold."""
    bias = model.head.bias

    def hook(parameter: torch.Tensor) -> None:
        if bias.grad is not None and parameter.grad is not None:
            parameter.grad = parameter.grad + bias.grad.sum()

    for parameter in _weights(model.stem):
        parameter.register_post_accumulate_grad_hook(hook)


def _dropped(model: nn.Module) -> None:
    """None where a gradient was."""

    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model.head.bias.register_post_accumulate_grad_hook(hook)


def _outputs(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda module, args, output: output * 1.1)
    model.blocks.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))


def _backward(model: nn.Module) -> None:
    model.head.register_full_backward_hook(
        lambda m, inputs, outputs: tuple(None if g is None else g * 2.0 for g in inputs)
    )


def _noting(model: nn.Module) -> None:
    seen: list[Any] = []
    model.stem.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for parameter in _weights(model):
        parameter.register_hook(lambda g: seen.append(float(g.abs().max())))


HOOKS: dict[str, tuple[Callable[[nn.Module], None], HookTraits]] = {
    "scaled": (_scaled, HookTraits()),
    "clamped": (_clamped, HookTraits(exact=False)),
    "after": (_after(lambda g: g * 0.5), HookTraits()),
    "after in place": (_after(lambda g: g.mul_(0.5)), HookTraits()),
    "after clamped": (_after(lambda g: g.clamp(-0.02, 0.02)), HookTraits(exact=False)),
    "turned": (_after(_turned), HookTraits(laid_out=False)),
    "part of more": (_after(_part_of_more), HookTraits(laid_out=False)),
    "expanded": (_after(lambda g: g.sum().expand_as(g)), HookTraits(laid_out=False)),
    "lent": (_lent, HookTraits(exact=False)),
    "beside": (_beside, HookTraits()),
    "dropped": (_dropped, HookTraits()),
    "outputs": (_outputs, HookTraits()),
    "backward": (_backward, HookTraits()),
    "noting": (_noting, HookTraits()),
}
