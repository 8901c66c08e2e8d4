"""Devices that do not do the same, one way after the other; called on each device of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import onefold
from onefold.run.world import current_world
from tests.small import Batch, line, make_trainer, points, sgd, square

Case = Callable[[bool], None]
"""Told whether it runs on the lead."""


def _stepped(**settings: object) -> onefold.Trainer:
    trainer = make_trainer(devices=None, **settings)
    trainer.step(points(8))
    return trainer


def plan(lead: bool) -> None:
    trainer = _stepped()
    trainer.plan = (3, 1) if lead else (1, 3)
    trainer.step(points(8))


def plan_at_start(lead: bool) -> None:
    _stepped(plan=(3, 1) if lead else (1, 3))


def samples(lead: bool) -> None:
    _stepped().step(points(8 if lead else 9))


def another_batch(lead: bool) -> None:
    """As where the lead has drawn one random number more."""
    inputs, targets = points(8)
    _stepped().step((inputs if lead else inputs + 1, targets))


def evaluated_data(lead: bool) -> None:
    data = TensorDataset(*points(40 if lead else 80))
    _stepped().evaluate(lambda m, b: {"loss": square(m, b)}, data, batch_size=20)


def predicted_data(lead: bool) -> None:
    data = TensorDataset(*points(40 if lead else 80))
    _stepped().predict(lambda m, b: {"value": m(b[0])}, data, batch_size=20)


def evaluation_batches(lead: bool) -> None:
    data = TensorDataset(*points(40))
    _stepped().evaluate(lambda m, b: {"loss": square(m, b)}, data, batch_size=20 if lead else 10)


def unseeded_data(lead: bool) -> None:
    trainer = _stepped()
    shift = 0.0 if lead else 1.0
    data = TensorDataset(*(tensor + shift for tensor in points(40)))
    for batch in trainer.loader(data, batch_size=20):
        trainer.step(batch)


def unseeded_data_with_workers(lead: bool) -> None:
    trainer = _stepped()
    shift = 0.0 if lead else 1.0
    data = TensorDataset(*(tensor + shift for tensor in points(40)))
    for batch in trainer.loader(data, batch_size=20, workers=1):
        trainer.step(batch)


def another_order(lead: bool) -> None:
    """A sampler that draws from nothing that could be seeded."""
    trainer = _stepped()
    data = TensorDataset(*points(40))
    order = range(20) if lead else [*range(10, 20), *range(10)]
    for batch in trainer.loader(data, batch_size=10, sampler=order):
        trainer.step(batch)


def _stream(begin: int, end: int) -> Any:
    rows = list(zip(*points(40), strict=True))[begin:end]

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    return Rows()


def another_stream(lead: bool) -> None:
    trainer = _stepped()
    for batch in trainer.loader(_stream(not lead, 30), batch_size=10):
        trainer.step(batch)


def longer_stream(lead: bool) -> None:
    stream = _stream(0, 30 if lead else 34)
    _stepped().evaluate(lambda m, b: {"loss": square(m, b)}, stream, batch_size=10)


def no_stream(lead: bool) -> None:
    stream = _stream(0, 30 * lead)
    _stepped().predict(lambda m, b: {"value": m(b[0])}, stream, batch_size=10)


def another_rule(lead: bool) -> None:
    """As where each process draws from a generator that it has seeded itself."""
    trainer = _stepped()
    for batch in trainer.batches(
        lambda step, _: tuple(part + lead for part in points(8)), per_epoch=3
    ):
        trainer.step(batch)


def place_in_the_data(lead: bool) -> None:
    trainer = _stepped()
    batches = iter(trainer.loader(TensorDataset(*points(40)), batch_size=10))
    if not lead:
        next(batches)
    trainer.step(next(batches))


def another_loader(lead: bool) -> None:
    trainer = _stepped()
    loaders = [trainer.loader(TensorDataset(*points(40)), batch_size=10) for _ in range(2)]
    trainer.step(next(iter(loaders[lead])))


def learning_rate(lead: bool) -> None:
    model = line()
    optimizer = sgd(model)
    trainer = make_trainer(model, optimizer=optimizer, devices=None)
    trainer.step(points(8))
    if lead:
        optimizer.param_groups[0]["lr"] = 0.01
    trainer.step(points(8))


def deterministic(lead: bool) -> None:
    _stepped(deterministic=lead)


def threads(lead: bool) -> None:
    try:
        _stepped(threads=1 if lead else 2)
    finally:
        torch.set_num_threads(1)


def schedule(lead: bool) -> None:
    model = line()
    optimizer = sgd(model)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 3 if lead else 4)
    make_trainer(model, optimizer=optimizer, devices=None, schedule=decay)


def schedule_every(lead: bool) -> None:
    model = line()
    optimizer = sgd(model)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    every = "epoch" if lead else "script"
    make_trainer(model, optimizer=optimizer, devices=None, schedule=decay, schedule_every=every)


def call(lead: bool) -> None:
    trainer = _stepped()
    if lead:
        trainer.evaluate(
            lambda m, b: {"loss": square(m, b)}, TensorDataset(*points(8)), batch_size=8
        )
    else:
        trainer.step(points(8))


def mode(lead: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), line())
    trainer = make_trainer(model, devices=None)
    trainer.step(points(8))
    model[0].train(lead)
    trainer.step(points(8))


def dropout(lead: bool) -> None:
    """As a schedule of a script's own would have it, here on one device alone."""
    model = nn.Sequential(nn.Dropout(0.5), line())
    trainer = make_trainer(model, devices=None)
    trainer.step(points(8))
    if lead:
        model[0].p = 0.25
    trainer.step(points(8))


def frozen(lead: bool) -> None:
    trainer = _stepped()
    trainer.model.bias.requires_grad_(lead)
    trainer.step(points(8))


def buffer(lead: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), line())
    trainer = make_trainer(model, devices=None)
    trainer.step(points(8))
    if lead:
        model[0].running_mean.zero_()
    trainer.step(points(8))


def weights_on_the_lead(lead: bool) -> None:
    trainer = _stepped()
    if lead:
        with torch.no_grad():
            trainer.model.weight.mul_(0.5)
    trainer.step(points(8))


def weights_through_data(lead: bool) -> None:
    trainer = _stepped()
    if lead:
        trainer.model.weight.data.mul_(0.5)
    trainer.step(points(8))


def swapped_weights(lead: bool) -> None:
    """An average in, evaluate, the original back, as scripts do."""
    trainer = _stepped()
    saved = [p.detach().clone() for p in trainer.model.parameters()]
    for parameter in trainer.model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    trainer.evaluate(lambda m, b: {"loss": square(m, b)}, TensorDataset(*points(8)), batch_size=8)
    for parameter, value in zip(trainer.model.parameters(), saved, strict=True):
        parameter.data.copy_(value)


def outside_module(lead: bool) -> None:
    """An unseeded teacher that the loss closes over."""
    teacher = line()
    with torch.no_grad():
        teacher.weight.add_(0.0 if lead else 1.0)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0]).detach()).square().mean(dim=1)

    trainer = make_trainer(line(), loss, devices=None)
    for _ in range(2):
        trainer.step(points(8))


def evaluated_average(lead: bool) -> None:
    """An average that the lead alone has kept, evaluated through a closure."""
    average = line()
    with torch.no_grad():
        average.weight.add_(1.0 if lead else 0.0)
    data = TensorDataset(*points(8))
    _stepped().evaluate(lambda m, b: {"loss": square(average, b)}, data, batch_size=4)


def data_of_the_lead(lead: bool) -> None:
    """Changed between two passes."""
    data = TensorDataset(*points(8))
    trainer = _stepped()
    batches = trainer.loader(data, batch_size=4)
    for turn in range(2):
        if turn and lead:
            data.tensors[0].add_(1)
        for batch in batches:
            trainer.step(batch)


def save_elsewhere(lead: bool) -> None:
    _stepped().save("here", keep=2 if lead else 3)


def barrier(lead: bool) -> None:
    trainer = _stepped()
    if lead:
        trainer.barrier()
    trainer.step(points(8))


def averages(lead: bool) -> None:
    _stepped().average(decay=0.9 if lead else 0.99)


def averaged_on_the_lead(lead: bool) -> None:
    trainer = _stepped()
    trainer.average(mean=True)
    if not lead:
        trainer.step(points(8))
        return
    with trainer.averaged():
        pass


def written_in_averaged(lead: bool) -> None:
    trainer = _stepped()
    trainer.average(mean=True)
    with trainer.averaged(), torch.no_grad():
        if lead:
            trainer.model.weight.mul_(0.5)


def library(lead: bool) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if lead else "high")
    try:
        _stepped()
    finally:
        torch.set_float32_matmul_precision(before)


CASES: dict[str, tuple[Case, str]] = {
    "plan": (plan, r"step 2, trainer.step: device 1 has another plan than device 0"),
    "plan at start": (plan_at_start, r"the plan is \(3, 1\) on device 0 and \(1, 3\) on device 1"),
    "samples": (samples, "step 2, trainer.step: device 1 has 9 samples and device 0 has 8"),
    "another batch": (another_batch, "step 2.*device 1 was given another batch than device 0"),
    "evaluated data": (evaluated_data, "trainer.evaluate: device 1 has 80 samples .* 0 has 40"),
    "predicted data": (predicted_data, "trainer.predict: device 1 has 80 samples .* 0 has 40"),
    "evaluation batches": (evaluation_batches, "device 1 has a batch_size of 10 .* one of 20"),
    "unseeded data": (unseeded_data, "data set of device 1 has other samples than .* device 0"),
    "unseeded data, workers": (unseeded_data_with_workers, "data set of device 1 has other"),
    "another order": (another_order, "data set of device 1 has other .* A sampler, a stream"),
    "another stream": (another_stream, "data set of device 1 has other samples than"),
    "longer stream": (longer_stream, "trainer.evaluate: device 1 has 34 samples .* 0 has 30"),
    "no stream": (no_stream, "device 1 has a batch_size of 0 and device 0 one of 10"),
    "another rule": (another_rule, "data set of device 1 has other .* trainer.batches must give"),
    "place": (place_in_the_data, "device 1 is at sample 20 of a pass .* device 0 at sample 10"),
    "another loader": (another_loader, "device 1 has a batch of loader 0 and device 0 .* loader 1"),
    "learning rate": (learning_rate, "step 2.*optimizer's settings of device 1 .* differ"),
    "deterministic": (deterministic, "deterministic is True on device 0 and False on device 1"),
    "threads": (threads, "the threads of a device is 1 .* on device 0 and 2 .* on device 1"),
    "schedule": (schedule, "the state of the schedule is .* on device 0 and .* on device 1"),
    "schedule_every": (
        schedule_every,
        "schedule_every is epoch on device 0 and script on device 1",
    ),
    "call": (call, "device 1 calls trainer.step while device 0 calls trainer.evaluate"),
    "mode": (mode, r"step 2.*device 1 has modules in another mode \(train, eval\)"),
    "dropout": (dropout, r"step 2.*device 1 has .* with other numbers \(the p of dropout"),
    "frozen": (frozen, "step 2.*device 1 has .* other frozen parameters than device 0"),
    "buffer": (buffer, "step 2.*device 1 has other parameters or buffers than device 0"),
    "weights on the lead": (weights_on_the_lead, r"step 2.*parameter weight changed .* device 0"),
    "weights through data": (weights_through_data, r"step 2.*\(through .data\) changed since"),
    "swapped weights": (swapped_weights, r"step 2, trainer.evaluate: .* trainer.changing\(\)"),
    "outside module": (outside_module, "a module that the loss uses .* other values on device 1"),
    "average": (evaluated_average, "trainer.evaluate: a module .* other values on device 1"),
    "data of the lead": (data_of_the_lead, "the data set of device 1 has other samples"),
    "save": (save_elsewhere, "trainer.save: the arguments of device 1 differ"),
    "barrier": (barrier, "device 1 calls trainer.step while device 0 calls trainer.barrier"),
    "averages": (averages, "step 2, trainer.average: the arguments of device 1 differ"),
    "averaged": (
        averaged_on_the_lead,
        "device 1 calls trainer.step while device 0 calls the beginning of trainer.averaged",
    ),
    "written in averaged": (
        written_in_averaged,
        "the end of trainer.averaged: parameter weight changed .* on device 0",
    ),
    "library": (library, "the precision of matrix products is highest on device 0 and high on"),
}


def run_and_write(names: Sequence[str], folder: str) -> None:
    """What each case raises, one after the other in one process; every device writes its own."""
    said = {name: _raised(CASES[name][0]) for name in names}
    Path(folder, f"{current_world().rank}.json").write_text(json.dumps(said))


def _raised(case: Case) -> str:
    try:
        case(current_world().rank == 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_late(folder: str) -> None:
    """Device 1 comes to its second step later than the Trainer is to wait."""
    trainer = _stepped(timeout_s=1.5)
    if not trainer.is_lead:
        while not Path(folder, "given up").exists():
            time.sleep(0.05)
        return
    try:
        trainer.step(points(8))
    except onefold.errors.PeerError as error:
        Path(folder, "words").write_text(f"{type(error).__name__}: {error}")
    Path(folder, "given up").touch()
