"""What a pipeline cannot compute is refused by name, on every device, and nobody hangs; and
what a line does with what it has computed."""

from __future__ import annotations

import copy
import gc
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import onefold
from onefold.core.options import ExchangeName, LaunchContext, RunOptions
from onefold.errors import PeerFailed, PipelineError
from onefold.placement.pipeline import shape_stages
from onefold.system.compat import FakeTensorMode
from onefold.testing import outcomes
from tests import simulated
from tests.tables import for_each

WIDTH, DEVICES = 6, 3


class Layers(nn.Module):
    """Layers that each are a stage, called as a function says."""

    mean: torch.Tensor

    def __init__(self, forward: Forward, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


Forward = Callable[[Layers, torch.Tensor], torch.Tensor]


class Linear(nn.Linear):
    """A layer that may be given more than it uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return super().forward(x)


class Overwriting(Linear):
    """A layer that writes to what it is given beside its input."""

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        for other in others:
            other.add_(1.0)
        return super().forward(x)


class Thinning(Linear):
    """A layer that draws what it multiplies by, and tells of it."""

    factor = 1.0

    def forward(self, x: torch.Tensor, *told: Any) -> Any:
        factor = random.random()
        if told:
            return super().forward(x) * factor, factor
        self.factor = factor
        return super().forward(x) * factor


def by(numbers: Any = range(6), given: Callable[[int, torch.Tensor], Any] | None = None) -> Forward:
    """Call these layers, each with what a function gives for its number and input."""

    def forward(model: Layers, x: torch.Tensor) -> torch.Tensor:
        for number in numbers:
            x = model.layers[number](x, *(given(number, x) if given else ()))
        return x

    return forward


in_order = by()


def around(change: Callable[[Layers, torch.Tensor], torch.Tensor]) -> Forward:
    def forward(model: Layers, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = change(model, layer(x))
        return x

    return forward


def writing_down(model: Layers, x: torch.Tensor) -> torch.Tensor:
    model.mean.copy_(x.detach().mean(dim=0))
    return x


def passing_by(model: Layers, x: torch.Tensor) -> torch.Tensor:
    first: torch.Tensor = model.layers[0](x)
    return by(range(1, 6))(model, first) + first


def drawing(model: Layers, x: torch.Tensor) -> torch.Tensor:
    factor = 1.0
    for layer in model.layers:
        x, factor = layer(x, factor)
    return x * factor


def rerun(reentrant: bool = False, **choices: Any) -> Callable[[Forward], Forward]:
    """Compute it once more in backward."""

    def wrap(inner: Forward) -> Forward:
        def forward(model: Layers, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_(reentrant)
            out: torch.Tensor = checkpoint(
                lambda y: inner(model, y), x, use_reentrant=reentrant, **choices
            )
            return out

        return forward

    return wrap


def with_the_batch(model: Layers, x: torch.Tensor) -> torch.Tensor:
    y = x
    for number, layer in enumerate(model.layers):
        y = layer(y, x) if number == 0 else layer(y.clone())
    return y


def with_a_mask(model: Layers, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(WIDTH)
    return by(given=lambda n, _: (mask,) if n == 4 else ())(model, x) * mask


def far(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean(dim=1)


def gathering(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)
    return (out - onefold.gather(out).mean(dim=0)).square().mean(dim=1)


def differentiating(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.clone().requires_grad_()
    losses = far(model, batch)
    (gradient,) = torch.autograd.grad(losses.sum(), batch, create_graph=True)
    return losses + gradient.square().mean(dim=1)


def one_by_one(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.vmap(lambda x: (model(x[None])[0] - x).square().mean())(batch)
    return out


def normalizing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.mul_(0.5)
    return model(batch.clone()).square().mean(dim=1)


class Refused(NamedTuple):
    """What a pipeline refuses."""

    match: str
    forward: Forward = in_order
    loss: Callable[..., Any] = far
    layer: Callable[[], nn.Module] = Linear
    stops_early: bool = True
    in_processes: str = ""
    """What is said where each device has a process; the same if empty, nothing if "-"."""


REFUSED = {
    "values": Refused(
        "computes __bool__ from the output of a stage",
        around(lambda _, x: x if bool(x.sum() > -1e9) else -x),
    ),
    "skip": Refused(
        "after stage layers.., the script uses in .* a value made before it", passing_by
    ),
    "writing": Refused("writes the output of a stage on another device into", around(writing_down)),
    "shapes": Refused(
        "tensor of shape .* there, and .* here",
        by(given=lambda _, x: (x if type(x) is torch.Tensor else x[:1],)),
    ),
    "drawn": Refused("draws random numbers, and returns a number", drawing, layer=Thinning),
    "kept": Refused("draws random numbers, and .* stores one", layer=Thinning),
    "draws": Refused("random numbers between two stages", around(lambda _, x: x * torch.rand(()))),
    "one by one": Refused("is called inside torch.vmap", loss=one_by_one),
    "order": Refused("stage layers.1 is called after stage layers.2", by([0, 2, 1, 3, 4, 5])),
    "dropped": Refused(
        r"stage layers.4 is called .*, but layers.2 should be called\. .* must still be called",
        by([0, 1, 4, 5]),
    ),
    "twice": Refused(
        "stage layers.0 is called after stage layers", loss=lambda m, b: far(m, b) + far(m, b + 1)
    ),
    "left out": Refused("the loss ended on device 1", by(range(4))),
    "no early stop": Refused(
        "would be recomputed on a device", rerun()(in_order), stops_early=False
    ),
    "reentrant": Refused("use_reentrant=True", rerun(True)(in_order)),
    "other draws": Refused(
        "recomputes them with other random numbers",
        rerun(preserve_rng_state=False)(around(lambda _, x: F.dropout(x, 0.3))),
    ),
    "batch": Refused(
        "the loss changes its batch",
        with_the_batch,
        layer=Overwriting,
        in_processes="that does not belong to it",
    ),
    "in place": Refused("the loss changes its batch", loss=normalizing, in_processes="-"),
    "mask": Refused("writes in place to a tensor of shape", with_a_mask, layer=Overwriting),
    "scale": Refused(
        "parameter scale is used on device 1 and on a later one", around(lambda m, x: x * m.scale)
    ),
    "penalty": Refused(
        "parameter .* is used on device 2, outside of its stage",
        loss=lambda m, b: far(m, b) + sum(p.square().sum() for p in m.parameters()),
    ),
    "gather": Refused("the loss calls onefold.gather", loss=gathering),
    "terms": Refused(
        "several terms with separate denominators",
        loss=lambda m, b: onefold.Mean((x := m(b)).sum(), 9) + onefold.Sum(x.sum()),
    ),
    "grad": Refused(
        "the loss calls torch.autograd.grad or backward on a value", loss=differentiating
    ),
}


def trainer_of(model: nn.Module, loss: Any, devices: int, **choices: Any) -> onefold.Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    named = ["cpu"] * devices or None
    return onefold.Trainer(model, optimizer, loss, shards=4, threads=1, devices=named, **choices)


def attempt(name: str, devices: int = 0) -> None:
    case = REFUSED[name]
    torch.manual_seed(3)
    model = Layers(case.forward, case.layer)
    trainer = trainer_of(model, case.loss, devices)
    try:
        with set_checkpoint_early_stop(case.stops_early):
            trainer.step(F.normalize(torch.randn(9, WIDTH)))
    finally:
        trainer.close()


@pytest.fixture
def _in_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched, whose devices are a line."""
    context = LaunchContext(options=RunOptions(placement="pipeline"))
    monkeypatch.setattr("onefold.trainer.current_context", lambda: context)


@for_each("name", REFUSED)
@pytest.mark.usefixtures("_in_pipeline")
def test_devices_of_one_process(name: str) -> None:
    """What one device computes, or the refusal would say nothing about lines."""
    attempt(name, 1)
    with pytest.raises(PipelineError, match=REFUSED[name].match):
        attempt(name, DEVICES)


@for_each(
    ("name", "exchange"),
    [(name, "shared") for name, case in REFUSED.items() if case.in_processes != "-"]
    + [(name, "collective") for name in ("values", "order", "left out", "gather", "reentrant")],
)
def test_devices_of_several_processes(name: str, exchange: ExchangeName) -> None:
    case = REFUSED[name]
    options = RunOptions(placement="pipeline", exchange=exchange)
    errors = [each.error for each in outcomes(attempt, DEVICES, args=(name,), options=options)]
    assert {type(error) for error in errors} <= {PipelineError, PeerFailed}
    causes = [str(error) for error in errors if isinstance(error, PipelineError)]
    assert re.search(case.in_processes or case.match, causes[0])
    assert all("PipelineError" in str(error) for error in errors if isinstance(error, PeerFailed))


computed: Counter[str] = Counter()


class Noted(nn.Module):
    """Batch norm and dropout; counts the calls with values and those in shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed["values" if type(x) is torch.Tensor else "shape"] += 1
        return F.dropout(self.norm(self.linear(x)), 0.2)


@pytest.mark.usefixtures("_in_pipeline")
def test_a_step_computes_each_stage_once_and_leaves_nothing_to_the_collector() -> None:
    """What a device was sent would wait there, and each file with it."""
    torch.manual_seed(1)
    stages = [Noted() for _ in range(6)]
    model = nn.Sequential(*[nn.Sequential(each) for each in stages])
    trainer = trainer_of(model, lambda m, b: m(b).square().mean(dim=1), DEVICES, stages=stages)
    trainer.step(torch.ones(12, 5))
    computed.clear()
    # What earlier tests have left: some of it can be collected only once the rest is.
    while gc.collect():
        pass
    gc.disable()
    try:
        trainer.step(torch.ones(12, 5))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
    assert computed == {"values": 6 * 4}
    trainer.close()


TAKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "by name": lambda places, other: places.to(tensor=other),  # type: ignore[call-overload]
    "by place": lambda places, other: places.to(other, False),
    "asked for": lambda places, other: places.to(other.dtype),
    "of a copy": lambda places, other: places.to(copy.copy(other)),
    "made of it": lambda places, other: other.new_tensor(places.tolist()),
}


def given_a_dtype(way: str, devices: int = 0) -> str:
    """The fingerprint of a model between whose stages a tensor takes the dtype of another."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Dropout()) for _ in range(4)])
    places = torch.randn(5, dtype=torch.float64)

    def loss(model: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
        first = model[0](batch)  # in bfloat16, by autocast
        x = first + TAKEN[way](places, first)
        for layer in list(model)[1:]:
            x = layer(x)
        return x.square().mean(dim=1)

    trainer = trainer_of(model, loss, devices, precision="bf16")
    trainer.step(torch.ones(8, 5))
    return trainer.fingerprint()


@for_each("way", TAKEN)
def test_its_dtype_may_be_taken(way: str) -> None:
    """It needs no values; nor do random numbers within stages."""
    found = simulated.launch(given_a_dtype, devices="cpu:2", args=(way,), placement="pipeline")
    assert found == given_a_dtype(way, 1)


def test_forms_are_not_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of many sizes would fill memory."""
    monkeypatch.setattr(shape_stages, "MOST_KEPT", 3)
    for size in range(1, 20):
        progress = shape_stages.LossProgress("here", torch.device("cpu"))
        made = shape_stages.ShapeTensor.apart(torch.empty(size), progress) + 1.0
        assert made.shape == (size,)
    assert FakeTensorMode.cache_info().size <= 4
