"""Devices without common memory send the stages of their last partial sum while backward runs: the
bits are those of one device, and most of the bytes leave early. With ``replicate:state`` they send
all of it to all, and nothing else."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import RunOptions
from onefold.core.flat import FlatTensors, Layout
from onefold.core.options import ExchangeName
from onefold.errors import PeerError
from onefold.exchange.collective_memory import CollectiveMemory
from onefold.exchange.memory import Partial
from onefold.shard.stage_modules import GradientHooks
from onefold.step import assembly
from onefold.testing import Fault, outcomes, simulate
from tests.tables import for_each, some

WIDTH = 24


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send by stage, although these models are small and their stages have few segments."""
    monkeypatch.setattr(assembly, "LEAST_SENT_EARLY_BYTES", 0)
    monkeypatch.setattr(assembly, "divides_evenly", lambda *_: True)


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
        parts: Any = self.parts
        weight = parts[0].weight.t() + parts[1].weight.t()
        return (found @ weight).relu() + self.parts[2](found)


class Narrow(nn.Module):
    """Small stages that are merged with their neighbors, of which one is used without a call."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)] * 2
        self.layers = nn.ModuleList(copy.deepcopy(layer) for layer in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        first, norm, narrow, *others = layers
        found = norm(first(x)) @ narrow.weight.t() @ others[2].weight
        return others[1](others[0](found).relu())


def scripted() -> nn.Module:
    """One of its stages takes no hooks."""
    model = Skipping()
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model.blocks[1] = without_hooks(block)
    return model


def without_hooks(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        made: nn.Module = torch.jit.script(module)
    return made


def merged_scripted() -> nn.Module:
    """One that takes no hooks is small, and leaves with its neighbors."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    return nn.Sequential(*layers[:2], without_hooks(nn.LayerNorm(WIDTH)), *layers[2:])


def plain(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean(1)


def now_and_then(model: Any, x: torch.Tensor) -> Any:
    """Some shards use only some of the blocks."""
    few = bool(x[0, 0] > 0)
    found = x if few else model.first(x)
    for block in list(model.blocks)[2 if few else 0 :]:
        found = found + block(found)
    return found.square().mean(1)


def gathering_later(model: Any, x: torch.Tensor) -> Any:
    """Asks for the others' rows from the fourth step on, when nobody expects it any more."""
    found = model(x)
    center = onefold.gather(found).mean(0) if model.steps > 3 else 0.0
    return (found - center).square().mean(1)


def two_terms(model: nn.Module, x: torch.Tensor) -> Any:
    found = model(x).square().mean(1)
    kept = (x[:, 0] > 0).float()
    return onefold.Mean((found * kept).sum(), kept.sum()) + 0.1 * onefold.Mean(found.sum(), len(x))


def earlier_use(model: Any, x: torch.Tensor) -> Any:
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
        model: Any = make()
        made = optimizer(model.parameters(), lr=0.01)
        trainer = onefold.Trainer(model, made, loss, shards=shards, **options)
        data = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in trainer.epochs(2):
            for batch in trainer.loader(data, batch_size=20, shuffle=True):
                model.steps = trainer.steps + 1
                trainer.step(batch)
        return trainer.fingerprint()

    return run


def bits(run: Callable[[], Any], devices: int, placement: str = "replicate") -> set[Any]:
    exchange: ExchangeName = "collective" if devices > 1 else "auto"
    options = RunOptions(exchange=exchange, placement=placement)
    return set(simulate(run, devices, options=options))


WAYS: list[dict[str, Any]] = [
    *({"shards": shards} for shards in (2, 3, 4, 7)),
    *({"shards": 4, "loss": loss} for loss in (now_and_then, two_terms, earlier_use)),
    {"shards": 4, "make": partial(Skipping, tied=True)},
    *({"shards": shards, "make": Sharing} for shards in (2, 3)),
    {"shards": 7, "make": Sharing, "shares": (1, 6)},
    *({"shards": 4, "make": make} for make in (scripted, merged_scripted)),
    *({"shards": shards, "make": Narrow} for shards in (4, 5)),
    {"shards": 7, "shares": (1, 0, 6)},
    {"shards": 7, "shares": (3, 3, 1)},
    {"shards": 4, "clip_norm": 0.1, "clip_value": 0.01},
    {"shards": 4, "precision": "bf16"},
    {"shards": 4, "precision": "bf16-params"},
    {"shards": 4, "microbatch": 2},
    {"shards": 4, "optimizer": torch.optim.Adafactor},
    {"shards": 3, "loss": gathering_later},
]


EVERY = [
    (way, devices, placement)
    for way in WAYS
    for devices in ([len(way["shares"])] if "shares" in way else [2, 3])
    for placement in ("replicate", "replicate:state")
    if devices <= way["shards"]
]
"""In turn a way is tried by default on two devices or on three, with one placement or the other."""


def check_bits(way: dict[str, Any], devices: int, placement: str) -> None:
    alone = {name: value for name, value in way.items() if name != "shares"}
    assert bits(script(**way), devices, placement) == bits(script(**alone), 1)


@for_each(("way", "devices", "placement"), some(EVERY, 9))
def test_the_bits_are_those_of_one_device(
    way: dict[str, Any], devices: int, placement: str
) -> None:
    check_bits(way, devices, placement)


COPIED = [way for way in WAYS if way["shards"] > 3 or way.get("make") is Sharing]


@for_each("way", COPIED[::2])
def test_sums_may_all_be_copied_to_where_they_are_sent_from(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where what was there before may be anything."""

    def private(layout: Layout, device: torch.device) -> Partial:
        memory = torch.full((layout.nbytes,), 255, dtype=torch.uint8, device=device)
        return Partial(FlatTensors(layout, memory=memory), copies_all=True)

    monkeypatch.setattr(Partial, "private", private)
    at_once = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(CollectiveMemory, "at_once", at_once, raising=False)
    check_bits(way, len(way.get("shares", (1, 1))), "replicate")


@for_each(
    ("model", "placement", "early", "late"),
    [
        (partial(Skipping, tied=True), "replicate", 4, 2),
        (Skipping, "replicate", 4, 2),
        (Skipping, "replicate:state", 4, 2),
        (scripted, "replicate", 3, 3),
        (merged_scripted, "replicate", 4, 2),
        (Narrow, "replicate", 1, 2),
    ],
)
def test_most_stages_leave_before_backward_ends(
    model: Callable[[], nn.Module],
    placement: str,
    early: int,
    late: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but what is done last, at the model's beginning, what is not used at all, and a stage
    that takes no hooks and has no neighbor to leave with."""
    left: dict[str, int] = Counter()
    started, finish, ending = CollectiveMemory._start_next, GradientHooks.finish, [False]

    def start_next(self: CollectiveMemory) -> None:
        left["late" if ending[0] else "early"] += 1
        started(self)

    def finishing(self: GradientHooks) -> None:
        ending[0] = True
        finish(self)
        ending[0] = False

    monkeypatch.setattr(CollectiveMemory, "_start_next", start_next)
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

    simulate(run, 2, options=RunOptions(exchange="collective", placement=placement))
    # In three steps, on two devices.
    assert left == {"early": 6 * early, "late": 6 * late}


def published(placement: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often devices bring each other parameters in a few steps."""
    calls: list[int] = []
    publish = CollectiveMemory.publish_parameters

    def publishing(self: CollectiveMemory) -> None:
        calls.append(1)
        publish(self)

    monkeypatch.setattr(CollectiveMemory, "publish_parameters", publishing)
    bits(script(4), 2, placement)
    return len(calls)


def test_with_all_state_no_parameters_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published("replicate:state", monkeypatch) == 0


def test_small_models_have_partitions_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "LEAST_SENT_EARLY_BYTES", 1 << 30)
    assert published("replicate", monkeypatch) > 0
    assert "replicate:state" not in caplog.text
    assert published("replicate:state", monkeypatch) == published("replicate", monkeypatch)
    assert caplog.text.count("replicate:state acts as replicate for this model") == 1


def trained(first: int, last: int, folder: Path | None = None) -> str:
    """Steps of a run, which goes on from a folder unless it begins, and is saved there."""
    torch.manual_seed(0)
    model = Skipping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = onefold.Trainer(model, optimizer, plain, shards=4, clip_norm=0.5)
    trainer.average(decay=0.9)
    if first and folder:
        trainer.load(folder)
    for number in range(first, last):
        if number == 2:
            with trainer.modifying(optimizer_state=True):
                for parameter in model.first.parameters():
                    optimizer.state[parameter]["exp_avg"].mul_(-2)
        generator = torch.Generator().manual_seed(number)
        trainer.step(torch.randn(8, WIDTH, generator=generator))
    if folder:
        trainer.save(folder)
    with trainer.averaged():
        averaged = trainer.fingerprint()
    return trainer.fingerprint() + averaged


@for_each(("first", "then"), [("replicate:state", "replicate"), ("replicate", "replicate:state")])
def test_state_is_saved_loaded_and_changed(first: str, then: str, tmp_path: Path) -> None:
    bits(partial(trained, 0, 4, tmp_path), 2, first)
    assert bits(partial(trained, 4, 7, tmp_path), 3, then) == bits(partial(trained, 0, 7), 1)


def test_updates_of_the_script(tmp_path: Path) -> None:
    def run() -> str:
        torch.manual_seed(0)
        model = Skipping()
        trainer = onefold.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), plain, shards=3
        )
        for _ in range(3):
            trainer.gradient(torch.ones(6, WIDTH))
            with trainer.modifying(), torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
            trainer.step(torch.ones(6, WIDTH))
        return trainer.fingerprint()

    assert bits(run, 2, "replicate:state") == bits(run, 1)


def test_a_lost_device_ends_the_others() -> None:
    options = RunOptions(exchange="collective", placement="replicate:state")
    calls = min(each.calls for each in outcomes(script(2), 2, options=options))
    for call in range(calls - 60, calls, 7):
        told, lost = outcomes(script(2), 2, options=options, faults=[Fault(device=1, call=call)])
        assert lost.was_killed
        assert isinstance(told.error, PeerError)
