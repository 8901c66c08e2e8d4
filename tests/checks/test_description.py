"""What must be alike on every device when a run begins, beside `tests/test_agreement.py`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from onefold.checks.description import compare, describe, describe_settings
from onefold.core.assignment import Devices
from onefold.core.options import LaunchContext, RunOptions
from onefold.core.shard import Shares
from onefold.errors import DisagreementError
from onefold.shard.model_parts import ModelParts
from onefold.system import accelerator, cuda
from tests.small import sgd
from tests.step.assembled import devices_of, settings_of
from tests.tables import for_each

Change = Callable[[nn.Sequential], object]
Scheduler = Callable[[torch.optim.Optimizer], Any]


def said(
    change: Change = lambda _: None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    scheduler: Scheduler = lambda _: None,
    trainer: int = 0,
    gpus: Sequence[torch.device] = (),
    **settings: Any,
) -> dict[str, str]:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    change(module)
    parts = ModelParts(module, [n for n, p in module.named_parameters() if p.requires_grad])
    made, devices = optimizer(module), devices_of(2, own=[1], trainer=trainer)
    if gpus:
        devices = Devices(all=gpus, own=range(len(gpus)), context=devices.context, trainer=trainer)
    attached = scheduler(made)
    given = settings_of(**settings), devices, Shares((2, 2)), attached
    return describe(parts, made, *given) | describe_settings(made, attached)


def compared(*each: dict[str, str]) -> None:
    compare([json.dumps(one).encode() for one in each])


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    """Where functions lie in memory differs."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


def test_devices_that_are_alike_are_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    compared(said(), said(), said())
    compared(said(scheduler=by_lambda), said(scheduler=by_lambda))
    # Only sets depend on the hashes of text, so other ones are no error.
    compared(said(), *({**said(), "a hash": each} for each in "123"))
    assert len([m for m in caplog.messages if "set PYTHONHASHSEED=0" in m]) == 1


def test_steps_change_the_settings_alone() -> None:
    """So a device may be compared with others in the middle of a run."""
    module = nn.Linear(3, 1)
    optimizer, parts = sgd(module), ModelParts(module, ["weight", "bias"])
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    given = settings_of(), devices_of(1), Shares((4,)), scheduler
    one, settings = describe(parts, optimizer, *given), describe_settings(optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    assert describe(parts, optimizer, *given) == one
    now = describe_settings(optimizer, scheduler)
    changed = {key for key, value in settings.items() if now[key] != value}
    assert changed == {"the state of the scheduler", "optimizer group 0 lr"}
    assert not settings.keys() & one.keys()


def in_other_order(model: nn.Sequential) -> None:
    """The same parts under the same names, of which the last comes first."""
    model._modules = dict(reversed(model._modules.items()))


def buffers_in_other_order(model: nn.Sequential) -> None:
    model[1]._buffers = {n: model[1]._buffers[n] for n in sorted(model[1]._buffers, reverse=True)}


def in_groups(model: nn.Module, second: Sequence[str]) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    other = [named.pop(name) for name in second]
    groups = [{"params": [*named.values()]}, {"params": other}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


CHOICES: dict[str, dict[str, Any]] = {
    "shards is 4 on device 0 and 8 on device 1. Every device": {"shards": 8},
    "clip_norm is None on device 0 and 0.5 on": {"clip_norm": 0.5},
    "buffers is {} on device 0 and": {"buffers": {"*": "max"}},
    "the number of Trainers before this one is 0 on device 0": {"trainer": 1},
    r"parameter 0\.weight is .* number 0 of the optimizer's group 0 on .* number 5 of the": {
        "optimizer": lambda m: torch.optim.SGD([*m.parameters()][::-1], lr=0.1, momentum=0.9)
    },
    r"parameter 0\.bias is .* group 0 on device 0 and .* number 0 of the optimizer's group 1": {
        "optimizer": lambda m: in_groups(m, ["0.bias"])
    },
    "the scheduler is None on device 0 and LambdaLR on": {"scheduler": by_lambda},
    "the optimizer is SGD on device 0 and Rprop on": {
        "optimizer": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1)
    },
    r"optimizer group 0 lr is 0\.1 on device 0 and 0\.2 on": {
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9)
    },
}
MODELS: dict[str, Change] = {
    r"parameter 2\.weight is trained torch\.float32 .* torch.float64": lambda m: m[2].double(),
    r"parameter 3\.weight is absent .* and trained torch\.float32 \(2, 1\)": (
        lambda m: m.append(nn.Linear(1, 2))
    ),
    r"parameter 0\.weight is trained .* \(3, 1\), number 0 .* and .* \(1, 4\), number 0": (
        lambda m: setattr(m[0].weight, "data", torch.zeros(3, 4).t())
    ),
    r"parameter 0\.bias is trained .* other torch\.f": lambda m: m[0].bias.requires_grad_(False),
    r"parameter 0\.weight is .* number 0 of the model, .* number 4 of the model": in_other_order,
    r"buffer 1\.running_mean is .* number 0 on .* number 1 on": buffers_in_other_order,
    "buffer mask is absent on device 0": lambda m: m.register_buffer("mask", torch.zeros(2)),
}
CHOICES |= {words: {"change": each} for words, each in MODELS.items()}


@for_each("words", CHOICES)
def test_what_differs_is_named(words: str) -> None:
    other = said(**CHOICES[words])
    with pytest.raises(DisagreementError, match=f"^{words}"):
        compared(said(), other)
    with pytest.raises(DisagreementError, match=r" on device 2\b"):
        compared(said(), said(), other)


NEW = {"type": "RTX 4090", "multi processor count": "128", "major": "8"}
OLD = {"type": "GTX 1080", "multi processor count": "20", "major": "6"}


@for_each(
    ("cards", "deterministic", "words"),
    [
        ([NEW, NEW], True, ""),
        ([NEW, OLD], False, ""),
        (
            [NEW, OLD],
            True,
            r"^cuda:1 \(GTX 1080\) and cuda:0 \(RTX 4090\) differ.* their type",
        ),
        ([NEW, NEW | {"multi processor count": "96"}], True, "multi processor count is 96 and 128"),
    ],
)
def test_unlike_gpus_of_one_process_are_refused(
    cards: list[dict[str, str]],
    deterministic: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerator, "traits_of", lambda gpu: cards[gpu.index])
    monkeypatch.setattr(cuda, "described", lambda: {"the precision of convolutions": "tf32"})
    gpus = [torch.device("cuda", index) for index in range(len(cards))]
    if words:
        with pytest.raises(DisagreementError, match=words):
            said(gpus=gpus, deterministic=deterministic)
    else:
        found = said(gpus=gpus, deterministic=deterministic)
        assert (found.get("the type of the GPU") == "RTX 4090") == deterministic
        assert found["the precision of convolutions"] == "tf32"


def test_unlike_gpus_of_two_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "described", dict)
    each = []
    for card in (NEW, OLD):
        monkeypatch.setattr(accelerator, "traits_of", lambda gpu, card=card: card)
        each.append(said(gpus=[torch.device("cuda", 0)]))
    with pytest.raises(DisagreementError, match=r"^the type of the GPU is RTX 4090 .* trains"):
        compared(*each)


def test_scripts_may_set_the_precision_of_products_for_one_kind_of_device() -> None:
    """Asked in the old way after it was set in the new one, PyTorch raises."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert said()["the precision of matrix products"] == "none"
    finally:
        matmul.fp32_precision = before


def test_options_that_differ_name_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for host, checkpoint in (("one", ""), ("two", "/tmp/run")):
        given = RunOptions(record="/tmp/record", checkpoint=checkpoint)
        context = LaunchContext(launcher="torch", options=given)
        monkeypatch.setattr("platform.node", lambda host=host: host)
        monkeypatch.setattr("tests.step.assembled.LaunchContext", lambda context=context: context)
        found.append(json.dumps(said()).encode())
    compare(found[:1] * 2)
    words = (
        r"the option checkpoint is absent on device 0 and set on device 1 .hosts one and two.\. "
    )
    with pytest.raises(DisagreementError, match=words):
        compare(found)
