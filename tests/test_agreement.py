"""Devices that do not do the same are told so, on every device, before it does harm."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import onefold
from onefold.launcher.environment import current_context
from onefold.testing import simulate
from tests.small import Batch, line, make_trainer, points, sgd, square
from tests.tables import for_each


def stepped(model: nn.Module | None = None, **settings: Any) -> Any:
    model = model or nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())
    trainer = make_trainer(model, devices=None, **settings)
    trainer.step(points(8))
    return trainer


def rows(samples: int, shift: int = 0) -> TensorDataset:
    return TensorDataset(*(tensor + shift for tensor in points(samples)))


class Stream:
    def __init__(self, begin: int, end: int) -> None:
        self.rows = list(zip(*points(40), strict=True))[begin:end]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"value": square(model, batch)}


def train(trainer: Any, data: Any, **options: Any) -> None:
    for batch in trainer.loader(data, batch_size=10, **options):
        trainer.step(batch)


def other_rule(trainer: Any, n: int) -> None:
    """As where each process draws from a generator that it has seeded itself."""
    for batch in trainer.batches(lambda *_: tuple(p + n for p in points(8)), per_epoch=3):
        trainer.step(batch)


def other_place(trainer: Any, n: int) -> None:
    trainer.step([*trainer.loader(rows(40), batch_size=10)][n])


def other_loader(trainer: Any, n: int) -> None:
    loaders = [trainer.loader(rows(40), batch_size=10) for _ in range(2)]
    trainer.step(next(iter(loaders[1 - n])))


def changed_data(trainer: Any, n: int) -> None:
    """Between two passes, by the lead."""
    data = rows(16)
    batches = trainer.loader(data, batch_size=8)
    for turn in range(2):
        data.tensors[0].add_(turn * (1 - n))
        for batch in batches:
            trainer.step(batch)


@torch.no_grad()
def in_place(trainer: Any, n: int) -> None:
    if n == 0:
        trainer.model[2].weight.mul_(0.5)


def swapped_in(trainer: Any, n: int) -> None:
    """An average in, and evaluate, as scripts do."""
    for parameter in trainer.model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    trainer.evaluate(score, rows(8), batch_size=8)


def shifted(n: int) -> nn.Linear:
    model = line()
    model.weight.data.add_(n)
    return model


def other_average(trainer: Any, n: int) -> None:
    average = shifted(n)
    trainer.evaluate(lambda m, b: score(average, b), rows(8), batch_size=4)


def averaged(trainer: Any, n: int) -> None:
    trainer.average(mean=True)
    if n == 0:
        trainer.averaged().__enter__()


def written_in_averaged(trainer: Any, n: int) -> None:
    trainer.average(mean=True)
    with trainer.averaged():
        in_place(trainer, n)


AFTER_A_STEP: dict[str, Callable[[Any, int], object]] = {
    "step 2, trainer.step: device 1 has 9 samples .* 8": lambda t, n: t.step(points(8 + n)),
    "step 2.*another batch than device 0": lambda t, n: t.step((points(8)[0] + n, points(8)[1])),
    "trainer.evaluate: device 1 has 80 samples .* 0 has 40": (
        lambda t, n: t.evaluate(score, rows((40, 80)[n]), batch_size=20)
    ),
    "device 1 has a batch_size of 10 and device 0 has 20": (
        lambda t, n: t.evaluate(score, rows(40), batch_size=(20, 10)[n])
    ),
    "trainer.evaluate: device 1 has 34 samples .* 0 has 30": (
        lambda t, n: t.evaluate(score, Stream(0, 30 + 4 * n), batch_size=10)
    ),
    "device 1 has a batch_size of 0 and device 0 has 10": (
        lambda t, n: t.predict(score, Stream(0, 30 - 30 * n), batch_size=10)
    ),
    "data set of device 1 has other samples than .* device 0": lambda t, n: train(t, rows(40, n)),
    "data set of device 1 has other": lambda t, n: train(t, rows(40, n), workers=1),
    "data set of device 1 has other .* A sampler, a stream": (
        lambda t, n: train(t, rows(40), sampler=range(5 * n, 20 + 5 * n))
    ),
    "data set of device 1 has other samples than": lambda t, n: train(t, Stream(n, 30)),
    "data set of device 1 has other .* trainer.batches must also give": other_rule,
    "device 1 is at sample 20 of a pass .* device 0 at sample 10": other_place,
    "device 1 has a batch of loader 0 and device 0 .* loader 1": other_loader,
    "the data set of device 1 has other samples": changed_data,
    r"step 2, trainer.evaluate: .* trainer.modifying\(\)": swapped_in,
    "trainer.evaluate: a module .* other values on device 1": other_average,
    "trainer.step: the arguments of device 1 differ": lambda t, n: t.step(
        [torch.ones(3, 3)] * 2, dim=n
    ),
    "trainer.save: the arguments of device 1 differ": lambda t, n: t.save("here", keep=2 + n),
    "trainer.average: the arguments of device 1 differ": lambda t, n: t.average(decay=(1 + n) / 3),
    "the end of trainer.averaged: parameter 2.weight changed .* on device 0": written_in_averaged,
}
BEFORE_A_STEP: dict[str, Callable[[Any, int], object]] = {
    "step 2.*other shares than device 0": lambda t, n: setattr(t, "shares", (1 + 2 * n, 3 - 2 * n)),
    "device 1 reached trainer.step while device 0 reached trainer.barrier": (
        lambda t, n: n or t.barrier()
    ),
    "device 1 reached trainer.step while device 0 reached trainer.evaluate": (
        lambda t, n: n or t.evaluate(score, rows(8), batch_size=8)
    ),
    "trainer.step while device 0 reached trainer.averaged": averaged,
    r"step 2.*another mode \(train, eval": lambda t, n: t.model[1].train(n == 0),
    r"step 2.*\(the p of dropout": lambda t, n: setattr(t.model[1], "p", 0.25 * (1 + n)),
    "step 2.*other frozen parameters": lambda t, n: t.model[2].bias.requires_grad_(n == 0),
    "step 2.*other parameters or buffers": lambda t, n: t.model[0].running_mean.fill_(n),
    "step 2.*parameter 2.weight changed .* device 0": in_place,
    r"step 2.*\(through .data\) changed": lambda t, n: n or t.model[2].weight.data.mul_(0.5),
}


def other_rate(n: int) -> None:
    model = line()
    optimizer = sgd(model)
    trainer = stepped(model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + n)
    trainer.step(points(8))


def scheduled(steps: int, every: str = "step") -> None:
    model = line()
    optimizer = sgd(model)
    stepped(model, optimizer=optimizer, scheduler=StepLR(optimizer, steps), scheduler_every=every)


def unseeded_teacher(n: int) -> None:
    teacher = shifted(n)
    loss = lambda m, b: square(m, b) + square(teacher, b).detach()  # noqa: E731
    stepped(loss=loss).step(points(8))


def library(n: int) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(("highest", "high")[n])
    try:
        stepped()
    finally:
        torch.set_float32_matmul_precision(before)


class OfAllParameters(torch.optim.SGD):
    """As Prodigy: its groups hold sums over all parameters, and some that it makes only later."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        seen = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        group["d"] = group.get("d", 0.0) + seen
        if any(p.dim() > 1 for p in group["params"]):
            group["d_hat"] = seen
        super().step()


def of_all_parameters() -> None:
    model = line()
    trainer = stepped(model, optimizer=OfAllParameters(model.parameters(), lr=0.1))
    trainer.step(points(8))


FROM_THE_START: dict[str, Callable[[int], object]] = {
    r"the number of shards per device is \(3, 1\) on .* \(1, 3\) on": lambda n: stepped(
        shares=(3 - 2 * n, 1 + 2 * n)
    ),
    "deterministic is True on .* and False on": lambda n: stepped(deterministic=n == 0),
    "the threads of a device is 1 .* and 2 .* on device 1": lambda n: stepped(threads=1 + n),
    "step 2.*settings of device 1 differ from .* device 0, in lr of group 0 of SGD: ": other_rate,
    r"step 2.*, in d of group 0, d_hat of group 0 of OfAllParameters \(.*radient\): ": lambda n: (
        of_all_parameters()
    ),
    "the state of the scheduler is .* on device 0 and .* on device 1": lambda n: scheduled(3 + n),
    "scheduler_every is epoch on .* and script": lambda n: scheduled(3, ("epoch", "script")[n]),
    "a module that the loss uses .* other values on device 1": unseeded_teacher,
    "the precision of matrix products is highest on device 0 and high on": library,
    "the order of the losses is one, other on device 0 and other, one on": lambda n: stepped(
        loss=dict.fromkeys(("one", "other")[:: 1 - 2 * n], square)
    ),
    "parameter a.weight is .* number 0 of the model, .* number 2 of the model": lambda n: stepped(
        nn.ModuleDict({name: line() for name in "ab"[:: 1 - 2 * n]})
    ),
}


def after_a_step(act: Callable[[onefold.Trainer, int], object], number: int) -> None:
    act(stepped(), number)


def before_a_step(act: Callable[[onefold.Trainer, int], object], number: int) -> None:
    trainer = stepped()
    act(trainer, number)
    trainer.step(points(8))


CASES: dict[str, Callable[[int], object]] = {
    **{words: partial(after_a_step, act) for words, act in AFTER_A_STEP.items()},
    **{words: partial(before_a_step, act) for words, act in BEFORE_A_STEP.items()},
    **FROM_THE_START,
}
"""By what each error says: called with the number of the device."""


def all_cases() -> dict[str, str]:
    """What each case raises, one after the other in one process."""
    said = {}
    for words, case in CASES.items():
        try:
            case(current_context().rank)
        except Exception as error:
            said[words] = f"{type(error).__name__}: {error}"
    return said


@for_each("exchange", ["shared", "collective"])
def test_every_difference_ends_in_one_error_on_every_device(exchange: Any) -> None:
    """A new Trainer works after each failure."""
    said = simulate(all_cases, 2, exchange=exchange)
    wrong = {
        words: [device.get(words) for device in said]
        for words in CASES
        if not all(re.match(f"DisagreementError: .*{words}", d.get(words, "")) for d in said)
    }
    assert wrong == {}
