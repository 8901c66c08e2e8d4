"""Audits on a card: no bit is changed by them, nothing is found where nothing is wrong, and a wrong
gradient is found and told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from onefold import Record
from onefold.errors import AuditError
from onefold.record.entries import AuditEntry
from onefold.shard import replica
from onefold.shard.gradients import take_gradients
from tests.gpu.device import ON_GPU, each, raises
from tests.gpu.net import batches, keeping, result, trained, trainer_of

STEPS = 5
WAYS = [
    *(("replicate", devices, precision) for devices in (1, 2, 3) for precision in ("fp32", "bf16")),
    *(("offload", 1, precision) for precision in ("fp32", "fp16", "bf16-params")),
]


@each("way", WAYS)
def test_an_audit_changes_no_bit_and_finds_nothing(
    way: tuple[str, int, str], tmp_path: Path
) -> None:
    placement, devices, precision = way
    with keeping("replicate"):
        plain = trained(batches(STEPS), precision=precision)
    with keeping(placement, audit=1.0):
        trainer = trainer_of(devices, precision=precision)
        trainer.record(tmp_path)
        assert result(trainer, batches(STEPS)) == plain
        trainer.close()
    assert audited(tmp_path) == []


@contextmanager
def one_wrong_gradient(number: int) -> Iterator[None]:
    """Swap two elements of the gradient that is taken as the nth from here on."""
    real, taken = take_gradients, [0]

    def take(*arguments: Any) -> Any:
        gradients = real(*arguments)
        if taken[0] == number:
            words = next(g for g in gradients if g is not None and g.numel() > 60).view(-1)
            words[[3, 40]] = words[[40, 3]].clone()
        taken[0] += 1
        return gradients

    module: Any = replica
    module.take_gradients = take
    try:
        yield
    finally:
        module.take_gradients = real


@each("devices", [1, 2, 3])
@each("number", range(4))
def test_a_wrong_gradient_is_healed_and_told(devices: int, number: int, tmp_path: Path) -> None:
    steps = batches(STEPS)
    plain = trained(steps)
    with keeping("replicate", audit=1.0):
        trainer = trainer_of(devices)
        trainer.record(tmp_path)
        trainer.step(steps[0])
        with one_wrong_gradient(number):
            trainer.step(steps[1])
        assert result(trainer, steps[2:]) == plain
        trainer.close()
    found = audited(tmp_path)
    assert [(one.step, one.healed) for one in found] == [(2, True)]


def audited(folder: Path) -> list[AuditEntry]:
    return [entry for entry in Record(folder).entries if isinstance(entry, AuditEntry)]


def test_a_fault_that_stays_ends_the_run(tmp_path: Path) -> None:
    steps = batches(STEPS)
    with keeping("replicate", audit=1.0, on_corruption="stop"):
        trainer = trainer_of(2)
        trainer.step(steps[0])
        with one_wrong_gradient(1), raises(AuditError, "step 2"):
            trainer.step(steps[1])
        trainer.close()


def test_the_update_of_a_segment_is_made_once_more() -> None:
    """By optimizers whose state lies on the card."""
    steps = batches(STEPS)
    for settings in ({"fused": True}, {"capturable": ON_GPU}, {"foreach": True}):

        def made(model: torch.nn.Module, settings: Any = settings) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)

        plain = trained(steps, optimizer=made)
        with keeping("replicate", audit=1.0):
            assert trained(steps, optimizer=made, devices=2) == plain
