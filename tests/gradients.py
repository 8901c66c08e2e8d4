"""Runs whose script makes the updates, with `trainer.gradient`; called on each device of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import onefold
from tests.averaged import Net, batch_of, data, loss
from tests.small import Batch

Result = tuple[str, tuple[str, ...]]


def trainer_of(
    devices: int | None = 1,
    *,
    model: nn.Module | None = None,
    shards: int = 4,
    function: Callable[..., object] = loss,
    **options: Any,
) -> onefold.Trainer:
    """One without an optimizer; with None for devices, a launched process finds its own."""
    torch.manual_seed(0)
    options = {"threads": 1, "devices": ["cpu"] * devices if devices else None, **options}
    return onefold.Trainer(model or Net(), None, function, shards=shards, **options)


def digest(model: nn.Module) -> str:
    """Of everything in ``.grad``, to the last bit."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found.update(f"{name} {None if grad is None else (grad.shape, grad.dtype)}".encode())
        if grad is not None:
            found.update(grad.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Sam:
    """The two passes of sharpness-aware minimisation around an ordinary optimizer."""

    def __init__(self, base: torch.optim.Optimizer, rho: float = 0.05) -> None:
        self._base, self._rho = base, rho
        self._parameters = [p for group in base.param_groups for p in group["params"]]
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def climb(self) -> None:
        given = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in given]).norm()
        self._saved = [p.clone() for p in self._parameters]
        for p in self._parameters:
            if p.grad is not None:
                p.add_(p.grad * (self._rho / (norm + 1e-12)))

    @torch.no_grad()
    def step(self) -> None:
        for p, saved in zip(self._parameters, self._saved, strict=True):
            p.copy_(saved)
        self._base.step()


Steps = Iterator[tuple[float, str]]
"""The loss of each call, and the digest of the gradient."""


def plain_updates(trainer: onefold.Trainer, batches: Sequence[Batch]) -> Steps:
    optimizer = torch.optim.SGD(trained(trainer.model), lr=0.1, momentum=0.9)
    for batch in batches:
        step = trainer.gradient(batch)
        yield float(step.loss), digest(trainer.model)
        with trainer.changing():
            optimizer.step()


def line_search(trainer: onefold.Trainer, batches: Sequence[Batch]) -> Steps:
    optimizer = torch.optim.LBFGS(
        trained(trainer.model), max_iter=4, history_size=3, line_search_fn="strong_wolfe"
    )
    yield from _closures(trainer, batches, optimizer)


def no_line_search(trainer: onefold.Trainer, batches: Sequence[Batch]) -> Steps:
    yield from _closures(
        trainer, batches, torch.optim.LBFGS(trained(trainer.model), lr=0.1, max_iter=3)
    )


def _closures(
    trainer: onefold.Trainer, batches: Sequence[Batch], optimizer: torch.optim.Optimizer
) -> Steps:
    for batch in batches:
        with trainer.changing():
            value = optimizer.step(lambda batch=batch: trainer.gradient(batch).loss)
        yield float(value), digest(trainer.model)


def two_passes(trainer: onefold.Trainer, batches: Sequence[Batch]) -> Steps:
    """Both passes in one block."""
    sam = Sam(torch.optim.SGD(trained(trainer.model), lr=0.1, momentum=0.9))
    for batch in batches:
        with trainer.changing():
            first = trainer.gradient(batch)
            sam.climb()
            second = trainer.gradient(batch)
            assert (first.number, second.number) == (trainer.steps, trainer.steps)
            yield float(second.loss), digest(trainer.model)
            sam.step()


def two_blocks(trainer: onefold.Trainer, batches: Sequence[Batch]) -> Steps:
    """The same, with the gradients outside of the blocks."""
    sam = Sam(torch.optim.SGD(trained(trainer.model), lr=0.1, momentum=0.9))
    for batch in batches:
        trainer.gradient(batch)
        with trainer.changing():
            sam.climb()
        step = trainer.gradient(batch)
        assert step.number == trainer.steps
        yield float(step.loss), digest(trainer.model)
        with trainer.changing():
            sam.step()


def surgery(trainer: onefold.Trainer, batches: Sequence[Batch]) -> Steps:
    """Clipped, noisy, and normalised by layer, before the update; evaluated in between."""
    optimizer = torch.optim.Adam(trained(trainer.model), lr=1e-2)
    for batch in batches:
        step = trainer.gradient(batch)
        before = digest(trainer.model)
        trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, data(), batch_size=9)
        assert digest(trainer.model) == before
        torch.nn.utils.clip_grad_value_(trained(trainer.model), 0.01)
        torch.nn.utils.clip_grad_norm_(trained(trainer.model), 1.0)
        with trainer.changing():
            for parameter in trained(trainer.model):
                if parameter.grad is not None:
                    parameter.grad += 1e-3 * torch.randn(parameter.shape)
                    parameter.grad /= parameter.grad.norm() + 1e-3
            optimizer.step()
        yield float(step.loss), before


PROGRAMS: dict[str, Callable[[onefold.Trainer, Sequence[Batch]], Steps]] = {
    "plain updates": plain_updates,
    "line search": line_search,
    "no line search": no_line_search,
    "two passes": two_passes,
    "two blocks": two_blocks,
    "surgery": surgery,
}


def run(name: str, devices: int | None, **options: Any) -> Result:
    """The fingerprint, and each step's loss and gradient, to the last bit."""
    trainer = trainer_of(devices, **options)
    batches = [batch_of(step) for step in range(1, 5)]
    seen = [f"{value.hex()} {grads}" for value, grads in PROGRAMS[name](trainer, batches)]
    assert trainer.steps == len(batches)
    result = trainer.fingerprint(), tuple(seen)
    trainer.close()
    return result


def run_all() -> dict[str, Result]:
    return {name: run(name, None) for name in PROGRAMS}


def run_with_loader(devices: int | None, folder: str, stops: Sequence[int] = ()) -> str:
    """By Adam, its state in the checkpoint; saved, and left, before the steps in ``stops``."""
    trainer = trainer_of(devices)
    optimizer = torch.optim.Adam(trained(trainer.model), lr=1e-2)
    found = trainer.load(folder, if_any=True)
    if found is not None:
        set_state(optimizer, found.extra)
    batches = trainer.loader(data(), batch_size=10, shuffle=True)
    for _ in trainer.epochs(2):
        for batch in batches:
            if trainer.steps in stops and (found is None or found.step != trainer.steps):
                trainer.save(folder, extra=state_of(optimizer))
                trainer.close()
                return ""
            trainer.gradient(batch)
            with trainer.changing():
                optimizer.step()
    result = trainer.fingerprint()
    trainer.close()
    return result


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.state_dict()


def set_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.load_state_dict(state)
