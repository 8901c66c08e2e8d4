"""Where the time of a step goes."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from onefold.watch.timing import PhaseTime, Span, Stopwatch
from tests.small import Batch, make_trainer, points, square
from tests.tables import for_each


class Clock:
    """The host's clock: a second passes whenever it is read, and more where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        for module in ("watch.timing", "data_order.loader", "session.batches"):
            monkeypatch.setattr(f"onefold.{module}.host_now_s", self)

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def test_spans_of_a_phase_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch(torch.device("cpu"))
    watch.note("update", "optimizer", watch.now())
    watch.note("forward", "shard 0", 1.0, 1.5)
    watch.note("forward", "shard 1", 3.0, 3.25)
    spans = watch.drain()
    assert (spans[0], clock.now_s) == (Span("update", "optimizer", 1.0, 2.0), 2.0)
    assert PhaseTime.of(spans) == PhaseTime(
        data=0.0, forward=0.75, backward=0.0, exchange=0.0, update=1.0
    )
    assert watch.drain() == []


class Event:
    """A moment on a device's own clock."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1000 * (other.at_s - self.at_s)


@for_each("idle_s", [0.0, 1.0, 5.0])
def test_a_device_waits_for_a_batch_while_it_is_idle(
    idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for three seconds, in which the device may still compute the last step."""
    times = iter([10.0, 11.0, 11.0 + idle_s, 14.0])
    monkeypatch.setattr("onefold.watch.timing.record_event", lambda *_, **__: Event(next(times)))
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        watch.note("forward", "shard 0", watch.now())
        spans = watch.drain()
        seconds = PhaseTime.of([Span("data", "batch", 100.0, 103.0), *spans])
        moved = PhaseTime.of([*spans, Span("data", "move shard 0", 0.0, 0.5)])
        assert not watch.drain()
    assert (seconds.data, seconds.forward) == (min(3.0, idle_s), 3.0 - idle_s)
    assert moved.data == 0.5


@for_each("part", ["data", "forward", "backward"])
@for_each("devices", [1, 2])
def test_a_step_knows_where_its_time_went(
    part: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    late_s = 0

    class Data(torch.utils.data.Dataset[Batch]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Batch:
            clock.now_s += 100 * late_s if part == "data" else 0
            return points(8)[0][index], points(8)[1][index]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = square(model, batch)
        if part == "backward":
            losses.register_hook(lambda _: setattr(clock, "now_s", clock.now_s + 100 * late_s))
        clock.now_s += 100 * late_s if part == "forward" else 0
        if late_s == 2:
            raise ArithmeticError("on purpose")
        return losses

    trainer = make_trainer(loss=loss, devices=devices)
    loader = trainer.loader(Data(), batch_size=8)
    late_s, start = 1, clock.now_s
    seconds = asdict(trainer.step(next(iter(loader))).seconds)
    # Nobody launches anything on a CPU.
    assert (seconds.pop("launch"), seconds.pop("steps")) == (0.0, 1)
    # The first batch, its first shard again, and three samples for the digest of the data; or a
    # device's share of shards.
    parts = 8 + 2 + 3 if part == "data" else 4 / devices
    assert seconds[part] == pytest.approx(100 * parts, abs=20)
    assert max(seconds, key=lambda name: seconds[name]) == part
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) <= clock.now_s - start
    # Neither a step that failed nor the one before counts for the next.
    late_s = 2
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.step(next(iter(loader)))
    late_s = 0
    assert max(asdict(trainer.step(points(8)).seconds).values()) < 100
