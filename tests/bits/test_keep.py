"""What a device keeps of a model is no part of the result: the bits are those of one that keeps
all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from onefold.core.options import KeepName, RunOptions
from onefold.core.world import World
from onefold.system import heap
from tests.bits import cases, large, options, test_bits
from tests.bits.large import CASES
from tests.bits.options import STEPS, STOP_AFTER

pytestmark = pytest.mark.xdist_group("bits")

KEEPS: tuple[KeepName, ...] = ("span", "host")
IN_A_LINE = (), ("bf16-params", "decay"), ("clip-norm", "skip"), ("microbatch", "mean")
OTHERWISE = (*IN_A_LINE, ("sync-batch-norm", "gather"))
"""Options of runs that stop and go on."""


@functools.cache
def reference(case: large.Case) -> tuple[str, str]:
    """On one device that keeps everything."""
    return large.run(case, ["cpu"])


@pytest.fixture
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched, whose devices keep what the test says."""
    monkeypatch.setattr(heap, "_LEAST_BYTES", 1)
    world = World(options=RunOptions(keep=request.param))
    monkeypatch.setattr("onefold.trainer.current_world", lambda: world)


def with_all_in_files(call: Callable[..., Any], *given: object) -> Any:
    """In a launched process: the models here are small, and the home is to have all of them."""
    heap._LEAST_BYTES = 1
    return call(*given)


def differing(found: list[tuple[str, str]]) -> list[large.Case]:
    pairs = zip(CASES, found, strict=True)
    return [case for case, result in pairs if result != reference(case.reference)]


def test_the_reference_is_no_special_case() -> None:
    """Different cases have different bits, or the comparisons below would show nothing."""
    # Layers that are computed once more in backward are a matter of memory.
    different = {case.reference for case in CASES if case.model != "checkpoints"}
    assert len({reference(case.reference) for case in CASES}) == len(different)


@pytest.mark.parametrize("alone", KEEPS, indirect=True)
@pytest.mark.parametrize(
    "devices", [1, 3, *(pytest.param(devices, marks=pytest.mark.full) for devices in (2, 4))]
)
@pytest.mark.usefixtures("alone")
def test_devices_of_one_process(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [large.run(case, ["cpu"] * devices) for case in CASES]
    monkeypatch.undo()
    assert differing(found) == []


@pytest.mark.parametrize("alone", ["host"], indirect=True)
@pytest.mark.parametrize("option", [name for name in options.OPTIONS if name != "compile"])
@pytest.mark.usefixtures("alone")
def test_a_single_shard(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has nothing to add up, and whose gradient is clipped as PyTorch does."""
    monkeypatch.setattr(options, "SHARDS", 1)
    case = options.Case("transformer", ("clip-norm", option))
    found = options.run_part(case, None, STEPS, ["cpu"])
    monkeypatch.setattr("onefold.trainer.current_world", World)
    assert found == options.run_part(case, None, STEPS, ["cpu"])


@pytest.mark.processes
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    ("exchange", "devices"),
    [
        ("shared", 3),
        ("collective", 2),
        *(pytest.param("shared", devices, marks=pytest.mark.full) for devices in (2, 4)),
        pytest.param("collective", 3, marks=pytest.mark.full),
    ],
)
def test_devices_of_several_processes(exchange: str, devices: int, keep: KeepName) -> None:
    found = onefold.launch(
        with_all_in_files,
        devices=f"cpu:{devices}",
        args=(large.run_all, CASES),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )
    assert differing(found) == []


@pytest.mark.processes
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("exchange", "devices"), [("shared", 3), ("collective", 2)])
def test_all_else_that_a_run_can_be(exchange: str, devices: int, keep: KeepName) -> None:
    """The runs of test_bits: other models, precisions, averages, losses of the whole batch."""
    chosen = test_bits.turns(devices)
    found = onefold.launch(
        with_all_in_files,
        devices=f"cpu:{devices}",
        args=(cases.run_all, chosen),
        keep=keep,
        exchange=exchange,  # type: ignore[arg-type]
        timeout_s=300,
    )
    pairs = zip(chosen, found, strict=True)
    assert [c for c, result in pairs if result != test_bits.reference(c.reference)] == []


@pytest.mark.processes
@pytest.mark.parametrize(
    "way",
    [
        (("shared", "span"), ("collective", "all")),
        (("collective", "all"), ("shared", "span")),
        (("shared", "span"), ("collective", "span")),
        (("shared", "host"), ("collective", "span")),
        (("collective", "all"), ("shared", "host")),
        (("shared", "stages"), ("collective", "all")),
        (("collective", "span"), ("shared", "stages")),
        (("shared", "host"), ("collective", "stages")),
        (("collective", "stages"), ("collective", "span")),
    ],
    ids=lambda way: "-".join(word for part in way for word in part),
)
def test_a_run_goes_on_with_another_choice(
    way: tuple[tuple[str, KeepName], tuple[str, KeepName]], tmp_path: Path
) -> None:
    """Stopped on three devices, continued on two, with options that are in checkpoints.

    A line is of two devices: the model has two stages.
    """
    in_line = any(keep == "stages" for _, keep in way)
    chosen = [options.Case("transformer", names) for names in (IN_A_LINE if in_line else OTHERWISE)]
    found: list[str] = []
    for (exchange, keep), devices, stop in zip(way, (3, 2), (STOP_AFTER, STEPS), strict=True):
        found = onefold.launch(
            with_all_in_files,
            devices=f"cpu:{2 if keep == 'stages' else devices}",
            args=(options.run_parts, chosen, tmp_path, stop, keep != "stages"),
            keep=keep,
            exchange=exchange,  # type: ignore[arg-type]
            timeout_s=300,
        )
    assert found == [options.run_part(case, None, STEPS, ["cpu"]) for case in chosen]


def scores_and_values() -> tuple[object, object, str]:
    """Train a little, and then evaluate and predict: what is not trained is as ever."""
    torch.manual_seed(1)
    layers = (torch.nn.Linear(wide, 2 * wide) for wide in (3, 6, 12))
    model = torch.nn.Sequential(*layers, torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=5, threads=1)
    data = torch.randn(23, 3, generator=torch.Generator().manual_seed(2))
    trainer.step(data)
    scores = trainer.evaluate(lambda m, b: {"loss": loss(m, b)}, data, batch_size=7)
    values = trainer.predict(lambda m, b: {"sum": m(b).sum(dim=1)}, data, batch_size=7)
    trainer.gradient(data)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return scores, [v.tolist() for v in values.values()], str(gradient.tolist())


@pytest.mark.processes
@pytest.mark.parametrize(("exchange", "devices"), [("shared", 3), ("collective", 2)])
def test_scores_predictions_and_gradients_are_the_same(exchange: str, devices: int) -> None:
    settings: dict[str, Any] = {
        "devices": f"cpu:{devices}",
        "exchange": exchange,
        "timeout_s": 60,
    }
    launched = [
        onefold.launch(with_all_in_files, args=(scores_and_values,), keep=keep, **settings)
        for keep in ("all", *KEEPS, "stages")
    ]
    assert launched == [scores_and_values()] * 4


class Counting(torch.optim.Optimizer):
    """Counts its calls, and takes the norm of all gradients that it is called with."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["steps"] += 1
            norm = sum(float(p.grad.square().sum()) for p in group["params"])
            rate = float(group["lr"]) / (self.calls + group["steps"] + norm)
            for parameter in group["params"]:
                parameter -= rate * parameter.grad


def with_a_rate_of_the_scripts(kind: Callable[..., torch.optim.Optimizer]) -> str:
    """Train with a learning rate that the script changes in its own tensor, and several layers."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(7, 7) for _ in range(4)])
    rate = torch.tensor(0.1)
    optimizer = kind(model.parameters(), lr=rate)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean(dim=1)

    trainer = onefold.Trainer(model, optimizer, loss, shards=3, threads=1)
    for _ in range(3):
        trainer.step(torch.randn(8, 7, generator=torch.Generator().manual_seed(2)))
        rate.mul_(0.5)
    return trainer.fingerprint()


@pytest.mark.parametrize("alone", KEEPS, indirect=True)
@pytest.mark.parametrize(
    "kind", [Counting, functools.partial(torch.optim.AdamW, foreach=False)], ids=["own", "adamw"]
)
@pytest.mark.usefixtures("alone")
def test_optimizers_that_look_beyond_a_parameter(
    kind: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = with_a_rate_of_the_scripts(kind)
    monkeypatch.undo()
    assert found == with_a_rate_of_the_scripts(kind)
