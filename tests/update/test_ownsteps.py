"""Hooks on an optimizer's step, and wrappers of it, see whole parameters, on any device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.small import Batch, bits, make_trainer, points
from tests.tables import for_each

Hook = Callable[..., None]


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(130, 140), nn.Tanh(), nn.Linear(140, 1))


def mean_square(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.grad is not None)


def by_itself(optimizer: Optimizer, *_: Any) -> None:
    """As in DINO."""
    for p in parameters_of(optimizer):
        assert p.grad is not None
        p.grad.mul_((0.01 / (p.grad.norm() + 1e-6)).clamp(max=1.0))


def by_value(optimizer: Optimizer, *_: Any) -> None:
    clip_grad_value_(parameters_of(optimizer), 0.001)


@torch.no_grad()
def to_unit_rows(optimizer: Optimizer, *_: Any) -> None:
    for p in parameters_of(optimizer):
        if p.dim() > 1:
            p.div_(p.norm(dim=1, keepdim=True))


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def wrap(optimizer: Optimizer, hook: Hook) -> None:
    step = optimizer.step

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook(optimizer)
        return step(*args, **kwargs)

    optimizer.step = wrapper.__get__(optimizer)  # type: ignore[method-assign]


@contextmanager
def registered(way: str, optimizer: Optimizer, hook: Hook) -> Iterator[None]:
    handle: Any = None
    if way == "of all":
        handle = register_optimizer_step_pre_hook(hook)
    elif way == "wrapped":
        wrap(optimizer, hook)
    elif way == "before":
        optimizer.register_step_pre_hook(hook)
    else:
        optimizer.register_step_post_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def trained(way: str, hook: Hook, *, clip: float | None = None, shards: int, devices: int) -> Any:
    """The bits after three steps; in a plain loop on no device."""
    model = model_of()
    optimizer = adam(model)
    with registered(way, optimizer, hook):
        if devices:
            choices: Any = {"shards": shards, "devices": devices, "clip_norm": clip}
            trainer = make_trainer(model, mean_square, optimizer=optimizer, **choices)
        for _ in range(3):
            if devices:
                trainer.step(points(12, 130))
                continue
            optimizer.zero_grad()
            mean_square(model, points(12, 130)).backward()
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return bits(model)


@for_each(
    ("way", "hook", "clip"),
    [
        ("before", by_itself, 0.05),
        ("of all", by_itself, None),
        ("wrapped", by_itself, None),
        ("before", by_value, 0.05),
        ("after", to_unit_rows, 0.05),
    ],
)
def test_bits_are_those_of_a_plain_loop(way: str, hook: Hook, clip: float | None) -> None:
    plain = trained(way, hook, clip=clip, shards=1, devices=0)
    assert trained(way, hook, clip=clip, shards=1, devices=1) == plain
    assert trained(way, lambda *_: None, clip=clip, shards=1, devices=0) != plain
    found = [trained(way, hook, shards=4, devices=devices) for devices in (1, 3)]
    assert found[0] == found[1]


def of_all_together(optimizer: Optimizer, *_: Any) -> None:
    clip_grad_norm_(parameters_of(optimizer), 0.01)


class JointShards(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        of_all_together(self)
        return super().step(closure)


@for_each("devices", [1, 3])
@for_each("hook", [of_all_together, None])
def test_a_norm_of_several_is_refused(hook: Hook | None, devices: int) -> None:
    model = model_of()
    optimizer = adam(model) if hook else JointShards(model.parameters(), lr=0.1)
    if hook:
        optimizer.register_step_pre_hook(hook)
    trainer = make_trainer(model, mean_square, optimizer=optimizer, devices=devices)
    name = type(optimizer).__name__
    with pytest.raises(RuntimeError, match=rf"several parameters in the step of {name} \(.*clip_n"):
        trainer.step(points(12, 130))


@for_each(("way", "devices"), [("before", 1), ("wrapped", 2)])
def test_a_hook_that_comes_too_late_is_refused(way: str, devices: int) -> None:
    model = model_of()
    optimizer = adam(model)
    trainer = make_trainer(model, mean_square, optimizer=optimizer, devices=devices)
    trainer.step(points(12, 130))
    with (
        registered(way, optimizer, by_itself),
        pytest.raises(ValueError, match=r"Adam got a hook on its step, .* expected it before"),
    ):
        trainer.step(points(12, 130))


@for_each("first", ["hook", "wrapper, scheduler", "scheduler, wrapper"])
def test_a_hook_beside_a_scheduler_sees_whole_parameters(first: str) -> None:
    """A scheduler wraps ``step``, too."""
    model = model_of()
    optimizer = adam(model)
    seen: list[torch.Size] = []

    def look(*_: Any) -> None:
        seen.extend(p.shape for p in parameters_of(optimizer))

    for each in first.split(", "):
        if each == "scheduler":
            lr_scheduler.StepLR(optimizer, 1)
        elif each == "hook":
            optimizer.register_step_pre_hook(look)
        else:
            wrap(optimizer, look)
    make_trainer(model, mean_square, optimizer=optimizer).step(points(12, 130))
    assert seen == [p.shape for p in model.parameters()]


def test_an_optimizer_that_another_merely_knows_stays_the_scripts() -> None:
    """Of another Trainer, or of a model beside; also where they know one another."""
    models = [model_of(), model_of()]
    both = [adam(model) for model in models]
    beside = adam(own := model_of())
    for one, other in ((both[0], both[1]), (both[1], both[0])):
        one.other, one.beside = other, beside  # type: ignore[attr-defined]
    for model, optimizer in zip(models, both, strict=True):
        trainer = make_trainer(model, mean_square, optimizer=optimizer)
        trainer.step(points(12, 130))
    own(points(12, 130)[0]).sum().backward()
    before = [parameter.detach().clone() for parameter in own.parameters()]
    beside.step()
    assert not any(map(torch.equal, before, own.parameters()))
