"""What must be alike on every device, in words, and how a difference is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onefold.core.shard import Plan
from onefold.engine.description import _matmul_precision as matmul_precision
from onefold.engine.description import compare, describe
from onefold.engine.modelparts import ModelParts
from onefold.errors import DisagreementError
from tests.engine.assembled import settings_of, team_of
from tests.small import sgd
from tests.tables import for_each


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def said(
    module: nn.Module | None = None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    plan: tuple[int, ...] = (2, 2),
    trainer: int = 0,
    **settings: Any,
) -> dict[str, str]:
    """What one of two devices says."""
    module = model() if module is None else module
    parts = ModelParts(module, [n for n, p in module.named_parameters() if p.requires_grad])
    made = optimizer(module)
    return describe(
        parts,
        made,
        settings_of(**settings),
        team_of(2, own=[1], trainer=trainer),
        Plan(plan),
        None if schedule is None else schedule(made),
    )


def as_bytes(*each: dict[str, str]) -> list[bytes]:
    return [json.dumps(one).encode() for one in each]


def changed(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    module = model()
    change(module)
    return module


def decay(optimizer: torch.optim.Optimizer, steps: int = 3) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, steps)


def by_lambda(factor: float) -> Callable[[torch.optim.Optimizer], Any]:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)

    return make


def test_devices_that_are_alike_are_not_refused() -> None:
    compare(as_bytes(said(), said(), said()))
    compare(as_bytes(said(schedule=decay), said(schedule=decay)))


def test_functions_of_a_schedule_count_by_their_type() -> None:
    """What they return cannot be seen, and where they lie in memory differs."""
    one, other = said(schedule=by_lambda(0.5)), said(schedule=by_lambda(0.5))
    compare(as_bytes(one, other))
    assert " at 0x" not in one["the state of the schedule"]


DIFFERENT: dict[str, tuple[Callable[[], dict[str, str]], str]] = {
    "shards": (lambda: said(shards=8), "shards is 4 on device 0 and 8 on device 1: every device"),
    "seed": (lambda: said(seed=1), "seed is 0 on device 0 and 1 on"),
    "clip_norm": (lambda: said(clip_norm=0.5), "clip_norm is None on device 0 and 0.5 on"),
    "deterministic": (lambda: said(deterministic=False), "deterministic is True on"),
    "rules": (lambda: said(buffers={"*": "max"}), "the rules of buffers is {} on device 0 and"),
    "plan": (lambda: said(plan=(3, 1)), r"the plan is \(2, 2\) on device 0 and \(3, 1\) on"),
    "trainer": (lambda: said(trainer=1), "the number of Trainers before this one is 0 on device 0"),
    "optimizer": (
        lambda: said(optimizer=lambda m: torch.optim.Rprop(m.parameters(), lr=0.1)),
        "the optimizer is SGD on device 0 and Rprop on",
    ),
    "settings": (
        lambda: said(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9)),
        r"optimizer group 0 lr is 0\.1 on device 0 and 0\.2 on",
    ),
    "a schedule": (lambda: said(schedule=decay), "the schedule is None on device 0 and StepLR on"),
    "type": (
        lambda: said(changed(lambda m: m[2].double())),
        r"parameter 2\.weight is trained torch\.float32 .* and trained torch\.float64",
    ),
    "shape": (
        lambda: said(changed(lambda m: m.append(nn.Linear(1, 2)))),
        r"parameter 3\.weight is absent on device 0 and trained torch\.float32 \(2, 1\)",
    ),
    "strides": (
        lambda: said(changed(lambda m: setattr(m[0].weight, "data", torch.zeros(3, 4).t()))),
        r"parameter 0\.weight is trained .* \(3, 1\) on device 0 and .* \(1, 4\) on device 1",
    ),
    "frozen": (
        lambda: said(changed(lambda m: m[0].bias.requires_grad_(False))),
        r"parameter 0\.bias is trained .* and other torch\.float32",
    ),
    "buffer": (
        lambda: said(changed(lambda m: m.register_buffer("mask", torch.zeros(2)))),
        "buffer mask is absent on device 0 and torch.float32",
    ),
}


@for_each("name", DIFFERENT)
def test_what_differs_is_named_with_the_device_and_both_values(name: str) -> None:
    make, words = DIFFERENT[name]
    with pytest.raises(DisagreementError, match=f"^{words}"):
        compare(as_bytes(said(), make()))


def test_where_a_schedule_is_counts() -> None:
    further = said(schedule=lambda optimizer: decay(optimizer, 4))
    with pytest.raises(DisagreementError, match=r"the state of the schedule is .* on device 0"):
        compare(as_bytes(said(schedule=decay), further))


def test_any_device_may_be_the_one_that_differs() -> None:
    with pytest.raises(DisagreementError, match="seed is 0 on device 0 and 5 on device 2"):
        compare(as_bytes(said(), said(), said(seed=5)))


def test_what_one_device_alone_has_is_absent_on_the_other() -> None:
    with pytest.raises(DisagreementError, match="a thing is 1 on device 0 and absent on device 1"):
        compare(as_bytes({"a thing": "1"}, {}))


def test_other_hashes_of_text_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Only sets depend on them, so this is no error."""
    compare(as_bytes(said(), {**said(), "a hash": "12345"}))
    assert [m for m in caplog.messages if "set PYTHONHASHSEED=0" in m]


SURROUNDINGS = {
    "the kind of device": "cpu",
    "the threads of a device": "1 (Trainer(threads=...))",
    "the version of torch": torch.__version__,
    "the default dtype": "torch.float32",
}


@for_each("what", SURROUNDINGS)
def test_what_bits_depend_on_beside_the_script_is_compared(what: str) -> None:
    found = said()
    assert found[what] == SURROUNDINGS[what]
    with pytest.raises(DisagreementError, match=rf"^{what} is .* and other on device 1"):
        compare(as_bytes(found, {**found, what: "other"}))


@for_each("kind", ["cpu", "cuda"])
def test_scripts_may_set_the_precision_of_products_in_either_way(kind: str) -> None:
    """Asked in the old way after it was set in the new one, PyTorch raises."""
    device, backend = torch.device(kind), torch.backends.cuda
    before = backend.matmul.fp32_precision
    assert matmul_precision(device) == "highest"
    try:
        backend.matmul.fp32_precision = "tf32"
        assert matmul_precision(device) == ("tf32" if kind == "cuda" else "none")
    finally:
        backend.matmul.fp32_precision = before
