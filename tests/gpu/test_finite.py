"""What is not finite: on a card it is noticed one step late, or at once where it decides."""

from __future__ import annotations

from pathlib import Path

import torch

from onefold.errors import GradientError, LossError
from tests.gpu.device import ON_GPU, each, raises
from tests.gpu.net import Spoilt, batches, trainer_of


@each("devices", [1, 2])
def test_the_error_comes_one_step_late_and_names_step_and_shard(devices: int) -> None:
    loss = Spoilt()
    trainer = trainer_of(devices, loss=loss)
    steps = batches(4)
    trainer.step(steps[0])
    loss.on = True
    if ON_GPU:
        trainer.step(steps[1])
        loss.on = False
        after = trainer.fingerprint()
    with raises(LossError, "loss of step 2, shard 1 is nan"):
        trainer.step(steps[2])
    assert not ON_GPU or trainer.fingerprint() == after


def test_a_gradient_that_is_not_finite_is_noticed_as_well() -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("inf")

    plain = Spoilt()
    trainer = trainer_of(loss=lambda model, batch: Steep.apply(plain(model, batch)))
    with raises(GradientError, "gradient of step 1 is not finite" if ON_GPU else "not finite"):
        trainer.step(batches(1)[0])
        trainer.step(batches(1)[0])


def test_a_save_hears_of_it_before_it_writes(tmp_path: Path) -> None:
    loss = Spoilt()
    trainer = trainer_of(loss=loss)
    loss.on = True
    with raises(LossError, "loss of step 1, shard 1 is nan"):
        trainer.step(batches(1)[0])
        trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())


@each("devices", [1, 2])
@each("precision", [None, "bf16", "fp16"])
def test_a_step_that_is_left_out_is_left_out_on_time(devices: int, precision: str | None) -> None:
    loss = Spoilt()
    trainer = trainer_of(devices, loss=loss, on_nonfinite="skip", precision=precision)
    steps = batches(3)
    trainer.step(steps[0])
    before, loss.on = trainer.fingerprint(), True
    assert "shard 1 is nan" in trainer.step(steps[1]).skipped
    assert trainer.fingerprint() == before
    loss.on = False
    assert not trainer.step(steps[2]).skipped
