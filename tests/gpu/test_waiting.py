"""Nothing in a step waits for a card: PyTorch is asked to raise where the host would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import onefold
from tests.gpu.device import DEVICE, ON_GPU, each, needs
from tests.gpu.net import Batch, adamw, batches, trainer_of

WARM_UP = 5
"""In the first steps checks are made that wait, see `onefold.engine.guard.Turns`."""


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return adamw(model, fused=True)


CHOICES: list[dict[str, Any]] = [
    {"shards": 1},
    {},
    {"optimizer": sgd},
    {"optimizer": fused},
    {"clip_norm": 0.5, "clip_value": 0.1},
    {"precision": "bf16"},
    {"precision": "bf16-params"},
    {"devices": 2},
    {"devices": 3, "plan": (0, 3, 1), "clip_norm": 0.5},
    {"deterministic": False},
]


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Raise where the host would wait for the card."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def placed(steps: list[Batch], where: str) -> list[Batch]:
    """The batches on the card, in pinned memory, or where they are."""
    if where == "card":
        return [(images.to(DEVICE), labels.to(DEVICE)) for images, labels in steps]
    if where == "pinned":
        return [(images.pin_memory(), labels.pin_memory()) for images, labels in steps]
    return steps


@each("options", CHOICES)
@each("where", ["card", "pinned", "host"])
def test_no_step_waits(options: dict[str, Any], where: str) -> None:
    needs(ON_GPU, "a GPU")
    trainer = trainer_of(**options)
    steps = placed(batches(12), where)
    for batch in steps[:WARM_UP]:
        trainer.step(batch)
    done: list[onefold.Step] = []
    with nobody_waits():
        for batch in steps[WARM_UP:]:
            done.append(trainer.step(batch))
    losses = [float(step.loss) for step in done]
    assert len(set(losses)) == len(losses)
    assert all(0 < loss < 10 for loss in losses)
    assert all(0 < step.grad_norm < 1000 for step in done)


def test_the_steps_before_would_have_been_noticed() -> None:
    """The checks of the first steps wait: or this way of looking would prove nothing."""
    needs(ON_GPU, "a GPU")
    trainer = trainer_of()
    trainer.step(batches(1)[0])
    waited = False
    with nobody_waits():
        try:
            float(trainer.step(batches(1)[0]).loss)
        except RuntimeError as error:
            waited = "synchroniz" in str(error)
    assert waited


def test_many_steps_without_a_look_are_the_same_as_with_one_each() -> None:
    steps = batches(30)
    found = set()
    for looks in (False, True):
        trainer = trainer_of(2)
        for batch in steps:
            step = trainer.step(batch)
            if looks:
                float(step.loss)
        found.add(trainer.fingerprint())
    assert len(found) == 1
