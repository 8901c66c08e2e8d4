"""Devices that do not do the same are told so, on every device, before it does harm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.run.world import current_world
from tests import simulated
from tests.small import Batch, line, make_trainer, points, sgd, square
from tests.tables import for_each


def stepped(**settings: Any) -> Any:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), line())
    trainer = make_trainer(settings.pop("model", model), devices=None, **settings)
    trainer.step(points(8))
    return trainer


def rows(samples: int, shift: float = 0.0) -> TensorDataset:
    return TensorDataset(*(tensor + shift for tensor in points(samples)))


def score(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return {"value": square(model, batch)}


def stream(begin: int, end: int) -> Any:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            return iter(list(zip(*points(40), strict=True))[begin:end])

    return Rows()


def train(trainer: onefold.Trainer, data: Any, size: int = 10, **options: Any) -> None:
    for batch in trainer.loader(data, batch_size=size, **options):
        trainer.step(batch)


def scheduled(steps: int, every: str = "step") -> None:
    model = line()
    optimizer = sgd(model)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, steps)
    make_trainer(model, optimizer=optimizer, devices=None, schedule=decay, schedule_every=every)


def other_plan(trainer: onefold.Trainer, lead: bool) -> None:
    trainer.plan = (3, 1) if lead else (1, 3)
    trainer.step(points(8))


def other_rule(trainer: onefold.Trainer, lead: bool) -> None:
    """As where each process draws from a generator that it has seeded itself."""
    for batch in trainer.batches(lambda *_: tuple(p + lead for p in points(8)), per_epoch=3):
        trainer.step(batch)


def other_place(trainer: onefold.Trainer, lead: bool) -> None:
    batches = iter(trainer.loader(rows(40), batch_size=10))
    if not lead:
        next(batches)
    trainer.step(next(batches))


def other_loader(trainer: onefold.Trainer, lead: bool) -> None:
    loaders = [trainer.loader(rows(40), batch_size=10) for _ in range(2)]
    trainer.step(next(iter(loaders[lead])))


def data_of_the_lead(trainer: onefold.Trainer, lead: bool) -> None:
    """Changed between two passes."""
    data = rows(16)
    batches = trainer.loader(data, batch_size=8)
    for turn in range(2):
        if turn and lead:
            data.tensors[0].add_(1)
        for batch in batches:
            trainer.step(batch)


def other_rate(lead: bool) -> None:
    model = line()
    optimizer = sgd(model)
    trainer = stepped(model=model, optimizer=optimizer)
    if lead:
        optimizer.param_groups[0]["lr"] = 0.01
    trainer.step(points(8))


def other_call(trainer: onefold.Trainer, lead: bool) -> None:
    if lead:
        trainer.evaluate(score, rows(8), batch_size=8)
    else:
        trainer.step(points(8))


def written(change: Callable[[Any, bool], object]) -> Callable[[Any, bool], None]:
    """The model is changed, and a step follows."""

    def case(trainer: onefold.Trainer, lead: bool) -> None:
        change(trainer.model, lead)
        trainer.step(points(8))

    return case


def other_p(model: Any, lead: bool) -> None:
    """As a schedule of a script's own would have it, here on one device alone."""
    model[1].p = 0.25 if lead else 0.5


@torch.no_grad()
def in_place(model: Any, lead: bool) -> None:
    model[2].weight.mul_(0.5) if lead else None


def swapped_in(trainer: onefold.Trainer, lead: bool) -> None:
    """An average in, and evaluate, as scripts do."""
    for parameter in trainer.model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    trainer.evaluate(score, rows(8), batch_size=8)


def shifted(lead: bool) -> nn.Linear:
    model = line()
    with torch.no_grad():
        model.weight.add_(0.0 if lead else 1.0)
    return model


def unseeded_teacher(lead: bool) -> None:
    teacher = shifted(lead)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)

    stepped(loss=loss).step(points(8))


def evaluated_average(trainer: onefold.Trainer, lead: bool) -> None:
    average = shifted(lead)
    trainer.evaluate(lambda m, b: score(average, b), rows(8), batch_size=4)


def barrier(trainer: onefold.Trainer, lead: bool) -> None:
    if lead:
        trainer.barrier()
    trainer.step(points(8))


def averaged_on_the_lead(trainer: onefold.Trainer, lead: bool) -> None:
    trainer.average(mean=True)
    if not lead:
        trainer.step(points(8))
        return
    with trainer.averaged():
        pass


def written_in_averaged(trainer: onefold.Trainer, lead: bool) -> None:
    trainer.average(mean=True)
    with trainer.averaged():
        in_place(trainer.model, lead)


def library(lead: bool) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if lead else "high")
    try:
        stepped()
    finally:
        torch.set_float32_matmul_precision(before)


AFTER_A_STEP: dict[str, Callable[[Any, bool], object]] = {
    "step 2, trainer.step: device 1 has another plan than device 0": other_plan,
    "step 2, trainer.step: device 1 has 9 samples and device 0 has 8": (
        lambda t, lead: t.step(points(8 if lead else 9))
    ),
    "step 2.*device 1 was given another batch than device 0": (
        lambda t, lead: t.step((points(8)[0] + lead, points(8)[1]))
    ),
    "trainer.evaluate: device 1 has 80 samples .* 0 has 40": (
        lambda t, lead: t.evaluate(score, rows(40 if lead else 80), batch_size=20)
    ),
    "device 1 has a batch_size of 10 .* one of 20": (
        lambda t, lead: t.evaluate(score, rows(40), batch_size=20 if lead else 10)
    ),
    "data set of device 1 has other samples than .* device 0": (
        lambda t, lead: train(t, rows(40, shift=float(lead)))
    ),
    "data set of device 1 has other samples": (
        lambda t, lead: train(t, rows(40, shift=float(lead)), workers=1)
    ),
    "data set of device 1 has other .* A sampler, a stream": (
        lambda t, lead: train(t, rows(40), sampler=range(20) if lead else range(5, 25))
    ),
    "data set of device 1 has other samples than": (lambda t, lead: train(t, stream(not lead, 30))),
    "trainer.evaluate: device 1 has 34 samples .* 0 has 30": (
        lambda t, lead: t.evaluate(score, stream(0, 30 if lead else 34), batch_size=10)
    ),
    "device 1 has a batch_size of 0 and device 0 one of 10": (
        lambda t, lead: t.predict(score, stream(0, 30 * lead), batch_size=10)
    ),
    "data set of device 1 has other .* trainer.batches must give": other_rule,
    "device 1 is at sample 20 of a pass .* device 0 at sample 10": other_place,
    "device 1 has a batch of loader 0 and device 0 .* loader 1": other_loader,
    "the data set of device 1 has other samples": data_of_the_lead,
    "device 1 calls trainer.step while device 0 calls trainer.evaluate": other_call,
    r"step 2.*device 1 has modules in another mode \(train, eval": (
        written(lambda m, lead: m[1].train(lead))
    ),
    r"step 2.*device 1 has .* with other numbers \(the p of dropout": written(other_p),
    "step 2.*device 1 has .* other frozen parameters than device 0": (
        written(lambda m, lead: m[2].bias.requires_grad_(lead))
    ),
    "step 2.*device 1 has other parameters or buffers than device 0": (
        written(lambda m, lead: m[0].running_mean.fill_(lead))
    ),
    r"step 2.*parameter 2.weight changed .* device 0": written(in_place),
    r"step 2.*\(through .data\) changed since": (
        written(lambda m, lead: m[2].weight.data.mul_(0.5 if lead else 1.0))
    ),
    r"step 2, trainer.evaluate: .* trainer.changing\(\)": swapped_in,
    "trainer.evaluate: a module .* other values on device 1": evaluated_average,
    "trainer.save: the arguments of device 1 differ": (
        lambda t, lead: t.save("here", keep=2 if lead else 3)
    ),
    "device 1 calls trainer.step while device 0 calls trainer.barrier": barrier,
    "step 2, trainer.average: the arguments of device 1 differ": (
        lambda t, lead: t.average(decay=0.9 if lead else 0.99)
    ),
    "device 1 calls trainer.step while device 0 calls the beginning of trainer.averaged": (
        averaged_on_the_lead
    ),
    "the end of trainer.averaged: parameter 2.weight changed .* on device 0": written_in_averaged,
}
FROM_THE_START: dict[str, Callable[[bool], object]] = {
    r"the plan is \(3, 1\) on device 0 and \(1, 3\) on device 1": (
        lambda lead: stepped(plan=(3, 1) if lead else (1, 3))
    ),
    "deterministic is True on device 0 and False on device 1": (
        lambda lead: stepped(deterministic=lead)
    ),
    "the threads of a device is 1 .* on device 0 and 2 .* on device 1": (
        lambda lead: stepped(threads=1 if lead else 2)
    ),
    "step 2.*optimizer's settings of device 1 .* differ": other_rate,
    "the state of the schedule is .* on device 0 and .* on device 1": (
        lambda lead: scheduled(3 if lead else 4)
    ),
    "schedule_every is epoch on device 0 and script on device 1": (
        lambda lead: scheduled(3, "epoch" if lead else "script")
    ),
    "a module that the loss uses .* other values on device 1": unseeded_teacher,
    "the precision of matrix products is highest on device 0 and high on": library,
}
CASES: dict[str, Callable[[bool], object]] = {
    **{words: lambda lead, act=act: act(stepped(), lead) for words, act in AFTER_A_STEP.items()},
    **FROM_THE_START,
}
"""By what each error says."""


def run_and_write(folder: str) -> None:
    """What each case raises, one after the other in one process; every device writes its own."""
    rank, said = current_world().rank, {}
    for words, case in CASES.items():
        try:
            case(rank == 0)
        except Exception as error:
            said[words] = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps(said))


@for_each("exchange", ["shared", "collective"])
def test_every_difference_ends_in_one_error_on_every_device(exchange: Any, tmp_path: Path) -> None:
    """A new Trainer works after each failure."""
    simulated.launch(run_and_write, devices="cpu:2", args=(str(tmp_path),), exchange=exchange)
    said = [json.loads((tmp_path / f"{device}.json").read_text()) for device in range(2)]
    wrong = {
        words: [device.get(words) for device in said]
        for words in CASES
        if not all(re.match(f"DisagreementError: .*{words}", d.get(words, "")) for d in said)
    }
    assert wrong == {}
