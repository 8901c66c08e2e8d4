"""What is said of errors that a shard ends with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onefold.engine.advice import advice_on
from tests.small import Batch, make_trainer, points, square
from tests.tables import for_each


@for_each(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("tried to allocate"),
            "a shard of 3 samples did not fit: run it in pieces",
        ),
        (RuntimeError("set CUBLAS_WORKSPACE_CONFIG=:4096:8"), "make Trainer before anything is"),
        (RuntimeError("torch.func.{grad} don't yet support saved tensor hooks"), "--keep all"),
        (RuntimeError("x does not have a deterministic implementation"), "deterministic=False"),
    ],
)
def test_what_can_be_done_is_said(error: Exception, words: str) -> None:
    assert words in advice_on(error, samples=3, shards=4)


def test_other_errors_speak_for_themselves() -> None:
    assert advice_on(RuntimeError("out of order"), samples=3, shards=4) == ""


@for_each("devices", [1, 2])
def test_a_lack_of_memory_names_step_and_shard_and_says_what_to_do(devices: int) -> None:
    fails = [False]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if fails[0] and bool((batch[0] == last).all(dim=1).any()):
            raise torch.OutOfMemoryError("tried to allocate")
        return square(model, batch)

    trainer = make_trainer(loss=loss, devices=devices)
    batch = points(8)
    last = batch[0][-1]
    trainer.step(batch)
    before = trainer.fingerprint()
    fails[0] = True
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.step(batch)
    where, advice = raised.value.__notes__
    assert where == f"raised in step 2, shard 3, on device {devices - 1} (cpu)"
    assert advice.startswith("a shard of 2 samples did not fit: run it in pieces")
    assert "more than 4 shards" in advice
    assert trainer.fingerprint() == before
    fails[0] = False
    assert trainer.step(batch).number == 2
