"""Where the time of a step goes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from onefold.watch.timing import PhaseSeconds, Span, Stopwatch, elapsed_s, host_now_s
from tests.small import Batch, make_trainer, points, square
from tests.tables import for_each

CPU = torch.device("cpu")


def test_spans_of_a_phase_add_up() -> None:
    spans = [
        Span("forward", "forward shard 0", 1.0, 1.5),
        Span("backward", "backward shard 0", 1.5, 2.5),
        Span("forward", "forward shard 1", 3.0, 3.25),
    ]
    assert PhaseSeconds.of(spans) == PhaseSeconds(
        data=0.0, forward=0.75, backward=1.0, exchange=0.0, update=0.0
    )


def test_notes_are_taken_once() -> None:
    watch = Stopwatch(CPU)
    start = watch.now()
    watch.note("update", "optimizer", start)
    (span,) = watch.take()
    assert (span.phase, span.label, span.start) == ("update", "optimizer", start)
    assert elapsed_s(span.start, span.stop) >= 0
    assert watch.take() == []


def slow_in(part: str) -> nn.Module:
    """A model whose forward or backward takes 50 ms longer, and which 4 devices can hold."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context: object, values: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05 if part == "forward" else 0)
            return values.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            time.sleep(0.05 if part == "backward" else 0)
            return gradient

    class Model(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = Slow.apply(super().forward(inputs))
            return values

    return Model(3, 1)


@for_each("part", ["forward", "backward"])
@for_each("devices", [1, 2])
def test_a_step_knows_where_its_time_went(part: str, devices: int) -> None:
    trainer = make_trainer(slow_in(part), devices=devices)
    start = host_now_s()
    seconds = trainer.step(points(8)).seconds
    whole = host_now_s() - start
    times = {name: getattr(seconds, name) for name in PhaseSeconds.__dataclass_fields__}
    assert max(times, key=lambda name: times[name]) == part
    assert times[part] >= 0.05 * 4 / devices  # of this process's first device
    assert all(time > 0 for time in times.values())
    assert sum(times.values()) <= whole


def test_waiting_for_the_loader_is_data() -> None:
    class Slow(torch.utils.data.Dataset[Batch]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Batch:
            time.sleep(0.02)
            return torch.ones(3) * index, torch.zeros(1)

    trainer = make_trainer()
    (batch,) = trainer.loader(Slow(), batch_size=4)
    seconds = trainer.step(batch).seconds
    assert seconds.data >= 4 * 0.02
    assert seconds.data > seconds.forward


def test_a_step_that_failed_leaves_no_seconds() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if fails:
            time.sleep(0.1)
            raise ArithmeticError("on purpose")
        return square(model, batch)

    trainer = make_trainer(loss=loss)
    fails = True
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.step(points(8))
    fails = False
    assert trainer.step(points(8)).seconds.forward < 0.1


def test_seconds_are_of_their_own_step() -> None:
    calls = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(None)
        time.sleep(0.05 if len(calls) <= 4 else 0)
        return square(model, batch)

    trainer = make_trainer(loss=loss)
    slow, quick = trainer.step(points(8)), trainer.step(points(8))
    assert slow.seconds.forward >= 0.2
    assert quick.seconds.forward < 0.2
