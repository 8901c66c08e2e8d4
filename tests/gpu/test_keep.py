"""A card that keeps nothing: the model lies in a file of the host, and the bits are the card's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold.trainer
from onefold.core.options import KeepName, RunOptions
from onefold.core.world import World
from tests.apart import apart
from tests.gpu.device import ON_GPU, each, needs, raises
from tests.gpu.net import Batch, Spoilt, adamw, batches, result, trainer_of

MIB = 1 << 20
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "fused": partial(adamw, fused=True),
    "capturable": partial(adamw, capturable=ON_GPU),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.1},
    "clip_value": {"clip_value": 1e-3},
    "one shard": {"shards": 1, "clip_norm": 0.1},
    "bf16": {"precision": "bf16", "clip_norm": 0.1},
    "fp16": {"precision": "fp16"},
    "bf16-params": {"precision": "bf16-params", "clip_norm": 0.1},
    "microbatch": {"microbatch": 2},
}


@contextmanager
def keeping(keep: KeepName) -> Iterator[None]:
    """Have Trainers here keep so much of their models."""
    module: Any = onefold.trainer
    before = module.current_world
    module.current_world = lambda: World(options=RunOptions(keep=keep))
    try:
        with apart():
            yield
    finally:
        module.current_world = before


def with_each(use: Callable[[], Any]) -> list[Any]:
    """What comes of it where all is kept, and where nothing is."""
    found = []
    for keep in ("all", "host"):
        with keeping(keep):
            found.append(use())
    return found


def trained(steps: Sequence[Batch], **options: Any) -> tuple[str, str, float]:
    trainer = trainer_of(**options)
    found = result(trainer, steps)
    trainer.close()
    return found


@each("option", list(OPTIONS))
def test_the_bits_are_those_of_a_card_that_keeps_all(option: str) -> None:
    kept, brought = with_each(lambda: trained(batches(3), **OPTIONS[option]))
    assert kept == brought


@each("kind", list(OPTIMIZERS))
def test_optimizers(kind: str) -> None:
    kept, brought = with_each(lambda: trained(batches(3), optimizer=OPTIMIZERS[kind]))
    assert kept == brought


def test_averages_evaluation_and_changes() -> None:
    def use() -> list[Any]:
        trainer = trainer_of(clip_norm=0.1)
        trainer.average(decay=0.9)
        steps = batches(4)
        trainer.step(steps[0])
        with trainer.changing(), torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.01)
        trainer.step(steps[1])

        def outputs(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"score": model(images).square().mean(dim=1)}

        found: list[Any] = [trainer.evaluate(outputs, steps[2][0], batch_size=7)]
        with trainer.averaged():
            found.append(trainer.evaluate(outputs, steps[2][0], batch_size=7))
        with trainer.whole(), torch.no_grad():
            trainer.model.get_parameter("out.bias").add_(0.1)
        trainer.step(steps[3])
        found.append(trainer.fingerprint())
        trainer.close()
        return found

    kept, brought = with_each(use)
    assert kept == brought


@each("way", [("all", "host"), ("host", "all"), ("host", "host")])
@each("precision", [None, "bf16-params"])
def test_a_stopped_run_goes_on(
    way: tuple[KeepName, KeepName], precision: str | None, tmp_path: Path
) -> None:
    steps = batches(4)
    with keeping("all"):
        whole = trained(steps, precision=precision)
    with keeping(way[0]):
        first = trainer_of(precision=precision)
        for batch in steps[:2]:
            first.step(batch)
        first.save(tmp_path)
        first.close()
    with keeping(way[1]):
        second = trainer_of(precision=precision)
        second.load(tmp_path)
        assert result(second, steps[2:]) == whole
        second.close()


def test_a_gradient_that_is_not_finite_is_found() -> None:
    with keeping("host"):
        spoilt = Spoilt()
        trainer = trainer_of(loss=spoilt)
        steps = batches(2)
        trainer.step(steps[0])
        spoilt.on = True
        with raises(onefold.errors.LossError, "step 2, shard 1"):
            trainer.step(steps[1])
            # On a card it is reported once the next step is under way.
            trainer.step(steps[1])
        trainer.close()


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
        return model(batch).square().mean(dim=1)  # type: ignore[no-any-return]

    def most(layers: int) -> float:
        trainer = trainer_of(model=Deep(layers), loss=squared, clip_norm=0.1)
        batch = torch.randn(8, 1024, generator=torch.Generator().manual_seed(1))
        trainer.step(batch)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.step(batch)
        torch.cuda.synchronize()
        found = (torch.cuda.max_memory_allocated() - before) / MIB
        trainer.close()
        return found

    with keeping("host"):
        few, many = most(4), most(16)
    # Six stages of 4 MiB, and what kernels take for themselves; all of 16 layers would be 256.
    assert few < 40
    assert many < few + 8
