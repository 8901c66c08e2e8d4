"""Where randomness and state hide in a script: in each of 20 places it is equal or rejected.

In each place something draws from a generator of its own, or counts its calls, and moves what is
trained or reported. The reference is one device that reads by itself and is never interrupted. All
other cells of the matrix (workers, devices, a death followed by a resume on another number of
devices) end with the same bits or with an error of onefold. Where the reference is rejected, so are
all others.

Left out are counts in a loss, a hook, a score or an optimizer, which only `onefold verify` finds,
and counts of a stream's passes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, IterableDataset

import onefold
from onefold.core.options import RunOptions
from onefold.errors import OnefoldError
from onefold.testing import outcomes
from tests.checkpoint.inprocess import Died, new_progress
from tests.inside import run_in, session_in

SAMPLES, BATCH = 12, 4
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
OF_DATA = ("attribute", "closure", "partial", "default", "global", "slot", "nested", "class")
PLACES = (
    *(*OF_DATA, "module", "environment", "collate", "sampler", "stream", "rule"),
    *("loss", "metric", "optimizer", "hook", "ema", "callback"),
)
COUNTING = (*OF_DATA, "module", "environment", "collate", "sampler", "rule", "callback")
MADE: list[onefold.Trainer] = []
"""Trainers of the run at hand, one for each device."""
GLOBAL: list["Own"] = []
LIBRARY: Any = ModuleType("library")
"""A library that draws from a generator of its module."""
exec("def draw():\n    return own()", vars(LIBRARY))


class Own:
    """Returns a number each time: drawn, or counted."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0
        self.rng = np.random.default_rng(5)

    def __call__(self) -> float:
        self.calls += 1
        return float(self.rng.random()) if self.kind == "draws" else self.calls / 8


class Data(Dataset[torch.Tensor]):
    """Adds to each sample what a function returns."""

    def __init__(self, extra: Callable[[], float]) -> None:
        self.extra = extra

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] + self.extra()


class Slotted:
    __slots__ = ("own",)

    def __init__(self, own: Own) -> None:
        self.own = own

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] + self.own()


class Nested(Data):
    def __init__(self, own: Own) -> None:
        self.parts = {"a": [(0, own)]}

    def extra(self) -> float:
        return self.parts["a"][0][1]()


class Transform(torch.nn.Module):
    def __init__(self, own: Own) -> None:
        super().__init__()
        self.own = own

    def forward(self) -> float:
        return self.own()


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, own: Own) -> None:
        self.own = own

    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in X:
            yield row + self.own()


class Sampler(torch.utils.data.Sampler[int]):
    def __init__(self, own: Own) -> None:
        self.own = own

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        first = int(self.own() * 8)
        return iter([(index + first) % SAMPLES for index in range(SAMPLES)])


class Noisy(torch.optim.SGD):
    own: Own

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(self.own() / 100)
        return found


def data_of(place: str, own: Own) -> Any:
    def drawn(draw: Own = own) -> Any:
        return draw()

    made: dict[str, Callable[[], Any]] = {
        "attribute": lambda: Data(own),
        "closure": lambda: Data(lambda: own()),
        "partial": lambda: Data(partial(lambda draw: draw(), own)),
        "default": lambda: Data(drawn),
        "global": lambda: Data(lambda: GLOBAL[0]()),
        "slot": lambda: Slotted(own),
        "nested": lambda: Nested(own),
        "class": lambda: type("Class", (Data,), {"extra": own, "__init__": lambda self: None})(),
        "module": lambda: Data(Transform(own)),
        "environment": lambda: Data(lambda: LIBRARY.draw()),
        "stream": lambda: Stream(own),
    }
    return made.get(place, lambda: Data(float))()


def script(place: str, kind: str, workers: int, dies: int | None) -> str:
    torch.manual_seed(0)
    # Simulated devices are threads: a global is one object for all of them.
    own, idle = GLOBAL[0] if place in ("global", "environment") else Own(kind), float
    used = {name: own if name == place else idle for name in PLACES}
    model = torch.nn.Linear(3, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if place == "optimizer":
        optimizer = noisy = Noisy(model.parameters(), lr=0.1)
        noisy.own = own
    if place == "hook":
        model.register_forward_hook(lambda *given: given[-1] + own())

    def loss(net: Any, batch: Any) -> Any:
        return (net(batch).square() + used["loss"]() * net(batch)).mean(dim=1)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + used["collate"]()

    def score(net: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": net(batch).square().mean(dim=1) + used["metric"]()}

    def rule(number: int, _: torch.Generator) -> torch.Tensor:
        first = int(own() * 8)
        return X[[(first + index) % SAMPLES for index in range(BATCH)]]

    trainer = onefold.Trainer(model, optimizer, loss, shards=4, threads=1)
    MADE.append(trainer)
    averaged = AveragedModel(model) if place == "ema" else None
    trainer.on_step(lambda step: used["callback"]())
    if place == "rule":
        loader = trainer.batches(rule, per_epoch=3)
    else:
        choices: dict[str, Any] = {"sampler": Sampler(own)} if place == "sampler" else {}
        data, choices = data_of(place, own), choices | {"num_workers": workers}
        loader = trainer.loader(data, batch_size=BATCH, collate_fn=collate, **choices)
    kept: list[Any] = []
    for _ in trainer.epochs(2):
        for batch in loader:
            if dies is not None and trainer.steps == dies:
                raise Died
            kept.append(float(trainer.step(batch).loss))
            if averaged is not None:
                averaged.update_parameters(model)
            if place == "callback":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + own())
        kept.append(trainer.evaluate(score, Data(float), batch_size=6)["loss"])
    if averaged is not None:
        kept += [parameter.tolist() for parameter in averaged.parameters()]
    return f"{trainer.fingerprint()} {kept}"


def run(
    *cell: Any, devices: int, workers: int, folder: Path | None = None, dies: int | None = None
) -> str:
    """What the script returns; "rejected", or "died"."""
    options = RunOptions(checkpoint=str(folder or ""), save_every=1)
    GLOBAL[:] = [Own(cell[1])]
    LIBRARY.own = GLOBAL[0]
    with ExitStack() as stack:
        if folder is not None:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            progress = stack.enter_context(new_progress(devices))
            for name in ("progress_of", "places_of"):
                patch.setattr(f"onefold.tools.registry.{name}", lambda context: progress)
        ended = outcomes(script, devices, args=(*cell, workers, dies), options=options)
        while MADE:
            let_go(MADE.pop())
    errors = [each.error for each in ended if each.error is not None]
    if any(isinstance(error, Died) for error in errors):
        return "died"
    if any(isinstance(error, OnefoldError) for error in errors):
        return "rejected"
    if errors:
        raise errors[0]
    (value,) = {each.value for each in ended}
    return str(value)


def let_go(trainer: onefold.Trainer) -> None:
    """Let go of what the system would take from a process that has ended."""
    session, seen = session_in(trainer), run_in(trainer)
    seen.checkpoints.finish()
    session.hooks.close()
    session.engine.context.exchange.close()
    if seen.lock is not None:
        seen.lock.let_go()


@cache
def reference(place: str, kind: str) -> str:
    return run(place, kind, devices=1, workers=0)


def check(folder: Path, place: str, kind: str, workers: int, devices: int, resumed: int) -> None:
    expected = reference(place, kind)
    assert run(place, kind, devices=devices, workers=workers) in (expected, "rejected")
    for dies in (1, 3, 4) if resumed else ():
        below = folder / str(dies)
        began = run(place, kind, devices=devices, workers=workers, folder=below, dies=dies)
        assert began in ("died", "rejected")
        if began == "died":
            found = run(place, kind, devices=resumed, workers=workers, folder=below)
            assert found in (expected, "rejected"), dies


CASES = [(place, "draws") for place in PLACES] + [(place, "counts") for place in COUNTING]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(("place", "kind"), CASES)
def test_it_is_equal_or_rejected(tmp_path: Path, place: str, kind: str, workers: int) -> None:
    if place == "stream" and workers == 2:
        pytest.skip("a stream has one worker at most")
    for devices in (1, 2, 3):
        check(tmp_path / str(devices), place, kind, workers, devices, devices % 3 + 1)


@pytest.mark.parametrize(
    ("place", "kind", "devices", "resumed"),
    [
        ("closure", "draws", 2, 3),
        ("environment", "draws", 3, 0),
        ("collate", "draws", 3, 1),
        ("rule", "counts", 1, 2),
        ("loss", "draws", 2, 1),
        ("metric", "draws", 2, 0),
    ],
)
def test_a_sample_of_the_matrix(
    tmp_path: Path, place: str, kind: str, devices: int, resumed: int
) -> None:
    check(tmp_path, place, kind, 0, devices, resumed)
    assert reference(place, kind) not in ("rejected", "died")


@pytest.mark.parametrize(
    ("place", "kind"), [("collate", "counts"), ("nested", "counts"), ("optimizer", "draws")]
)
def test_what_cannot_be_equal_is_rejected_on_one_device_too(place: str, kind: str) -> None:
    assert reference(place, kind) == "rejected"
