"""Devices without common memory send the stages of their last partial sum while backward runs: the
bits are those of one device, and most of the bytes leave early."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import RunOptions
from onefold.exchange.private import PrivateMemory
from onefold.shard.replica import GradientHooks
from onefold.step import assembly
from onefold.testing import simulate
from tests.tables import for_each

WIDTH = 24


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are small, and are sent stage by stage all the same."""
    monkeypatch.setattr(assembly, "LEAST_SENT_EARLY_BYTES", 0)


class Skipping(nn.Module):
    """Blocks with skips, dropout and norms, of which the head uses the first one's weight again."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2))
            for _ in range(4)
        )
        self.unused = nn.Linear(WIDTH, 3)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        for block in self.blocks:
            found = found + block(found).relu()
        return found @ self.first.weight if self.tied else found


class Sharing(nn.Module):
    """Two stages whose gradients are views of one tensor, large enough to stay where they are."""

    def __init__(self, wide: int = 260) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, wide)
        self.parts = nn.ModuleList([nn.Linear(wide, wide, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        weight = self.parts[0].weight.t() + self.parts[1].weight.t()
        return (found @ weight).relu() + self.parts[2](found)


def scripted() -> nn.Module:
    """One of its stages takes no hooks."""
    model = Skipping()
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        model.blocks[1] = torch.jit.script(block)  # type: ignore[no-untyped-call]
    return model


def plain(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean(1)


def now_and_then(model: nn.Module, x: torch.Tensor) -> Any:
    """Some shards use only some of the blocks."""
    few = bool(x[0, 0] > 0)
    found = x if few else model.first(x)
    for block in list(model.blocks)[2 if few else 0 :]:
        found = found + block(found)
    return found.square().mean(1)


def gathering_later(model: nn.Module, x: torch.Tensor) -> Any:
    """Asks for the others' rows from the fourth step on, when nobody expects it any more."""
    found = model(x)
    centre = onefold.gather(found).mean(0) if model.steps > 3 else 0.0
    return (found - centre).square().mean(1)


def two_terms(model: nn.Module, x: torch.Tensor) -> Any:
    found = model(x).square().mean(1)
    kept = (x[:, 0] > 0).float()
    return onefold.Mean((found * kept).sum(), kept.sum()) + 0.1 * onefold.Mean(found.sum(), len(x))


def earlier_use(model: nn.Module, x: torch.Tensor) -> Any:
    """The loss uses a block's weight before the block runs, so its gradient comes late."""
    penalty = model.blocks[3][0].weight.square().mean()
    return model(x).square().mean(1) + penalty


def script(
    shards: int,
    loss: Callable[..., Any] = plain,
    *,
    make: Callable[[], nn.Module] = Skipping,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **options: Any,
) -> Callable[[], str]:
    def run() -> str:
        torch.manual_seed(0)
        model = make()
        made = optimizer(model.parameters(), lr=0.01)
        trainer = onefold.Trainer(model, made, loss, shards=shards, **options)
        data = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in trainer.epochs(2):
            for batch in trainer.loader(data, batch_size=20, shuffle=True):
                model.steps = trainer.steps + 1
                trainer.step(batch)
        return trainer.fingerprint()

    return run


def bits(run: Callable[[], str], devices: int) -> set[str]:
    options = RunOptions(exchange="collective" if devices > 1 else "auto")
    return set(simulate(run, devices, options=options))


WAYS: list[dict[str, Any]] = [
    *({"shards": shards} for shards in (2, 3, 4, 7)),
    *({"shards": 4, "loss": loss} for loss in (now_and_then, two_terms, earlier_use)),
    {"shards": 4, "make": partial(Skipping, tied=True)},
    *({"shards": shards, "make": Sharing} for shards in (2, 3)),
    {"shards": 7, "make": Sharing, "plan": (1, 6)},
    {"shards": 4, "make": scripted},
    {"shards": 7, "plan": (1, 0, 6)},
    {"shards": 7, "plan": (3, 3, 1)},
    {"shards": 4, "clip_norm": 0.1, "clip_value": 0.01},
    {"shards": 4, "precision": "bf16"},
    {"shards": 4, "precision": "bf16-params"},
    {"shards": 4, "microbatch": 2},
    {"shards": 4, "optimizer": torch.optim.Adafactor},
    {"shards": 3, "loss": gathering_later},
]


@for_each("devices", [2, 3])
@for_each("way", WAYS)
def test_the_bits_are_those_of_one_device(way: dict[str, Any], devices: int) -> None:
    plan = way.get("plan")
    if devices > way["shards"] or len(plan or range(devices)) != devices:
        return
    alone = {name: value for name, value in way.items() if name != "plan"}
    assert bits(script(**way), devices) == bits(script(**alone), 1)


@for_each("model", [partial(Skipping, tied=True), Skipping])
def test_most_stages_leave_before_backward_ends(
    model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what is done last, at the model's beginning, and what is not used at all."""
    left: dict[str, int] = Counter()
    started, finish, ending = PrivateMemory._start_next, GradientHooks.finish, [False]

    def start_next(self: PrivateMemory) -> None:
        left["late" if ending[0] else "early"] += 1
        started(self)

    def finishing(self: GradientHooks) -> None:
        ending[0] = True
        finish(self)
        ending[0] = False

    monkeypatch.setattr(PrivateMemory, "_start_next", start_next)
    monkeypatch.setattr(GradientHooks, "finish", finishing)

    def run() -> None:
        torch.manual_seed(0)
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        trainer = onefold.Trainer(made, optimizer, plain, shards=2)
        for number in range(8):
            if number == 5:
                left.clear()
            trainer.step(torch.randn(8, WIDTH))

    simulate(run, 2, options=RunOptions(exchange="collective"))
    assert left["early"] >= 0.7 * left.total(), left
