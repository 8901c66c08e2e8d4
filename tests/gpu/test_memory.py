"""Memory of a card: it does not grow, and a shard that does not fit is named."""

from __future__ import annotations

import gc

import torch
from torch import nn

from tests.gpu.device import DEVICE, ON_GPU, each, needs, raises
from tests.gpu.net import Batch, batches, loss, trainer_of


@each("devices", [1, 2])
@each("precision", [None, "bf16-params"])
def test_memory_does_not_grow_from_step_to_step(devices: int, precision: str | None) -> None:
    needs(ON_GPU, "a GPU")
    trainer = trainer_of(devices, precision=precision, clip_norm=1.0)
    steps = batches(4)

    def train(times: int) -> tuple[int, int]:
        for number in range(times):
            trainer.step(steps[number % len(steps)])
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    # Past step 50, in which checks are made that take memory of their own; and past step 100.
    before = train(60)
    assert train(60) == before


def test_a_trainer_that_is_dropped_gives_its_memory_back() -> None:
    needs(ON_GPU, "a GPU")

    def use() -> None:
        trainer = trainer_of(2)
        trainer.step(batches(1)[0])
        trainer.close()

    use()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        use()
        gc.collect()
    # The gradient that backward begins with is kept for the steps that follow, in a few bytes.
    assert torch.cuda.memory_allocated() - before < 4096


@each("devices", [1, 2])
def test_a_shard_that_does_not_fit_is_named_with_advice(devices: int) -> None:
    asked = [0]

    def greedy(model: nn.Module, batch: Batch) -> torch.Tensor:
        asked[0] += 1
        if asked[0] == 4 + 3:
            if not ON_GPU:
                raise torch.OutOfMemoryError("there is no card to fill")
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
        return loss(model, batch)

    steps = batches(3)
    trainer = trainer_of(devices, loss=greedy)
    trainer.step(steps[0])
    before = trainer.fingerprint()
    with raises(torch.OutOfMemoryError, "step 2, shard 2, on device") as found:
        trainer.step(steps[1])
    assert "give Trainer more than 4 shards" in "\n".join(found[0].__notes__)
    assert trainer.fingerprint() == before
    # The script may go on, with the bits of a run to which nothing happened.
    again = trainer_of(devices)
    for each_trainer in (trainer, again):
        for batch in steps[1:] if each_trainer is trainer else steps:
            each_trainer.step(batch)
    assert trainer.fingerprint() == again.fingerprint()
