"""Pieces that are kept in other memory than the device's: what is computed where, and what is left
behind there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.options import RunOptions
from onefold.core.world import World
from onefold.engine.update import SpanOptimizer
from onefold.engine.visits import change_at, updating_at
from onefold.system import heap
from onefold.system.heap import DiskHeap
from tests.apart import TwoMemories, apart
from tests.bits.large import GPT, TOKENS

CPU = torch.device("cpu")
EXACT = {"_foreach_add_", "add", "add_", "sum", "clone"}
"""What the host may compute: sums of two have the same bits everywhere, and the others look whether
values are finite, or copy them."""
SEEN_ON_THE_HOST = {"equal", "where", "eq"}
"""What comes to the host to be compared, by ``.to``, which cannot be told on a machine without a
GPU."""
LONG = torch.arange(70).view(7, 10) % TOKENS


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).view(len(tokens), -1, TOKENS)
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(dim=1)


def scored(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": next_token(model, tokens)}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[onefold.Trainer]:
    """Of a model that is partly frozen, with all that is done to a gradient."""
    world = World(options=RunOptions(keep="host"))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)
    torch.manual_seed(1)
    model = GPT(tied=False)
    model.blocks[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    with apart():
        made = onefold.Trainer(
            model,
            torch.optim.AdamW(trained, lr=0.01),
            next_token,
            shards=4,
            threads=1,
            clip_norm=0.1,
            clip_value=0.01,
        )
        made.average(decay=0.9)
        yield made
        made.close()


def home_of(trainer: onefold.Trainer) -> DiskHeap:
    found: Any = trainer._session.engine.exchange.memory.heap
    assert isinstance(found, DiskHeap)
    return found


def whole(trainer: onefold.Trainer, _: Path) -> None:
    with trainer.whole():
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def changed(trainer: onefold.Trainer, _: Path) -> None:
    with trainer.changing(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)


def averaged(trainer: onefold.Trainer, _: Path) -> None:
    with trainer.averaged():
        trainer.evaluate(scored, LONG, batch_size=4)


def saved(trainer: onefold.Trainer, folder: Path) -> None:
    trainer.save(folder)
    trainer.load(folder)


CALLS: dict[str, Callable[[onefold.Trainer, Path], object]] = {
    "step": lambda trainer, _: trainer.step(LONG),
    "fingerprint": lambda trainer, _: trainer.fingerprint(),
    "evaluate": lambda trainer, _: trainer.evaluate(scored, LONG, batch_size=4),
    "whole": whole,
    "changing": changed,
    "averaged": averaged,
    "save": saved,
}


@pytest.mark.parametrize("name", CALLS)
def test_memories_are_not_mixed_and_the_device_computes(
    name: str, trainer: onefold.Trainer, tmp_path: Path
) -> None:
    trainer.step(LONG)
    with TwoMemories(home_of(trainer)) as seen:
        CALLS[name](trainer, tmp_path / "saved")
        trainer.step(LONG)
    assert seen.mixed <= SEEN_ON_THE_HOST
    assert seen.at_home <= EXACT


def test_that_a_mixture_would_be_seen(
    trainer: onefold.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.step(LONG)
    monkeypatch.setattr(SpanOptimizer, "is_apart", False)
    with TwoMemories(home_of(trainer)) as seen:
        trainer.step(LONG)
    assert seen.at_home >= {"_foreach_mul_", "addcmul_", "lerp_"}


def test_between_steps_the_device_has_nothing(trainer: onefold.Trainer) -> None:
    trainer.step(LONG)
    update = trainer._session.engine.update
    live = home_of(trainer)._live
    kept = [item.values for item in update.owned] + [*update.averages.pieces.values()]
    for item in update.owned:
        kept += [v for v in update.optimizer.state[item.values].values() if v.dim()]
    assert len(kept) > 3 * len(update.owned)
    assert all(tensor.untyped_storage().data_ptr() in live for tensor in kept)
    frozen: Any = trainer._session.engine.exchange.memory.frozen
    assert all(frozen.part(n).untyped_storage().data_ptr() in live for n in frozen.numbers)
    lending: Any = trainer._session.engine.lending
    assert not lending._flat.is_there
    assert not frozen.flat.is_there
    assert not lending._rooms


def kinds() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    }


@pytest.mark.parametrize("kind", kinds())
def test_an_update_on_a_visit_is_the_plain_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_LEAST_BYTES", 1)
    home = DiskHeap(tmp_path, apart=True)
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(6, 5, generator=generator).t()
    plain, away = nn.Parameter(first.clone()), nn.Parameter(home.copy(first))
    stays = away.data_ptr()
    optimizers = [kinds()[kind]([p]) for p in (plain, away)]
    for _ in range(3):
        gradient = torch.randn(6, 5, generator=generator).t()
        plain.grad = gradient.clone()
        with updating_at(CPU, optimizers[1], [[away]], home):
            assert away.data_ptr() != stays
            away.grad = gradient.clone()
            optimizers[1].step()
        optimizers[0].step()
        assert away.grad is None
    assert away.data_ptr() == stays
    assert torch.equal(plain, away)
    states = [optimizer.state[p] for optimizer, p in zip(optimizers, (plain, away), strict=True)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        found = states[1][key]
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(found)), key
        if isinstance(value, torch.Tensor) and value.dim():
            assert found.untyped_storage().data_ptr() in home._live, key
            assert found.stride() == value.stride(), key


def test_values_come_home_when_an_update_fails(tmp_path: Path) -> None:
    home = DiskHeap(tmp_path, apart=True)
    parameter = nn.Parameter(home.copy(torch.ones(2000)))
    stays = parameter.data_ptr()
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def failing() -> None:
        with updating_at(CPU, optimizer, [[parameter]], home):
            parameter.data.fill_(2)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        failing()
    assert parameter.data_ptr() == stays
    assert bool((parameter == 2).all())


def test_gradients_are_changed_where_they_are_kept() -> None:
    tensors = [torch.ones(3), torch.full((2,), 5.0)]
    alone: list[int] = []

    def change(there: list[torch.Tensor]) -> None:
        alone.append(len(there))
        assert all(each.data_ptr() not in {t.data_ptr() for t in tensors} for each in there)
        there[0].mul_(2)

    change_at(CPU, tensors, change)
    assert alone == [1, 1]
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3, [10.0] * 2]
