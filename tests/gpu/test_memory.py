"""Memory of a card: it does not grow, a shard that does not fit is named, stages come and go."""

import gc

import torch
from torch import nn

from tests.gpu.device import DEVICE, ON_GPU, each, needs, raises
from tests.gpu.net import Batch, batches, keeping, loss, trainer_of

MIB = 1 << 20


@each("devices", [1, 2])
@each("precision", [None, "bf16-params"])
def test_memory_does_not_grow_from_step_to_step(devices: int, precision: str | None) -> None:
    needs(ON_GPU, "a GPU")
    trainer = trainer_of(devices, precision=precision, clip_norm=1.0)
    steps = batches(4)

    def train(times: int) -> tuple[int, int]:
        for number in range(times):
            trainer.step(steps[number % len(steps)])
        gc.collect()  # what tests before this one have left may hold memory as well
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()

    # Past step 50, in which checks are made that take memory of their own; and past step 100.
    before = train(60)
    assert train(60) == before


def test_a_trainer_that_is_dropped_gives_its_memory_back() -> None:
    needs(ON_GPU, "a GPU")

    def use() -> int:
        trainer = trainer_of(2)
        trainer.step(batches(1)[0])
        trainer.close()
        del trainer
        gc.collect()
        return torch.accelerator.memory_allocated()

    before = use()
    # The gradient that backward begins with is kept for the steps that follow, in a few bytes.
    assert max(use() for _ in range(3)) - before < 4096


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
    trainer, again = trainer_of(devices, loss=greedy), trainer_of(devices)
    trainer.step(steps[0])
    before = trainer.fingerprint()
    with raises(torch.OutOfMemoryError, "step 2, shard 2, on device") as found:
        trainer.step(steps[1])
    assert "use more than 4 shards" in "\n".join(found[0].__notes__)
    assert trainer.fingerprint() == before
    # The script may go on, with the bits of a run to which nothing happened.
    for batch in steps[1:]:
        trainer.step(batch)
    for batch in steps:
        again.step(batch)
    assert trainer.fingerprint() == again.fingerprint()


class Deep(nn.Module):
    """Layers of 4 MiB each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_card_has_some_stages_and_no_more_in_a_deeper_model() -> None:
    needs(ON_GPU, "a GPU")

    def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    def most(layers: int) -> float:
        trainer = trainer_of(model=Deep(layers), loss=squared, clip_norm=0.1)
        batch = torch.randn(8, 1024, generator=torch.Generator().manual_seed(1))
        trainer.step(batch)
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        trainer.step(batch)
        torch.accelerator.synchronize()
        found = (torch.accelerator.max_memory_allocated() - before) / MIB
        trainer.close()
        return found

    with keeping("offload"):
        few, many = most(4), most(16)
    # Six stages of 4 MiB, and what kernels take for themselves; all of 16 layers would be 256.
    assert few < 40
    assert many < few + 8
