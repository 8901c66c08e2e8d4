"""Segments that are kept in other memory than the device's: what is computed where, and what is
left behind there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.core.options import LaunchContext, RunOptions
from onefold.system.file_memory import MmapAllocator
from tests.apart import TwoMemories, apart
from tests.bits.large import GPT, TOKENS
from tests.inside import engine_in
from tests.tables import for_each

EXACT = {"_foreach_add_", "add", "add_", "_foreach_mul_", "sum", "clone"}
EXACT |= {"_foreach_clamp_min_", "_foreach_clamp_max_"}
"""What the host may compute: sums of two, and products with one number, have the same bits
everywhere; the others look whether values are finite, or copy them."""
SEEN_ON_THE_HOST = {"equal", "where", "eq"}
"""What comes to the host to be compared, by ``.to``, which cannot be told on a machine without a
GPU."""
LONG = torch.arange(70).view(7, 10) % TOKENS


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).view(len(tokens), -1, TOKENS)
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(dim=1)


Make = Callable[..., onefold.Trainer]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Trainers of a model that is partly frozen, whose home is other memory than the device's."""
    made: list[onefold.Trainer] = []

    def make(placement: str = "offload", **settings: Any) -> onefold.Trainer:
        context = LaunchContext(options=RunOptions(placement=placement))
        monkeypatch.setattr("onefold.trainer.current_context", lambda: context)
        torch.manual_seed(1)
        model = GPT(tied=False)
        model.blocks[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        settings = {"shards": 4, "clip_norm": 0.1, "loss": next_token, **settings}
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        made.append(onefold.Trainer(model, optimizer, threads=1, **settings))
        return made[-1]

    with apart():
        yield make
        for trainer in made:
            trainer.close()


def home_of(trainer: onefold.Trainer) -> MmapAllocator:
    found: Any = engine_in(trainer).context.exchange.memory.allocator
    assert isinstance(found, MmapAllocator)
    return found


def changed(trainer: onefold.Trainer, _: Path) -> None:
    with trainer.modifying(), torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)


def averaged(trainer: onefold.Trainer, _: Path) -> None:
    with trainer.averaged():
        trainer.evaluate(lambda m, b: {"loss": next_token(m, b)}, LONG[:4], batch_size=4)
    with trainer.gathered():
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def saved(trainer: onefold.Trainer, folder: Path) -> None:
    trainer.save(folder)
    trainer.load(folder)
    trainer.fingerprint()


@for_each("call", [changed, averaged, saved])
def test_memories_are_not_mixed(call: Callable[..., None], make: Make, tmp_path: Path) -> None:
    trainer = make(clip_value=0.01, shards=2)
    trainer.average(decay=0.9)
    trainer.step(LONG[:4])
    with TwoMemories(home_of(trainer)) as seen:
        call(trainer, tmp_path / "saved")
        trainer.step(LONG[:4])
    assert seen.mixed <= SEEN_ON_THE_HOST
    assert seen.at_home <= EXACT


def test_between_steps_the_device_has_nothing(make: Make) -> None:
    trainer = make()
    trainer.average(decay=0.9)
    trainer.step(LONG)
    engine, home = engine_in(trainer), home_of(trainer)
    update, exchange = engine.context.update, engine.context.exchange
    kept = [item.values for item in update.owned] + [*update.averages.segments.values()]
    for item in update.owned:
        kept += [v for v in update.state[item.values].values() if v.dim()]
    assert len(kept) > 3 * len(update.owned)
    frozen: Any = exchange.memory.frozen
    kept += [frozen.part(n) for n in frozen.numbers]
    kept.append(exchange.transport.buffer(5000))  # for a checkpoint
    assert all(home.kept(tensor) is tensor for tensor in kept)
    (flat,) = exchange.memory.trained.values()
    assert not flat.is_there
    assert not frozen.flat.is_there


@for_each("inside", [False, True])
@for_each("precision", [None, "bf16-params"])
def test_what_a_script_changes_is_kept(precision: Any, inside: bool, make: Make) -> None:
    found = []
    for placement in ("replicate", "offload"):
        trainer = make(placement, precision=precision)
        trainer.step(LONG)
        with trainer.gathered():
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(1.5)
            if inside:
                trainer.step(LONG)
        trainer.step(LONG)
        found.append(trainer.fingerprint())
    assert found[0] == found[1]
