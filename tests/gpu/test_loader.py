"""Batches on their way to a card: read into pinned memory, which is not used again too early."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from tests.gpu.device import DEVICE, ON_GPU, each
from tests.gpu.net import Batch, batches, loss, trainer_of

SAMPLES = 90


def data() -> TensorDataset:
    return TensorDataset(*batches(1, SAMPLES)[0])


class Slow(torch.nn.Module):
    """Keeps a card busy while the next batches are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *[torch.nn.Linear(196, 196) for _ in range(4)], torch.nn.Linear(196, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = images.flatten(1)
        for _ in range(20):
            for layer in self.layers[:-1]:
                hidden = layer(hidden).tanh()
        return self.layers[-1](hidden)


@each("workers", [0, 2])
@each("devices", [1, 2])
def test_the_bits_do_not_depend_on_who_reads(workers: int, devices: int) -> None:
    found = set()
    for count, reading in ((1, 0), (devices, workers)):
        trainer = trainer_of(count)
        loader = trainer.loader(data(), batch_size=18, shuffle=True, workers=reading)
        for _ in trainer.epochs(2):
            for batch in loader:
                trainer.step(batch)
        found.add(trainer.fingerprint())
        trainer.close()
    assert len(found) == 1


def test_workers_read_into_pinned_memory() -> None:
    trainer = trainer_of()
    for workers in (0, 1):
        for batch in trainer.loader(data(), batch_size=30, workers=workers):
            leaves = [leaf for shard in batch.shards.values() for leaf in shard]
            assert all(leaf.is_pinned() == (ON_GPU and workers > 0) for leaf in leaves)
            assert all(leaf.device.type == "cpu" for leaf in leaves)
    trainer.close()


def test_pinned_memory_is_not_used_again_before_it_was_copied() -> None:
    """One loop waits after every step, so that nothing can be under way; the other never does."""
    found = set()
    for waits in (True, False):
        torch.manual_seed(0)
        trainer = trainer_of(model=Slow())
        loader = trainer.loader(data(), batch_size=9, shuffle=True, workers=2)
        for _ in trainer.epochs(3):
            for batch in loader:
                trainer.step(batch)
                if waits and ON_GPU:
                    torch.cuda.synchronize()
        found.add(trainer.fingerprint())
        trainer.close()
    assert len(found) == 1


def test_a_collate_function_of_the_script_keeps_its_types() -> None:
    def collate(samples: list[Batch]) -> dict[str, torch.Tensor]:
        images, labels = zip(*samples, strict=True)
        return {"images": torch.stack(images), "labels": torch.stack(labels)}

    seen: set[tuple[str, str]] = set()

    def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.add((type(batch).__name__, batch["images"].device.type))
        return loss(model, (batch["images"], batch["labels"]))

    trainer = trainer_of(loss=loss_of)
    for workers in (0, 1):
        for batch in trainer.loader(data(), batch_size=45, workers=workers, collate=collate):
            trainer.step(batch)
    trainer.close()
    assert seen == {("dict", torch.device(DEVICE).type)}
